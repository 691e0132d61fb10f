"""Random fabrics: bounds against enumeration of cuts and an independent linear programme, forests against bounds.

``python -m tests.property.test_forest_optimal 200`` tries that many fabrics and prints what they were.
"""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from itertools import chain, combinations
from math import ceil, floor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import lil_matrix
from scipy.sparse.csgraph import maximum_flow
from tests.effort import examples, long

from mycel.collectives.bound import bound, find_optimum, root_weights
from mycel.collectives.spec import Collective
from mycel.collectives.synth import synthesize
from mycel.collectives.verify import verify_schedule
from mycel.topology.load import load_topology
from mycel.topology.model import Link, Topology, Vertex

NAMES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")
QUICK = examples(30, 300, derandomize=True)
FEW = examples(12, 120, derandomize=True)
SUITE = Path(__file__).parents[1] / "data" / "topologies"
LARGE = ("hypercube_16", "mi250_x2", "torus_4x4")
NAMES_OF_SUITE = sorted(json.loads((SUITE / "expected.json").read_text()))


def make(num_ranks, num_switches, capacity):
    vertices = [Vertex(kind="rank", label=f"r{i}") for i in range(num_ranks)]
    vertices += [Vertex(kind="switch", label=f"s{i}") for i in range(num_switches)]
    links = tuple(Link(src=a, dst=b, capacity=c) for (a, b), c in sorted(capacity.items()))
    return Topology(name="random", unit="link", vertices=tuple(vertices), links=links)


@st.composite
def balanced_fabrics(draw, most_ranks=6, most_switches=4, largest=6, least_switches=0):
    """Sums of closed walks, so that every vertex is balanced, and then links between ranks, so that ranks are not."""
    n = draw(st.integers(2, most_ranks))
    switches = draw(st.integers(least_switches, most_switches))
    everyone = list(range(n + switches))
    capacity = {}
    walks = [draw(st.permutations(everyone))]
    walks += [
        draw(st.permutations(everyone))[: draw(st.integers(2, len(everyone)))] for _ in range(draw(st.integers(0, 4)))
    ]
    for walk in walks:
        amount = draw(st.integers(1, largest))
        for a, b in zip(walk, walk[1:] + walk[:1], strict=True):
            capacity[a, b] = capacity.get((a, b), 0) + amount
    for a, b in draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=4)):
        if a != b:
            capacity[a, b] = capacity.get((a, b), 0) + draw(st.integers(1, largest))
    return make(n, switches, capacity)


@st.composite
def any_fabrics(draw, most_ranks=5, most_switches=3, largest=6):
    """A cycle through everything and random links: switches are seldom balanced."""
    n = draw(st.integers(2, most_ranks))
    switches = draw(st.integers(1, most_switches))
    everyone = list(range(n + switches))
    cycle = draw(st.permutations(everyone))
    capacity = {hop: draw(st.integers(1, largest)) for hop in zip(cycle, cycle[1:] + cycle[:1], strict=True)}
    ends = st.sampled_from(everyone)
    for a, b in draw(st.lists(st.tuples(ends, ends), max_size=8)):
        if a != b:
            capacity[a, b] = draw(st.integers(1, largest))
    return make(n, switches, capacity)


@st.composite
def mirrored_fabrics(draw, most_ranks=5, most_switches=3, largest=6, least_switches=0):
    """A tree over everything and random cables, every link as wide one way as the other."""
    n = draw(st.integers(2, most_ranks))
    switches = draw(st.integers(least_switches, most_switches))
    order = draw(st.permutations(range(n + switches)))
    cables = {(order[draw(st.integers(0, i - 1))], order[i]) for i in range(1, n + switches)}
    ends = st.sampled_from(order)
    cables |= {(a, b) for a, b in draw(st.lists(st.tuples(ends, ends), max_size=6)) if a != b}
    widths = {frozenset(cable): draw(st.integers(1, largest)) for cable in sorted(cables)}
    return make(
        n, switches, {hop: width for cable, width in widths.items() for hop in (tuple(cable), tuple(cable)[::-1])}
    )


def collective_on(name, fabric, root):
    return Collective(
        name=name,
        num_ranks=fabric.num_ranks,
        root=root % fabric.num_ranks if name in ("broadcast", "reduce") else None,
    )


def worst_cut(fabric, weights):
    """max over sets B with a rank in them of (weight outside) / (capacity into B), by trying every set."""
    everyone = range(len(fabric.vertices))
    worst = Fraction(0)
    for inside in chain.from_iterable(combinations(everyone, size) for size in range(1, len(everyone))):
        missing = sum(w for rank, w in enumerate(weights) if fabric.ranks[rank] not in inside)
        into = sum(k.capacity for k in fabric.links if k.src not in inside and k.dst in inside)
        if missing and any(v in inside for v in fabric.ranks):
            worst = max(worst, Fraction(missing, into))
    return worst


