"""Double binary tree: two trees with half of the data each, whose inner ranks are the other's leaves.

In one binary tree half of the ranks are leaves and never send on; with two, every rank sends at full bandwidth, and
the depth stays logarithmic.

References:
    P. Sanders, J. Speck, J. L. Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
    Parallel Computing 35(12), 2009, section 3 (trees by mirroring and by shifting).
"""

from __future__ import annotations

from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth.classics.strands import Edge, Strand, check_served, from_strands, mirrored
from mycel.topology.model import Topology

__all__ = ["SERVES", "in_order_tree", "synthesize"]

SERVES: tuple[CollectiveName, ...] = ("all_reduce", "broadcast", "reduce")


def in_order_tree(size: int) -> tuple[int, tuple[Edge, ...]]:
    """Root and edges (parents first) of a binary tree over ``1..size`` in which every odd number is a leaf.

    Examples:
        >>> in_order_tree(5)
        (4, ((4, 2), (4, 5), (2, 1), (2, 3)))
    """
    children: dict[int, list[int]] = {}
    for place in range(1, size + 1):
        bit = place & -place
        parent = (place ^ bit) | bit << 1
        children.setdefault(parent if parent <= size else place ^ bit, []).append(place)
    (root,) = children[0]
    edges: list[Edge] = []
    frontier = [root]
    while frontier:
        fresh = [(parent, child) for parent in frontier for child in children.get(parent, ())]
        edges += fresh
        frontier = [child for _, child in fresh]
    return root, tuple(edges)


def _two_trees(ranks: list[int]) -> list[tuple[int, tuple[Edge, ...]]]:
    """The tree and its double: mirrored where the number of ranks is even, shifted by one where it is odd."""
    n = len(ranks)
    top, edges = in_order_tree(n)
    doubled = [n - place for place in range(n)] if n % 2 == 0 else [*range(2, n + 1), 1]
    trees = []
    for places in (list(range(1, n + 1)), doubled):
        rank_at = [ranks[place - 1] for place in places]
        trees.append((rank_at[top - 1], tuple((rank_at[a - 1], rank_at[b - 1]) for a, b in edges)))
    return trees


def synthesize(topology: Topology, collective: Collective) -> Schedule:
    """Half of the array through each tree; a root stands outside both and talks to their tops.

    Raises:
        SynthesisError: another collective, or partners without a path that passes no other rank.
    """
    check_served(topology, collective, "double_binary_tree", SERVES)
    root = collective.root
    trees = _two_trees([rank for rank in range(collective.num_ranks) if rank != root])
    strands = []
    for top, inner in trees:
        edges = inner if root is None else ((root, top), *inner)
        strands.append(
            Strand(
                block=0,
                up=mirrored(edges) if collective.reduces else (),
                down=() if collective.name == "reduce" else edges,
            )
        )
    return from_strands(topology, collective, "double_binary_tree", strands)
