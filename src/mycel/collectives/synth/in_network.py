"""Trees through switches that copy and add: what makes them lighter and shallower.

Vertices are numbered as in ``Topology.compute_vertices``.
"""

from __future__ import annotations

import numpy as np

from mycel.collectives.maxflow import IntArray

__all__ = ["root_at_switch", "without_idle_switches"]


def without_idle_switches(tree: IntArray, tail: IntArray, head: IntArray, num_ranks: int) -> IntArray:
    """An out-tree without switches from which nothing goes on.

    Args:
        tree: links of a spanning out-tree, in the order of growth.
        tail, head: vertices that each link leaves and reaches.
        num_ranks: vertices from there on are switches.

    Examples:
        >>> tail, head = np.array([0, 0, 3, 3]), np.array([3, 1, 4, 2])
        >>> without_idle_switches(np.arange(4), tail, head, 3).tolist()
        [0, 1, 3]
    """
    kept: list[int] = []
    useful: set[int] = set()
    for link in reversed(tree.tolist()):
        if head[link] < num_ranks or int(head[link]) in useful:
            useful.add(int(tail[link]))
            kept.append(link)
    return np.array(kept[::-1], dtype=np.int64)


def root_at_switch(
    up: IntArray, down: IntArray, src: IntArray, dst: IntArray, num_ranks: int
) -> tuple[IntArray, IntArray]:
    """The same two trees, rooted at a switch where the root only hands the sum back to the switch it came from.

    If all of the sum reaches the root from one switch, and all that spreads goes back there, the root may be a leaf
    instead: it sends its own data where it sent the sum, and receives the sum where it did. Every link carries
    what it did, and everyone is two steps nearer.

    Args:
        up: paths of the in-tree, leaves first.
        down: paths of the out-tree, in the order of growth.
        src, dst: vertices that each path joins.
        num_ranks: vertices from there on are switches.

    Examples:
        >>> src, dst = np.array([1, 2, 0, 2]), np.array([2, 0, 2, 1])
        >>> up, down = root_at_switch(np.array([0, 1]), np.array([2, 3]), src, dst, 2)
        >>> up.tolist(), down.tolist()
        ([2, 0], [1, 3])
    """
    if not len(up) or not len(down):
        return up, down
    root = src[down[0]]
    arriving, leaving = up[dst[up] == root], down[src[down] == root]
    if root >= num_ranks or len(arriving) != 1 or len(leaving) != 1:
        return up, down
    if src[arriving[0]] != dst[leaving[0]] or src[arriving[0]] < num_ranks:
        return up, down
    return np.concatenate([leaving, up[up != arriving[0]]]), np.concatenate([arriving, down[down != leaving[0]]])
