"""all_to_all where the programme is too large: both ends of an interval, one path a pair, whatever the numbering."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from tests.effort import long
from tests.unit.test_sparse_cuts import cables, numbered
from typer.testing import CliRunner

from mycel.cli import build_app
from mycel.collectives import concurrent_flow, flow_bound
from mycel.collectives.bound import bound
from mycel.collectives.cheapest_ways import find_leaves
from mycel.collectives.concurrent_flow import bracket_flow, proven_time
from mycel.collectives.flow_bound import is_large, solve_flow
from mycel.collectives.spec import Collective
from mycel.collectives.synth import balanced_paths, synthesize
from mycel.collectives.verify import verify_schedule
from mycel.errors import SynthesisError
from mycel.topology.builders import dragonfly, ring, torus
from mycel.topology.json_format import to_json
from mycel.topology.load import load_topology
from mycel.topology.model import Link, Topology, Vertex


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flow_bound, "_MOST_VARIABLES", 0)
    solve_flow.cache_clear()
    yield
    solve_flow.cache_clear()


def raw(num_boxes: int, seed: int, *, nics: list[int]) -> Topology:
    """Boxes of four ranks round a switch each, with network links of one width a box, in a shuffled order."""
    rng = random.Random(seed)
    kinds: list[str] = ["switch"]
    capacity: dict[tuple[int, int], int] = {}
    for box in range(num_boxes):
        inner = len(kinds)
        kinds.append("switch")
        for _ in range(4):
            kinds.append("rank")
            for other, width in ((inner, 300), (0, nics[box % len(nics)])):
                capacity[len(kinds) - 1, other] = capacity[other, len(kinds) - 1] = width
    place = rng.sample(range(len(kinds)), len(kinds))
    found = sorted((place[old], kind) for old, kind in enumerate(kinds))
    links = [Link(src=place[a], dst=place[b], capacity=c) for (a, b), c in capacity.items()]
    rng.shuffle(links)
    return Topology(
        name="raw",
        unit="GB/s",
        vertices=tuple(Vertex(kind="rank" if kind == "rank" else "switch", label=f"v{v}") for v, kind in found),
        links=tuple(links),
    )


def unlike(seed: int, num_ranks: int) -> Topology:
    """A cycle through ranks and two switches, and chords, of unlike widths."""
    rng = random.Random(seed)
    count = num_ranks + 2
    cycle = rng.sample(range(count), count)
    hops = set(zip(cycle, cycle[1:] + cycle[:1], strict=True))
    hops |= {(a, b) for a, b in (rng.sample(range(count), 2) for _ in range(2 * num_ranks))}
    return Topology(
        name="unlike",
        unit="link",
        vertices=tuple(Vertex(kind="rank" if i < num_ranks else "switch", label=f"v{i}") for i in range(count)),
        links=tuple(Link(src=a, dst=b, capacity=rng.randint(1, 40)) for a, b in sorted(hops)),
    )


def pairs(num_ranks: int) -> Collective:
    return Collective(name="all_to_all", num_ranks=num_ranks)


@pytest.mark.parametrize("seed", range(4))
def test_the_interval_holds_the_optimum(seed: int) -> None:
    topology = unlike(seed, 9)
    exact = solve_flow(topology, pairs(9))
    rng = random.Random(seed)
    weights = [rng.randint(0, 5) for _ in range(81)]
    skewed = replace(pairs(9), weights=tuple(weights))
    for best in (exact, solve_flow(topology, skewed)):
        found = bracket_flow(topology, np.array(best.sources), best.demands)
        assert found.inverse_x <= best.inverse_x_reached and found.reached >= best.inverse_x
        assert found.reached <= found.inverse_x * Fraction(103, 100)
        prices = np.array(found.prices)
        assert proven_time(topology, np.array(best.sources), best.demands, prices) == found.inverse_x


def test_numbers_play_no_part(everything_is_large: None) -> None:
    """A third of the boxes has narrower cables, which bind; the rest shares what they leave."""
    rates = {bound(raw(9, seed, nics=[20, 50, 50]), pairs(36)).algbw for seed in range(3)}
    assert rates == {Fraction(20 * 36, 32)}


@long
@pytest.mark.parametrize("boxes", [64, 128])
def test_numbers_play_no_part_at_size(boxes: int) -> None:
    n = 4 * boxes
    topologies = [raw(boxes, seed, nics=[25]) for seed in range(2)]
    assert is_large(topologies[0], pairs(n))
    assert {bound(topology, pairs(n)).algbw for topology in topologies} == {Fraction(25 * n, n - 4)}


def test_what_is_not_exact_says_so(everything_is_large: None) -> None:
    topology = unlike(2, 9)
    best = bound(topology, pairs(9))
    assert best.reached < best.algbw and not best.is_exact
    assert "is known to be reached" in best.explain()
    even = bound(torus(dims=(4, 4, 6), bandwidth="1 GB/s"), pairs(96))
    assert even.algbw == Fraction(4, 3), "3/2 hops a pair along the dimension of 6, half of them each way"
    assert "nine digits" in even.explain() and "may be" not in even.explain()


def printed(folder: Path, topology: Topology, command: str, *words: str) -> str:
    """What a command line prints of all_to_all on a fabric."""
    file = folder / "fabric.json"
    file.write_text(json.dumps(to_json(topology)))
    run = CliRunner().invoke(build_app(), [command, str(file), "-c", "all_to_all", *words])
    assert run.exit_code == 0, run.output
    return run.stdout


def test_what_a_schedule_reaches_is_the_least_beside_it(
    everything_is_large: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A torus with two failed cables, where the search for the bound ends early and planned paths reach more."""
    monkeypatch.setattr(concurrent_flow, "_WORK", 0)
    monkeypatch.setattr(concurrent_flow, "_LEVEL_WORK", 0)
    topology = numbered(cables((5, 5), 2, 0), 0)
    alone = json.loads(printed(tmp_path, topology, "bound", "--json"))
    beside = json.loads(printed(tmp_path, topology, "synth", "--json"))
    assert alone["bound_algbw"] == beside["bound_algbw"]
    assert alone["reached_algbw"] < beside["algbw"] == beside["reached_algbw"] < beside["bound_algbw"]
    assert f"{beside['algbw']:.6g} {beside['unit']} is known to be reached" in printed(tmp_path, topology, "synth")
    slow = json.loads(printed(tmp_path, topology, "synth", "--method", "direct", "--json"))
    assert slow["algbw"] < slow["reached_algbw"] == alone["reached_algbw"], "it takes nothing from what is known"