def flow_rate(fabric, weights):
    """The optimum from flows, not cuts: balanced capacities that hold, for each rank apart, a flow of everything."""
    num_links, n = len(fabric.links), fabric.num_ranks
    inject = num_links * (n + 1)
    rate = inject + n * n
    links, total = fabric.links, sum(weights)
    rows_le, rows_eq = [], []
    for sink in range(n):
        base = num_links * (1 + sink)
        rows_le += [{base + e: 1.0, e: -1.0} for e in range(num_links)]
        rows_le += [{inject + sink * n + r: 1.0, rate: -float(weights[r])} for r in range(n)]
        for v in range(len(fabric.vertices)):
            row = {base + e: 1.0 if k.dst == v else -1.0 for e, k in enumerate(links) if v in (k.src, k.dst)}
            if v in fabric.rank_of:
                row[inject + sink * n + fabric.rank_of[v]] = 1.0
            if v == fabric.ranks[sink]:
                row[rate] = -float(total)
            rows_eq.append(row)
    rows_eq += [
        {e: 1.0 if k.dst == v else -1.0 for e, k in enumerate(links) if v in (k.src, k.dst)} for v in fabric.switches
    ]

    def matrix(rows):
        out = lil_matrix((len(rows), rate + 1))
        for i, row in enumerate(rows):
            for j, a in row.items():
                out[i, j] = a
        return out.tocsr()

    cost = np.zeros(rate + 1)
    cost[rate] = -1
    limits = [(0, k.capacity) for k in links] + [(0, None)] * (rate + 1 - num_links)
    result = linprog(
        cost,
        A_ub=matrix(rows_le),
        b_ub=np.zeros(len(rows_le)),
        A_eq=matrix(rows_eq),
        b_eq=np.zeros(len(rows_eq)),
        bounds=limits,
    )
    return -result.fun


def all_reduce_rate(fabric):
    """The optimum of all_reduce from flows: each link divided in two; within one part everything flows from the
    roots to each rank, within the other from each rank to the roots."""
    links, n = fabric.links, fabric.num_ranks
    num_links, shares = len(links), 2 * len(links)
    size = shares + n + 2 * n * num_links
    at_most = [({e: 1, num_links + e: 1}, k.capacity) for e, k in enumerate(links)]
    balanced = []
    for phase in (0, 1):
        ends = [(k.dst, k.src) if phase else (k.src, k.dst) for k in links]

        def net(base, vertex, ends=ends):
            return {
                base + e: 1 if tail == vertex else -1 for e, (tail, head) in enumerate(ends) if vertex in (tail, head)
            }

        balanced += [net(phase * num_links, switch) for switch in fabric.switches]
        for rank in range(n):
            base = shares + n + (phase * n + rank) * num_links
            at_most += [({base + e: 1, phase * num_links + e: -1}, 0) for e in range(num_links)]
            for vertex in range(len(fabric.vertices)):
                if vertex != fabric.ranks[rank]:
                    made = {shares + fabric.rank_of[vertex]: -1} if vertex in fabric.rank_of else {}
                    balanced.append(net(base, vertex) | made)

    def matrix(rows):
        out = lil_matrix((len(rows), size))
        for i, row in enumerate(rows):
            for j, a in row.items():
                out[i, j] = a
        return out.tocsr()

    cost = np.zeros(size)
    cost[shares : shares + n] = -1
    result = linprog(
        cost,
        A_ub=matrix([row for row, _ in at_most]),
        b_ub=[limit for _, limit in at_most],
        A_eq=matrix(balanced),
        b_eq=np.zeros(len(balanced)),
    )
    return -result.fun


@QUICK
@given(fabric=balanced_fabrics(most_ranks=5, most_switches=3), root=st.integers(0, 5))
def test_bound_is_the_worst_of_all_cuts(fabric, root):
    for name in ("all_gather", "broadcast"):
        collective = collective_on(name, fabric, root)
        best = bound(fabric, collective)
        weights = root_weights(collective)
        assert best.inverse_x == worst_cut(fabric, weights)
        inside = sum(fabric.capacity[hop] for hop in best.cut)
        assert (best.inverse_x * inside).denominator == 1  # the cut carries a whole number of shares
        mirrored = collective_on({"all_gather": "reduce_scatter", "broadcast": "reduce"}[name], fabric, root)
        assert bound(fabric, mirrored).inverse_x == worst_cut(fabric.reversed(), weights)


