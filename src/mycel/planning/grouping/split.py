"""Cutting a step's sequences into micro-batches: neighbours by length, cut where the sum of times is least.

A dynamic programme over the sequences in order of their length: runs of neighbours become micro-batches, each as
long as its bound says, and no run has more tokens than all ranks hold. Long ones together need large groups, short
ones small groups, and neither waits for the other. Beside it stand sequences dealt out so that all micro-batches
have as much to do, which is better where what a micro-batch takes whatever is in it is small.

References:
    Y. Wang et al., "FlexSP", ASPLOS 2025, section 4.2 ("blaster": runs of sorted sequences with the least greatest
    sum of tokens; here the sum of times is least).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mycel.planning.grouping.batch import Batch, Floats

__all__ = ["splits"]

#: Places where sequences may be cut, at most; among more, evenly spaced ones are taken.
_MOST_CUTS = 512


def splits(batch: Batch, num_micro_batches: int) -> Iterator[list[list[int]]]:
    """Ways to cut, each a list of indices of sequences for every micro-batch.

    Args:
        batch: all sequences of the step.
        num_micro_batches: none of which is empty.
    """
    if num_micro_batches == 1:
        yield [list(batch.which)]
        return
    if num_micro_batches > len(batch.which):
        return
    work = np.where(batch.fits(), batch.work, np.inf)
    soonest = work.min(axis=1)
    area = (work * batch.sizes).min(axis=1) / batch.instance.num_ranks
    runs = _runs(batch, soonest, area, num_micro_batches)
    if runs is not None:
        yield runs
    yield _dealt(batch, area, num_micro_batches)


def _runs(batch: Batch, soonest: Floats, area: Floats, many: int) -> list[list[int]] | None:
    num = len(batch.which)
    cuts = np.unique(np.linspace(0, num, min(num, _MOST_CUTS) + 1).astype(int))
    areas = np.concatenate([[0.0], np.cumsum(area)])[cuts]
    tokens = np.concatenate([[0], np.cumsum(batch.tokens)])[cuts]
    room = batch.instance.num_ranks * batch.instance.capacity_tokens
    # Sequences are longest first, so a run's longest is its first.
    first = np.maximum.accumulate(soonest[::-1])[::-1][np.minimum(cuts, num - 1)]
    best = np.full(len(cuts), np.inf)
    best[0] = 0.0
    came = []
    for _ in range(many):
        after, source = np.full(len(cuts), np.inf), np.zeros(len(cuts), dtype=int)
        for end in range(1, len(cuts)):
            takes = np.maximum(first[:end], areas[end] - areas[:end])
            takes = np.where(tokens[end] - tokens[:end] <= room, takes, np.inf) + best[:end]
            source[end] = int(np.argmin(takes))
            after[end] = takes[source[end]]
        best = after
        came.append(source)
    if not np.isfinite(best[-1]):
        return None
    runs, end = [], len(cuts) - 1
    for source in reversed(came):
        begin = int(source[end])
        runs.append(list(batch.which[cuts[begin] : cuts[end]]))
        end = begin
    return runs


def _dealt(batch: Batch, area: Floats, many: int) -> list[list[int]]:
    """Longest first to the micro-batch with the least to do, among those with room."""
    parts: list[list[int]] = [[] for _ in range(many)]
    load, tokens = np.zeros(many), np.zeros(many)
    room = batch.instance.num_ranks * batch.instance.capacity_tokens
    for place, sequence in enumerate(batch.which):
        free = tokens + batch.tokens[place] <= room
        chosen = int(np.argmin(np.where(free, load, np.inf) if free.any() else tokens))
        parts[chosen].append(sequence)
        load[chosen] += area[place]
        tokens[chosen] += batch.tokens[place]
    return [part for part in parts if part]
