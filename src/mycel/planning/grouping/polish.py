"""Making a plan better at random, as long as there is time: other divisions, other orders, other micro-batches."""

from __future__ import annotations

import numpy as np

from mycel.pipeline.search.solving import Clock
from mycel.planning.grouping.batch import Batch, Division, Ints
from mycel.planning.grouping.bounds import division_bounds
from mycel.planning.grouping.greedy import dual_greedy
from mycel.planning.grouping.instance import SequenceInstance
from mycel.planning.grouping.kernels import anneal, fill, shake

__all__ = ["exchange", "polish"]

#: Divisions that are tried in turn, and how often at a time.
_DIVISIONS, _TRIES = 40, 8
#: Times, in parts of the best, in which annealing looks for a distribution to begin with; its steps a sequence.
_STARTS, _STEPS = (1.0, 1.02, 1.05, 1.1, 1.3), 1500


def polish(batch: Batch, division: Division, clock: Clock, *, bound_us: float, seeds: range) -> Division:
    """A division that is at least as good.

    Args:
        batch: the sequences of a micro-batch.
        division: the best so far.
        clock: ends it.
        bound_us: that ends it when it is met.
        seeds: of the random numbers of each round over the divisions.
    """
    beta = batch.instance.us_per_step
    least = division_bounds(batch)
    order = np.argsort(least, kind="stable")
    rows = [division.row, *order[:_DIVISIONS].tolist()]
    for seed in seeds:
        for row in rows:
            if clock.left_s <= 0 or division.time_us <= bound_us * (1 + 1e-7):
                return division
            if least[row] + beta >= division.time_us * (1 - 1e-7):
                continue
            counts = batch.divisions.counts[row]
            placed = division.placed.copy()
            most = division.time_us - beta
            time = shake(batch.work, batch.tokens, batch.sizes, batch.rooms, counts, seed, _TRIES, most, placed)
            if time >= most * (1 - 1e-9):
                time = _annealed(batch, counts, seed, most, placed)
            if time < most * (1 - 1e-9):
                division = Division(
                    time_us=time + beta, row=row, counts=counts, placed=placed, source="dual greedy, polished"
                )
    return division


def _annealed(batch: Batch, counts: Ints, seed: int, most: float, placed: Ints) -> float:
    """What the slowest group of a division works after annealing, ``most`` where that is no better."""
    kinds = batch.kind_of(counts)
    start = np.zeros(len(batch.which), dtype=np.int64)
    for longer in _STARTS:
        if fill(batch.work, batch.tokens, batch.ranked, batch.rooms, counts, most * longer, start, kinds) >= 0:
            steps = _STEPS * len(batch.which)
            time = anneal(batch.work, batch.tokens, batch.rooms, kinds, seed, steps, most * (1 - 1e-6), start)
            if time < most:
                placed[:] = start
                return time
            break
    return most


def exchange(
    instance: SequenceInstance,
    parts: list[list[int]],
    divisions: list[Division],
    clock: Clock,
    *,
    tries: int,
    seed: int,
) -> tuple[list[list[int]], list[Division]]:
    """Micro-batches between which sequences were moved or exchanged where that made the two shorter together.

    Args:
        instance: of which.
        parts: sequences of each micro-batch.
        divisions: of each.
        clock: ends it.
        tries: at most so many.
        seed: of the random numbers.
    """
    chance = np.random.default_rng(seed)
    for _ in range(tries):
        if clock.left_s <= 0:
            break
        a, b = chance.choice(len(parts), 2, replace=False).tolist()
        one, other = list(parts[a]), list(parts[b])
        moved = one.pop(int(chance.integers(len(one))))
        if chance.random() < 0.5:
            one.append(other.pop(int(chance.integers(len(other)))))
        other.append(moved)
        batches = [Batch.of(instance, part) for part in (one, other) if part]
        found = [dual_greedy(batch, patience=400_000) for batch in batches]
        if any(each is None for each in found):
            continue
        before = divisions[a].time_us + divisions[b].time_us
        if sum(each.time_us for each in found if each is not None) < before * (1 - 1e-9):
            kept = [(part, each) for part, each in zip((p for p in (one, other) if p), found, strict=True)]
            rest = [(parts[i], divisions[i]) for i in range(len(parts)) if i not in (a, b)]
            now = [*rest, *((part, each) for part, each in kept if each is not None)]
            parts, divisions = [part for part, _ in now], [each for _, each in now]
            if len(parts) < 2:
                break
    return parts, divisions
