"""Searched orders for the best few of a search: kept where they are simulated to be faster and fit.

A search of degrees and cuts plans with 1F1B, or interleaved. Where messages are slow beside stages, where stages
differ, or where micro-batches are few, another order of the same stages is shorter, if memory has room for what it
holds. Stages, messages and room of a plan make a placement, for which the search for orders finds one; the simulator
judges both. The search is bounded by work, not by time: the same plan comes out on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from mycel.errors import SynthesisError, UsageError
from mycel.pipeline.check import check
from mycel.pipeline.order import Order
from mycel.pipeline.placement import Block, Dependency, Placement
from mycel.pipeline.search.batch import find_batch
from mycel.pipeline.search.solving import Clock
from mycel.pipeline.stages import order_of
from mycel.planning.cluster import Cluster
from mycel.planning.models.json_format import ModelDescription
from mycel.planning.models.shape import ModelShape
from mycel.planning.plan.build import plan_of
from mycel.planning.plan.held import held_total
from mycel.planning.plan.plan import Plan
from mycel.planning.search import Found, Limits
from mycel.planning.search.score import binding_of
from mycel.planning.search.stages import Stages, stages_of

__all__ = ["WORK", "plan_with_orders", "with_searched_order"]

#: Work for one order, in the solver's seconds, which count its steps; some times as many seconds of a processor.
WORK = 4.0
#: Units of time that the longest block has, and actions of an order up to which one is searched.
_UNITS, _MOST_ACTIONS = 48, 1024
#: Shares of a step below which an order is not worth another name.
_LEAST_GAIN = 0.001


def plan_with_orders(
    found: Found,
    model: ModelDescription | ModelShape,
    cluster: Cluster,
    *,
    count: int,
    limits: tuple[str, ...] = (),
    work: float = WORK,
    told: Callable[[str], None] | None = None,
) -> Plan:
    """The fastest of a search's best few when each has an order of its own.

    Args:
        found: by a search.
        model: that it was searched for.
        cluster: that it was searched on.
        count: of the candidates, how many; ways without a pipeline keep what they have.
        limits: that the search kept, as people wrote them.
        work: for each order.
        told: called with what is being searched.

    Raises:
        UsageError: no candidates, or no solver (the extra ``solver``).
    """
    if count < 1:
        raise UsageError(f"orders for {count} of the candidates; it must be one at least")
    plans = []
    for number, candidate in enumerate(found.candidates[:count], 1):
        if told is not None:
            told(f"an order for {number} of {min(count, len(found.candidates))}")
        plan = plan_of(found, candidate, model, cluster, limits=limits)
        plans.append(with_searched_order(plan, cluster, work=work))
    return min(plans, key=lambda plan: plan.predicted.seconds)


def with_searched_order(plan: Plan, cluster: Cluster, *, work: float = WORK) -> Plan:
    """A plan with an order that was searched for it, where that is faster; else the plan itself.

    Args:
        plan: a right one.
        cluster: that it is for.
        work: for the search, in the solver's seconds.

    Raises:
        UsageError: the plan is for another cluster, or there is no solver (the extra ``solver``).
    """
    actions = 2 * plan.num_stages * plan.order.num_micro_batches
    if plan.order.ranks < 2 or actions > _MOST_ACTIONS:
        return plan
    before = plan.simulate(cluster)
    stages = stages_of(cluster, plan.model.shape, plan.job, plan.ranks, cluster.memory_bytes)
    placement = _placement(plan, stages, _room(plan, cluster))
    try:
        timed = find_batch(placement, plan.order.num_micro_batches, clock=Clock(work, is_counted=True)).timed
    except SynthesisError:
        return plan  # none was found with so much work
    changed = _with(plan, order_of(timed, name="searched"), stages, before.makespan, cluster)
    if changed.predicted.seconds > plan.predicted.seconds * (1.0 - _LEAST_GAIN):
        return plan
    changed.validate(cluster=cluster)
    return changed


def _placement(plan: Plan, stages: Stages, room: tuple[int | None, ...]) -> Placement:
    """A plan's stages as blocks, its messages as delays, its memory in micro-batches of one stage."""
    seconds, count = plan.seconds_of(_slowest(plan)), plan.num_stages
    unit_s = max(max(pair) for pair in seconds) / _UNITS
    places = plan.stage_places

    def units(lasts: float) -> int:
        return max(1, round(lasts / unit_s))

    blocks = [
        Block(name=f"F{stage}", devices=(places[stage],), time=units(seconds[stage][0]), memory=1)
        for stage in range(count)
    ]
    blocks += [
        Block(name=f"B{stage}", devices=(places[stage],), time=units(seconds[stage][1]), memory=-1)
        for stage in reversed(range(count))
    ]
    between = [_message_s(places[stage], places[stage + 1], stages) for stage in range(count - 1)]
    delays = [round(lasts / unit_s) for lasts in (*between, 0.0, *between[::-1])]
    waits = tuple(Dependency(before=at, after=at + 1, delay=delay) for at, delay in enumerate(delays))
    return Placement(
        name=plan.model.shape.name, num_devices=plan.order.ranks, blocks=tuple(blocks), dependencies=waits, cap=room
    )


