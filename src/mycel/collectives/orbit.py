"""Orbit: a schedule over ranks that are alike, as the transfers of rank 0's chunks and the moves of the fabric.

Move ``r`` takes rank 0 to rank ``r`` (``mycel.collectives.moves``), and the transfers of rank 0's chunks to those of
rank ``r``'s. So the whole is stated by one part in N of it, and what is the same for all ranks (levels, loads,
whether it is right) is found in that part. Nothing of the size of the whole is made unless somebody asks for it.

The whole is numbered so: transfer ``e`` of the part, moved by ``r``, is transfer ``e * N + r``. The array falls into
N equal shares, rank ``r``'s being the ``r``-th, and each share into chunks as that of rank 0 does; only all_to_all,
whose share is a rank's row of blocks, has the chunks of a share in the order of the ranks that they go to.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mycel.collectives.columns import Columns, IntArray, Transfer, starts
from mycel.collectives.moves import Moves
from mycel.topology.model import Topology

__all__ = ["Orbit"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Orbit:
    """What a schedule is made of.

    Attributes:
        moves: one a rank.
        columns: transfers of rank 0's chunks, which are numbered from 0; each after those it names, by level.
        stops: units at which these chunks end, counted from the beginning of the share; shape ``[num_chunks]``.
        turns: the chunks of a share stand in the order of the ranks that they go to.
    """

    moves: Moves
    columns: Columns
    stops: IntArray
    turns: bool

    @property
    def num_ranks(self) -> int:
        """N, the number of ranks, of moves and of shares."""
        return len(self.moves.ranks)

    @property
    def units(self) -> IntArray:
        """Length of each of rank 0's chunks."""
        return np.diff(self.stops, prepend=0)

    def chunk_stops(self) -> IntArray:
        """Unit at which each chunk of the array ends."""
        share = int(self.stops[-1])
        return (np.arange(self.num_ranks, dtype=np.int64)[:, None] * share + self.stops).reshape(-1)

    def chunk_of(self, chunk: IntArray, move: IntArray) -> IntArray:
        """Where rank 0's chunks are in the whole, once they have been moved."""
        return move * len(self.stops) + (self.moves.apply(move, chunk) if self.turns else chunk)

    def expanded(self) -> Columns:
        """The transfers of the whole."""
        own, n = self.columns, self.num_ranks
        move = np.arange(n, dtype=np.int64)[None, :]
        src, dst = (self.moves.apply(move, end[:, None]).reshape(-1) for end in (own.src, own.dst))
        chunk = self.chunk_of(own.chunk[:, None], move).reshape(-1)
        after = [np.zeros(0, dtype=np.int64)]
        for first, stop in pairwise(own.after_start.tolist()):
            after.append((own.after[None, first:stop] * n + move.T).reshape(-1))
        return Columns(
            chunk=np.ascontiguousarray(chunk),
            src=src,
            dst=dst,
            reduce=np.repeat(own.reduce, n),
            path=(own.path[:, None] * n + move).reshape(-1),
            paths=tuple(
                tuple(row) for path in own.paths for row in self.moves.images(move.T, np.array(path)).tolist()
            ),
            after_start=starts(np.repeat(np.diff(own.after_start), n)),
            after=np.concatenate(after),
        )

    def at(self, rank: int) -> tuple[IntArray, IntArray]:
        """Transfers that begin or end at a rank, by their numbers in the whole: which of the part, moved by what."""
        own, n = self.columns, self.num_ranks
        which = np.tile(np.arange(len(own), dtype=np.int64), 2)
        move = self.moves.between(np.concatenate([own.src, own.dst]), rank)
        order = np.argsort(which * n + move)
        return which[order], move[order]

    def some(self, which: IntArray, move: IntArray) -> list[Transfer]:
        """Transfers of the part, moved."""
        own, n, found = self.columns, self.num_ranks, []
        after, begin = own.after.tolist(), own.after_start.tolist()
        paths = self._moved_paths(own.path[which], move)
        columns = (
            which,
            move,
            self.chunk_of(own.chunk[which], move),
            self.moves.apply(move, own.src[which]),
            self.moves.apply(move, own.dst[which]),
            own.reduce[which],
        )
        rows = zip(*(column.tolist() for column in columns), paths, strict=True)
        for e, r, chunk, src, dst, reduce, path in rows:
            waits = tuple(earlier * n + r for earlier in after[begin[e] : begin[e + 1]])
            found.append(Transfer(chunk=chunk, src=src, dst=dst, reduce=reduce, path=path, after=waits))
        return found

    def _moved_paths(self, path: IntArray, move: IntArray) -> list[tuple[int, ...]]:
        """Paths of the part, by their place in its table, each moved; equals are one object."""
        paths = self.columns.paths
        length = np.array([len(vertices) for vertices in paths], dtype=np.int64)
        table = np.zeros((len(paths), int(length.max(initial=0))), dtype=np.int64)
        for place, vertices in enumerate(paths):
            table[place, : len(vertices)] = vertices
        moved = self.moves.images(move[:, None], table[path])
        same: dict[tuple[int, ...], tuple[int, ...]] = {}
        found = (tuple(row[:size]) for row, size in zip(moved.tolist(), length[path].tolist(), strict=True))
        return [same.setdefault(vertices, vertices) for vertices in found]

    def link_load(self, topology: Topology) -> dict[tuple[int, int], int]:
        """Units that cross each link of the fabric, those that carry nothing left out.

        A link has what all links carry to which moves take it, divided by how many these are.
        """
        own, n = self.columns, self.num_ranks
        units = [0] * len(own.paths)
        for path, chunk_units in zip(own.path.tolist(), self.units[own.chunk].tolist(), strict=True):
            units[path] += chunk_units
        count = len(topology.vertices)
        links = np.array([link.src * count + link.dst for link in topology.links], dtype=np.int64)
        order = np.argsort(links)
        least = np.arange(len(links), dtype=np.int64)  # of each link the first to which moves take it
        for generator, repeats in zip(self.moves.generators, self.moves.orders, strict=True):
            moved = generator[links // count] * count + generator[links % count]
            image = order[np.searchsorted(links, moved, sorter=order)]
            for _ in range(repeats):
                least = np.minimum(least, least[image])
        sizes = np.bincount(least, minlength=len(links)).tolist()
        class_of = dict(zip(links.tolist(), least.tolist(), strict=True))
        carried = [0] * len(links)
        for path, amount in zip(own.paths, units, strict=True):
            for a, b in pairwise(path):
                carried[class_of[a * count + b]] += amount
        return {
            (link.src, link.dst): carried[first] * n // sizes[first]
            for link, first in zip(topology.links, least.tolist(), strict=True)
            if carried[first]
        }
