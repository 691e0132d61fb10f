"""From forests to a schedule, on columns: pieces of the array, their transfers, and what each transfer waits for.

A tree is a row of paths, each given by its place in a table of different ones: a path says which vertices it joins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd, lcm

import numpy as np

from mycel.collectives.columns import Columns, starts
from mycel.collectives.maxflow import BoolArray, IntArray
from mycel.collectives.schedule import Chunk, Schedule
from mycel.collectives.spec import Collective
from mycel.collectives.synth.array_forest import Forest
from mycel.collectives.synth.in_network import root_at_switch, without_idle_switches
from mycel.collectives.synth.logical_arcs import Path
from mycel.compiled import compiled
from mycel.topology.model import Topology

__all__ = ["emit"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Tree:
    """A tree of one direction.

    Attributes:
        root: a compute vertex.
        multiplicity: units of the root's share that use it.
        paths: places in the table of paths, in the order in which data moves.
    """

    root: int
    multiplicity: int
    paths: IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Piece:
    """A run of units, and the tree that reduces it and the tree that spreads it, of which one may be empty."""

    start: int
    stop: int
    up: IntArray
    down: IntArray


def emit(
    topology: Topology, collective: Collective, weights: Sequence[int], forests: Sequence[tuple[Forest, int]]
) -> Schedule:
    """The schedule that adds up along forests that are turned round, and copies along the others.

    Transfers that can go first stand before those that wait; of a level, they stand chunk by chunk.

    Args:
        topology: the fabric; forests may be of the same with some of its computing switches as ranks.
        collective: what moves.
        weights: share of each compute vertex as a root.
        forests: each with the factor by which its multiplicities are stretched.
    """
    table: dict[Path, int] = {}
    directions = {
        turned: [
            tree for f, factor in forests if f.is_reversed == turned for tree in _trees(f, factor, topology, table)
        ]
        for turned in sorted({forest.is_reversed for forest, _ in forests}, reverse=True)
    }
    ends = np.array(
        [(topology.compute_index[path[0]], topology.compute_index[path[-1]]) for path in table], dtype=np.int64
    )
    src, dst = np.ascontiguousarray(ends.T)
    pieces = _pieces(weights, directions)
    if len(directions) == 2 and len(topology.compute_vertices) > topology.num_ranks:
        pieces = [
            replace(piece, up=up, down=down)
            for piece in pieces
            for up, down in (root_at_switch(piece.up, piece.down, src, dst, topology.num_ranks),)
        ]
    up_start, down_start = (starts([len(row) for row in rows]) for rows in _rows(pieces))
    up, down = (np.concatenate(rows) for rows in _rows(pieces))
    chunk, path, adds, chains, level = _trace(
        up_start, up, down_start, down, src, dst, len(topology.compute_vertices)
    )
    # Levels are few: sorting them as short numbers takes no comparisons.
    order = np.argsort(level.astype(np.int16) if level.max() < 1 << 15 else level, kind="stable")
    after_start, after = _renumbered(order, *chains)
    divisor = gcd(*(piece.stop - piece.start for piece in pieces))
    return Schedule.of_columns(
        collective=collective,
        topology=topology,
        method="forest",
        num_units=pieces[-1].stop // divisor,
        chunks=tuple(Chunk(start=p.start // divisor, stop=p.stop // divisor) for p in pieces),
        columns=Columns(
            chunk=chunk[order],
            src=src[path[order]],
            dst=dst[path[order]],
            reduce=adds[order],
            path=path[order],
            paths=tuple(table),
            after_start=after_start,
            after=after,
        ),
    )


def _rows(pieces: Sequence[_Piece]) -> tuple[list[IntArray], list[IntArray]]:
    return [piece.up for piece in pieces], [piece.down for piece in pieces]


def _trees(forest: Forest, factor: int, topology: Topology, table: dict[Path, int]) -> list[_Tree]:
    """A forest's trees by root, as data moves along them; their paths are added to the table."""
    turned, arcs = forest.is_reversed, forest.arcs
    place = [table.setdefault(path[::-1] if turned else path, len(table)) for path in arcs.paths]
    path = np.array(place, dtype=np.int64)
    index = np.array([topology.compute_index[vertex] for vertex in forest.topology.ranks], dtype=np.int64)
    trees: list[_Tree] = []
    for i in np.argsort(forest.roots, kind="stable").tolist():
        row = forest.trees[i]
        if len(index) > topology.num_ranks:
            row = without_idle_switches(row, index[arcs.tail], index[arcs.head], topology.num_ranks)
        paths = path[row[::-1]] if turned else path[row]
        multiplicity = int(forest.multiplicities[i]) * factor
        trees.append(_Tree(root=int(index[forest.roots[i]]), multiplicity=multiplicity, paths=paths))
    return trees