def test_a_schedule_that_meets_the_bound_closes_the_interval(everything_is_large: None, tmp_path: Path) -> None:
    topology = unlike(0, 16)
    assert "nine digits" in printed(tmp_path, topology, "bound")
    beside = json.loads(printed(tmp_path, topology, "synth", "--json"))
    assert beside["optimal"] and beside["exact"] and beside["reached_algbw"] == beside["bound_algbw"]
    assert "digits" not in printed(tmp_path, topology, "synth")


@pytest.mark.parametrize("seed", range(3))
def test_one_path_a_pair_is_near_the_bound(seed: int, everything_is_large: None) -> None:
    topology = unlike(seed, 24)
    schedule = synthesize(topology, pairs(24))
    verify_schedule(schedule)
    best = bound(topology, pairs(24))
    assert 0.9 * best.algbw <= schedule.algbw <= best.algbw
    assert schedule.algbw >= synthesize(topology, pairs(24), "direct").algbw


def test_uneven_blocks_and_ranks_that_send_nothing(everything_is_large: None) -> None:
    rng = random.Random(1)
    n = 10
    weights = tuple(0 if block // n == 3 else rng.randint(0, 4) for block in range(n * n))
    topology, skewed = unlike(2, n), replace(pairs(n), weights=weights)
    schedule = synthesize(topology, skewed)
    verify_schedule(schedule)
    assert schedule.algbw <= bound(topology, skewed).algbw
    assert {t.chunk for t in schedule.transfers if t.src == t.dst} == set()


def test_ranks_that_are_alike_are_planned_once(everything_is_large: None) -> None:
    topology = load_topology("dgx_h100:boxes=5")
    schedule = synthesize(topology, pairs(40))
    assert schedule.orbit is not None and schedule.method == "flow"
    assert schedule.algbw == bound(topology, pairs(40)).algbw


def test_links_that_are_all_nearly_full_are_shared_out(everything_is_large: None) -> None:
    topology = dragonfly(num_groups=8, num_routers=4, num_ranks_per_router=3)
    schedule = synthesize(topology, pairs(96))
    verify_schedule(schedule)
    assert 0.98 * bound(topology, pairs(96)).algbw <= schedule.algbw <= bound(topology, pairs(96)).algbw
    assert schedule.algbw > 1.2 * synthesize(topology, pairs(96), "direct").algbw


def test_vertices_that_no_way_passes() -> None:
    tail, head = np.array([0, 1, 1, 2, 2, 3, 1, 0]), np.array([1, 0, 2, 1, 3, 2, 0, 1])
    assert find_leaves(tail, head, 5).tolist() == [True, False, False, True, False]


def test_more_transfers_than_a_schedule_has_are_refused(
    monkeypatch: pytest.MonkeyPatch, everything_is_large: None
) -> None:
    monkeypatch.setattr(balanced_paths, "_MOST_TRANSFERS", 100)
    with pytest.raises(SynthesisError, match="128 transfers along the shortest ways are too many"):
        synthesize(ring(num_ranks=8), pairs(8))
