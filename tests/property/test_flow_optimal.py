"""All_to_all, gather and scatter on any fabric: schedules meet a bound that an independent programme confirms."""

from __future__ import annotations

from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from tests.oracles.link_loads import verify_link_loads

from mycel.collectives.bound import bound
from mycel.collectives.flow_bound import solve_flow
from mycel.collectives.lower import lower
from mycel.collectives.spec import Collective
from mycel.collectives.synth import synthesize
from mycel.collectives.verify import verify_programs, verify_schedule
from mycel.errors import UsageError
from mycel.topology.model import Link, Topology, Vertex

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
NAMES = ("all_to_all", "gather", "scatter")


@st.composite
def fabrics(draw: st.DrawFn) -> Topology:
    """A cycle through ranks and switches in any order, and more links; capacities small, or up to 700."""
    n, switches = draw(st.integers(2, 5)), draw(st.integers(0, 3))
    everyone = list(range(n + switches))
    cycle = draw(st.permutations(everyone))
    widths = st.integers(1, draw(st.sampled_from((6, 700))))
    capacity = {hop: draw(widths) for hop in zip(cycle, cycle[1:] + cycle[:1], strict=True)}
    for a, b in draw(st.lists(st.tuples(st.sampled_from(everyone), st.sampled_from(everyone)), max_size=9)):
        if a != b:
            capacity[a, b] = draw(widths)
    return Topology(
        name="any",
        unit="link",
        vertices=tuple(Vertex(kind="rank" if i < n else "switch", label=f"v{i}") for i in everyone),
        links=tuple(Link(src=a, dst=b, capacity=c) for (a, b), c in capacity.items()),
    )


def on(fabric: Topology, name: str, root: int, weights: list[int] | None = None) -> Collective:
    """The collective, of equal blocks, or of as many of the weights as it has blocks."""
    n = fabric.num_ranks
    blocks = n * n if name == "all_to_all" else n
    sizes = None if weights is None else tuple(weights[:blocks])
    return Collective(name=name, num_ranks=n, root=None if name == "all_to_all" else root % n, weights=sizes)


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
    n, blocks = fabric.num_ranks, collective.weights
    numbers = [s * n + d if collective.root is None else s + d - collective.root for s, d in pairs]
    size = np.ones(len(pairs)) if blocks is None else np.array([blocks[b] for b in numbers])
    found = linprog(cost, A_ub=load, b_ub=np.zeros(len(load)), A_eq=whole, b_eq=size)
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
    if name != "all_to_all" or solve_flow(fabric, collective).is_exact:
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


weight_lists = st.lists(st.sampled_from((0, 0, 1, 2, 5)), min_size=25, max_size=25)


@QUICK
@given(fabric=fabrics(), name=st.sampled_from(NAMES), root=st.integers(0, 4), weights=weight_lists)
def test_uneven_blocks_meet_a_bound_that_paths_confirm(
    fabric: Topology, name: str, root: int, weights: list[int]
) -> None:
    try:
        collective = on(fabric, name, root, weights)
    except UsageError:
        assume(False)
    best = bound(fabric, collective)
    assert float(best.inverse_x) == pytest.approx(least_time_by_paths(fabric, collective), rel=1e-7)
    total = sum(collective.block_weights)
    assert best.algbw * best.inverse_x * (fabric.num_ranks if name == "all_to_all" else 1) == total
    for method in ("flow", "direct"):
        schedule = synthesize(fabric, collective, method=method)
        verify_schedule(schedule)
        verify_link_loads(schedule, schedule.algbw)
        assert schedule.algbw <= best.algbw
        if method == "flow" and solve_flow(fabric, collective).is_exact:
            assert schedule.algbw == best.algbw
        elif method == "flow":
            assert 0.999 * best.algbw <= schedule.algbw
