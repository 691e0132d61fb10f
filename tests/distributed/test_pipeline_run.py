"""Orders of pipelines run through torch: losses and gradients are those of one process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.effort import long

from mycel.emulate.launch import start
from mycel.pipeline.placement import Block, Dependency, Placement
from mycel.pipeline.routes import Nodes, find_routes
from mycel.pipeline.search import find_batch
from mycel.pipeline.stages import order_of
from mycel.topology.builders import two_boxes

PRELOAD = ["mycel.parallel"]
PROGRAMS = Path(__file__).parent / "programs"
#: Of a wait for a message, and for a busy machine's wake-up.
TIMEOUT_S, LATE_S = 4.0, 10.0


@pytest.mark.parametrize("backend", ["mycel", "gloo"])
@pytest.mark.parametrize("size", [2, 3])
def test_torchs_own_orders(run_ranks: Callable[..., list[Any]], size: int, backend: str) -> None:
    run_ranks(size, "pipelines", "torchs", backend=backend, preload=PRELOAD, timeout_s=60)


@pytest.mark.parametrize("backend", ["mycel", "gloo"])
@pytest.mark.parametrize("size", [2, 4])
def test_orders_that_torch_has_no_class_for(run_ranks: Callable[..., list[Any]], size: int, backend: str) -> None:
    run_ranks(size, "pipelines", "unlike", backend=backend, preload=PRELOAD, timeout_s=60)


@pytest.mark.parametrize("backend", ["mycel", "gloo"])
@pytest.mark.parametrize("what", ["sharded", "recomputed", "evaluated"])
def test_what_is_inside_of_stages(run_ranks: Callable[..., list[Any]], what: str, backend: str) -> None:
    run_ranks(4, "pipelines", what, backend=backend, preload=PRELOAD, timeout_s=60)


def _found(name: str, blocks: Sequence[tuple[str, Sequence[int], int, int]], *waits: str, delay: int = 0) -> str:
    """The JSON of the best order of four micro-batches for blocks, given as name, ranks, time and memory."""
    place = {block[0]: i for i, block in enumerate(blocks)}
    placement = Placement(
        name=name,
        num_devices=1 + max(rank for _, ranks, _, _ in blocks for rank in ranks),
        blocks=tuple(Block(name=n, devices=tuple(ranks), time=t, memory=m) for n, ranks, t, m in blocks),
        dependencies=tuple(
            Dependency(
                before=place[one],
                after=place[other],
                delay=delay if set(blocks[place[one]][1]).isdisjoint(blocks[place[other]][1]) else 0,
            )
            for wait in waits
            for one, other in pairwise(wait.split())
        ),
        cap=(3 * max(1, len(blocks) // 4),) * (1 + max(rank for _, ranks, _, _ in blocks for rank in ranks)),
    )
    return json.dumps(order_of(find_batch(placement, 4, time_limit_s=30.0).timed).to_json())


def _chain(name: str, ranks: Sequence[int], *, split: bool = False, delay: int = 0) -> str:
    """Stages on ranks, one after the other and back."""
    stages = range(len(ranks))
    blocks = [(f"F{s}", [ranks[s]], 1 + s % 2, 1) for s in stages]
    back = [(f"{'I' if split else 'B'}{s}", [ranks[s]], 2, 0 if split else -1) for s in reversed(stages)]
    halves = [(f"W{s}", [ranks[s]], 1, -1) for s in stages] if split else []
    waits = [f"I{s} W{s}" for s in stages] if split else []
    return _found(name, [*blocks, *back, *halves], " ".join(b[0] for b in [*blocks, *back]), *waits, delay=delay)


@pytest.mark.parametrize("backend", ["mycel", "gloo"])
@pytest.mark.parametrize("size", [2, 3])
def test_orders_from_search(run_ranks: Callable[..., list[Any]], size: int, backend: str) -> None:
    straight = list(range(size))
    texts = [
        _chain("V", straight),
        _chain("delays", straight, delay=3),
        _chain("halves", straight, split=True),
        _chain("there and back", [*straight, *reversed(straight)]),
        _chain("unequal", [0, *straight]),
    ]
    run_ranks(size, "pipelines", "searched", texts, backend=backend, preload=PRELOAD, timeout_s=60)


@pytest.mark.parametrize("backend", ["mycel", "gloo"])
def test_blocks_that_all_ranks_carry_out_together(run_ranks: Callable[..., list[Any]], backend: str) -> None:
    ranks = [0, 1, 2, 3]
    there = [(f"F{r}", [r], 1, 1) for r in ranks]
    back = [(f"B{r}", [r], 2, -1) for r in reversed(ranks)]
    ends = [("embed", ranks, 1, 0), ("embed_back", ranks, 1, 0)]
    m_shape = _found("M", [ends[0], *there, *back, ends[1]], "embed F0 F1 F2 F3 B3 B2 B1 B0 embed_back")
    k_shape = _found("K", [*there, ("meet", ranks, 1, 0), *back], "F0 F1 meet B1 B0", "F2 F3 meet B3 B2")
    run_ranks(4, "pipelines", "m_shape", m_shape, backend=backend, preload=PRELOAD, timeout_s=60)
    run_ranks(4, "pipelines", "k_shape", k_shape, backend=backend, preload=PRELOAD, timeout_s=60)


def test_a_block_of_all_ranks_between_stages(run_ranks: Callable[..., list[Any]]) -> None:
    ranks = [0, 1, 2, 3]
    there = [(f"F{r}", [r], 1, 1) for r in ranks]
    back = [(f"B{r}", [r], 2, -1) for r in reversed(ranks)]
    meet = [("meet", ranks, 1, 0), ("meet_back", ranks, 1, 0)]
    text = _found("NN", [*there, *back, *meet], "F0 F1 meet F2 F3 B3 B2 meet_back B1 B0")
    run_ranks(4, "pipelines", "nn_shape", text, preload=PRELOAD, timeout_s=60)


@pytest.mark.parametrize("backend", ["mycel", pytest.param("gloo", marks=long)])
def test_routes_from_search_skip_and_exchange_stages(run_ranks: Callable[..., list[Any]], backend: str) -> None:
    delay = tuple(tuple(0 if a == b else 1 for b in range(4)) for a in range(4))
    nodes = Nodes(stage=(0, 1, 2, 3), forward=(1, 2, 1, 2), backward=(2, 3, 2, 3), delay=delay)
    found = [find_routes(nodes, 4, visited=3, reorder=reorder) for reorder in (True, False)]
    assert all(len(route) == 3 for routes in found for route in routes.stages)
    texts = [json.dumps(routes.order().to_json()) for routes in found]
    run_ranks(4, "pipelines", "searched", texts, backend=backend, preload=PRELOAD, timeout_s=60)


def test_overlapped_parts_by_a_function_of_ones_own(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(2, "pipelines", "overlapped", preload=PRELOAD, timeout_s=60)
    run_ranks(1, "pipelines", "overlap_that_forgets", preload=PRELOAD, timeout_s=60)


def test_compiled_stages(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(2, "pipelines", "compiled", preload=PRELOAD, timeout_s=120)


def test_what_does_not_fit_is_refused(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(2, "pipelines", "refused", preload=PRELOAD, timeout_s=60)
    run_ranks(2, "pipelines", "without_private_names", preload=PRELOAD, timeout_s=60)


@pytest.mark.parametrize("backend", ["mycel", "gloo"])
def test_torchs_classes_in_our_place(run_ranks: Callable[..., list[Any]], backend: str) -> None:
    run_ranks(2, "pipelines", "by_torch", backend=backend, preload=PRELOAD, timeout_s=60)


@pytest.mark.parametrize("backend", ["mycel", "gloo"])
def test_what_was_sent_is_let_go(run_ranks: Callable[..., list[Any]], backend: str) -> None:
    assert max(run_ranks(3, "pipelines", "sends_let_go", backend=backend, preload=PRELOAD, timeout_s=60)) <= 5


def test_one_process_holds_the_orders(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    happened = run_ranks(3, "pipelines", "controlled", str(tmp_path / "store"), preload=PRELOAD, timeout_s=60)
    assert happened == [["one0", "other0", "other1", "one1"]] * 2 + [[]]


@long
@pytest.mark.parametrize("backend", ["mycel", "gloo"])
@pytest.mark.parametrize("size", [3, 4, 5])
def test_both_at_more_ranks(run_ranks: Callable[..., list[Any]], size: int, backend: str) -> None:
    for function in ("torchs", "unlike"):
        run_ranks(size, "pipelines", function, backend=backend, preload=PRELOAD, timeout_s=200)


@pytest.mark.usefixtures("warm_ranks")
@long
@pytest.mark.namespaces
@pytest.mark.parametrize("backend", ["mycel", "gloo"])
def test_over_two_nodes(backend: str) -> None:
    lines: list[str] = []
    command = [sys.executable, str(PROGRAMS / "pipeline_nodes.py"), backend]
    with start(two_boxes(num_ranks=4), command, output=lambda _, line: lines.append(line), timeout_s=300) as run:
        assert run.wait() == 0, "\n".join(lines)
    assert lines.count("right") == 4


@pytest.mark.parametrize("backend", ["mycel", pytest.param("gloo", marks=long)])
def test_tensor_pipeline_and_data(run_ranks: Callable[..., list[Any]], backend: str) -> None:
    run_ranks(8, "pipelines", "threefold", backend=backend, preload=PRELOAD, timeout_s=200)


@pytest.mark.parametrize(("backend", "how"), [("mycel", "kill"), ("gloo", "kill"), ("mycel", "stop")])
def test_of_a_lost_rank_survivors_say_what_they_wait_for(
    run_ranks: Callable[..., list[Any]], backend: str, how: str
) -> None:
    reports = run_ranks(4, "pipelines", "lost", backend, how, 2, TIMEOUT_S, backend=None, preload=PRELOAD)
    assert reports[2] is None
    for rank in (0, 1, 3):
        (first, _, _), (kind, words, seconds) = reports[rank]
        assert first == "none" and kind in ("PeerLostError", "CollectiveTimeoutError"), reports
        assert words.startswith(f"rank {rank} was at ") and seconds < 2 * TIMEOUT_S + LATE_S, reports
    # Its neighbours wait for what it was about to do: the forward in which it went, and the backward after that.
    assert "waits for 2F3 of rank 2" in reports[3][1][1]
    assert "waits for 2B2 of rank 2" in reports[1][1][1]
    if backend == "mycel":  # over Gloo, who is no neighbour learns only of the neighbour who gave up
        assert "behind that for 2B2 of rank 2" in reports[0][1][1]
