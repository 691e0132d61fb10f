"""Sequences of one micro-batch as arrays, and answers for it: what heuristics work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mycel.planning.grouping.configurations import Configurations, configurations
from mycel.planning.grouping.instance import SequenceInstance
from mycel.planning.grouping.plan import PlannedGroup

__all__ = ["Batch", "Division"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Sequences of a batch, distributed.

    Attributes:
        time_us: of the slowest group, with what every micro-batch takes.
        row: which of the configurations; -1 where it is given by its counts alone.
        counts: groups of each kind, of shape (kinds,).
        placed: group of each sequence of the batch, groups of the first kind first.
        source: what found it.
    """

    time_us: float
    row: int
    counts: Ints
    placed: Ints
    source: str


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch.

    Attributes:
        instance: of which.
        which: indices of its sequences, longest first.
        tokens: of each, int64.
        work: microseconds of each on each kind, float64 of shape (sequences, kinds).
        ranked: kinds of each by the rank-time they take, least first.
        sizes, rooms: ranks and tokens of each kind.
        divisions: of the ranks.
    """

    instance: SequenceInstance
    which: tuple[int, ...]
    tokens: Ints
    work: Floats
    ranked: Ints
    sizes: Ints
    rooms: Ints
    divisions: Configurations

    @classmethod
    def of(cls, instance: SequenceInstance, sequences: Sequence[int] | None = None) -> Batch:
        """The batch of some sequences.

        Args:
            instance: of which.
            sequences: their indices; all if not given.
        """
        lengths = np.array(instance.lengths, dtype=np.int64)
        chosen = np.arange(len(lengths)) if sequences is None else np.array(sequences, dtype=np.int64)
        chosen = chosen[np.argsort(-lengths[chosen], kind="stable")]
        tokens = lengths[chosen]
        sizes = np.array([size for size, _ in instance.kinds], dtype=np.int64)
        comm = np.array([cost for _, cost in instance.kinds])
        alone = instance.us_per_token2 * tokens.astype(float) ** 2 + instance.us_per_token * tokens
        work = alone[:, None] / sizes + comm * tokens[:, None]
        return cls(
            instance=instance,
            which=tuple(chosen.tolist()),
            tokens=tokens,
            work=work,
            ranked=np.argsort(work * sizes, axis=1, kind="stable"),
            sizes=sizes,
            rooms=sizes * instance.capacity_tokens,
            divisions=configurations(instance),
        )

    def fits(self) -> Ints:
        """Whether a sequence alone fits a kind, of shape (sequences, kinds)."""
        return np.asarray(self.tokens[:, None] <= self.rooms)

    def kind_of(self, counts: Ints) -> Ints:
        """Kind of each group of a division.

        Args:
            counts: groups of each kind.
        """
        return np.repeat(np.arange(len(self.sizes)), counts)

    def groups(self, division: Division, micro_batch: int) -> list[PlannedGroup]:
        """Groups with ranks and sequences.

        Args:
            division: of this batch.
            micro_batch: in which they work.
        """
        kinds = self.kind_of(division.counts)
        slots: list[tuple[int, list[int]]] = [(int(kind), []) for kind in kinds]
        for sequence, slot in zip(self.which, division.placed.tolist(), strict=True):
            slots[slot][1].append(sequence)
        return self.divisions.place(self.instance, division.row, slots, micro_batch)
