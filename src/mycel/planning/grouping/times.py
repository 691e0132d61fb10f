"""What groups of a plan take."""

from __future__ import annotations

from collections.abc import Sequence

from mycel.planning.grouping.instance import SequenceInstance
from mycel.planning.grouping.plan import PlannedGroup

__all__ = ["micro_batch_times", "total_us"]


def micro_batch_times(instance: SequenceInstance, groups: Sequence[PlannedGroup]) -> dict[int, float]:
    """Microseconds of each micro-batch.

    Args:
        instance: with its costs.
        groups: of the step.
    """
    costs = {(c.size if c.ranks is None else frozenset(c.ranks)): c for c in instance.candidates}
    times: dict[int, float] = {}
    for group in groups:
        candidate = costs.get(frozenset(group.ranks)) or costs[len(group.ranks)]
        time = instance.us_per_step + sum(instance.cost(k, candidate) for k in group.sequences)
        times[group.micro_batch] = max(times.get(group.micro_batch, 0.0), time)
    return times


def total_us(instance: SequenceInstance, groups: Sequence[PlannedGroup]) -> float:
    """Microseconds of the step.

    Args:
        instance: with its costs.
        groups: of the step.
    """
    return sum(micro_batch_times(instance, groups).values())
