"""What ranks hold: beside published figures, and what must be so whatever the sizes are."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import published
from mycel.errors import UsageError
from mycel.planning.job import Job, Mesh
from mycel.planning.memory import MemoryParts, activation_bytes, footprints, memory_of, memory_parts, ways_to_save
from mycel.planning.models import ModelShape, named
from mycel.planning.step.points import Points

GIB = 1 << 30
#: Korthikanti et al., table 3: layers, hidden, heads, stages, chunks, micro-batch; eight tensor-parallel ranks.
MODELS = {
    22: (48, 6144, 64, 1, 1, 4),
    175: (96, 12288, 96, 8, 3, 1),
    530: (105, 20480, 128, 35, 3, 1),
    1000: (128, 25600, 160, 64, 1, 1),
}


def megatron(billions: int, **more: Any) -> tuple[ModelShape, Job]:
    layers, hidden, heads, pp, chunks, batch = MODELS[billions]
    shape = published.gpt({"layers": layers, "hidden": hidden, "heads": heads, "seq": 2048}, 51200)
    job = Job(
        mesh=Mesh(tp=8, pp=pp),
        global_batch=4 * pp * batch,
        micro_batch=batch,
        seq=2048,
        chunks=chunks,
        is_flash=False,
        has_dropout=True,
        executor="megatron",
    )
    return shape, replace(job, **more)


POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "selective+sp": {"recompute": "attention", "is_sequence_parallel": True},
    "sequence_parallel": {"is_sequence_parallel": True},
    "selective": {"recompute": "attention"},
    "sequence_parallel+selective": {"recompute": "attention", "is_sequence_parallel": True},
    "full": {"recompute": "full"},
}


def test_activations_are_those_of_the_paper() -> None:
    errors = []
    for row in published.published("korthikanti_memory_gib"):
        first = memory_of(*megatron(row["params_billion"], **POLICIES[row["recompute"]]), stage=0)
        errors.append(first.activations / GIB / row["activations_gib"] - 1)
    assert np.mean(np.abs(errors)) < 0.001


def test_parameters_and_optimizer_are_those_of_the_paper() -> None:
    """Its bars are of the layers alone, which is what a stage in the middle holds; a model of one stage holds all."""
    errors = []
    for row in published.published("korthikanti_memory_gib"):
        shape, job = megatron(row["params_billion"])
        held = memory_of(shape, job, stage=min(1, job.mesh.pp - 1))
        whole = held.parameters + held.gradients + held.optimizer
        errors.append(whole / GIB / row["parameters_and_optimizer_gib"] - 1)
    assert np.mean(np.abs(errors)) < 0.03
    assert np.median(np.abs(errors)) < 0.001


def test_policies_are_in_the_paper_s_proportions() -> None:
    """Figure 7, in per cent of tensor parallelism alone."""
    for row in published.published("korthikanti_activation_percent"):
        kept = {
            name: float(activation_bytes(Points.of([megatron(row["params_billion"], **more)]))[0][0])
            for name, more in POLICIES.items()
        }
        for name in ("sequence_parallel", "selective", "sequence_parallel+selective", "full"):
            assert 100 * kept[name] / kept["none"] == pytest.approx(row[name], rel=0.03), (row, name)


def test_torchtitan_s_sizes() -> None:
    rows = published.torchtitan()
    errors = [
        memory_of(*job).total / GIB / row["memory_gib"] - 1
        for job, row in zip(rows.jobs, rows.published, strict=True)
        if row["memory_gib"]
    ]
    assert len(errors) == 13
    assert np.mean(np.abs(errors)) < 0.08
    assert np.max(np.abs(errors)) < 0.10


def test_no_published_run_that_ran_is_called_impossible() -> None:
    every = [
        published.selene(),
        published.vtrain("vtrain_multi_a100"),
        published.vtrain("vtrain_single_a100"),
        published.torchtitan(),
        *published.mosaic(),
    ]
    for rows in every:
        for job, row in zip(rows.jobs, rows.published, strict=True):
            whole = memory_of(*job)
            assert not whole.is_impossible(rows.device.memory_bytes), (row, whole)
            assert whole.fits(rows.device.memory_bytes), (row, whole)


def test_what_cannot_be_is_called_so() -> None:
    job = Job(mesh=Mesh(dp=8), global_batch=8, micro_batch=1, seq=8192)
    assert memory_of(named("llama3-70b"), job).is_impossible(80 * GIB)


jobs = st.builds(
    lambda pp, dp, tp, m, b, **more: Job(
        mesh=Mesh(pp=pp, dp=dp, tp=tp), global_batch=dp * m * b, micro_batch=b, seq=1024, **more
    ),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([1, 2]),
    recompute=st.sampled_from(["none", "full", "attention", "alternate"]),
    zero=st.sampled_from([0, 1, 2, 3]),
    is_sequence_parallel=st.booleans(),
    is_flash=st.booleans(),
    is_offloaded=st.booleans(),
    executor=st.sampled_from(["mycel", "torch", "megatron"]),
)


@settings(max_examples=60, deadline=None)
@given(job=jobs)
def test_parts_add_up_and_nothing_is_negative(job: Job) -> None:
    shape = named("llama3-8b")
    for held in footprints(shape, job):
        assert held.total == pytest.approx(sum(held.parts.values()))
        assert min(held.parts.values()) >= 0
    whole = memory_of(shape, job)
    assert all(saved > 0 for saved in ways_to_save(shape, job).values())
    for other in ({"is_offloaded": True}, {"is_loss_fused": True}):
        assert memory_of(shape, replace(job, **other)).total <= whole.total


@settings(max_examples=30, deadline=None)
@given(job=jobs)
def test_parameters_of_all_ranks_are_the_model_s(job: Job) -> None:
    """Layers divide evenly here, so all shards together are the model, and norms are counted as if shared."""
    shape = replace(named("llama3-8b"), num_layers=32)
    count = sum(held.parameters for held in footprints(shape, replace(job, zero=0))) * job.mesh.tp / 2
    assert count == pytest.approx(shape.num_parameters, rel=1e-3)


def test_many_jobs_at_once_are_each_by_itself() -> None:
    pairs = [
        megatron(175),
        megatron(22, recompute="full"),
        (named("llama3-8b"), Job(mesh=Mesh(dp=8), global_batch=8, micro_batch=1, seq=8192, zero=3)),
    ]
    together = memory_parts(Points.of(pairs), np.zeros(3))
    for row, pair in enumerate(pairs):
        alone = memory_parts(Points.of([pair]), np.zeros(1))
        for field in fields(MemoryParts):
            assert getattr(alone, field.name)[0] == getattr(together, field.name)[row]


def test_stages_hold_what_1f1b_has_in_flight() -> None:
    shape, job = megatron(1000)
    held = [one.activations for one in footprints(shape, replace(job, global_batch=64 * 2))]
    assert held[0] == pytest.approx(64 * held[-1])
    few = [one.activations for one in footprints(shape, replace(job, global_batch=3))]
    assert few[0] == pytest.approx(3 * few[-1])


def test_torch_s_executor_holds_a_buffer_for_each_micro_batch() -> None:
    shape = named("llama3-8b")
    job = Job(mesh=Mesh(pp=4), global_batch=16, micro_batch=1, seq=8192)
    message = 2 * 8192 * 4096
    by = {
        name: memory_of(shape, replace(job, executor=name), stage=1).boundary / message for name in ("torch", "mycel")
    }
    assert by == {"torch": 32, "mycel": 3}


@pytest.mark.parametrize("recompute", ["none", "full", "alternate"])
def test_in_32_bits_everything_but_adam_is_twice_as_much(recompute: Any) -> None:
    half = named("llama3-8b")
    job = Job(mesh=Mesh(pp=4, dp=2), global_batch=8, micro_batch=1, seq=4096, zero=1, recompute=recompute)
    for stage, (one, two) in enumerate(
        zip(footprints(half, job), footprints(replace(half, element_bytes=4), job), strict=True)
    ):
        assert (two.parameters, two.boundary) == (2 * one.parameters, 2 * one.boundary), stage
        # Of attention on the chip a sum for each query is in 32 bits anyway.
        assert 1.9 * one.activations < two.activations <= 2 * one.activations, stage
        assert two.gradients == one.gradients, stage  # kept in 32 bits in both
        assert two.optimizer == one.optimizer * 8 / 12, stage  # parameters are their own master copy
        assert two.logits == one.logits * 8 / 12, stage


def test_experts_are_shared_by_their_ranks() -> None:
    shape = ModelShape(
        name="moe", num_layers=4, hidden=512, num_heads=8, num_kv_heads=8, head_dim=64, ffn=0, vocab=1000,
        num_experts=16, top_k=2, expert_ffn=1024,
    )  # fmt: skip
    job = Job(mesh=Mesh(dp=8), global_batch=8, micro_batch=1, seq=512)
    whole = memory_of(shape, job)
    shared = memory_of(shape, replace(job, mesh=Mesh(dp=8, ep=8)))
    assert whole.parameters - shared.parameters == pytest.approx(2 * 4 * shape.expert_parameters * 7 / 8)
    # Eight shards of all experts, or all of an eighth of them: as much.
    states = [memory_of(shape, replace(job, mesh=Mesh(dp=8, ep=ep), zero=1)).optimizer for ep in (1, 8)]
    assert states[0] == pytest.approx(states[1])


def test_refusals() -> None:
    shape = named("llama3-8b")
    job = Job(mesh=Mesh(tp=3), global_batch=1, micro_batch=1, seq=1024)
    with pytest.raises(UsageError, match=r"tp=3 does not divide the 32 heads of llama3-8b; 2 would"):
        memory_of(shape, job)
    with pytest.raises(UsageError, match="more than the 32 layers"):
        memory_of(shape, Job(mesh=Mesh(pp=64), global_batch=1, micro_batch=1, seq=1024))
    with pytest.raises(UsageError, match="no experts"):
        memory_of(shape, Job(mesh=Mesh(dp=2, ep=2), global_batch=2, micro_batch=1, seq=1024))
    with pytest.raises(UsageError, match="stage 4 of 1"):
        memory_of(shape, replace(job, mesh=Mesh()), stage=4)
