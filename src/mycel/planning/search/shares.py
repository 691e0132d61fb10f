"""Unequal shares of a batch: how many micro-batches each replica of a placement gets, where replicas differ in speed.

All replicas have one cut, and each its own speeds. ``B(r, m)``, the bound of ``cuts`` for replica ``r`` with ``m``
micro-batches, grows with ``m``, and a step is bounded by the largest. So the least that any shares reach is found by
handing out micro-batches to whoever is done soonest with one more. All shares below a time are those in which nobody
has more than are done in it.

Which cuts may win is known before: if replica ``r`` works ``w(r)`` for a micro-batch on a stage, ``M`` of them take
all replicas together no less than ``M / sum of 1 / w(r)``, which is at least linear in the stage's layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mycel.planning.cuts import Chain, bounds_by_count
from mycel.planning.search.stages import Stages, stages_of

__all__ = ["best_shares", "least_of_shares", "shared_chain", "shares_below", "with_shares"]


def shared_chain(stages: Stages) -> Chain:
    """A chain whose bounds are below those of all shares.

    Args:
        stages: of a job with shares, by kinds of replicas.
    """
    whole, chains = stages.chain(), [one.chain() for one in stages.replicas]
    counts = Counter(stages.kind_of)

    def together(columns: list[tuple[float, ...]]) -> tuple[float, ...]:
        rates = [
            sum(counts[k] / seconds if seconds else np.inf for k, seconds in enumerate(row))
            for row in zip(*columns, strict=True)
        ]
        return tuple(float(1.0 / rate) for rate in rates)

    return replace(
        whole,
        batches=sum(stages.job.shares),
        layer_s=together([chain.layer_s for chain in chains]),
        extra_s=together([chain.extra_s for chain in chains]),
        first_layer_s=tuple(map(min, zip(*(chain.layer_s for chain in chains), strict=True))),
        first_extra_s=tuple(map(min, zip(*(chain.extra_s for chain in chains), strict=True))),
    )


def least_of_shares(stages: Stages, cut: tuple[int, ...]) -> float:
    """Seconds that a cut takes at least, whatever the shares.

    Args:
        stages: of a job with shares.
        cut: layers of each stage.
    """
    seconds = _by_count(stages, cut)
    total, counts = sum(stages.job.shares), Counter(stages.kind_of)
    every = np.concatenate([np.repeat(seconds[kind], number) for kind, number in counts.items()])
    one_each = max(float(seconds[kind][0]) for kind in counts)
    return max(one_each, float(np.partition(every, total - 1)[total - 1]))


def best_shares(stages: Stages, cut: tuple[int, ...]) -> tuple[int, ...]:
    """The shares that reach it.

    Args:
        stages: of a job with shares.
        cut: layers of each stage.
    """
    seconds, total = _by_count(stages, cut), sum(stages.job.shares)
    least = least_of_shares(stages, cut)
    most = [int(np.searchsorted(seconds[kind], least, side="right")) for kind in stages.kind_of]
    # Several may be done at the very same time: those too many are taken from whoever is done last.
    for _ in range(sum(most) - total):
        last = max(
            (r for r in range(len(most)) if most[r] > 1), key=lambda r: float(seconds[stages.kind_of[r]][most[r] - 1])
        )
        most[last] -= 1
    return tuple(most)


def shares_below(stages: Stages, cut: tuple[int, ...], seconds: float) -> Iterator[tuple[int, ...]]:
    """All unequal shares whose bound is below a time; replicas of one kind are not told apart.

    Args:
        stages: of a job with shares.
        cut: layers of each stage.
        seconds: that bounds must be below.
    """
    by_count, total = _by_count(stages, cut), sum(stages.job.shares)
    kinds = stages.kind_of
    most = [int(np.searchsorted(by_count[kind], seconds, side="left")) for kind in kinds]
    if min(most) < 1:
        return
    caps = dict(zip(kinds, most, strict=True))

    def grow(left: int, shares: tuple[int, ...], caps: dict[int, int]) -> Iterator[tuple[int, ...]]:
        """Those that begin so; of a kind nobody has more than the one before, which ``caps`` says."""
        replica = len(shares)
        if replica == len(kinds):
            if len(set(shares)) > 1:
                yield shares
            return
        kind, others = kinds[replica], kinds[replica + 1 :]
        for share in range(min(caps[kind], left - len(others)), 0, -1):
            below = caps | {kind: share}
            if left - share > sum(below[other] for other in others):
                return  # whoever comes later cannot do the rest
            yield from grow(left - share, (*shares, share), below)

    yield from grow(total, (), caps)


def with_shares(stages: Stages, shares: tuple[int, ...], memory_bytes: tuple[int, ...]) -> Stages:
    """The same placement with other shares: also what is held and exchanged follows from them.

    Args:
        stages: of a job with shares.
        shares: micro-batches of each replica.
        memory_bytes: that a job may use on each rank of the cluster.
    """
    job = replace(stages.job, shares=shares)
    return stages_of(stages.cluster, stages.shape, job, stages.ranks, memory_bytes)


def _by_count(stages: Stages, cut: tuple[int, ...]) -> list[NDArray[np.float64]]:
    """Of each kind of replica, seconds at least for 1, 2, ... micro-batches."""
    most = sum(stages.job.shares) - len(stages.kind_of) + 1
    return [bounds_by_count(one.chain(), cut, most) for one in stages.replicas]
