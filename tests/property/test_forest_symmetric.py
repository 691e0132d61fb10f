"""Random fabrics of equal nodes: forests with symmetry, without, and arc by arc meet the same bound."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.effort import examples

from mycel.collectives import allreduce_bound, bound
from mycel.collectives.bound import find_division, find_optimum
from mycel.collectives.maxflow import FlowGraph
from mycel.collectives.symmetry import find_rotation, is_automorphism
from mycel.collectives.synth.plan import plan_forest
from mycel.topology.model import Link, Topology, Vertex

QUICK = examples(30, 300, derandomize=True)


@st.composite
def fabrics_of_nodees(draw):
    """Equal nodes of ranks and perhaps a switch, joined through one or two switches in the middle, renumbered."""
    nodes, size = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    hubs, has_switch = draw(st.integers(1, 2)), draw(st.booleans())
    inside = {}
    if has_switch and size > 1:
        width = draw(st.integers(1, 8))
        inside |= {(i, size): width for i in range(size)}
    for a, b in draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, size - 1)), max_size=5)):
        if a != b:
            inside[min(a, b), max(a, b)] = draw(st.integers(1, 6))
    count = size + (has_switch and size > 1)
    uplinks = [(i, draw(st.integers(0, hubs - 1)), draw(st.integers(1, 4))) for i in range(size)]
    cables = [
        (node * count + a, node * count + b, width) for node in range(nodes) for (a, b), width in inside.items()
    ]
    used = sorted({hub for _, hub, _ in uplinks})
    cables += [
        (node * count + i, nodes * count + used.index(hub), width)
        for node in range(nodes)
        for i, hub, width in uplinks
    ]
    if len(used) == 2:  # so that everything hangs together whatever the nodes are
        cables.append((nodes * count, nodes * count + 1, draw(st.integers(1, 9))))
    total = nodes * count + len(used)
    place = draw(st.permutations(range(total)))
    kinds = ["switch"] * total
    for node in range(nodes):
        for i in range(size):
            kinds[place[node * count + i]] = "rank"
    links = [Link(src=place[s], dst=place[t], capacity=c) for a, b, c in cables for s, t in ((a, b), (b, a))]
    vertices = tuple(Vertex(kind=kind, label=f"v{i}") for i, kind in enumerate(kinds))
    return Topology(name="nodes", unit="link", vertices=vertices, links=tuple(links))


@QUICK
@given(fabric=fabrics_of_nodees(), is_reversed=st.booleans())
def test_symmetric_and_general_forests_meet_the_same_bound(fabric, is_reversed):
    weights = (1,) * fabric.num_ranks
    best = find_optimum(fabric, weights, is_reversed=is_reversed).inverse_x
    for with_symmetry in (True, False):
        forest = plan_forest(fabric, weights, is_reversed=is_reversed, with_symmetry=with_symmetry)
        assert forest.check()[0] == best


@QUICK
@given(fabric=fabrics_of_nodees())
def test_rotations_found_are_automorphisms_by_definition(fabric):
    graph = FlowGraph.of(fabric)
    capacity = np.array([link.capacity for link in fabric.links], dtype=np.int64)
    image = find_rotation(graph, capacity)
    if image is None:
        return
    assert is_automorphism(graph, capacity, image)
    assert sorted(image.tolist()) == list(range(len(fabric.vertices)))
    moved = {(int(image[s]), int(image[d])): c for (s, d), c in fabric.capacity.items()}
    assert moved == fabric.capacity
    assert all(int(image[v]) in fabric.rank_of and int(image[v]) != v for v in fabric.ranks)


def test_most_fabrics_of_equal_nodes_show_their_symmetry():
    found = []

    @QUICK
    @given(fabric=fabrics_of_nodees())
    def count(fabric):
        capacity = np.array([link.capacity for link in fabric.links], dtype=np.int64)
        found.append(find_rotation(FlowGraph.of(fabric), capacity) is not None)

    count()
    assert sum(found) > len(found) / 2


@QUICK
@given(fabric=fabrics_of_nodees())
def test_all_reduce_by_classes_has_the_optimum_of_all_links(fabric):
    one, two = (by_classes(fabric, most) for most in (0, 1000))
    assert one.limit == two.limit >= one.reached >= one.limit * Fraction(99, 100)
    if one.shares:  # an optimum of its own, checked by flows while it was made
        pairs = zip(one.spread, one.reduce, fabric.links, strict=True)
        assert all(a + b <= link.capacity for a, b, link in pairs)


def by_classes(fabric, most_without_classes):
    """The division with an unknown a class above so many ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound, "_find_division", bound._find_division.__wrapped__)
        patch.setattr(allreduce_bound, "_SMALL", most_without_classes)
        return find_division(fabric)[0]
