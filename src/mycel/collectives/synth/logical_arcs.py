"""Links between ranks once switches are gone: arrays, with the physical path of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mycel.collectives.maxflow import IntArray
from mycel.topology.model import Topology

__all__ = ["LogicalArcs", "Path", "path_lengths", "without_loops"]

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogicalArcs:
    """Links between ranks as arrays; links between the same ranks that differ in path stand apart.

    Attributes:
        tail: rank each leaves; shape ``[num_arcs]``.
        head: rank each reaches; shape ``[num_arcs]``.
        capacity: units; shape ``[num_arcs]``.
        paths: vertices each passes, ends included.
    """

    tail: IntArray
    head: IntArray
    capacity: IntArray
    paths: tuple[Path, ...]

    @classmethod
    def of(cls, paths: dict[Path, int], rank_of: dict[int, int]) -> LogicalArcs:
        """Links along paths, in their order.

        Args:
            paths: capacity of each.
            rank_of: rank of the vertices in which they end.
        """
        return cls(
            tail=np.array([rank_of[path[0]] for path in paths], dtype=np.int64),
            head=np.array([rank_of[path[-1]] for path in paths], dtype=np.int64),
            capacity=np.array(list(paths.values()), dtype=np.int64),
            paths=tuple(paths),
        )


def path_lengths(topology: Topology, paths: Iterable[Path], *, is_reversed: bool) -> IntArray:
    """Latency of each path in 16ths of the longest; 1 of each where no link has a latency, or all have the same.

    What counts is how ways compare; and few different lengths keep growth by length as quick as growth by steps.
    """
    paths, latency = list(paths), topology.latency_s
    if not any(latency.values()):
        return np.ones(len(paths), dtype=np.int64)
    hops = [[(b, a) if is_reversed else (a, b) for a, b in pairwise(path)] for path in paths]
    seconds = [sum(latency[hop] for hop in way) for way in hops]
    longest = max(seconds, default=0.0)
    if not longest:  # latency only where no path goes
        return np.ones(len(seconds), dtype=np.int64)
    lengths = np.array([max(1, round(16 * s / longest)) for s in seconds], dtype=np.int64)
    return lengths // int(np.gcd.reduce(lengths))


def without_loops(walk: tuple[int, ...]) -> tuple[int, ...]:
    """A simple path along a walk: what lies between two visits of a vertex is cut out."""
    path: list[int] = []
    for vertex in walk:
        if vertex in path:
            del path[path.index(vertex) + 1 :]
        else:
            path.append(vertex)
    return tuple(path)