def _pieces(weights: Sequence[int], directions: Mapping[bool, Sequence[_Tree]]) -> list[_Piece]:
    """Each root's share cut at the boundaries of its trees in both directions; equal neighbours merged."""
    unit = {turned: sum(tree.multiplicity for tree in trees) // sum(weights) for turned, trees in directions.items()}
    common = lcm(*unit.values())
    runs: dict[bool, list[list[tuple[int, IntArray]]]] = {turned: [[] for _ in weights] for turned in (True, False)}
    for turned, trees in directions.items():
        for tree in trees:
            run = runs[turned][tree.root]
            reached = run[-1][0] if run else 0
            run.append((reached + tree.multiplicity * (common // unit[turned]), tree.paths))
    none = np.zeros(0, dtype=np.int64)
    pieces: list[_Piece] = []
    start = 0
    for ups, downs in zip(runs[True], runs[False], strict=True):
        cuts = sorted({0, *(stop for stop, _ in (*ups, *downs))})
        for low, high in pairwise(cuts):
            up, down = (next((paths for stop, paths in run if stop > low), none) for run in (ups, downs))
            same = pieces[-1] if low > 0 else None
            if same is not None and np.array_equal(same.up, up) and np.array_equal(same.down, down):
                pieces[-1] = replace(same, stop=start + high)
            else:
                pieces.append(_Piece(start=start + low, stop=start + high, up=up, down=down))
        start += cuts[-1]
    return pieces


@compiled
def _trace(
    up_start: IntArray,
    up: IntArray,
    down_start: IntArray,
    down: IntArray,
    src: IntArray,
    dst: IntArray,
    num_nodes: int,
) -> tuple[IntArray, IntArray, BoolArray, tuple[IntArray, IntArray], IntArray]:
    """Transfers chunk by chunk, first up, then down.

    What a transfer waits for is what has come into its source: sums wait for all additions there, copies at the root
    for the last of these, and copies elsewhere for the copy that came. Those that came into one place form a chain.

    Args:
        up_start, up: paths of the trees that reduce, chunk after chunk.
        down_start, down: paths of the trees that spread.
        src, dst: vertices that each path joins.
        num_nodes: ranks and computing switches.

    Returns:
        Of each transfer its chunk, its path and whether it adds; the head of the chain that it waits for and the next
        in the chain that it is in itself, -1 where there is none; and its level.
    """
    total = len(up) + len(down)
    chunk = np.empty(total, dtype=np.int64)
    path = np.empty(total, dtype=np.int64)
    adds = np.empty(total, dtype=np.bool_)
    head = np.empty(total, dtype=np.int64)
    following = np.empty(total, dtype=np.int64)
    level = np.empty(total, dtype=np.int64)
    highest = np.empty(total, dtype=np.int64)  # level in the chain from here on
    newest = np.empty(num_nodes, dtype=np.int64)
    t = 0
    for c in range(len(up_start) - 1):
        newest[:] = -1
        num_up = up_start[c + 1] - up_start[c]
        for i in range(num_up + down_start[c + 1] - down_start[c]):
            p = up[up_start[c] + i] if i < num_up else down[down_start[c] + i - num_up]
            chunk[t], path[t], adds[t] = c, p, i < num_up
            head[t] = newest[src[p]]
            following[t] = newest[dst[p]] if adds[t] else -1
            level[t] = 0 if head[t] < 0 else 1 + highest[head[t]]
            highest[t] = level[t] if following[t] < 0 else max(level[t], highest[following[t]])
            newest[dst[p]] = t
            t += 1
    return chunk, path, adds, (head, following), level


@compiled
def _renumbered(order: IntArray, head: IntArray, following: IntArray) -> tuple[IntArray, IntArray]:
    """The chains that transfers wait for as rows of rising numbers, of transfers in another order."""
    place = np.empty(len(order), dtype=np.int64)
    length = np.empty(len(order), dtype=np.int64)  # of the chain from each transfer on
    start = np.zeros(len(order) + 1, dtype=np.int64)
    for new in range(len(order)):
        place[order[new]] = new
    for old in range(len(order)):
        length[old] = 1 if following[old] < 0 else 1 + length[following[old]]
    for new in range(len(order)):
        start[new + 1] = start[new] + (0 if head[order[new]] < 0 else length[head[order[new]]])
    after = np.empty(start[-1], dtype=np.int64)
    for new in range(len(order)):
        at, link = start[new], head[order[new]]
        while link >= 0:
            after[at] = place[link]
            at, link = at + 1, following[link]
        if at > start[new] + 1:
            after[start[new] : at].sort()
    return start, after