@QUICK
@given(fabric=st.one_of(any_fabrics(), any_fabrics(largest=10**5)), is_reversed=st.booleans())
def test_unbalanced_switches_reach_the_optimum_over_flows(fabric, is_reversed):
    weights = (1,) * fabric.num_ranks
    best = find_optimum(fabric, weights, is_reversed=is_reversed)
    assert best.inverse_x == best.inverse_x_achieved
    reference = flow_rate(fabric.reversed() if is_reversed else fabric, weights)
    assert float(1 / best.inverse_x) == pytest.approx(reference, rel=1e-7)


@QUICK
@given(fabric=st.one_of(balanced_fabrics(), any_fabrics()), name=st.sampled_from(NAMES), root=st.integers(0, 5))
def test_forest_meets_the_bound(fabric, name, root):
    collective = collective_on(name, fabric, root)
    schedule = synthesize(fabric, collective)
    verify_schedule(schedule)
    assert schedule.algbw == bound(fabric, collective).algbw


@QUICK
@given(fabric=st.one_of(balanced_fabrics(), any_fabrics(), any_fabrics(largest=10**5)))
def test_all_reduce_reaches_the_optimum_over_flows(fabric):
    collective = collective_on("all_reduce", fabric, 0)
    best = bound(fabric, collective)
    assert best.composition <= best.algbw
    assert float(best.algbw) == pytest.approx(all_reduce_rate(fabric), rel=1e-7)
    schedule = synthesize(fabric, collective)
    verify_schedule(schedule)
    assert schedule.algbw == best.algbw


@QUICK
@given(fabric=st.one_of(balanced_fabrics(), any_fabrics()), name=st.sampled_from(NAMES), root=st.integers(0, 5))
def test_tree_is_right_on_any_fabric(fabric, name, root):
    collective = collective_on(name, fabric, root)
    schedule = synthesize(fabric, collective, method="tree")
    verify_schedule(schedule)
    assert schedule.num_units == collective.num_blocks


# -- few trees ------------------------------------------------------------------------------------------------


def least_units(fabric, demand, directions):
    """The least time in which whole units move, from flows: units c <= U * capacity of each link in each direction,
    balanced at switches, that hold for each rank apart a flow of everything. ``demand`` is what each rank roots, or
    what all do together."""
    links, n = fabric.links, fabric.num_ranks
    num_links = len(links)
    roots = num_links * len(directions)
    flows = roots + n
    scale = flows + len(directions) * n * num_links
    rows, low, high = [], [], []

    def add(row, least, most):
        rows.append(row)
        low.append(least)
        high.append(most)

    for e, k in enumerate(links):
        add({phase * num_links + e: 1 for phase in range(len(directions))} | {scale: -k.capacity}, -np.inf, 0)
    for phase, is_reversed in enumerate(directions):
        ends = [(k.dst, k.src) if is_reversed else (k.src, k.dst) for k in links]

        def net(base, vertex, ends=ends):
            return {base + e: 1 if t == vertex else -1 for e, (t, h) in enumerate(ends) if vertex in (t, h)}

        for switch in fabric.switches:
            add(net(phase * num_links, switch), 0, 0)
        for rank in range(n):
            base = flows + (phase * n + rank) * num_links
            for e in range(num_links):
                add({base + e: 1, phase * num_links + e: -1}, -np.inf, 0)
            for vertex in range(len(fabric.vertices)):
                if vertex != fabric.ranks[rank]:
                    made = {roots + fabric.rank_of[vertex]: -1} if vertex in fabric.rank_of else {}
                    add(net(base, vertex) | made, 0, 0)
    total = demand if isinstance(demand, int) else sum(demand)
    add({roots + r: 1 for r in range(n)}, total, total)
    matrix = lil_matrix((len(rows), scale + 1))
    for i, row in enumerate(rows):
        for j, a in row.items():
            matrix[i, j] = a
    lower, upper = np.zeros(scale + 1), np.full(scale + 1, np.inf)
    if not isinstance(demand, int):
        lower[roots:flows] = upper[roots:flows] = demand
    whole = np.zeros(scale + 1)
    whole[:flows] = 1
    cost = np.zeros(scale + 1)
    cost[scale] = 1
    result = milp(
        cost,
        integrality=whole,
        bounds=Bounds(lower, upper),
        constraints=LinearConstraint(matrix.tocsr(), low, high),
        options={"time_limit": 60.0, "mip_rel_gap": 0.0},
    )
    assert result.status == 0, result.message
    return result.fun


def fewest_units(fabric, name, k):
    n = fabric.num_ranks
    if name == "all_reduce":
        return least_units(fabric, k * n, (False, True))
    return least_units(fabric, (k,) * n, (name == "reduce_scatter",))


