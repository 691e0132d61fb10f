"""Sketches: lossless below their limit, honest above it; TAGC on top of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mycel.data_parallel.compress import AllReduce, Context, Item
from mycel.data_parallel.compress.sketch import _peeled_by_torch, insert, num_counters, peel
from mycel.data_parallel.compress.tagc import TAGC, heavy_layers
from mycel.errors import UsageError
from mycel.wire.buckets import pack
from mycel.wire.selection import largest_places, places_in


def sparse(count: int, kept: int, seed: int) -> tuple[Tensor, Tensor]:
    """Indices, and values that float32 adds exactly: whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(count, generator=generator)[:kept]
    return indices, torch.randint(-1000, 1000, (kept,), generator=generator).float()


@pytest.mark.parametrize("load", [0.1, 0.5, 0.75])
def test_a_sum_of_sketches_gives_the_sum_of_vectors_without_any_error(load: float) -> None:
    count, ratio, ranks = 30_000, 2.0, 3
    counters = num_counters(count, ratio)
    exact, sketch, union = torch.zeros(count), torch.zeros(counters), torch.zeros(count, dtype=torch.bool)
    for rank in range(ranks):
        indices, values = sparse(count, int(load * counters / ranks), rank)
        sketch += insert(indices, values, counters, seed=7)
        exact[indices] += values
        union[indices] = True
    indices = union.nonzero().view(-1)
    found, estimated = peel(sketch, indices, seed=7)
    assert len(estimated) == 0
    assert float((found - exact[indices]).abs().max()) == 0.0


def test_past_the_limit_most_is_estimated_and_said_so() -> None:
    counters = num_counters(30_000, 2.0)
    indices, values = sparse(30_000, int(1.0 * counters), 0)
    found, estimated = peel(insert(indices, values, counters, seed=1), indices, seed=1)
    assert len(estimated) > 0.5 * len(indices)
    assert float((found - values).abs().max()) > 0


def test_indices_that_hold_nothing_are_zero_and_another_seed_is_not_understood() -> None:
    indices, values = sparse(3000, 300, 0)
    sketch = insert(indices, values, num_counters(3000, 2.0), seed=1)
    more = torch.cat([indices, torch.tensor([i for i in range(3000) if i not in set(indices.tolist())][:50])])
    found, _ = peel(sketch, more, seed=1)
    assert torch.equal(found, torch.cat([values, torch.zeros(50)]))
    assert not torch.equal(peel(sketch, more, seed=2)[0], found)


def test_values_of_any_size_come_back_to_rounding() -> None:
    generator = torch.Generator().manual_seed(3)
    indices = torch.randperm(20_000, generator=generator)[:6000]
    values = torch.randn(6000, generator=generator) * 1e-6
    found, estimated = peel(insert(indices, values, 9999, seed=6), indices, seed=6)
    assert len(estimated) == 0
    assert float((found - values).abs().max()) < 1e-6 * float(values.abs().max())


def test_nothing_and_what_is_not_finite() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    assert peel(torch.zeros(3), empty, seed=0)[0].numel() == 0
    assert peel(torch.zeros(3), torch.tensor([1]), seed=0)[0].tolist() == [0.0]
    broken = insert(torch.tensor([0]), torch.tensor([float("nan")]), 3, seed=0)
    assert bool(peel(broken, torch.tensor([0]), seed=0)[0].isnan().all())


def run(compressor: TAGC, tensors: list[Tensor], *, keep_residual: bool = True) -> list[tuple[Tensor, Tensor]]:
    """What every rank of a conversation gets: means and losses."""
    talks = []
    for rank, tensor in enumerate(tensors):
        context = Context(name="w", rank=rank, world_size=len(tensors))
        talks.append(compressor.converse([Item(tensor=tensor, context=context)], keep_residual=keep_residual))
    answers: list[Tensor | None] = [None] * len(talks)
    while True:
        requests, outcomes = [], []
        for talk, answer in zip(talks, answers, strict=True):
            try:
                requests.append(talk.send(answer))
            except StopIteration as end:
                outcomes.append((end.value[0].mean, end.value[0].residual))
        if outcomes:
            return outcomes
        assert all(isinstance(request, AllReduce) for request in requests)
        total = requests[0].tensor.clone()
        for request in requests[1:]:
            total = total | request.tensor if request.op == "or" else total + request.tensor
        answers = [total.clone() for _ in talks]


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_default_density_fits_and_what_is_left_is_owed(world_size: int) -> None:
    generator = torch.Generator().manual_seed(world_size)
    tensors = [torch.randn(64, 400, generator=generator) for _ in range(world_size)]
    compressor = TAGC(ratio=2.0)
    outcomes = run(compressor, tensors)
    assert compressor.num_left == 0 < compressor.num_decoded
    mean = outcomes[0][0]
    assert all(torch.equal(other, mean) for other, _ in outcomes)
    owed = torch.stack([lost for _, lost in outcomes]).mean(dim=0)
    assert torch.allclose(mean + owed, torch.stack(tensors).mean(dim=0), atol=1e-6)