def _message_s(sender: int, receiver: int, stages: Stages) -> float:
    if sender == receiver:
        return 0.0
    is_near = abs(sender - receiver) == 1
    return stages.message_s[min(sender, receiver)] if is_near else max(stages.message_s)


def _room(plan: Plan, cluster: Cluster) -> tuple[int | None, ...]:
    """Stages' micro-batches that each place has room for."""
    allowed = Limits.from_text(*plan.limits).memory(cluster)
    chunks, places = plan.job.chunks, range(plan.order.ranks)
    none, one = (held_total(plan, [Fraction(flight)] * len(places)) for flight in (0, 1))
    found: list[int | None] = []
    for place in places:
        each = (one[place] - none[place]) / chunks
        least = min(min(allowed[rank], plan.cluster.memory_bytes[rank]) for rank in plan.group(place))
        found.append(max(chunks, math.floor((least - none[place]) / each)) if each > 0 else None)
    return tuple(found)


def _with(plan: Plan, order: Order, stages: Stages, before_s: float, cluster: Cluster) -> Plan:
    """The plan with another order, and what follows from it: time by the simulator, and memory."""
    changed = replace(plan, order=order)
    held = held_total(changed, check(order, executor="mycel").peaks)
    memory = list(plan.memory)
    for place in range(order.ranks):
        for rank in plan.group(place):
            memory[rank] = round(held[place])
    layers = set(plan.model.layers)
    cut = [0] * order.ranks
    for stage, modules in enumerate(plan.cut):
        cut[plan.stage_places[stage]] += sum(name in layers for name in modules)
    parts = dict(plan.predicted.parts or {})
    load = sum(parts.get(name, 0.0) for name in ("compute", "head", "tensor"))
    pipeline = load + parts.get("bubble", 0.0) + parts.get("boundary", 0.0)
    # What the simulator says in proportion: very long pipelines are priced by their pace.
    pipeline *= changed.simulate(cluster).makespan / before_s
    free = min(changed.simulate().makespan, pipeline)
    gradients, update, waiting = stages.ending(tuple(cut), pipeline)
    parts |= {
        "bubble": free - load,
        "boundary": pipeline - free,
        "gradients": gradients,
        "optimizer": update,
        "waiting": waiting,
    }
    works = [0.0] * order.ranks
    for stage, seconds in enumerate(plan.seconds_of(_slowest(plan))):
        works[plan.stage_places[stage]] += sum(seconds)
    return replace(
        changed,
        predicted=replace(plan.predicted, seconds=sum(parts.values()), parts=parts),
        memory=tuple(memory),
        binding=binding_of(parts, max(range(order.ranks), key=works.__getitem__), order.ranks),
    )


def _slowest(plan: Plan) -> int:
    """The replica that has most to compute."""
    work = [sum(map(sum, plan.seconds_of(r))) * count for r, count in enumerate(plan.job.shares)]
    return max(range(len(work)), key=work.__getitem__) if work else 0