def assert_least(fabric, name, k):
    schedule = synthesize(fabric, collective_on(name, fabric, 0), k=k)
    verify_schedule(schedule)
    assert (k * fabric.num_ranks) % schedule.num_units == 0
    units = k * fabric.num_ranks / schedule.algbw
    assert float(units) == pytest.approx(fewest_units(fabric, name, k), rel=1e-6)


@FEW
@given(
    fabric=st.one_of(balanced_fabrics(most_ranks=4, most_switches=2), any_fabrics(most_ranks=4, most_switches=2)),
    name=st.sampled_from(("all_gather", "reduce_scatter", "all_reduce")),
    k=st.integers(1, 4),
)
def test_given_k_is_the_optimum_over_whole_units(fabric, name, k):
    assert_least(fabric, name, k)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("name", ["eth4_asym_bal", "eth4_asym_unbal", "eth4_mixed", "ring_8"])
def test_given_k_of_all_reduce_is_the_optimum_over_whole_units(name, k):
    assert_least(load_topology(SUITE / f"{name}.json"), "all_reduce", k)


def has_units(fabric, scale, k):
    """Whether the whole parts of the capacities let every rank receive k units of each rank (scipy's flows)."""
    n, source = fabric.num_ranks, len(fabric.vertices)
    limit = lil_matrix((source + 1, source + 1), dtype=np.int32)
    for link in fabric.links:
        limit[link.src, link.dst] = floor(scale * link.capacity)
    for rank in fabric.ranks:
        limit[source, rank] = k
    limit = limit.tocsr()
    return all(maximum_flow(limit, source, rank).flow_value == k * n for rank in fabric.ranks)


@pytest.mark.parametrize("name", [pytest.param(name, marks=long if name in LARGE else ()) for name in NAMES_OF_SUITE])
def test_given_k_is_exact_on_the_suite(name):
    fabric = load_topology(SUITE / f"{name}.json")
    for collective, turned in (("all_gather", fabric), ("reduce_scatter", fabric.reversed())):
        for k in (1, 2, 4):
            schedule = synthesize(fabric, collective_on(collective, fabric, 0), k=k)
            verify_schedule(schedule)
            units = k * fabric.num_ranks / schedule.algbw
            before = max(Fraction(ceil(units * b) - 1, b) for b in {link.capacity for link in fabric.links})
            assert has_units(turned, units, k)
            assert not has_units(turned, before, k)


# -- by hand --------------------------------------------------------------------------------------------------


def reference(fabric, name, root):
    """The optimum of a collective from flows, in array parts over time."""
    if name == "all_reduce":
        return all_reduce_rate(fabric)
    weights = root_weights(collective_on(name, fabric, root))
    return sum(weights) * flow_rate(fabric.reversed() if name in ("reduce_scatter", "reduce") else fabric, weights)


def check_everything(fabric):
    """Every collective of one fabric: bound equal to the independent programme, schedule equal to the bound."""
    for name in NAMES:
        collective = collective_on(name, fabric, 0)
        best = bound(fabric, collective)
        assert float(best.algbw) == pytest.approx(reference(fabric, name, 0), rel=1e-7), (name, fabric)
        schedule = synthesize(fabric, collective)
        verify_schedule(schedule)
        assert schedule.algbw == best.algbw, (name, fabric)


KINDS = {
    "ranks alone": balanced_fabrics(most_switches=0),
    "ranks alone, symmetric": mirrored_fabrics(most_switches=0),
    "with switches": st.one_of(balanced_fabrics(least_switches=1), any_fabrics()),
    "with switches, symmetric": mirrored_fabrics(least_switches=1),
}


def try_fabrics(kind, count):
    """Check so many different fabrics of a kind; how many there were."""
    seen = set()

    @settings(QUICK, max_examples=2 * count)
    @given(fabric=KINDS[kind])
    def check(fabric):
        key = (fabric.num_ranks, *sorted(fabric.capacity.items()))
        if len(seen) < count and key not in seen:
            seen.add(key)
            check_everything(fabric)

    check()
    return len(seen)


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_fabrics_of_every_kind(kind):
    assert try_fabrics(kind, 5) == 5


if __name__ == "__main__":
    wanted = int(sys.argv[1])
    tried = {kind: try_fabrics(kind, -(-wanted // len(KINDS))) for kind in KINDS}
    for kind, number in tried.items():
        print(f"{number:5d} {kind}")
    print(f"{sum(tried.values()):5d} fabrics, {', '.join(NAMES)}: bound, independent programme and schedule agree")
