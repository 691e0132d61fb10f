"""Sets of vertices that hang together by links wider than those around them: boxes, and what is round a switch.

What enters and leaves such a set is what a collective over many boxes is short of. So trees had better enter it once,
and linear programmes begin with the cuts around it.
"""

from __future__ import annotations

import numpy as np

from mycel.collectives.maxflow import BoolArray, FlowGraph, IntArray

__all__ = ["clusters"]


def clusters(graph: FlowGraph, capacity: IntArray) -> list[BoolArray]:
    """What hangs together by links of each width and more, and each switch with the ranks around it.

    Args:
        graph: the fabric.
        capacity: of each of its arcs.

    Returns:
        Sets that hold more than one rank and not all, each as a row of booleans, shape ``[vertices]``.
    """
    found: dict[bytes, BoolArray] = {}
    is_rank = np.zeros(graph.num_vertices, dtype=np.bool_)
    is_rank[graph.ranks] = True
    for width in np.unique(capacity)[1:].tolist():
        wide = capacity >= width
        label = np.arange(graph.num_vertices)
        while True:
            before = label.copy()
            np.minimum.at(label, graph.head[wide], label[graph.tail[wide]])
            np.minimum.at(label, graph.tail[wide], label[graph.head[wide]])
            label = label[label]
            if np.array_equal(label, before):
                break
        for name in np.unique(label[graph.ranks]).tolist():
            row = label == name
            if 1 < (row & is_rank).sum() < len(graph.ranks):
                found[bytes(row)] = row
    for switch in np.flatnonzero(~is_rank).tolist():
        row = np.zeros(graph.num_vertices, dtype=np.bool_)
        row[switch] = True
        row[graph.head[graph.tail == switch]] = True
        row &= is_rank
        row[switch] = True
        if 2 < row.sum() <= len(graph.ranks) // 2:
            found[bytes(row)] = row
    return list(found.values())
