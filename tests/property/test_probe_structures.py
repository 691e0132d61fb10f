"""Random clusters on paper are found as they are: stars of unequal cables, nodes, and grids of unequal links."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.paper_cluster import PaperCluster

from mycel.probe import Limits
from mycel.probe.compare import compare
from mycel.probe.found import level, link_latencies, round_rate
from mycel.probe.structure import Structure
from mycel.probe.survey import Survey
from mycel.topology.builders.assembly import Assembly
from mycel.topology.model import Topology

#: Far enough apart never to be taken for one another.
RATES = st.sampled_from([50, 100, 200, 400, 800, 1600])
quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def stars(draw: st.DrawFn) -> Topology:
    fabric = Assembly("star")
    switch = fabric.switch("switch")
    rates = draw(st.lists(RATES, min_size=3, max_size=7))
    # The widest twice: of a single one, no traffic could show how wide it is.
    for number, rate in enumerate([*rates, max(rates)]):
        fabric.connect(fabric.rank(str(number)), switch, f"{rate} Mbit/s")
    return fabric.topology()


@st.composite
def grids(draw: st.DrawFn) -> Topology:
    """Ranks in a circle of unequal cables, and some across."""
    count = draw(st.integers(3, 7))
    fabric = Assembly("grid")
    ranks = [fabric.rank(str(number)) for number in range(count)]
    cables = {(a, (a + 1) % count) for a in range(count)}
    cables |= set(draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=3)))
    for a, b in sorted({(min(c), max(c)) for c in cables if c[0] != c[1]}):
        fabric.connect(ranks[a], ranks[b], f"{draw(RATES)} Mbit/s")
    return fabric.topology()


@st.composite
def nodes(draw: st.DrawFn) -> Topology:
    """Two or three nodes of fast ranks, each with one cable to a core."""
    fabric = Assembly("nodes")
    core_ends = []
    for node in range(draw(st.integers(2, 3))):
        ranks = [fabric.rank(f"{node}/{i}", str(node)) for i in range(draw(st.integers(2, 3)))]
        switch = fabric.switch(f"{node}/switch", str(node))
        for rank in ranks:
            fabric.connect(rank, switch, "800 Mbit/s")
        core_ends.append(switch)
    core = fabric.switch("core")
    for end in core_ends:
        fabric.connect(end, core, f"{draw(st.sampled_from([50, 100, 200, 400]))} Mbit/s")
    return fabric.topology()


def check(truth: Topology, *, silent: bool, seed: int) -> None:
    """Structure right; every link that is not said to carry only 'at least' so much within 10 %."""
    cluster = PaperCluster(truth, silent=silent, noise=0.03, seed=seed)
    found = Survey(cluster, truth.num_ranks, Limits(), lambda text: None).run("found")
    differences = compare(found.topology, truth)
    assert differences is not None
    assert all(difference.ratio <= 1.1 for difference in differences)
    if all(note.num_evidence and not note.series for note in found.links):
        assert all(difference.ratio >= 0.9 for difference in differences)


@quick
@given(stars(), st.booleans(), st.integers(0, 99))
def test_stars(truth: Topology, silent: bool, seed: int) -> None:
    check(truth, silent=silent, seed=seed)


@quick
@given(grids(), st.integers(0, 99))
def test_direct_cables(truth: Topology, seed: int) -> None:
    # A cable that no route uses cannot be found; the emulator's routes prefer wide ones.
    if PaperCluster(truth).links_in_use() == set(truth.capacity):
        check(truth, silent=False, seed=seed)


@quick
@given(nodes(), st.integers(0, 99))
def test_nodes_with_shared_uplinks(truth: Topology, seed: int) -> None:
    check(truth, silent=False, seed=seed)


@given(st.floats(1e6, 4e11))
def test_rounding_changes_a_rate_by_less_than_measuring_does(rate: float) -> None:
    assert abs(round_rate(rate) / rate - 1) <= 0.025


@given(st.dictionaries(st.tuples(st.integers(0, 9), st.integers(0, 9)), st.floats(1e6, 1e9), max_size=20))
def test_leveling_keeps_the_order_and_stays_near(rates: dict[tuple[int, int], float]) -> None:
    leveled = level(rates, ())
    assert leveled.keys() == rates.keys()
    for a in rates:
        assert abs(leveled[a] / rates[a] - 1) <= 0.08 + 1e-9
        assert all(leveled[a] <= leveled[b] for b in rates if rates[a] <= rates[b])


@given(st.lists(st.floats(1e-6, 1e-3), min_size=3, max_size=6))
def test_latencies_of_a_star_add_up(ends: list[float]) -> None:
    count = len(ends)
    paths = {(a, b): (a, count, b) for a in range(count) for b in range(count) if a != b}
    structure = Structure(name="", num_ranks=count, names=("switch",), paths=paths, reason="")
    pairs = {(a, b): ends[a] + ends[b] for a, b in paths}
    found = link_latencies(structure, pairs)
    for a, b in paths:
        assert abs(found[a, count] + found[count, b] - pairs[a, b]) <= 0.08 * max(pairs.values())
