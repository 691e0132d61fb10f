"""Scans of states equal the fold of one process, gradients too, in every way, transition and layout."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.effort import long
from tests.oracles.sequences import KEYS, VALUES, by_one, drawn, nodes_for, random_layout
from tests.rank_threads import on_ranks

from mycel.errors import UsageError
from mycel.planning.sequence import Layout, contiguous, per_document_zigzag, zigzag
from mycel.sequence import SequenceContext
from mycel.sequence.scan import WAYS, explain_scan, scan, start_scan
from mycel.sequence.scan.choice import _candidates, predict
from mycel.sequence.scan.line import Line, line_of
from mycel.sequence.scan.maps import Maps, Shape
from mycel.sequence.scan.messages import total_bytes
from mycel.topology import load_topology

call = import_module("mycel.sequence.scan.call")


def compare(layout: Layout, order: int, ways: list[str], seed: int, *, heads: int = 2) -> None:
    transitions, updates, weights = drawn(layout, order, heads, seed)
    expected = by_one(layout, transitions, updates, weights)
    size = layout.num_ranks

    def work(rank: int, group: dist.ProcessGroup) -> None:
        context = SequenceContext(layout, group)
        for number, way in enumerate(ways):
            m, u = transitions[rank].clone().requires_grad_(), updates[rank].clone().requires_grad_()
            if number % 2:
                found = scan(m, u, context, way=way, nodes=nodes_for(size))
            else:
                found = start_scan(m, u, context, way=way, nodes=nodes_for(size)).wait()
            for turn in range(2):
                (found * weights[rank]).sum().backward(retain_graph=turn == 0)
            m_grad, u_grad = ((x.grad if x.grad is not None else torch.zeros_like(x)) / 2 for x in (m, u))
            for name, got, want in zip("HMU", (found.detach(), m_grad, u_grad), expected[rank], strict=True):
                scale = want.abs().max().clamp(min=1.0) if want.numel() else 1.0
                error = float(((got - want) / scale).abs().max()) if want.numel() else 0.0
                assert error < 1e-12, (way, rank, name, error, layout)

    on_ranks(size, work)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_every_way_equals_one_process(size: int, order: int) -> None:
    for seed, layout in enumerate(
        [contiguous([9, 0, 1, 20], size), zigzag([23], size), per_document_zigzag([9, 17], size)]
    ):
        compare(layout, order, list(WAYS), seed)
    for seed in range(2):
        compare(random_layout(100 * size + seed, size), order, list(WAYS), seed)


def test_more_ranks_than_rows() -> None:
    compare(contiguous([20], 7), 2, ["two_exchanges", "two_levels"], 3, heads=1)


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("way", list(WAYS))
def test_bytes_are_what_is_said(way: str, order: int) -> None:
    layout, size = zigzag([40], 4), 4
    shape = Shape(heads=4, values=VALUES, keys=KEYS, order=order)
    nodes = nodes_for(size)
    said = total_bytes(WAYS[way].messages(line_of(layout), shape, size, nodes), 8)
    back = total_bytes(WAYS[way].messages(line_of(layout).reversed(), shape, size, nodes), 8)
    transitions, updates, _ = drawn(layout, order, 4, 0)

    def work(rank: int, group: dist.ProcessGroup) -> tuple[int, int]:
        context = SequenceContext(layout, group)
        u = updates[rank].clone().requires_grad_()
        scan(transitions[rank], u, context, way=way, nodes=nodes).sum().backward()
        return context.meter.total(["scan"]), context.meter.total(["scan.backward"])

    for rank, found in enumerate(on_ranks(size, work)):
        assert found == tuple(sum(n for (source, _), n in each.items() if source == rank) for each in (said, back))


def test_bytes_do_not_grow_with_the_sequence_and_shrink_with_the_way() -> None:
    shape = Shape(heads=8, values=64, keys=64, order=0)
    for lengths in ([64], [64000]):
        line = line_of(contiguous(lengths, 8))
        sent = {
            n: sum(total_bytes(w.messages(line, shape, 8, ()), 4).values())
            for n, w in WAYS.items()
            if n != "two_levels"
        }
        state = shape.update * 4
        assert sent["chain"] == 7 * state
        assert sent["all_gather"] == 8 * 7 * (state + 8 * 4)
        # Seven runs give and seven take, and of each a rank keeps its own eighth.
        assert sent["two_exchanges"] == 7 * 7 * (2 * state // 8 + 4)


def test_the_choice_is_the_same_everywhere_and_explained() -> None:
    layout = contiguous([12], 3)

    def work(rank: int, group: dist.ProcessGroup) -> str:
        context = SequenceContext(layout, group)
        assert explain_scan(context) == "no scan yet"
        for _ in range(2):
            scan(torch.ones(1, 1), torch.ones(1, 1, KEYS, VALUES), context)
        said = explain_scan(context)
        assert said.count("measured") == 4, "without nodes there are no two levels"
        return said

    assert len(set(on_ranks(3, work))) == 1


def test_fabrics_decide() -> None:
    from mycel.comm import nodes_of

    def best(fabric: str, keys: int) -> str:
        topology = load_topology(fabric)
        shape = Shape(heads=4, values=keys, keys=keys, order=0)
        found = predict(topology, line_of(contiguous([64], 8)), shape, 4, nodes_of(topology))
        return min(found, key=found.__getitem__)

    assert best("two_boxes:ranks=8", 256) == "two_levels"
    assert best("star:ranks=8", 256) == "two_exchanges"
    assert best("star:ranks=8", 4) == "all_gather"


@pytest.mark.parametrize(
    ("transition", "update", "more", "says"),
    [
        ((2, 3), (2, 4, 2), {}, "transitions of shape"),
        ((1,), (2, 4, 2), {}, "transitions of shape"),
        ((3,), (3, 4, 2), {}, "rank 0 has 2 segments"),
        ((2,), (2, 2), {}, "updates of shape"),
        ((2,), (2, 4, 2), {"way": "ring"}, "no way of scanning is called 'ring': auto, chain"),
    ],
)
def test_what_does_not_fit_is_refused(
    transition: tuple[int, ...], update: tuple[int, ...], more: dict[str, str], says: str
) -> None:
    context = SequenceContext(contiguous([3, 1], 1))
    with pytest.raises(UsageError, match=says):
        scan(torch.ones(transition), torch.ones(update), context, **more)  # type: ignore[arg-type]


def test_levels_need_nodes() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        context = SequenceContext(contiguous([4], 2), group)
        for nodes, says in ((None, "which ranks share a node"), (((0,),), "nodes .*: each of ranks 0 to 1 once")):
            with pytest.raises(UsageError, match=says):
                scan(torch.ones(1), torch.ones(1, 1, 1), context, way="two_levels", nodes=nodes)

    on_ranks(2, work)


def test_documents_of_one_rank_send_nothing() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> int:
        context = SequenceContext(contiguous([4, 4, 4], 3), group)
        update = torch.ones(1, 1, 1, requires_grad=True)
        scan(torch.ones(1), update, context, way="two_exchanges").sum().backward()
        return context.meter.total()

    assert on_ranks(3, work) == [0, 0, 0]
    assert len(line_of(contiguous([4, 4, 4], 3))) == 0


@long
def test_three_hundred_random_layouts() -> None:
    for seed in range(300):
        size = (1, 2, 3, 4, 7)[seed % 5]
        compare(random_layout(seed, size, most_documents=6, longest=30), seed % 3, list(WAYS), seed)


def _resets(monkeypatch: pytest.MonkeyPatch, *, to: bool) -> None:
    def changed(layout: Layout) -> Line:
        line = line_of(layout)
        return replace(line, resets=(to,) * len(line))

    monkeypatch.setattr(call, "line_of", changed)


def _state_kept_over_a_border(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset lost: documents that begin inside a run count as if they went on."""
    right = call.runs_of
    monkeypatch.setattr(call, "runs_of", lambda layout: tuple(replace(r, tail=0) for r in right(layout)))
    monkeypatch.setattr(
        call, "line_of", lambda layout: replace(line_of(layout), resets=(False,) * len(line_of(layout)))
    )


