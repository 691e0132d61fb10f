"""The time of a step: errors about published runs, closed forms beside a replay, and what must be so in any case."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fit_costs
import published
from mycel.cost import Device
from mycel.errors import UsageError
from mycel.planning.job import Job, Mesh
from mycel.planning.machines import Machine, known_machines, load_machine
from mycel.planning.machines.machine import to_json
from mycel.planning.models import ModelShape, named
from mycel.planning.predict import Prediction, predict_step, predict_steps
from mycel.planning.step.coefficients import Coefficients, limits
from mycel.planning.step.links import Rates
from mycel.planning.step.points import Points
from mycel.planning.step.times import Times, step_times
from mycel.planning.step.wires import Wires
from mycel.topology import load_topology

A100 = load_machine("a100")
H100 = load_machine("h100")


def kept(rows: published.Rows, machine: Machine, way: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Seconds by the coefficients that are kept in the machine's file."""
    return step_times(rows.points, rows.device, rows.rates, machine.fit(way).coefficients).total


# -- published runs -------------------------------------------------------------------------------------------


def test_selene_is_fitted() -> None:
    rows = published.selene()
    errors = np.abs(kept(rows, A100, "megatron") / rows.seconds - 1)
    assert errors.mean() <= 0.025
    assert A100.fit("megatron").num_rows == len(errors) == 12


def test_selene_left_out() -> None:
    """The fit is made anew without each row; the file says what came of it."""
    task = fit_costs.megatron()
    errors = np.abs(fit_costs.left_out(task, np.arange(12)) / task.measured - 1)
    assert errors.mean() <= 0.04
    assert errors.max() <= 0.09
    fit = A100.fit("megatron")
    assert (fit.mean_error, fit.max_error) == pytest.approx((errors.mean(), errors.max()), abs=1e-3)


@pytest.mark.parametrize(
    ("rows", "way", "mean", "median", "regret"),
    [
        ("vtrain_multi_a100", "megatron_deepspeed", 0.07, 0.04, 0.03),
        ("vtrain_single_a100", "megatron_deepspeed_node", 0.06, 0.05, 0.03),
    ],
)
def test_vtrain_and_what_would_be_picked(rows: str, way: str, mean: float, median: float, regret: float) -> None:
    measured = published.vtrain(rows)
    predicted = kept(measured, A100, way)
    errors = np.abs(predicted / measured.seconds - 1)
    assert errors.mean() <= mean
    assert np.median(errors) <= median
    assert published.regrets(measured, predicted).mean() <= regret


def test_fsdp_on_three_machines() -> None:
    errors = [
        np.abs(kept(rows, A100 if rows.family == "a100" else H100, "fsdp") / rows.seconds - 1)
        for rows in published.mosaic()
    ]
    assert np.concatenate(errors).mean() <= 0.06


def test_torchtitan_s_throughputs_are_in_order() -> None:
    rows = published.torchtitan()
    assert published.misordered(rows, kept(rows, H100, "torchtitan")) == []


# -- machines -------------------------------------------------------------------------------------------------


def test_every_machine_keeps_to_physics_and_says_what_it_saw() -> None:
    assert known_machines() == ("a100", "generic", "h100", "h200", "mi250x")
    for name in known_machines():
        machine = load_machine(name)
        for fit in machine.fits:
            for coefficient, limit in limits().items():
                assert limit.low <= getattr(fit.coefficients, coefficient) <= limit.high
                assert not (coefficient.endswith("_efficiency") and limit.high >= 1)
            assert fit.mean_error > 0
            assert bool(fit.num_rows) == bool(fit.fitted)
            assert fit.source


def test_machines_come_back_from_their_json(tmp_path: Path) -> None:
    file = tmp_path / "a100.json"
    file.write_text(json.dumps(to_json(A100)))
    assert load_machine(file) == A100


