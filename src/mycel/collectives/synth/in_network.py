"""Trees through switches that copy and add: what makes them lighter and shallower. Nodes as in ``Topology.nodes``."""

from __future__ import annotations

__all__ = ["Edges", "root_at_switch", "without_idle_switches"]

#: ``(src, dst, path)`` of each edge of a tree, in the order in which data moves or, for out-trees, grows.
Edges = tuple[tuple[int, int, tuple[int, ...]], ...]


def without_idle_switches(edges: Edges, num_ranks: int) -> Edges:
    """An out-tree without switches from which nothing goes on.

    Args:
        edges: of a spanning out-tree, in the order of growth.
        num_ranks: nodes from there on are switches.

    Examples:
        >>> without_idle_switches(((0, 3, (0, 3)), (0, 1, (0, 1)), (3, 4, (3, 4)), (3, 2, (3, 2))), 3)
        ((0, 3, (0, 3)), (0, 1, (0, 1)), (3, 2, (3, 2)))
    """
    kept: list[tuple[int, int, tuple[int, ...]]] = []
    useful: set[int] = set()
    for src, dst, path in reversed(edges):
        if dst < num_ranks or dst in useful:
            useful.add(src)
            kept.append((src, dst, path))
    return tuple(reversed(kept))


def root_at_switch(up: Edges, down: Edges, num_ranks: int) -> tuple[Edges, Edges]:
    """The same two trees, rooted at a switch where the root only hands the sum back to the switch it came from.

    If all of the sum reaches the root from one switch, and all that spreads goes back there, the root may be a leaf
    instead: it sends its own data where it sent the sum, and receives the sum where it did. Every link carries
    what it did, and everyone is two steps nearer.

    Args:
        up: of the in-tree, leaves first.
        down: of the out-tree, in the order of growth.
        num_ranks: nodes from there on are switches.

    Examples:
        >>> root_at_switch(((1, 2, (1, 2)), (2, 0, (2, 0))), ((0, 2, (0, 2)), (2, 1, (2, 1))), 2)
        (((0, 2, (0, 2)), (1, 2, (1, 2))), ((2, 0, (2, 0)), (2, 1, (2, 1))))
    """
    if not up or not down:
        return up, down
    root = down[0][0]
    arriving = [edge for edge in up if edge[1] == root]
    leaving = [edge for edge in down if edge[0] == root]
    if root >= num_ranks or len(arriving) != 1 or len(leaving) != 1:
        return up, down
    (switch, _, back), (_, other, out) = arriving[0], leaving[0]
    if switch != other or switch < num_ranks:
        return up, down
    return (
        ((root, switch, out), *(edge for edge in up if edge is not arriving[0])),
        ((switch, root, back), *(edge for edge in down if edge is not leaving[0])),
    )
