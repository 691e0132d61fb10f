"""The classics: right on every fabric they serve, with the steps and bytes that their papers promise."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, log2

import pytest

from mycel.collectives.lower import lower
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import ROOTED, Collective
from mycel.collectives.synth import synthesize
from mycel.collectives.synth.classics import CLASSICS, SERVES, classics_for
from mycel.collectives.synth.classics.double_binary_tree import in_order_tree
from mycel.collectives.synth.classics.ring import find_cycle
from mycel.collectives.verify import verify_programs, verify_schedule
from mycel.errors import SynthesisError, UsageError
from mycel.topology.builders import full_mesh, hypercube, ring, star, torus, two_boxes
from mycel.topology.model import Link, Topology, Vertex

BOXED = ("hierarchical", "two_step")
CASES = [(method, name) for method, served in SERVES.items() for name in served]


def made(topology: Topology, name: str, method: str, root: int = 0) -> Schedule:
    rooted = root if name in ROOTED else None
    return synthesize(topology, Collective(name=name, num_ranks=topology.num_ranks, root=rooted), method=method)


def check(schedule: Schedule) -> None:
    verify_schedule(schedule)
    blocks = schedule.collective.num_blocks
    for elements, piece in ((blocks, 4), (13 * blocks, 5)):
        verify_programs(lower(schedule, elements, piece_elements=piece))


def fits(method: str, ranks: int) -> bool:
    """Whether the paper has the algorithm for a number of ranks, or we do for more."""
    if method in ("swing_latency", "bine"):
        return ranks & (ranks - 1) == 0
    if method in ("trivance", "trivance_latency"):
        return ranks in (3, 9, 27, 81)
    return method != "swing" or ranks % 2 == 0


@pytest.mark.parametrize(("method", "name"), [case for case in CASES if case[0] not in BOXED])
@pytest.mark.parametrize("ranks", range(2, 18))
def test_right_on_one_switch(method: str, name: str, ranks: int) -> None:
    try:
        schedule = made(star(num_ranks=ranks), name, method, ranks - 1)
    except SynthesisError as error:
        assert not fits(method, ranks), error
        return
    assert fits(method, ranks)
    if ranks <= 9:
        check(schedule)
    else:
        verify_schedule(schedule)


def nodes_on_a_switch(num_nodes: int, size: int) -> Topology:
    """Ranks of all nodes in turns: those of one node do not follow each other."""
    n = num_nodes * size
    ranks = tuple(Vertex(kind="rank", label=f"r{i}", node=f"node{i % num_nodes}") for i in range(n))
    return Topology(
        name="nodes",
        unit="link",
        vertices=(*ranks, Vertex(kind="switch", label="switch")),
        links=tuple(Link(src=a, dst=b, capacity=1) for i in range(n) for a, b in ((i, n), (n, i))),
    )


@pytest.mark.parametrize(("method", "name"), [case for case in CASES if case[0] in BOXED])
@pytest.mark.parametrize(
    ("nodes", "size"), [(m, n // m) for n in range(2, 18) for m in range(2, n + 1) if n % m == 0]
)
def test_right_with_nodes_of_any_size(method: str, name: str, nodes: int, size: int) -> None:
    schedule = made(nodes_on_a_switch(nodes, size), name, method)
    if nodes * size <= 9:
        check(schedule)
    else:
        verify_schedule(schedule)


@pytest.mark.parametrize(("method", "name"), CASES)
def test_right_between_nodes(method: str, name: str) -> None:
    for ranks in (6, 8, 9):
        if method in BOXED and ranks == 9:
            continue
        if method in BOXED or fits(method, ranks):
            check(made(two_boxes(num_ranks=ranks), name, method, 5))


@pytest.mark.parametrize(("method", "name"), CASES)
def test_right_or_refused_without_switches(method: str, name: str) -> None:
    for topology in (ring(num_ranks=6), torus(dims=(2, 4)), hypercube(dim=3), full_mesh(num_ranks=5)):
        try:
            schedule = made(topology, name, method)
        except SynthesisError as error:
            assert method not in ("ring", "bidirectional_ring")
            assert str(error).startswith(method)
        else:
            check(schedule)


def test_refusals_say_why() -> None:
    four, boxed = star(num_ranks=4), two_boxes(num_ranks=5)
    with pytest.raises(SynthesisError, match="bruck does not serve broadcast; it serves all_gather"):
        made(four, "broadcast", "bruck")
    with pytest.raises(SynthesisError, match="rank 0 has no node"):
        made(four, "all_reduce", "hierarchical")
    with pytest.raises(SynthesisError, match=r"equally many ranks; found .*: 3, .*: 2"):
        made(boxed, "all_reduce", "hierarchical")
    with pytest.raises(SynthesisError, match="rank 0 has no path to rank 2 that passes no other rank"):
        made(ring(num_ranks=4), "all_gather", "recursive_doubling")
    with pytest.raises(SynthesisError, match="passes no other rank; flow and direct need none"):
        made(ring(num_ranks=4), "all_to_all", "bruck")
    with pytest.raises(UsageError, match="over 4 ranks"):
        synthesize(boxed, Collective(name="all_gather", num_ranks=4), method="ring")
    with pytest.raises(UsageError, match="method 'ring' has no option 'k'; it has none"):
        synthesize(four, Collective(name="all_gather", num_ranks=4), method="ring", k=2)


def test_every_classic_says_what_it_serves() -> None:
    assert set(SERVES) == set(CLASSICS)
    assert classics_for("gather") == ("binomial_tree", "bine")


# -- what the papers promise ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 8, 16])
def test_steps(ranks: int) -> None:
    topology, logarithm = star(num_ranks=ranks), ceil(log2(ranks))
    assert made(topology, "all_gather", "ring").depth == ranks - 1
    assert made(topology, "all_reduce", "ring").depth == 2 * (ranks - 1)
    assert made(topology, "broadcast", "binomial_tree").depth == max(bin(rank).count("1") for rank in range(ranks))
    assert made(topology, "all_reduce", "binomial_tree").depth <= 2 * logarithm
    for name in ("gather", "scatter"):
        assert made(topology, name, "binomial_tree").depth == max(rank.bit_count() for rank in range(ranks))
    assert made(topology, "all_gather", "bruck").depth <= logarithm
    assert made(topology, "broadcast", "double_binary_tree").depth <= logarithm + 1
    folded = 0 if ranks & (ranks - 1) == 0 else 1
    assert made(topology, "all_gather", "recursive_doubling").depth <= ranks.bit_length() - 1 + 2 * folded
    # The first message of a rank to which nobody hands over does not wait for those that do.
    assert made(topology, "all_reduce", "recursive_doubling").depth <= ranks.bit_length() - 1 + 2 * folded
    assert made(topology, "all_reduce", "rabenseifner").depth == 2 * (ranks.bit_length() - 1 + folded)
    assert made(topology, "all_to_all", "bruck").depth == max(rank.bit_count() for rank in range(ranks))


def test_bruck_has_logarithmically_many_partners() -> None:
    for ranks in (8, 11, 16):
        schedule = made(star(num_ranks=ranks), "all_to_all", "bruck")
        partners = {(t.dst - t.src) % ranks for t in schedule.transfers}
        assert partners == {1 << i for i in range(ceil(log2(ranks)))}


def test_between_nodes_only_places_that_are_alike_exchange() -> None:
    topology = nodes_on_a_switch(4, 3)
    place = [rank // 4 for rank in range(12)]
    schedule = made(topology, "all_to_all", "two_step")
    assert schedule.depth == 2
    for t in schedule.transfers:
        same_node = topology.vertices[topology.ranks[t.src]].node == topology.vertices[topology.ranks[t.dst]].node
        assert same_node != (place[t.src] == place[t.dst])


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce"])
def test_bytes_are_the_least_possible_on_a_star(name: str) -> None:
    topology = star(num_ranks=8)
    best = made(topology, name, "forest").algbw
    for method in classics_for(name):
        if method == "recursive_doubling" and name == "all_reduce":
            assert made(topology, name, method).algbw == topology.capacity[0, 8] / Fraction(
                3
            )  # three times everything
        elif method in ("ring", "bidirectional_ring", "recursive_doubling", "rabenseifner", "swing", "bruck"):
            assert made(topology, name, method).algbw == best


def test_two_trees_use_what_one_leaves_idle() -> None:
    for ranks in (7, 8, 9, 16):
        topology = star(num_ranks=ranks)
        assert made(topology, "broadcast", "binomial_tree").algbw < made(topology, "broadcast", "forest").algbw
        double = made(topology, "broadcast", "double_binary_tree")
        load = [double.link_load.get((vertex, topology.switches[0]), 0) for vertex in topology.ranks]
        assert max(load) <= double.num_units  # nobody sends more than the array


def test_nodes_beat_the_ring_where_links_between_them_are_slow() -> None:
    topology = two_boxes(num_ranks=8)
    assert made(topology, "all_reduce", "hierarchical").algbw >= 3 * made(topology, "all_reduce", "ring").algbw


@pytest.mark.parametrize("size", range(1, 40))
def test_in_order_trees_span_and_are_binary(size: int) -> None:
    root, edges = in_order_tree(size)
    assert sorted([root, *(child for _, child in edges)]) == list(range(1, size + 1))
    parents = [parent for parent, _ in edges]
    assert all(parents.count(p) <= 2 and p % 2 == 0 for p in parents)


def test_cycles_are_found_off_the_order_of_ranks() -> None:
    topology = hypercube(dim=4)
    cycle = find_cycle(topology, both_ways=True)
    assert sorted(cycle) == list(range(16))
    for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        assert (topology.ranks[a], topology.ranks[b]) in topology.capacity


def test_no_cycle_is_an_error() -> None:
    pair = [(0, 1), (1, 2), (2, 1), (1, 0)]
    topology = Topology(
        name="path",
        unit="link",
        vertices=tuple(Vertex(kind="rank", label=str(i)) for i in range(3)),
        links=tuple(Link(src=a, dst=b, capacity=1) for a, b in pair),
    )
    with pytest.raises(SynthesisError, match="ring on path: found no cycle of all 3 ranks"):
        made(topology, "all_gather", "ring")
