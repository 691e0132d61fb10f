"""Fragments of a model, fifteen levels in less than four bits, and combinations of local updates that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mycel.data_parallel import Adasum, Delayed, DenseInt4, Periodic, Quantised, Streaming, diloco, local_updates
from mycel.data_parallel.compress import Context, dense_int4
from mycel.data_parallel.local.scaler import watch_scaler
from mycel.data_parallel.local.streaming import divide
from mycel.errors import UsageError
from mycel.wire.buckets import bucket_scales, bytes_of


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 1023, 1024, 1025, 5000, 256 * 1024 + 1024 + 3])
def test_dense_int4_is_int4_to_the_nearest(count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    values[::7] = 0
    dense, plain, context = DenseInt4(), Quantised(4, stochastic=False), Context(name="w")
    payload = dense.compress(values, context)
    found = dense.decompress(payload, values.shape, context)
    want = plain.decompress(plain.compress(values, context), values.shape, context)
    assert torch.allclose(found, want, atol=1e-6) and len(payload) == dense.wire_bytes((count,))
    assert count % 1024 or 8 * len(payload) <= 3.97 * count


def test_every_code_at_every_place_comes_back() -> None:
    levels = torch.arange(-7.0, 8.0)
    values = torch.stack([levels.roll(i).repeat(69)[:1024] for i in range(15)]).view(-1)
    dense, context = DenseInt4(), Context(name="w")
    assert torch.equal(dense.decompress(dense.compress(values, context), values.shape, context), values)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_dense_int4_lets_overflow_through_and_nothing_else(bad: float) -> None:
    values = torch.ones(3000)
    values[1500] = bad
    dense, context = DenseInt4(stochastic=True), Context(name="w")
    found = dense.decompress(dense.compress(values, context), values.shape, context)
    assert found[1024:2048].isnan().all() and torch.equal(found[:1024], values[:1024])
    tiny = torch.full((1024,), 1e-45)
    assert dense.decompress(dense.compress(tiny, context), tiny.shape, context).isfinite().all()


@pytest.mark.parametrize("by_chance", [False, True])
@pytest.mark.parametrize("count", [0, 1, 17, 1023, 1024, 5000, 256 * 1024 + 1024 + 3])
def test_loops_and_tensor_operations_make_the_same_bytes(count: int, by_chance: bool) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    values[1024:1100] = 0
    values[3000:3001] = float("nan")
    values[4000:5000] = 1e-45
    dense, context = DenseInt4(stochastic=by_chance), Context(name="w", step=3)
    payload, scales = dense.compress(values, context), bucket_scales(values, 1024)
    seed = context.random_seed(shared=False) if by_chance else None
    slow = torch.cat([bytes_of(scales), *dense_int4._by_torch(values, scales, seed)])
    assert torch.equal(payload, slow)
    want = dense_int4._from_torch(payload[4 * len(scales) :], scales, count)
    found = dense.decompress(payload, (count,), context)
    assert torch.allclose(found, want, rtol=0, atol=0, equal_nan=True)
    total = torch.ones(count)
    dense.accumulate(payload, total, context)
    assert torch.allclose(total, 1 + want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("pattern", ["strided", "sequential"])
@pytest.mark.parametrize("fragments", [1, 2, 3, 5, 8])
def test_fragments_are_a_division(pattern: Any, fragments: int) -> None:
    names = ["tokens.weight", "places.weight", *(f"layers.{i}.{k}" for i in range(6) for k in "abc"), "head.weight"]
    sizes = [500, 60, *([100, 10, 1] * 6), 500]
    found = divide(names, sizes, fragments, pattern)
    assert sorted(place for part in found for place in part) == list(range(len(names)))
    assert len(found) == fragments and all(part == sorted(part) and part for part in found)
    for layer in range(6):
        where = {i for i, part in enumerate(found) for p in part if names[p].startswith(f"layers.{layer}.")}
        assert len(where) == 1, "a block stays together"


def test_fewer_blocks_than_fragments_are_cut() -> None:
    assert divide(["a.0.w", "a.0.b", "a.1.w"], [4, 1, 4], 3, "sequential") == [[0], [1], [2]]
    with pytest.raises(UsageError, match="cannot be divided"):
        divide(["a", "b"], [1, 1], 3, "strided")


@pytest.mark.parametrize("steps", [4, 7, 12])
@pytest.mark.parametrize("fragments", [1, 3, 4])
def test_a_fragment_meets_as_often_as_the_whole_would(steps: int, fragments: int) -> None:
    rule, total = Streaming(steps=steps, fragments=fragments), 5 * steps
    for fragment in range(fragments):
        found = [s for s in range(1, total + 1) if rule.meets(fragment, s, total)]
        assert len(found) == 5 and found[-1] == total
        assert all(b - a >= steps for a, b in pairwise(found))


@pytest.mark.parametrize(
    "settings",
    [
        {"fragments": 9},
        {"fragments": 0},
        {"overlap": 8},
        {"overlap": -1},
        {"mixing": 1.0},
        {"pattern": "other"},
        {"own": "x"},
    ],
)
def test_streaming_that_makes_no_sense_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Streaming(steps=8, **settings)


class Nobody:
    """Members of whom none ever comes or goes."""

    is_wanted = False

    def has_failed(self, error: Exception) -> bool:
        return False

    def form(self, note: int) -> dist.ProcessGroup:
        assert dist.group.WORLD is not None
        return dist.group.WORLD


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"combiner": Adasum(), "compressor": DenseInt4()}, "pass one of both"),
        ({"members": Nobody()}, "average_buffers=False"),
        ({"members": Nobody(), "average_buffers": False, "optimizer_state": "average"}, "use keep"),
        ({"synchronizer": Streaming(steps=9, fragments=9)}, "cannot be divided"),
    ],
)
def test_what_cannot_work_is_refused(alone: None, settings: dict[str, Any], says: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = settings.pop("synchronizer", Periodic(2))
    with pytest.raises(UsageError, match=says):
        local_updates(optimizer, rule, model=model, **settings)


def test_finish_needs_to_be_announced(alone: None) -> None:
    model = nn.Linear(2, 1)
    with (
        local_updates(torch.optim.SGD(model.parameters(), lr=0.1), Periodic(2), model=model) as updates,
        pytest.raises(UsageError, match="uneven=True"),
    ):
        updates.finish()


def test_complex_changes_are_refused_with_compressors(alone: None) -> None:
    model = nn.Linear(2, 1, dtype=torch.complex64)
    with pytest.raises(UsageError, match="complex"):
        local_updates(torch.optim.SGD(model.parameters(), lr=0.1), Periodic(2), model=model, compressor=DenseInt4())


def test_state_of_other_fragments_is_refused(alone: None) -> None:
    def made(rule: Any) -> Any:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        return local_updates(torch.optim.SGD(model.parameters(), lr=0.1), rule, model=model, outer=diloco())

    saved = made(Streaming(steps=4, fragments=2)).state_dict()
    with pytest.raises(UsageError, match="2 fragments, these have 1"):
        made(Delayed(Periodic(4))).load_state_dict(saved)
    whole = made(Periodic(4)).state_dict(own=True)
    with pytest.raises(UsageError, match="rank 0 of 1"):
        made(Periodic(4)).load_state_dict({**whole, "owner": [1, 2], "residuals": {"0.weight": torch.zeros(2, 2)}})


def test_only_steps_of_the_watched_optimizer_that_were_left_out_count() -> None:
    mine, other = (torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1) for _ in range(2))
    counted: list[str] = []
    mine.register_step_post_hook(lambda *_: counted.append("step"))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    release = watch_scaler(scaler, mine, lambda: len(counted), lambda: counted.append("left out"))
    for bad in (False, True):
        for optimizer in (mine, other):
            parameter = optimizer.param_groups[0]["params"][0]
            parameter.grad = torch.full((1,), float("inf") if bad else 1.0)
            scaler.scale(torch.ones(1))
            scaler.step(optimizer)
        scaler.update()
    assert counted == ["step", "left out"]
    release()
    assert "step" not in vars(scaler)
