"""A heap of vertices by key in two arrays, for compiled searches of shortest ways: floats or whole numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mycel.collectives.maxflow import IntArray
from mycel.compiled import compiled

__all__ = ["pop", "push"]

Keys = IntArray | npt.NDArray[np.float64]


@compiled
def push(keys: Keys, vertices: IntArray, size: int, key: float, vertex: int) -> None:
    """Put a vertex in; the heap then has one more.

    Args:
        keys: of the heap's entries, none less than that of ``(place - 1) // 2``; shape ``[capacity]``.
        vertices: the entries, shape ``[capacity]``.
        size: entries before; less than the capacity.
        key: of the new one.
        vertex: the new one, which may be there already with another key.
    """
    place = size
    while place > 0 and keys[(place - 1) // 2] > key:
        keys[place], vertices[place] = keys[(place - 1) // 2], vertices[(place - 1) // 2]
        place = (place - 1) // 2
    keys[place], vertices[place] = key, vertex


@compiled
def pop(keys: Keys, vertices: IntArray, size: int) -> int:
    """Take out a vertex of least key, and give it; the heap then has one less.

    Args:
        keys: as of ``push``.
        vertices: as of ``push``.
        size: entries before; at least one.
    """
    first: int = vertices[0]
    size -= 1
    key, moved, place = keys[size], vertices[size], 0
    while 2 * place + 1 < size:
        child = 2 * place + 1
        if child + 1 < size and keys[child + 1] < keys[child]:
            child += 1
        if keys[child] >= key:
            break
        keys[place], vertices[place] = keys[child], vertices[child]
        place = child
    keys[place], vertices[place] = key, moved
    return first