def test_a_density_that_does_not_fit_is_counted() -> None:
    compressor = TAGC(ratio=2.0, density=0.2)
    generator = torch.Generator().manual_seed(0)
    for world_size, is_lossless in ((2, True), (4, False)):
        compressor.num_left = 0
        run(compressor, [torch.randn(20_000, generator=generator) for _ in range(world_size)], keep_residual=False)
        assert (compressor.num_left == 0) == is_lossless


@pytest.mark.parametrize("density", [None, 0.5])
def test_what_a_sketch_does_not_give_back_is_owed(density: float | None) -> None:
    compressor, lost = TAGC(ratio=2.0, density=density), 0.0
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        tensors = [torch.randn(12, 25, generator=generator) for _ in range(4)]
        outcomes = run(compressor, tensors)
        owed = torch.stack([residual for _, residual in outcomes]).mean(dim=0)
        lost = max(lost, float((outcomes[0][0] + owed - torch.stack(tensors).mean(dim=0)).abs().max()))
        assert all(residual.norm() <= tensor.norm() for (_, residual), tensor in zip(outcomes, tensors, strict=True))
    assert lost < 1e-5
    assert compressor.num_left > 0 or density is None


def test_owners_hear_what_senders_believe_was_heard() -> None:
    compressor = TAGC(ratio=2.0, density=0.3)
    contexts = [Context(name="w", rank=rank, world_size=4) for rank in range(4)]
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(40, 50, generator=generator) for _ in contexts]
    payloads = [compressor.compress(t, c) for t, c in zip(tensors, contexts, strict=True)]
    heard = torch.zeros(40, 50)
    compressor.accumulate_all(payloads, heard, contexts)  # the sum is too full, each alone is not
    believed = sum(compressor.decompress(p, (40, 50), c) for p, c in zip(payloads, contexts, strict=True))
    assert torch.allclose(heard, believed, atol=1e-5)  # type: ignore[arg-type]
    assert int((heard != 0).sum()) > 0.7 * 2000


def test_compiled_and_torch_take_the_same_apart() -> None:
    indices, values = sparse(30_000, 9000, 0)
    sketch = insert(indices, values, num_counters(30_000, 2.0), seed=3)
    found, left = peel(sketch, indices, seed=3)
    by_torch, is_left = _peeled_by_torch(sketch, 2.0**-20, indices, 3)
    assert torch.equal(found, (by_torch.double() * 2.0**-20).float())
    assert torch.equal(left, is_left.nonzero().view(-1))


@pytest.mark.parametrize("count", [0, 1, 7, 500, 1000])
def test_the_largest_places(count: int) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1)).mul_(8).round_()  # with ties and zeros
    x[5], x[700] = torch.nan, -torch.inf
    places = largest_places(x, count)
    assert torch.equal(places, places.unique())
    magnitudes = x.abs().nan_to_num(nan=1e9, posinf=1e8)
    assert torch.equal(
        magnitudes[places].sort().values, magnitudes.topk(count).values.sort().values[-len(places) or 1000 :]
    )
    assert bool((x[places] != 0).all())


@pytest.mark.parametrize("count", [0, 1, 9, 64, 1001])
def test_places_in_a_bitmap(count: int) -> None:
    bits = torch.randint(0, 2, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    assert torch.equal(places_in(pack(bits, 1), count), bits.nonzero().view(-1))


def test_payloads_add_up() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(30, 50, generator=generator) for _ in range(3)]
    compressor, contexts = TAGC(), [Context(name="w", rank=rank, world_size=3) for rank in range(3)]
    payloads = [compressor.compress(t, c) for t, c in zip(tensors, contexts, strict=True)]
    assert {len(p) for p in payloads} == {compressor.wire_bytes((30, 50))}
    together = compressor.decompress(compressor.added(payloads, (30, 50)), (30, 50), contexts[0])
    apart = sum(compressor.decompress(p, (30, 50), c) for p, c in zip(payloads, contexts, strict=True))
    assert torch.allclose(together, apart, atol=1e-5)
    assert int((together != 0).sum()) > compressor.num_kept(1500, 3)


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5)])
def test_tiny_and_zero_tensors(shape: tuple[int, ...]) -> None:
    compressor, context = TAGC(), Context(name="w")
    for tensor in (torch.zeros(shape), torch.ones(shape)):
        payload = compressor.compress(tensor, context)
        assert len(payload) == compressor.wire_bytes(shape)
        assert not bool(compressor.decompress(payload, shape, context).isnan().any())
    zero = compressor.decompress(compressor.compress(torch.zeros(shape), context), shape, context)
    assert torch.equal(zero, torch.zeros(shape))


def test_heavy_layers_keep_equals_together() -> None:
    model = nn.ModuleDict({f"up{i}": nn.Linear(8, 32) for i in range(3)} | {"out": nn.Linear(8, 8)})
    assert heavy_layers(model, 0.5) == ["up0.weight", "up1.weight", "up2.weight"]
    assert len(heavy_layers(model, 1.0)) == 4


@pytest.mark.parametrize("options", [{"ratio": 0.5}, {"density": 0.0}, {"density": 1.5}])
def test_what_makes_no_sense_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="TAGC"):
        TAGC(**options)
