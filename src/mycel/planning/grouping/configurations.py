"""Into which groups the ranks may be divided at a time: how many of each kind, and which ranks those are.

A kind is a size with a cost of a token; groups of one kind are alike to whoever distributes sequences. What differs
between divisions is then only how many of each kind they have. Groups that name their ranks, and of which each two
are disjoint or one inside the other, are a tree; its divisions are put together from those of the parts. For groups
that cross, divisions are counted over the lowest rank that is not decided: it is idle, or in one of the groups of
ranks that are all free. What was reached by the same ranks with the same counts is gone on with once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add

import numpy as np
from numpy.typing import NDArray

from mycel.errors import UsageError
from mycel.planning.grouping.instance import Candidate, SequenceInstance
from mycel.planning.grouping.plan import PlannedGroup

__all__ = ["Configurations", "configurations"]

#: Divisions that are looked at. 64 ranks in powers of two have 1,828; beyond, the first ones found are kept.
MOST = 1 << 12


@dataclass(frozen=True, kw_only=True)
class Configurations:
    """Divisions of the ranks, none of which is contained in another.

    Attributes:
        kinds: size and cost of a token of each kind, as in ``SequenceInstance.kinds``.
        counts: groups of each kind, a row a division: int64 of shape (divisions, kinds).
        chosen: of each division, the indices of its candidates, where they name ranks; else empty.
        is_whole: whether these are all.
    """

    kinds: tuple[tuple[int, float], ...]
    counts: NDArray[np.int64]
    chosen: tuple[tuple[int, ...], ...]
    is_whole: bool

    def place(
        self, instance: SequenceInstance, row: int, slots: Sequence[tuple[int, Sequence[int]]], micro_batch: int
    ) -> list[PlannedGroup]:
        """Groups with their ranks.

        Args:
            instance: whose divisions these are.
            row: which division.
            slots: of every group that is used its kind and the indices of its sequences.
            micro_batch: in which they work.
        """
        named = [instance.candidates[index] for index in self.chosen[row]] if self.chosen else []
        return with_ranks(instance, self.kinds, slots, named, micro_batch)


def with_ranks(
    instance: SequenceInstance,
    kinds: Sequence[tuple[int, float]],
    slots: Sequence[tuple[int, Sequence[int]]],
    named: Sequence[Candidate],
    micro_batch: int,
) -> list[PlannedGroup]:
    """Groups of the kinds that are used, with ranks: those of named candidates, or the next free ones, large first.

    Args:
        instance: of which.
        kinds: size and cost of a token.
        slots: of every group its kind and its sequences.
        named: candidates of the division, where they name ranks.
        micro_batch: in which they work.
    """
    groups, next_rank = [], 0
    left = {kind: [c.ranks or () for c in named if (c.size, c.comm_us_per_token) == kind] for kind in kinds}
    # Large groups first: sizes that divide each other then begin at multiples of themselves.
    for kind, sequences in sorted(slots, key=lambda slot: -kinds[slot[0]][0]):
        if not sequences:
            continue
        size = kinds[kind][0]
        if instance.has_named_ranks:
            ranks = left[kinds[kind]].pop(0)
        else:
            ranks = tuple(range(next_rank, next_rank + size))
            next_rank += size
        groups.append(PlannedGroup(micro_batch=micro_batch, ranks=ranks, sequences=tuple(sorted(sequences))))
    return groups


def configurations(instance: SequenceInstance) -> Configurations:
    """All divisions of an instance's ranks, or as many as are looked at.

    Args:
        instance: its ranks and candidates.

    Examples:
        >>> from mycel.planning.grouping.instance import Candidate
        >>> four = SequenceInstance(
        ...     num_ranks=4, capacity_tokens=9, us_per_token2=0.0, us_per_token=1.0, us_per_step=0.0, lengths=(3,),
        ...     candidates=tuple(Candidate(size=size, comm_us_per_token=0.0) for size in (1, 2, 4)),
        ... )
        >>> configurations(four).counts.tolist()  # of sizes 1, 2 and 4
        [[0, 0, 1], [0, 2, 0], [2, 1, 0], [4, 0, 0]]
    """
    return _found(instance.num_ranks, instance.candidates, instance.kinds)


@lru_cache(maxsize=64)
def _found(num_ranks: int, candidates: tuple[Candidate, ...], kinds: tuple[tuple[int, float], ...]) -> Configurations:
    if candidates[0].ranks is None:
        rows, is_whole = _of_sizes(num_ranks, [size for size, _ in kinds])
        counts: list[tuple[int, ...]] = rows
        chosen: tuple[tuple[int, ...], ...] = ()
    else:
        found, is_whole = _of_ranks(num_ranks, candidates, kinds)
        counts, chosen = [row for row, _ in found], tuple(which for _, which in found)
    if not counts:
        raise UsageError("no group fits on the ranks")
    return Configurations(kinds=kinds, counts=np.array(counts, dtype=np.int64), chosen=chosen, is_whole=is_whole)


def _of_sizes(num_ranks: int, sizes: Sequence[int]) -> tuple[list[tuple[int, ...]], bool]:
    """Counts with as many ranks as possible; large groups first, so that what is cut off has many small ones."""
    rows: list[tuple[int, ...]] = []
    smallest = min(sizes)

    def descend(kind: int, left: int, taken: tuple[int, ...]) -> None:
        if len(rows) >= MOST:
            return
        if kind < 0:
            if left < smallest:
                rows.append(taken)
            return
        for count in range(left // sizes[kind], -1, -1):
            descend(kind - 1, left - count * sizes[kind], (count, *taken))

    descend(len(sizes) - 1, num_ranks, ())
    return rows, len(rows) < MOST


def _of_ranks(
    num_ranks: int, candidates: Sequence[Candidate], kinds: Sequence[tuple[int, float]]
) -> tuple[list[tuple[tuple[int, ...], tuple[int, ...]]], bool]:
    masks = [sum(1 << rank for rank in c.ranks or ()) for c in candidates]
    kind_of = [kinds.index((c.size, float(c.comm_us_per_token))) for c in candidates]
    inside = _nested(num_ranks, candidates)
    if inside is not None:
        return _of_nested(inside, kind_of, [size for size, _ in kinds])
    starting: list[list[int]] = [[] for _ in range(num_ranks)]
    for index, mask in enumerate(masks):
        starting[(mask & -mask).bit_length() - 1].append(index)
    # Ranks that are taken, counts of kinds -> the candidates: one way each.
    reached: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {(0, (0,) * len(kinds)): ()}
    is_whole = True
    for rank in range(num_ranks):
        after: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
        for (taken, counts), chosen in reached.items():
            if taken >> rank & 1:
                after.setdefault((taken, counts), chosen)
                continue
            for index in starting[rank]:
                if not masks[index] & taken:
                    kind = kind_of[index]
                    more = (*counts[:kind], counts[kind] + 1, *counts[kind + 1 :])
                    after.setdefault((taken | masks[index], more), (*chosen, index))
            after.setdefault((taken, counts), chosen)  # this rank may be idle, or in no group that is left
        if len(after) > MOST:  # those with more ranks at work are kept
            is_whole = False
            best = sorted(after.items(), key=lambda item: -item[0][0].bit_count())[:MOST]
            after = dict(best)
        reached = after
    ways: dict[tuple[int, ...], tuple[int, ...]] = {}
    for (_, counts), chosen in reached.items():
        ways.setdefault(counts, chosen)
    matrix = np.array(list(ways), dtype=np.int64)
    kept = [
        row
        for row in range(len(matrix))
        if not ((matrix >= matrix[row]).all(axis=1) & (matrix != matrix[row]).any(axis=1)).any()
    ]
    rows = list(ways.items())
    return [rows[row] for row in kept], is_whole


def _nested(num_ranks: int, candidates: Sequence[Candidate]) -> list[list[int]] | None:
    """Of each candidate those right inside it, and last those that are in none; ``None`` where two cross."""
    inside: list[list[int]] = [[] for _ in range(len(candidates) + 1)]
    owner = [-1] * num_ranks
    for index in sorted(range(len(candidates)), key=lambda index: -candidates[index].size):
        ranks = candidates[index].ranks or ()
        if len({owner[rank] for rank in ranks}) > 1:
            return None
        inside[owner[ranks[0]]].append(index)
        for rank in ranks:
            owner[rank] = index
    return inside


def _of_nested(
    inside: Sequence[Sequence[int]], kind_of: Sequence[int], sizes: Sequence[int]
) -> tuple[list[tuple[tuple[int, ...], tuple[int, ...]]], bool]:
    """Counts of a tree of groups: each node is a group, or what its parts are divided into, one beside the other."""
    is_whole = True
    alone = np.eye(len(sizes), dtype=np.int64).tolist()

    def of_parts(parts: Sequence[int]) -> dict[tuple[int, ...], tuple[int, ...]]:
        nonlocal is_whole
        reached: dict[tuple[int, ...], tuple[int, ...]] = {(0,) * len(sizes): ()}
        for part in parts:
            ways = of_parts(inside[part])
            ways[tuple(alone[kind_of[part]])] = (part,)
            after: dict[tuple[int, ...], tuple[int, ...]] = {}
            for counts, chosen in reached.items():
                for more, others in ways.items():
                    after.setdefault(tuple(map(add, counts, more)), chosen + others)
            reached = _undominated(after, sizes)
            if len(reached) > MOST:  # some of few groups, some of many
                is_whole = False
                rows = sorted(reached.items(), key=lambda item: sum(item[0]))
                reached = dict(rows[number * len(rows) // MOST] for number in range(MOST))
        return reached

    return list(of_parts(inside[-1]).items()), is_whole


def _undominated(
    ways: dict[tuple[int, ...], tuple[int, ...]], sizes: Sequence[int]
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Those beside which no other has as many groups of every kind; what has most ranks at work always is."""
    matrix = np.array(list(ways), dtype=np.int64)
    ranks = matrix @ np.array(sizes, dtype=np.int64)
    kept: dict[tuple[int, ...], tuple[int, ...]] = {}
    for row, ranked, (counts, chosen) in zip(matrix, ranks == ranks.max(), ways.items(), strict=True):
        if ranked or not ((matrix >= row).all(axis=1) & (matrix != row).any(axis=1)).any():
            kept[counts] = chosen
    return kept
