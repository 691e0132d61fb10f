"""Cheapest ways from a vertex by whatever links cost: compiled, for searches by the hundred thousand."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mycel.collectives.maxflow import BoolArray, IntArray
from mycel.collectives.vertex_heap import pop, push
from mycel.compiled import compiled_at_once

__all__ = ["find_leaves", "search_ways"]

Floats = npt.NDArray[np.float64]


def find_leaves(tail: IntArray, head: IntArray, count: int) -> BoolArray:
    """Of each vertex, whether it has one neighbour, so that no way passes it.

    Args:
        tail: vertex that each link leaves.
        head: vertex that each link enters.
        count: of vertices.
    """
    ends = np.unique(np.concatenate([tail * count + head, head * count + tail]))
    is_leaf: BoolArray = np.bincount(ends // count, minlength=count) == 1
    return is_leaf


@compiled_at_once
def search_ways(
    begin: IntArray,
    order: IntArray,
    head: IntArray,
    is_leaf: BoolArray,
    weights: Floats,
    start: int,
    far: Floats,
    last: IntArray,
) -> None:
    """Cheapest ways from a vertex (Dijkstra), into ``far`` and ``last``.

    Args:
        begin: where each vertex's links begin in ``order``, shape ``[vertices + 1]``.
        order: links by the vertex that they leave.
        head: vertex that each link enters.
        is_leaf: of each vertex, whether it has one neighbour.
        weights: of each link, not negative.
        start: a vertex.
        far: for the cost of each vertex's way, infinite where there is none.
        last: for the last link of each vertex's way, -1 at the start.
    """
    done = np.zeros(len(far), dtype=np.bool_)
    far[:] = np.inf
    last[:] = -1
    far[start] = 0.0
    keys = np.empty(len(head) + 1, dtype=np.float64)
    vertices = np.empty(len(head) + 1, dtype=np.int64)
    keys[0], vertices[0] = 0.0, start
    size = 1
    while size > 0:
        vertex = pop(keys, vertices, size)
        size -= 1
        if done[vertex]:
            continue
        done[vertex] = True
        for i in range(begin[vertex], begin[vertex + 1]):
            arc = order[i]
            v, length = head[arc], far[vertex] + weights[arc]
            if length < far[v]:
                far[v], last[v] = length, arc
                if is_leaf[v]:
                    continue
                push(keys, vertices, size, length, v)
                size += 1
