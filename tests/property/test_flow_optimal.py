"""All_to_all, gather and scatter on any fabric: schedules meet a bound that an independent programme confirms."""

from __future__ import annotations

from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from mycel.collectives.bound import bound
from mycel.collectives.flow_bound import solve_flow
from mycel.collectives.lower import lower
from mycel.collectives.spec import Collective
from mycel.collectives.synth import synthesize
from mycel.collectives.verify import verify_link_loads, verify_programs, verify_schedule
from mycel.topology.model import Link, Topology, Vertex

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
NAMES = ("all_to_all", "gather", "scatter")


@st.composite
def fabrics(draw: st.DrawFn) -> Topology:
    """A cycle through ranks and switches in any order, and more links of any capacity."""
    n, switches = draw(st.integers(2, 5)), draw(st.integers(0, 3))
    everyone = list(range(n + switches))
    cycle = draw(st.permutations(everyone))
    capacity = {hop: draw(st.integers(1, 6)) for hop in zip(cycle, cycle[1:] + cycle[:1], strict=True)}
    for a, b in draw(st.lists(st.tuples(st.sampled_from(everyone), st.sampled_from(everyone)), max_size=9)):
        if a != b:
            capacity[a, b] = draw(st.integers(1, 6))
    return Topology(
        name="any",
        unit="link",
        vertices=tuple(Vertex(kind="rank" if i < n else "switch", label=f"v{i}") for i in everyone),
        links=tuple(Link(src=a, dst=b, capacity=c) for (a, b), c in capacity.items()),
    )


def on(fabric: Topology, name: str, root: int) -> Collective:
    n = fabric.num_ranks
    return Collective(name=name, num_ranks=n, root=None if name == "all_to_all" else root % n)


def least_time_by_paths(fabric: Topology, collective: Collective) -> float:
    """The same optimum from a programme over paths instead of links: a variable for each simple path of each pair."""
    graph = nx.DiGraph([(k.src, k.dst) for k in fabric.links])
    ranks = range(fabric.num_ranks)
    if collective.name == "gather":
        pairs = [(s, collective.root) for s in ranks if s != collective.root]
    elif collective.name == "scatter":
        pairs = [(collective.root, d) for d in ranks if d != collective.root]
    else:
        pairs = [(s, d) for s in ranks for d in ranks if s != d]
    row = {(k.src, k.dst): i for i, k in enumerate(fabric.links)}
    paths = [
        (i, path)
        for i, (s, d) in enumerate(pairs)
        for path in nx.all_simple_paths(graph, fabric.ranks[s], fabric.ranks[d])
    ]
    whole, load = np.zeros((len(pairs), len(paths) + 1)), np.zeros((len(fabric.links), len(paths) + 1))
    for column, (i, path) in enumerate(paths):
        whole[i, column] = 1
        for hop in pairwise(path):
            load[row[hop], column] = 1
    load[:, -1] = [-k.capacity for k in fabric.links]
    cost = np.zeros(len(paths) + 1)
    cost[-1] = 1
    found = linprog(cost, A_ub=load, b_ub=np.zeros(len(load)), A_eq=whole, b_eq=np.ones(len(pairs)))
    return float(found.fun)


@QUICK
@given(fabric=fabrics(), name=st.sampled_from(NAMES), root=st.integers(0, 4))
def test_bound_is_what_a_programme_over_paths_finds(fabric: Topology, name: str, root: int) -> None:
    collective = on(fabric, name, root)
    best = bound(fabric, collective)
    assert float(best.inverse_x) == pytest.approx(least_time_by_paths(fabric, collective), rel=1e-7)
    assert best.algbw == fabric.num_ranks / best.inverse_x
    assert best.cut, "some link binds"


@QUICK
@given(fabric=fabrics(), name=st.sampled_from(NAMES), root=st.integers(0, 4))
def test_flow_meets_the_bound(fabric: Topology, name: str, root: int) -> None:
    collective = on(fabric, name, root)
    schedule, best = synthesize(fabric, collective, method="flow"), bound(fabric, collective)
    verify_schedule(schedule)
    verify_link_loads(schedule, schedule.algbw)
    if solve_flow(fabric, collective).is_exact:
        assert schedule.algbw == best.algbw
    else:
        assert 0.999 * best.algbw <= schedule.algbw <= best.algbw


@QUICK
@given(fabric=fabrics(), name=st.sampled_from(NAMES), root=st.integers(0, 4))
def test_direct_is_right_and_no_better(fabric: Topology, name: str, root: int) -> None:
    collective = on(fabric, name, root)
    schedule = synthesize(fabric, collective, method="direct")
    verify_schedule(schedule)
    assert schedule.num_units == collective.num_blocks
    assert schedule.algbw <= bound(fabric, collective).algbw


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    fabric=fabrics(),
    name=st.sampled_from(NAMES),
    method=st.sampled_from(("flow", "direct")),
    size=st.integers(0, 9),
    piece=st.integers(1, 4),
)
def test_programs_are_right(fabric: Topology, name: str, method: str, size: int, piece: int) -> None:
    collective = on(fabric, name, 1)
    schedule = synthesize(fabric, collective, method=method)
    verify_programs(lower(schedule, size * collective.num_blocks, piece_elements=piece))
