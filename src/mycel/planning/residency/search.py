"""The best plan of an iteration in the time there is: known designs, random changes, exact search; with a bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from mycel.collectives.cp_sat import cp_sat
from mycel.errors import SynthesisError, UsageError
from mycel.pipeline.search.solving import Clock
from mycel.planning.residency.bounds import iteration_bound
from mycel.planning.residency.check import check_plan
from mycel.planning.residency.exact import Exact
from mycel.planning.residency.instance import MemoryInstance
from mycel.planning.residency.kernels import anneal
from mycel.planning.residency.listed import as_columns, families, known_plans, listed_plan
from mycel.planning.residency.plan import POLICIES, MemoryPlan

__all__ = ["Progress", "fast_plan", "plan_memory"]

#: Blocks beyond which the exact search gets what the random one leaves, and not the other way round; and beyond which
#: it gets nothing, as it finds nothing in minutes.
_FEW_BLOCKS, _MANY_BLOCKS = 24, 64
#: Plays of a schedule in one descent; blocks times so many, between these.
_LEAST_TRIES, _MOST_TRIES = 2_000, 40_000
#: Part of the time above the ideal by which a change may be worse at the beginning of descents, in turn.
_WARMTHS = (0.3, 0.1, 0.03, 0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a search is.

    Attributes:
        doing: what it does now.
        iteration_us: of the best plan so far, in microseconds.
        lower_bound_us: that no plan is below.
    """

    doing: str
    iteration_us: int
    lower_bound_us: int

    def __str__(self) -> str:
        return f"{self.doing}: best {self.iteration_us} us, bound {self.lower_bound_us} us"


def fast_plan(instance: MemoryInstance) -> MemoryPlan:
    """A plan at once: the best of known designs and of mixtures in simple patterns.

    Args:
        instance: the blocks.

    Raises:
        SynthesisError: none of them fits.

    Examples:
        >>> from mycel.planning.residency import Block
        >>> four = MemoryInstance(
        ...     blocks=(Block(forward_us=10, backward_us=20, saved=100, input=10),) * 4, capacity=250,
        ...     out_bytes_per_us=20.0, in_bytes_per_us=20.0,
        ... )
        >>> plan = fast_plan(four)
        >>> plan.iteration_us, plan.proved  # everything moves behind the computation
        (120, True)
    """
    plans = list(known_plans(instance).values())
    plans += [
        plan
        for policy in families(instance)
        if (plan := listed_plan(instance, policy, source="a pattern")) is not None
    ]
    if not plans:
        raise SynthesisError(f"no plan of {len(instance.blocks)} blocks fits into {instance.capacity}")
    best = min(plans, key=lambda plan: plan.iteration_us)
    return replace(best, lower_bound_us=min(iteration_bound(instance), best.iteration_us))


def plan_memory(
    instance: MemoryInstance, *, limit_s: float = 60.0, told: Callable[[Progress], None] | None = None
) -> MemoryPlan:
    """The best plan that is found in the time, and what none is below; also when Ctrl-C ends it.

    Args:
        instance: the blocks.
        limit_s: seconds. 0 takes the best of known designs and simple patterns, without OR-tools.
        told: is called with progress.

    Raises:
        SynthesisError: no plan fits.
        UsageError: a limit below 0, or no OR-tools for a limit above 0.
    """
    if not limit_s >= 0:
        raise UsageError(f"a limit of {limit_s} seconds: at least 0")
    if limit_s == 0:
        return fast_plan(instance)
    cp_sat("planning memory with a time limit above 0")
    clock = Clock(limit_s)
    plan = fast_plan(instance)
    tell = told or (lambda progress: None)
    try:
        plan = _descend(instance, plan, clock, limit_s, tell)
        if not plan.proved and clock.left_s > 0 and len(instance.blocks) <= _MANY_BLOCKS:
            tell(Progress(doing="exactly", iteration_us=plan.iteration_us, lower_bound_us=plan.lower_bound_us))
            model = Exact(instance=instance, known=plan, bound_us=plan.lower_bound_us)
            best, bound = model.solve(
                clock,
                lambda time, bound: tell(Progress(doing="exactly", iteration_us=time, lower_bound_us=bound)),
            )
            plan = replace(best, lower_bound_us=min(bound, best.iteration_us))
    except KeyboardInterrupt:
        clock.stop()
    check_plan(instance, plan)
    return replace(plan, interrupted=clock.interrupted)


def _descend(
    instance: MemoryInstance, plan: MemoryPlan, clock: Clock, limit_s: float, tell: Callable[[Progress], None]
) -> MemoryPlan:
    """Random changes from the best so far and from other patterns, in turn."""
    count = len(instance.blocks)
    columns = as_columns(instance)
    few = count <= _FEW_BLOCKS
    share = 0.5 if count <= _MANY_BLOCKS else 1.0
    end = clock.within(min(3.0, 0.1 * limit_s) if few else share * limit_s)
    tries = min(max(_LEAST_TRIES, 20 * count), _MOST_TRIES)
    others = sorted(
        (found for policy in families(instance) if (found := listed_plan(instance, policy)) is not None),
        key=lambda found: found.iteration_us,
    )[:8]
    best_order = np.arange(count)
    seed = 0
    most_seeds = 12 if few else 1 << 30
    while end.left_s > 0 and seed < most_seeds and not plan.proved:
        start = plan if seed % 3 != 2 or not others else others[(seed // 3) % len(others)]
        policy = np.array([POLICIES.index(each) for each in start.policy], dtype=np.int64)
        order = best_order.copy() if start is plan else np.arange(count)
        warm = _WARMTHS[seed % len(_WARMTHS)]
        try:
            anneal(columns, instance.capacity, policy, order, seed, tries, warm, plan.lower_bound_us)
        except KeyboardInterrupt:  # what was found before is kept
            clock.stop()
            break
        names = [POLICIES[number] for number in policy.tolist()]
        found = listed_plan(instance, names, urgency=order.tolist(), source="descent")
        if found is not None and found.iteration_us < plan.iteration_us:
            plan = replace(found, lower_bound_us=min(plan.lower_bound_us, found.iteration_us))
            best_order = order
            tell(Progress(doing="descent", iteration_us=plan.iteration_us, lower_bound_us=plan.lower_bound_us))
        seed += 1
    return plan
