"""Trees by levels: spanning trees that fit their links and are no deeper than distances are, at the limit on tori."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from tests.unit.test_both_ways import check_division, rate
from tests.unit.test_sparse_cuts import cables, numbered

from mycel.collectives import allreduce_bound, orientation
from mycel.collectives import bound as bounds
from mycel.collectives.bound import find_division
from mycel.collectives.level_trees import LevelTrees, grow_levels
from mycel.collectives.maxflow import as_int64
from mycel.collectives.spec import Collective
from mycel.collectives.synth import synthesize
from mycel.collectives.synth.both_ways import grow_both_ways
from mycel.collectives.verify import verify_schedule
from mycel.topology.builders import mesh, star, torus
from mycel.topology.model import Link, Topology, Vertex

WHOLE = Fraction(1)


def check_trees(topology: Topology, found: LevelTrees, room: int) -> None:
    """By walking: every rank is entered once, from a rank nearer to the root or as near; no cable holds too many."""
    held: dict[frozenset[int], int] = {}
    for root, row, levels in zip(found.roots.tolist(), found.entered_by.tolist(), found.levels.tolist(), strict=True):
        joined = {rank: topology.links[link] for rank, link in enumerate(row) if link >= 0}
        assert sorted([root, *joined]) == list(range(topology.num_ranks)) and levels[root] == 0
        for rank, link in joined.items():
            ends = frozenset((link.src, link.dst))
            held[ends] = held.get(ends, 0) + 1
            steps, at = 0, rank
            while at != root:
                steps, at = steps + 1, topology.rank_of[joined[at].src]
                assert steps < topology.num_ranks
            assert topology.rank_of[link.dst] == rank and steps >= levels[rank]
    assert max(held.values()) <= room
    loads = {frozenset((k.src, k.dst)): load for k, load in zip(topology.links, found.loads.tolist(), strict=True)}
    assert {ends: load for ends, load in loads.items() if load} == held


@pytest.mark.parametrize("dims", [(4, 4, 4), (6, 8), (5, 5)])
@pytest.mark.parametrize("seed", range(3))
def test_trees_span_and_fit(dims: tuple[int, ...], seed: int) -> None:
    joined = cables(dims, 3, seed)
    topology, n = numbered(joined, seed), int(np.prod(dims))
    room, cables_at = 30, [sum(at in ends for ends in joined) for at in {at for ends in joined for at in ends}]
    wanted = min(room * len(joined) // (n - 1), room * min(cables_at))
    found = grow_levels(topology, np.full(len(topology.links), room), wanted=wanted, least=wanted * 9 // 10)
    assert found is not None and wanted * 9 // 10 <= len(found.roots) <= wanted
    check_trees(topology, found, room)


@pytest.mark.parametrize("seed", range(3))
def test_tori_with_failed_cables_reach_the_limit_in_shallow_trees(seed: int) -> None:
    """A torus of 4 x 4 x 8 is 8 wide; a failed cable may make a way longer by one."""
    joined = cables((4, 4, 8), 4, seed)
    topology = numbered(joined, seed + 5)
    division, _ = find_division(topology)
    check_division(topology, division)
    assert division.reached == division.limit == Fraction(50 * len(joined), 127)
    forests = grow_both_ways(topology, division, within=WHOLE)
    assert forests is not None and rate(*forests) == division.limit
    assert {forest.depth() for forest in forests} <= {8, 9}


def test_schedules_are_right_and_meet_the_bound() -> None:
    topology = numbered(cables((4, 4, 4), 2, 8), 3)
    schedule = synthesize(topology, Collective(name="all_reduce", num_ranks=64), "forest")
    verify_schedule(schedule)
    assert schedule.algbw == Fraction(50 * 190, 63) and schedule.depth <= 14


def test_fewer_trees_where_fewer_will_do() -> None:
    topology = numbered(cables((4, 4, 8), 4, 0), 1)
    division, _ = find_division(topology)
    whole, nearly = (grow_both_ways(topology, division, within=share) for share in (WHOLE, Fraction(95, 100)))
    assert whole is not None and nearly is not None
    assert nearly[0].num_trees < whole[0].num_trees and nearly[0].depth() <= whole[0].depth()
    assert rate(*nearly) >= Fraction(93, 100) * division.limit


def test_trees_that_do_not_fit_exactly_count_with_the_links_they_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the bound says is reached is what the same trees reach as a schedule, not what rounding leaves of it."""
    monkeypatch.setattr(bounds, "_find_division", bounds._find_division.__wrapped__)
    monkeypatch.setattr(allreduce_bound, "_LARGEST", 0)
    monkeypatch.setattr(orientation, "_LARGEST", 1)
    monkeypatch.setattr(orientation, "_LARGEST_LEVELS", 1)
    topology = numbered(cables((4, 4, 4), 2, 8), 3)
    division, _ = find_division(topology)
    check_division(topology, division)
    forests = grow_both_ways(topology, division, within=WHOLE)
    assert forests is not None and rate(*forests) == division.reached < division.limit
    schedule = synthesize(topology, Collective(name="all_reduce", num_ranks=64), "forest")
    verify_schedule(schedule)
    assert schedule.algbw == division.reached


def test_unlike_cables_hold_what_they_are_wide() -> None:
    """A ring of six in which one cable is narrower: trees are chains, each without one of the cables."""
    width = [4, 4, 1, 4, 4, 4]
    links = [Link(src=a, dst=b, capacity=w) for i, w in enumerate(width) for a, b in ((i, -~i % 6), (-~i % 6, i))]
    vertices = tuple(Vertex(kind="rank", label=f"v{i}") for i in range(6))
    topology = Topology(name="ring", unit="link", vertices=vertices, links=tuple(links))
    found = grow_levels(topology, as_int64([link.capacity for link in links]), wanted=4, least=1)
    if found is not None:
        check_trees(topology, found, 4)
        narrow = [load for load, link in zip(found.loads.tolist(), links, strict=True) if link.capacity == 1]
        assert max(narrow) <= 1
    no_way = [0 if {link.src, link.dst} in ({0, 1}, {0, 5}) else link.capacity for link in links]
    assert grow_levels(topology, as_int64(no_way), wanted=4, least=1) is None, "rank 0 has no link that counts"


def test_too_many_are_not_promised() -> None:
    topology = torus(dims=(4, 4), bandwidth="1 GB/s")
    units = np.full(len(topology.links), 3)
    assert grow_levels(topology, units, wanted=7, least=7) is None, "3 * 32 units hold 96 of 105 links"
    found = grow_levels(topology, units, wanted=7, least=5)
    assert found is not None and 5 <= len(found.roots) <= 6
    check_trees(topology, found, 3)
    assert grow_levels(star(num_ranks=4), np.full(8, 9), wanted=2, least=1) is None


def test_trees_of_a_mesh_begin_in_its_middle() -> None:
    topology = mesh(dims=(5, 5), bandwidth="1 GB/s")
    found = grow_levels(topology, np.full(len(topology.links), 12), wanted=16, least=10)
    assert found is not None and found.levels.max() == 4 and set(found.roots.tolist()) == {12}
