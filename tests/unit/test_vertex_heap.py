"""A heap in two arrays: it gives what ``heapq`` gives, compiled and as it is written."""

from __future__ import annotations

import heapq
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mycel.collectives import vertex_heap


@pytest.mark.parametrize("form", ["interpreted", "compiled"])
@pytest.mark.parametrize("kind", [np.int64, np.float64])
@pytest.mark.parametrize("seed", range(3))
def test_keys_come_out_in_order(form: str, kind: type, seed: int) -> None:
    push, pop = getattr(vertex_heap.push, form), getattr(vertex_heap.pop, form)
    rng = random.Random(seed)
    keys: npt.NDArray[Any] = np.zeros(200, dtype=kind)
    vertices, size = np.zeros(200, dtype=np.int64), 0
    key_of: dict[int, Any] = {}
    other: list[Any] = []
    for vertex in range(400):
        if size and (size == 200 or rng.random() < 0.4):
            assert key_of.pop(int(pop(keys, vertices, size))) == heapq.heappop(other)
            size -= 1
        else:
            key_of[vertex] = kind(rng.randrange(50))
            push(keys, vertices, size, key_of[vertex], vertex)
            heapq.heappush(other, key_of[vertex])
            size += 1
    while size:
        assert key_of.pop(int(pop(keys, vertices, size))) == heapq.heappop(other)
        size -= 1
    assert not key_of
