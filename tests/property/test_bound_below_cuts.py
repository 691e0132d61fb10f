"""No bound of all_reduce is above the least maximum flow between two ranks, nor above what is reached; scipy says."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow
from tests.effort import long

from mycel.collectives.bound import bound
from mycel.topology.model import Link, Topology, Vertex


def random_fabric(seed: int, most: int) -> Topology:
    """Boxes of unlike size and width behind switches, network cables of unlike width, some of them missing."""
    rng = random.Random(seed)
    kinds = ["switch"] * rng.randint(1, 3)
    spines = len(kinds)
    capacity: dict[tuple[int, int], int] = {}

    def join(a: int, b: int, width: int) -> None:
        capacity[a, b] = capacity[b, a] = capacity.get((a, b), 0) + width

    for spine in range(1, spines):
        join(0, spine, rng.randint(20, 200))
    num_ranks = rng.randint(3, most)
    ranks = 0
    while ranks < num_ranks:
        size, width, nic = min(rng.choice([1, 2, 4, 8]), num_ranks - ranks), rng.randint(50, 450), rng.randint(5, 60)
        inner = len(kinds)
        kinds.append("switch")
        for place in range(size):
            kinds.append("rank")
            rank = len(kinds) - 1
            join(rank, inner, width)
            if place == 0 or rng.random() < 0.9:  # else its network cable has failed
                join(rank, rng.randrange(spines), nic)
        ranks += size
    order = rng.sample(range(len(kinds)), len(kinds))
    placed = sorted((order[old], kind) for old, kind in enumerate(kinds))
    return Topology(
        name=f"random{seed}",
        unit="GB/s",
        vertices=tuple(Vertex(kind="rank" if k == "rank" else "switch", label=f"v{v}") for v, k in placed),
        links=tuple(Link(src=order[a], dst=order[b], capacity=c) for (a, b), c in capacity.items()),
    )


def least_flow(topology: Topology) -> int:
    """The least maximum flow between two ranks. Links go both ways: one rank to all others, and back, will do."""
    count = len(topology.vertices)
    tail, head, width = np.array([(k.src, k.dst, k.capacity) for k in topology.links]).T
    graph = csr_array((width.astype(np.int32), (tail, head)), shape=(count, count)).tocsr()
    first, *others = topology.ranks
    there = (maximum_flow(graph, first, other).flow_value for other in others)
    back = (maximum_flow(graph, other, first).flow_value for other in others)
    return int(min(*there, *back))


def check(seed: int, most: int) -> None:
    topology = random_fabric(seed, most)
    best, least = bound(topology, "all_reduce"), least_flow(topology)
    assert best.algbw <= least, f"seed {seed}: {best.algbw} of {least}"
    assert best.reached <= best.algbw
    assert best.is_exact or "is known to be reached" in best.explain()


@pytest.mark.parametrize("seed", range(24))
def test_bounds_of_small_fabrics_are_below_every_cut(seed: int) -> None:
    check(seed, 12)


@long
@pytest.mark.parametrize("seed", range(500))
def test_bounds_of_large_fabrics_are_below_every_cut(seed: int) -> None:
    check(1000 + seed, 128)
