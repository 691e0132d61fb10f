"""Cuts of a chain of layers into stages of any sizes, under each one's own speed and memory, by dynamic programming.

A layer takes ``layer_s[s]`` for one micro-batch, forward and backward, on the ranks of stage ``s``, which also does
``extra_s[s]`` that is no layer (the head). Before stage ``s`` starts, the first micro-batch passes the stages before
it, and after it ends the last one passes them backward; in between it works for all ``M`` micro-batches. So no order
whatever takes less than the largest over stages of

    M T(s) + sum over i < s of (T(i) + 2 message(i)),

which 1F1B reaches where stages are equal and messages are nothing. ``R(s, k)``, the least of that over cuts of the
last ``k`` layers into stages ``s`` and later, counted from the start of stage ``s``, is the least over ``n`` of
``max(M T, T + 2 message(s) + R(s + 1, k - n))``: the largest grows with its parts, so the rest is cut on its own.
How many layers fit is known before: what a rank holds is linear in its layers, at its place in the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mycel.brief import brief
from mycel.errors import UsageError

__all__ = [
    "Chain",
    "best_cut",
    "bounds_by_count",
    "cut_bound",
    "cuts_below",
    "least_flight",
    "one_f_one_b_bound",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """What a cut is made for.

    Attributes:
        num_layers: to be cut.
        batches: micro-batches of a step.
        layer_s: of one layer on each stage, forward and backward.
        extra_s: of what a stage does beside its layers.
        message_s: from each stage to the next, at least; one fewer than stages.
        most: layers that fit on each stage.
        least: layers that each stage has at least.
        chunks: stages a rank; ``layer_s`` and the others are of ranks, whose layers are spread over their chunks.
        first_layer_s, first_extra_s: the same of the first micro-batch's way through a stage, where that is not as
            long as it works for each; empty where it is.

    Raises:
        UsageError: lists of different lengths, or a number below 0.

    Examples:
        >>> head = Chain(num_layers=12, batches=8, layer_s=(1.0,) * 3, extra_s=(0, 0, 3.0), message_s=(0, 0),
        ...     most=(12,) * 3, least=(1,) * 3)
        >>> best_cut(head)
        (6, 5, 1)
    """

    num_layers: int
    batches: int
    layer_s: tuple[float, ...]
    extra_s: tuple[float, ...]
    message_s: tuple[float, ...]
    most: tuple[int, ...]
    least: tuple[int, ...]
    chunks: int = 1
    first_layer_s: tuple[float, ...] = ()
    first_extra_s: tuple[float, ...] = ()

    __repr__ = brief

    def __post_init__(self) -> None:
        stages = len(self.layer_s)
        if not stages or not stages == len(self.extra_s) == len(self.most) == len(self.least):
            raise UsageError(f"a chain needs a time, a most and a least for each stage; there are {stages} times")
        if len(self.message_s) != stages - 1:
            raise UsageError(f"{len(self.message_s)} messages between {stages} stages; one fewer than stages")
        if self.num_layers < 1 or self.batches < 1 or self.chunks < 1:
            raise UsageError("a chain needs at least one layer, one micro-batch and one chunk")
        for seconds in (*self.layer_s, *self.extra_s, *self.message_s):
            if not 0 <= seconds < float("inf"):
                raise UsageError(f"{seconds} s in a chain; times must be from 0")

    def work_s(self, stage: int, layers: int) -> float:
        """One micro-batch on a stage of so many layers."""
        return self.layer_s[stage] * layers + self.extra_s[stage]

    def passed_s(self, stage: int, layers: int) -> float:
        """From the start of a stage's first work to the next stage's, and back."""
        each = (self.first_layer_s or self.layer_s)[stage]
        extra = (self.first_extra_s or self.extra_s)[stage] if self.chunks == 1 else 0.0
        return each * (layers // self.chunks) + extra + 2.0 * self.message_s[stage]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """``R(s, k)`` and the layers of stage ``s`` that reach it."""

    least_s: NDArray[np.float64]
    layers: NDArray[np.int_]


def _table(chain: Chain) -> _Table:
    stages, total = len(chain.layer_s), chain.num_layers
    rest = np.full((stages + 1, total + 1), np.inf)
    rest[stages, 0] = 0.0
    taken = np.zeros((stages, total + 1), dtype=int)
    counts = np.arange(total + 1)
    left = counts[:, None] - counts[None, :]  # of k layers, after n of them
    for stage in reversed(range(stages)):
        work = chain.batches * (chain.layer_s[stage] * counts + chain.extra_s[stage])
        is_allowed = (counts >= chain.least[stage]) & (counts <= chain.most[stage])
        work = np.where(is_allowed, work, np.inf)
        if stage == stages - 1:
            rest[stage] = work
            taken[stage] = counts
            continue
        each = (chain.first_layer_s or chain.layer_s)[stage]
        passed = each * (counts // chain.chunks) + chain.passed_s(stage, 0)
        later = np.where(left >= 0, rest[stage + 1][np.clip(left, 0, total)], np.inf)
        whole = np.maximum(work[None, :], passed[None, :] + later)
        taken[stage] = np.argmin(whole, axis=1)
        rest[stage] = whole[counts, taken[stage]]
    return _Table(least_s=rest, layers=taken)


def best_cut(chain: Chain) -> tuple[int, ...] | None:
    """The cut with the least bound; ``None`` where no cut fits.

    Args:
        chain: what is cut.
    """
    return _best_of(chain, _table(chain))


def _best_of(chain: Chain, table: _Table) -> tuple[int, ...] | None:
    if not np.isfinite(table.least_s[0, chain.num_layers]):
        return None
    cut, left = [], chain.num_layers
    for stage in range(len(chain.layer_s)):
        cut.append(int(table.layers[stage, left]))
        left -= cut[-1]
    return tuple(cut)


def cut_bound(chain: Chain, cut: tuple[int, ...]) -> float:
    """Seconds that no order of a cut takes less than.

    Args:
        chain: what is cut.
        cut: layers of each stage.
    """
    before, most = 0.0, 0.0
    for stage, layers in enumerate(cut):
        most = max(most, before + chain.batches * chain.work_s(stage, layers))
        if stage < len(cut) - 1:
            before += chain.passed_s(stage, layers)
    return most


def one_f_one_b_bound(chain: Chain, cut: tuple[int, ...]) -> float:
    """Seconds that 1F1B does not take less than, where it holds a stage's micro-batches back.

    Stage ``s`` of ``p`` has ``p - s`` micro-batches under way at most. So one of every ``p - s`` passes the later
    stages, forward and back, after the one before has come back: this is where slow messages take time.

    Args:
        chain: what is cut; one chunk a rank.
        cut: layers of each stage.
    """
    messages = chain.batches * chain.chunks * max(chain.message_s, default=0.0)
    most = max(cut_bound(chain, cut), messages)
    if chain.chunks > 1:
        return most
    before = [0.0]
    for stage, layers in enumerate(cut[:-1]):
        before.append(before[-1] + chain.passed_s(stage, layers))
    around = 0.0
    for stage in reversed(range(len(cut))):
        around += chain.work_s(stage, cut[stage])
        if stage < len(cut) - 1:
            around += 2.0 * chain.message_s[stage]
        most = max(most, before[stage] + -(-chain.batches // (len(cut) - stage)) * around)
    return most


def bounds_by_count(chain: Chain, cut: tuple[int, ...], most: int) -> NDArray[np.float64]:
    """What ``one_f_one_b_bound`` gives for 1, 2, ... micro-batches.

    Args:
        chain: what is cut; one chunk a rank.
        cut: layers of each stage.
        most: micro-batches.
    """
    counts = np.arange(1, most + 1)
    least = counts * max(chain.message_s, default=0.0)
    before = [0.0]
    for stage, layers in enumerate(cut[:-1]):
        before.append(before[-1] + chain.passed_s(stage, layers))
    around = 0.0
    for stage in reversed(range(len(cut))):
        work = chain.work_s(stage, cut[stage])
        around += work + (2.0 * chain.message_s[stage] if stage < len(cut) - 1 else 0.0)
        rounds = -(-counts // (len(cut) - stage))
        least = np.maximum(least, before[stage] + np.maximum(counts * work, rounds * around))
    return least.astype(float)


def least_flight(chain: Chain) -> float:
    """The same for the first stage, over all cuts: every layer where it is fastest.

    Args:
        chain: what is cut.
    """
    if chain.chunks > 1:
        return 0.0
    around = chain.num_layers * min(chain.layer_s) + sum(chain.extra_s) + 2.0 * sum(chain.message_s)
    return -(-chain.batches // len(chain.layer_s)) * around


def cuts_below(chain: Chain, seconds: float) -> Iterator[tuple[float, tuple[int, ...]]]:
    """All cuts that fit and whose bound is below a time, each with its bound, those with the least first in part.

    The best comes first; every other one comes once, by stages, where the best of what follows allows it.

    Args:
        chain: what is cut.
        seconds: that bounds must be below.

    Examples:
        >>> even = Chain(num_layers=4, batches=2, layer_s=(1.0, 1.0), extra_s=(0, 0), message_s=(0,),
        ...     most=(4, 4), least=(1, 1))
        >>> list(cuts_below(even, 7.0))
        [(6.0, (2, 2)), (6.0, (3, 1))]
    """
    table = _table(chain)
    stages = len(chain.layer_s)
    first = _best_of(chain, table)
    if first is None or table.least_s[0, chain.num_layers] >= seconds:
        return
    yield cut_bound(chain, first), first

    def grow(stage: int, left: int, before: float, most: float, cut: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if stage == stages:
            if left == 0 and cut != first:
                yield cut
            return
        low, high = chain.least[stage], min(chain.most[stage], left)
        if stage == stages - 1:
            low = max(low, left)
        for layers in range(low, high + 1):
            here = max(most, before + chain.batches * chain.work_s(stage, layers))
            if here >= seconds:
                break
            passed = before
            if stage < stages - 1:
                passed += chain.passed_s(stage, layers)
                if passed + table.least_s[stage + 1, left - layers] >= seconds:
                    continue
            yield from grow(stage + 1, left - layers, passed, here, (*cut, layers))

    for cut in grow(0, chain.num_layers, 0.0, 0.0, ()):
        yield cut_bound(chain, cut), cut
