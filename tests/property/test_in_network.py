"""Random fabrics with switches that copy and add: the optimum against a linear programme over every single tree."""

from __future__ import annotations

from itertools import chain, combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.sparse import lil_matrix
from tests.effort import examples

from mycel.collectives.bound import bound
from mycel.collectives.lower import lower
from mycel.collectives.spec import Collective
from mycel.collectives.synth import synthesize
from mycel.collectives.verify import verify_programs, verify_schedule
from mycel.topology.model import Link, Topology, Vertex

QUICK = settings(examples(25, 250, derandomize=True), suppress_health_check=list(HealthCheck))


@st.composite
def fabrics(draw, most_ranks=3, most_computing=2, most_plain=1, largest=5):
    """Cables from ranks to a computing switch, a cycle through everything (or through what they miss) and random
    links; vertices in any order, so that ranks do not always come first."""
    n = draw(st.sampled_from(range(most_ranks, 1, -1)))
    computing, plain = draw(st.integers(1, most_computing)), draw(st.integers(0, most_plain))
    vertices = [Vertex(kind="rank", label=f"r{i}") for i in range(n)]
    vertices += [Vertex(kind="switch", label=f"c{i}", computes=True) for i in range(computing)]
    vertices += [Vertex(kind="switch", label=f"s{i}") for i in range(plain)]
    vertices = draw(st.permutations(vertices))
    hub = next(i for i, v in enumerate(vertices) if v.computes)
    capacity = {}
    for rank in (i for i, v in enumerate(vertices) if v.kind == "rank"):
        if cable := draw(st.sampled_from((*range(largest, 0, -1), 0))):
            capacity[rank, hub] = capacity[hub, rank] = cable
    apart = [i for i, v in enumerate(vertices) if v.kind == "rank" and (i, hub) not in capacity]
    around = draw(st.permutations([hub, *apart] if draw(st.booleans()) else range(len(vertices))))
    for a, b in zip(around, around[1:] + around[:1], strict=True):
        if a != b:
            capacity[a, b] = capacity.get((a, b), 0) + 1
    ends = st.sampled_from(range(len(vertices)))
    for a, b in draw(st.lists(st.tuples(ends, ends), max_size=3)):
        if a != b:
            capacity[a, b] = draw(st.integers(1, 2))
    links = tuple(Link(src=a, dst=b, capacity=c) for (a, b), c in sorted(capacity.items()))
    return Topology(name="random", unit="link", vertices=tuple(vertices), links=links)


def ways(fabric, src, dst):
    """Every simple path from vertex to vertex with nothing but switches between."""
    found, stack = [], [(src,)]
    while stack:
        path = stack.pop()
        for a, b in fabric.capacity:
            if a == path[-1] and b == dst:
                found.append((*path, b))
            elif a == path[-1] and b in fabric.switches and b not in path:
                stack.append((*path, b))
    return found


def trees(fabric):
    """Every out-tree that spans the ranks: its root, and how often it crosses each link."""
    computing = [v for v in fabric.switches if fabric.vertices[v].computes]
    paths = {(a, b): ways(fabric, a, b) for a in fabric.compute_vertices for b in fabric.compute_vertices if a != b}
    for used in chain.from_iterable(combinations(computing, k) for k in range(len(computing) + 1)):
        members = (*fabric.ranks, *used)
        for root in members:
            others = [v for v in members if v != root]
            for parents in product(members, repeat=len(others)):
                parent = dict(zip(others, parents, strict=True))
                if all(reaches(parent, v, root) for v in others) and set(used) <= {root, *parents}:
                    for routes in product(*(paths[parent[v], v] for v in others)):
                        crossings = {}
                        for route in routes:
                            for hop in pairwise(route):
                                crossings[hop] = crossings.get(hop, 0) + 1
                        yield root, crossings


def reaches(parent, vertex, root):
    seen = set()
    while vertex != root:
        if vertex in seen:
            return False
        seen.add(vertex)
        vertex = parent[vertex]
    return True


def rate_over_all_trees(fabric):
    """The most that all pairs of an in-tree and an out-tree with one root carry together."""
    down = list(dict.fromkeys((root, tuple(sorted(c.items()))) for root, c in trees(fabric)))
    up = dict.fromkeys((root, tuple(sorted(c.items()))) for root, c in trees(fabric.reversed()))
    up = [(root, tuple(((b, a), k) for (a, b), k in c)) for root, c in up]
    assume(len(down) + len(up) <= 20_000)
    number = {hop: i for i, hop in enumerate(fabric.capacity)}
    loads = lil_matrix((len(number), len(down) + len(up)))
    roots = lil_matrix((len(fabric.vertices), len(down) + len(up)))
    for column, (root, crossings) in enumerate([*down, *up]):
        roots[root, column] = 1 if column < len(down) else -1
        for hop, count in crossings:
            loads[number[hop], column] = count
    cost = np.zeros(len(down) + len(up))
    cost[: len(down)] = -1
    result = linprog(
        cost,
        A_ub=loads.tocsr(),
        b_ub=list(fabric.capacity.values()),
        A_eq=roots.tocsr(),
        b_eq=np.zeros(len(fabric.vertices)),
    )
    return -result.fun


@QUICK
@given(fabric=fabrics())
def test_all_reduce_reaches_the_optimum_over_all_trees(fabric):
    collective = Collective(name="all_reduce", num_ranks=fabric.num_ranks)
    best = bound(fabric, collective)
    assert float(best.algbw) == pytest.approx(rate_over_all_trees(fabric), rel=1e-7)
    assert best.algbw >= best.without_computing == bound(fabric.without_computing(), collective).algbw
    schedule = synthesize(fabric, collective)
    verify_schedule(schedule)
    assert schedule.algbw == best.algbw
    verify_programs(lower(schedule, 2 * schedule.num_units + 1, piece_elements=2))
    event(f"switches gain: {best.algbw > best.without_computing}")