def test_machines_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'h100'"):
        load_machine("h10")
    with pytest.raises(UsageError, match="did you mean 'fsdp'"):
        H100.fit("fdsp")
    good = to_json(A100)
    file = tmp_path / "own.json"
    changes: tuple[dict[str, Any], ...] = ({"version": 2}, {"device": {}}, {"fits": 3}, {"links": None})
    for change in changes:
        file.write_text(json.dumps({**good, **change}))
        with pytest.raises(UsageError, match=r"own\.json"):
            load_machine(file)
    kept_value = A100.fits[0].coefficients.matmul_efficiency
    text = json.dumps(good).replace(f'"value": {kept_value}', '"value": 1.2')
    assert text != json.dumps(good)
    file.write_text(text)
    with pytest.raises(UsageError, match=r"matmul_efficiency is 1\.2 of peak; physics allows"):
        load_machine(file)
    with pytest.raises(UsageError, match="flops is 0"):
        Device(name="x", flops=0, memory_bytes=1, memory_gbps=1)


# -- closed forms beside a replay ------------------------------------------------------------------------------


def replayed(stages: int, batches: int, forward: list[float], backward: list[float]) -> float:
    """Makespan of 1F1B, each rank's actions in order, each as soon as what it needs is there."""
    rows = []
    for rank in range(stages):
        warm = min(stages - rank - 1, batches)
        row = [("F", m) for m in range(warm)]
        for m in range(batches - warm):
            row += [("F", warm + m), ("B", m)]
        rows.append(row + [("B", m) for m in range(batches - warm, batches)])
    done: dict[tuple[str, int, int], float] = {}
    clock, at = [0.0] * stages, [0] * stages
    while any(at[rank] < len(rows[rank]) for rank in range(stages)):
        for rank in range(stages):
            while at[rank] < len(rows[rank]):
                kind, m = rows[rank][at[rank]]
                if kind == "F":
                    needs = ("F", rank - 1, m) if rank else None
                else:
                    needs = ("B", rank + 1, m) if rank < stages - 1 else ("F", rank, m)
                if needs is not None and needs not in done:
                    break
                clock[rank] = max(clock[rank], done.get(needs, 0.0) if needs else 0.0)
                clock[rank] += forward[rank] if kind == "F" else backward[rank]
                done[kind, rank, m] = clock[rank]
                at[rank] += 1
    return max(clock)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("batches", [8, 13, 32])
def test_a_pipeline_takes_what_a_replay_of_it_does(stages: int, batches: int) -> None:
    """With the head on the last stage; messages are left out on both sides."""
    shape = named("llama3-8b")
    job = Job(mesh=Mesh(pp=stages), global_batch=batches, micro_batch=1, seq=4096)
    shape = replace(shape, num_layers=stages * 3)
    fit = H100.fits[0].coefficients.with_values({"replica_wait": 0.0})
    times = step_times(Points.of([(shape, job)]), H100.device, H100.rates, fit)
    work, head = float(times.compute[0]) / batches, float(times.head[0]) / batches
    forward, backward = [work / 3] * stages, [2 * work / 3] * stages
    forward[-1] += head / 3
    backward[-1] += 2 * head / 3
    closed = float((times.compute + times.head + times.bubble)[0])
    assert replayed(stages, batches, forward, backward) == pytest.approx(closed, rel=1e-9)


# -- what must be so -------------------------------------------------------------------------------------------