def _state_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset where no document begins."""
    monkeypatch.setattr(
        call, "line_of", lambda layout: replace(line_of(layout), resets=(True,) * len(line_of(layout)))
    )


def _not_transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients through the transition instead of its transpose."""
    monkeypatch.setattr(
        Maps, "transposed", lambda maps: Maps(transition=maps.transition.flip(0), update=maps.update.flip(0))
    )


def _stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of transitions by the states of another run."""
    right = Maps.transposed
    monkeypatch.setattr(
        Maps, "transposed", lambda maps: replace(right(maps), update=right(maps).update.roll(1, 0) * 1.0)
    )


@pytest.mark.parametrize("wrong", [_state_kept_over_a_border, _state_forgotten, _not_transposed, _stale])
@pytest.mark.parametrize("way", ["all_gather", "two_exchanges", "doubling"])
def test_what_is_wrong_is_caught(wrong: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = contiguous([9, 5, 12], 3) if wrong is _state_kept_over_a_border else zigzag([23], 3)
    compare(layout, 2, [way], 2)
    wrong(monkeypatch)
    call._line.cache_clear()
    with pytest.raises((AssertionError, RuntimeError)):
        compare(layout, 2, [way], 2)
    call._line.cache_clear()


def test_what_predictions_cannot_tell_apart_is_measured() -> None:
    assert _candidates({"chain": 0.1, "doubling": 0.15, "all_gather": 0.17}) == ["chain", "doubling"]
    assert _candidates({"chain": 6e-3, "doubling": 1e-3, "all_gather": 12e-3}) == ["chain", "doubling"], "quick ones"
