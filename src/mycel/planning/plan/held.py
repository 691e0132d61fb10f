"""What each rank holds by a plan, worked out again from the model's sizes, the cut and the order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from fractions import Fraction

import numpy as np

from mycel.pipeline.check import check
from mycel.planning.memory import MemoryParts, activation_bytes, again_bytes, memory_parts
from mycel.planning.memory.footprint import RESERVE_BYTES, RESERVE_SHARE
from mycel.planning.plan.record import PlanRecord
from mycel.planning.step.points import Numbers, Points

__all__ = ["held_parts", "held_total"]


def held_parts(plan: PlanRecord, peaks: Sequence[Fraction] | None = None) -> MemoryParts:
    """Bytes of a rank at each place of the pipeline, by part.

    Activations are counted by the order itself: as many micro-batches as it really has in flight.

    Args:
        plan: whose order is right.
        peaks: micro-batches that each place has in flight at most, where they are known.
    """
    count, chunks = plan.order.ranks, plan.job.chunks
    layers = set(plan.model.layers)
    held = np.zeros(count)
    for stage, modules in enumerate(plan.cut):
        held[plan.order.rank_of(stage)] += sum(name in layers for name in modules)
    one = Points.of([(plan.model.shape, plan.job)]).take(np.zeros(count, dtype=int))
    points = replace(one, held=held)
    place = np.arange(count, dtype=float)
    parts = memory_parts(points, place)
    # Where the last stage is not at the last place (in a V), head and logits are where it is.
    last = plan.order.rank_of(plan.num_stages - 1)
    if last != count - 1:
        parts = _with_head_at(points, parts, last)
    kept, _ = activation_bytes(points)
    found = check(plan.order, executor="mycel").peaks if peaks is None else peaks
    flight = np.array([float(peak) for peak in found]) * chunks
    return replace(parts, activations=held / chunks * kept * flight + again_bytes(points))


def held_total(plan: PlanRecord, peaks: Sequence[Fraction] | None = None) -> tuple[float, ...]:
    """Bytes of a rank at each place of the pipeline, with what allocator and driver hold beside.

    Args:
        plan: whose order is right.
        peaks: micro-batches that each place has in flight at most, where they are known.
    """
    total = held_parts(plan, peaks).total
    return tuple(float(size) for size in total + RESERVE_SHARE * total + RESERVE_BYTES)


def _with_head_at(points: Points, parts: MemoryParts, place: int) -> MemoryParts:
    """The same where head and logits stand at another place than the last."""
    middle = np.full(len(points), 0.5)  # neither first nor last
    at_end = memory_parts(points, points.pp - 1.0)
    without = memory_parts(points, middle)
    moved: dict[str, Numbers] = {}
    for name in (f.name for f in fields(MemoryParts) if f.name != "activations"):
        column = getattr(parts, name).copy()
        column[-1] = getattr(without, name)[-1]
        column[place] += (getattr(at_end, name) - getattr(without, name))[place]
        moved[name] = column
    return replace(parts, **moved)
