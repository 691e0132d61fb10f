"""Plans whose groups all have one size: what frameworks with one degree for the whole run do."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mycel.planning.grouping.batch import Batch, Division
from mycel.planning.grouping.kernels import lightest_first, settle

__all__ = ["SETTLED", "static_divisions"]

#: Exchanges that end a distribution, at most.
SETTLED = 60


def static_divisions(batch: Batch) -> Iterator[Division]:
    """For each size, the batch over as many groups of it as there are: longest first, to the one that is done first.

    Args:
        batch: the sequences. Sizes that cannot hold them so are left out.
    """
    counts = batch.divisions.counts
    sizes = batch.sizes
    for size in np.unique(sizes):
        others = counts[:, sizes != size].sum(axis=1)
        rows = np.flatnonzero(others == 0)
        if not len(rows):
            # No division is of this size alone, as some ranks would be idle: the one with most of it, others unused.
            rows = np.array([int(np.argmax(counts[:, sizes == size].sum(axis=1)))])
        for row in rows.tolist():
            mine = np.where(sizes == size, counts[row], 0)
            if not mine.any():
                continue
            kinds, placed = batch.kind_of(mine), np.zeros(len(batch.which), dtype=np.int64)
            if lightest_first(batch.work, batch.tokens, batch.rooms, kinds, placed) < 0:
                continue
            slowest = settle(batch.work, batch.tokens, batch.rooms, kinds, placed, SETTLED)
            yield Division(
                time_us=slowest + batch.instance.us_per_step,
                row=row,
                counts=mine,
                placed=placed,
                source=f"degree {size}",
            )