jobs = st.builds(
    lambda pp, dp, tp, cp, m, b, **more: Job(
        mesh=Mesh(pp=pp, dp=dp, tp=tp, cp=cp), global_batch=dp * m * b, micro_batch=b, seq=4096, **more
    ),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 2]),
    st.sampled_from([4, 8]),
    st.sampled_from([1, 2]),
    recompute=st.sampled_from(["none", "full", "attention", "alternate"]),
    zero=st.sampled_from([0, 1, 2, 3]),
    is_sequence_parallel=st.booleans(),
    is_flash=st.booleans(),
    is_compiled=st.booleans(),
    is_float8=st.booleans(),
)
MOE = ModelShape(
    name="moe", num_layers=8, hidden=1024, num_heads=8, num_kv_heads=8, head_dim=128, ffn=0, vocab=32000,
    num_experts=16, top_k=2, expert_ffn=2048,
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(job=jobs, shape=st.sampled_from([named("llama3-8b"), MOE]), machine=st.sampled_from(known_machines()))
def test_parts_are_seconds_and_better_machines_are_not_slower(job: Job, shape: ModelShape, machine: str) -> None:
    of = load_machine(machine)
    step = predict_step(shape, job, of)
    assert step.parts is not None
    assert all(np.isfinite(s) and s >= 0 for s in step.parts.values())
    assert step.low < step.seconds < step.high
    useful = shape.flops_per_token(job.seq) * job.global_batch * job.seq / job.mesh.num_ranks
    assert step.seconds > useful / max(of.device.flops, of.device.float8_flops)
    rates = of.rates
    faster = (
        replace(of, device=replace(of.device, flops=of.device.flops * 2, float8_flops=of.device.float8_flops * 2)),
        replace(of, device=replace(of.device, memory_gbps=of.device.memory_gbps * 2)),
        replace(of, rates=replace(rates, link_gbps=rates.link_gbps * 2)),
        replace(of, rates=replace(rates, network_gbps=rates.network_gbps * 2)),
    )
    for better in faster:
        assert predict_step(shape, job, better).seconds <= step.seconds * (1 + 1e-12)
    more = predict_step(shape, replace(job, global_batch=job.global_batch * 2), of)
    assert more.seconds > step.seconds
    if job.recompute == "none":
        assert predict_step(shape, replace(job, recompute="full"), of).seconds > step.seconds


def test_many_jobs_at_once_are_each_by_itself() -> None:
    shape = named("llama3-8b")
    many = [
        (shape, Job(mesh=Mesh(dp=dp, tp=8 // dp), global_batch=8, micro_batch=1, seq=4096)) for dp in (1, 2, 4, 8)
    ]
    together = predict_steps(many, H100)
    assert [one.seconds for one in together] == [predict_step(*one, H100).seconds for one in many]


def test_a_hundred_thousand_jobs_are_columns() -> None:
    points = Points.of([(named("llama3-8b"), Job(mesh=Mesh(dp=8), global_batch=8, micro_batch=1, seq=4096))])
    many = points.take(np.zeros(100_000, dtype=int))
    times = step_times(many, H100.device, H100.rates, H100.fits[0].coefficients)
    assert len(times.total) == len(many) == 100_000
    assert np.ptp(times.total) == 0


def test_experts_over_ranks_trade_gradients_for_exchanges() -> None:
    job = Job(mesh=Mesh(dp=8), global_batch=64, micro_batch=8, seq=4096)
    whole, shared = (predict_step(MOE, replace(job, mesh=Mesh(dp=8, ep=ep)), A100).parts for ep in (1, 8))
    assert whole is not None
    assert shared is not None
    assert whole["tensor"] == 0 < shared["tensor"]
    # Every rank has its own experts: only what they share is summed.
    assert shared["gradients"] < 0.3 * whole["gradients"]


def test_in_32_bits_messages_and_gathers_are_twice_as_long() -> None:
    half = named("llama3-8b")
    job = Job(mesh=Mesh(pp=2, dp=2, tp=2), global_batch=16, micro_batch=1, seq=4096, zero=2)
    one, two = (predict_step(replace(half, element_bytes=size), job, H100).parts for size in (2, 4))
    assert one is not None
    assert two is not None
    starts = (2 * 8 + 2 * 1) * H100.fits[0].coefficients.exchange_s  # of messages, whatever is in them
    assert two["boundary"] - starts == pytest.approx(2 * (one["boundary"] - starts))
    assert two["gradients"] == pytest.approx(one["gradients"] * (4 + 4) / (2 + 4))  # sums are in 32 bits in both
    assert two["tensor"] > one["tensor"]


def test_offloading_costs_a_transfer() -> None:
    job = Job(mesh=Mesh(dp=8), global_batch=8, micro_batch=1, seq=4096, zero=3)
    here, there = (predict_step(named("llama3-8b"), replace(job, is_offloaded=o), H100).parts for o in (False, True))
    assert here is not None
    assert there is not None
    assert there["optimizer"] > here["optimizer"]


# -- wires ----------------------------------------------------------------------------------------------------


def test_wires_of_alike_boxes_are_near_their_rates() -> None:
    """Our schedules use cards for what stays in a box too, so groups across boxes are no slower than by rings."""
    wires = Wires(topology=load_topology("dgx_a100:nodes=2"))
    size, stride = np.array([8.0, 2.0, 16.0, 4.0]), np.array([1.0, 8.0, 1.0, 2.0])
    ours = wires.ring(size, stride, 1.0, 1.0)
    rings = A100.rates.ring(size, stride, 1.0, 1.0)
    assert np.all(ours >= rings)
    assert ours[1] == rings[1] == 25e9
    assert list(wires.hop(np.array([8.0, 1.0]), np.array([2.0, 8.0]), 1.0, 1.0)) == [25e9, 300e9]


def test_groups_that_share_a_wire_share_its_rate() -> None:
    """Four pairs across two boxes with one cable of 50 Mbit/s a rank: the same alone. Around a ring they meet."""
    ring = Wires(topology=load_topology("ring:ranks=8,bandwidth=8 Gbit/s"))
    near = ring.ring(np.array([2.0]), np.array([1.0]), 1.0, 1.0)
    far = ring.ring(np.array([2.0]), np.array([4.0]), 1.0, 1.0)
    assert near[0] == 1e9
    assert far[0] < near[0]


def test_an_order_of_ranks_is_obeyed() -> None:
    fabric = load_topology("dgx_a100:nodes=2")
    turned = tuple(rank for pair in zip(range(8), range(8, 16), strict=True) for rank in pair)
    pairs = (np.array([2.0]), np.array([1.0]), 1.0, 1.0)
    assert Wires(topology=fabric).ring(*pairs)[0] > Wires(topology=fabric, order=turned).ring(*pairs)[0]


def test_a_slow_network_slows_what_crosses_it() -> None:
    shape = replace(named("llama3-8b"), num_layers=8)
    job = Job(mesh=Mesh(dp=2, tp=4), global_batch=8, micro_batch=1, seq=2048)
    fast, slow = (
        predict_step(
            shape,
            job,
            A100,
            links=Wires(topology=load_topology(f"two_boxes:ranks=8,inside=2400 Gbit/s,between={rate} Gbit/s")),
        )
        for rate in (200, 2)
    )
    assert fast.parts is not None
    assert slow.parts is not None
    assert slow.parts["gradients"] > 50 * fast.parts["gradients"]
    assert slow.seconds > fast.seconds


def test_wires_refuse_what_has_no_rates_or_too_few_ranks() -> None:
    with pytest.raises(UsageError, match="relative capacities"):
        Wires(topology=load_topology("ring:ranks=4"))
    wires = Wires(topology=load_topology("ring:ranks=4,bandwidth=1 GB/s"))
    with pytest.raises(UsageError, match="need 16 ranks"):
        wires.ring(np.array([8.0]), np.array([2.0]), 1.0, 1.0)
    with pytest.raises(UsageError, match="each of 4 ranks once"):
        Wires(topology=wires.topology, order=(0, 1, 1, 3))


# -- jobs -----------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mesh": Mesh(dp=4), "global_batch": 30}, "32 would, or 28"),
    ({"seq": 4097, "mesh": Mesh(cp=2)}, "do not divide over cp=2"),
    ({"recompute": "some"}, "must be one of none, full"),
    ({"zero": 4}, "must be 0, 1, 2 or 3"),
    ({"chunks": 2}, "need a pipeline"),
    ({"micro_batch": 0}, "from 1"),
    ({"executor": "other"}, "must be one of mycel"),
    ({"gradient_bytes": 8}, "must be 2 or 4"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_jobs_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"mesh": Mesh(), "global_batch": 32, "micro_batch": 1, "seq": 4096}
    with pytest.raises(UsageError, match=message):
        Job(**(good | change))


def test_meshes_and_coefficients_and_predictions_are_checked() -> None:
    with pytest.raises(UsageError, match="ep=3 does not divide"):
        Mesh(dp=4, ep=3)
    with pytest.raises(UsageError, match="tp is 0"):
        Mesh(tp=0)
    with pytest.raises(UsageError, match="did you mean 'launch_s'"):
        Coefficients().with_values({"lanch_s": 1.0})
    with pytest.raises(UsageError, match="physics allows"):
        Coefficients(matmul_efficiency=1.0)
    with pytest.raises(UsageError, match="from 0"):
        Prediction(seconds=-1.0, error=0.1)


def test_times_have_every_part() -> None:
    job = Job(mesh=Mesh(pp=2, dp=2, tp=2, cp=2), global_batch=8, micro_batch=1, seq=4096)
    times = step_times(
        Points.of([(named("llama3-8b"), job)]),
        A100.device,
        Rates(ranks_per_node=8, link_gbps=300, network_gbps=25),
        A100.fit("megatron").coefficients,
    )
    assert all(float(getattr(times, f.name)[0]) > 0 for f in fields(Times))
