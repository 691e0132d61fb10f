"""Figures of a schedule that commands print: its trees, and what each root has of the array."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from mycel.collectives.bound import root_weights
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import POINTED

__all__ = ["count_trees", "trees_a_root"]


def count_trees(schedule: Schedule) -> int:
    """Different trees in a schedule; a chunk that is reduced up one and copied down another has two."""
    columns = schedule.columns
    sets = np.sort((2 * columns.chunk + columns.reduce) * len(columns.paths) + columns.path)
    tree, path = np.divmod(sets, len(columns.paths))
    first = np.flatnonzero(np.diff(tree, prepend=-1))
    rows, size = path.tobytes(), path.itemsize
    starts = (first * size).tolist()
    trees = (rows[start:stop] for start, stop in pairwise([*starts, len(rows)]))
    return len(set(zip((tree[first] % 2).tolist(), trees, strict=True)))


def trees_a_root(schedule: Schedule) -> int | None:
    """Units of the array that each root has, one a tree; ``None`` if roots have different shares (all_reduce).

    ``None`` as well where trees go through switches that copy and add: some of those may be roots, and some not.

    Of all_to_all, gather and scatter, units that each block has, one a path. Of uneven blocks, units of weight 1.
    """
    if schedule.collective.name in POINTED:
        return schedule.num_units // schedule.collective.total_weight
    if schedule.collective.name != "all_reduce":
        return schedule.num_units // sum(root_weights(schedule.collective)) or 1
    if schedule.num_compute_vertices > schedule.collective.num_ranks:
        return None
    columns = schedule.columns
    receives = np.zeros((len(schedule.chunks), schedule.collective.num_ranks), dtype=np.bool_)
    receives[columns.chunk[~columns.reduce], columns.dst[~columns.reduce]] = True
    share: dict[bytes, int] = {}  # a root is who receives no copy
    for chunk, ranks in zip(schedule.chunks, receives, strict=True):
        share[ranks.tobytes()] = share.get(ranks.tobytes(), 0) + chunk.num_units
    return next(iter(share.values())) if len(set(share.values())) == 1 else None
