"""Routes: rules kept, collisions avoided, skips counted, orders that are right."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, permutations, product
from random import Random

import pytest

from mycel.errors import SynthesisError, UsageError
from mycel.pipeline.check import check
from mycel.pipeline.routes import Nodes, Routes, Visit, find_routes

pytest.importorskip("ortools")


def nodes(stages: int, each: int, *, seed: int = 1, in_flight: int = 3) -> Nodes:
    """Some nodes a stage, on links of unequal speed."""
    chance = Random(seed)
    count = stages * each
    return Nodes(
        stage=tuple(node % stages for node in range(count)),
        forward=(2,) * count,
        backward=(4,) * count,
        delay=tuple(tuple(0 if a == b else chance.randint(1, 4) for b in range(count)) for a in range(count)),
        in_flight=in_flight,
    )


def test_rules_are_kept() -> None:
    found = find_routes(nodes(4, 2), 4, visited=3, most_skips=0.5)
    assert found.makespan >= found.bound
    visited = Counter(stage for row in found.stages for stage in row)
    assert all(row[0] == 0 and len(set(row)) == 3 for row in found.stages)
    assert all(visited[stage] >= 2 for stage in range(4))


def test_ascending_unless_reordered() -> None:
    found = find_routes(nodes(4, 1), 3, visited=3, reorder=False)
    assert all(list(row) == sorted(row) for row in found.stages)


@pytest.mark.parametrize("seed", range(3))
def test_one_micro_batch_takes_the_shortest_way(seed: int) -> None:
    fabric = nodes(4, 2, seed=seed)
    ways = [
        way
        for order in permutations(range(1, 4), 2)
        for way in product(*(fabric.of_stage(stage) for stage in (0, *order)))
    ]
    shortest = min(
        sum(fabric.forward[n] + fabric.backward[n] for n in way)
        + sum(fabric.delay[a][b] + fabric.delay[b][a] for a, b in pairwise(way))
        for way in ways
    )
    together = find_routes(fabric, 1, visited=3, most_skips=1)
    alone = find_routes(fabric, 1, visited=3, most_skips=1, avoid_collisions=False)
    assert together.makespan == together.bound == shortest == alone.makespan


def test_choosing_together_is_never_longer() -> None:
    fabric = nodes(4, 2, seed=5)
    together = find_routes(fabric, 4, visited=3)
    assert together.is_least
    same_skips = [tuple(sorted(row)) for row in together.stages]
    apart = find_routes(fabric, 4, visited=3, avoid_collisions=False, routes=same_skips)
    assert apart.stages == tuple(same_skips)
    assert together.makespan <= apart.makespan
    given = find_routes(fabric, 4, visited=3, routes=together.stages)
    assert given.makespan == together.makespan
    assert given.stages == together.stages


def test_an_order_for_runtimes() -> None:
    found = find_routes(nodes(4, 1), 4, visited=3)
    order = found.order()
    assert order.routes == found.stages
    # Losses are read by micro-batch: the last stage of a route is not the same for all.
    check(order, executor="mycel")
    with pytest.raises(UsageError, match="every stage on one rank"):
        find_routes(nodes(2, 2), 2, visited=2).order()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"visited": 5}, "stages that are visited: 5 is not"),
        ({"visited": 2, "most_skips": 0.25}, "raise most_skips to 0.75"),
        ({"visited": 3, "num_micro_batches": 0}, "micro-batches: 0"),
    ],
)
def test_what_cannot_be(options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_routes(nodes(4, 1), **({"num_micro_batches": 4} | options))


def test_nodes_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="stage 1 of 3 is on no node"):
        Nodes(stage=(0, 2), forward=(1, 1), backward=(1, 1), delay=((0, 0), (0, 0)))
    with pytest.raises(UsageError, match="forward of node 1: 0"):
        Nodes(stage=(0, 1), forward=(1, 0), backward=(1, 1), delay=((0, 0), (0, 0)))
    with pytest.raises(UsageError, match="delays from node 0 to 1 nodes"):
        Nodes(stage=(0, 1), forward=(1, 1), backward=(1, 1), delay=((0,), (0, 0)))


def test_routes_prove_themselves() -> None:
    fabric = nodes(2, 1)
    way = fabric.delay[0][1] + 2
    good = (Visit(node=0, forward_start=0, backward_start=40), Visit(node=1, forward_start=way, backward_start=20))
    assert Routes(nodes=fabric, visits=(good,), bound=0).makespan == 44
    early = (good[0], Visit(node=1, forward_start=way - 1, backward_start=20))
    with pytest.raises(SynthesisError, match="before its input is there"):
        Routes(nodes=fabric, visits=(early,), bound=0)
    with pytest.raises(SynthesisError, match="node 0 has too much to do"):
        Routes(nodes=fabric, visits=(good, good), bound=0)
