"""Whether a plan is right: examined without looking at how it was found.

A plan that passes can be run: every rank is there once, the mesh divides the model and the batch, stages hold all
modules once and in order, the order of actions is proved, what each rank holds fits, and the limits are kept. What a
plan says of memory is worked out again from the model's sizes, not believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from mycel.errors import UsageError
from mycel.names import nearest
from mycel.pipeline.check import Report, check
from mycel.planning.models.json_format import LAYOUTS, ModelDescription
from mycel.planning.plan.held import held_parts, held_total
from mycel.planning.plan.modules import digest_of_model, module_names, pattern_names
from mycel.planning.plan.record import PlannedModel, PlanRecord
from mycel.planning.search.limits import Limits

__all__ = ["check_form", "check_limits", "check_memory", "check_model"]

#: Bytes that a plan says and that are worked out again may differ by this share: orders are counted action by action
#: here, and by formula in a search.
_TOLERANCE = 0.02


def check_form(plan: PlanRecord) -> Report:
    """Everything but memory and limits: mesh, ranks, stages, layouts, order, predictions.

    Args:
        plan: to be examined.

    Returns:
        What is known of its order.

    Raises:
        UsageError: something is wrong; the message says what, where, and the nearest way out.
        VerificationError: the order of actions is wrong.
    """
    shape = plan.model.shape
    found = digest_of_model(shape, plan.model.modules)
    if found != plan.model.digest:
        raise UsageError(
            f"the plan's model {shape.name!r} has digest {found}, and the plan was made for {plan.model.digest}: its "
            "sizes or module names were changed; search again"
        )
    plan.job.check(shape)
    tp, heads = plan.job.mesh.tp, shape.num_kv_heads
    if heads % tp and tp % heads:
        raise UsageError(
            f"tp={tp} neither divides the {heads} heads of keys and values of {shape.name} nor is a multiple of them"
        )
    _check_ranks(plan)
    _check_cut(plan)
    _check_stages(plan)
    _check_layouts(plan)
    report = check(plan.order, executor="torch" if plan.job.executor == "torch" else "mycel")
    for count in sorted(set(plan.job.shares) - {plan.job.num_micro_batches}):
        check(plan.order.of_first(count), executor="mycel")
    _check_times(plan)
    return report


def check_memory(plan: PlanRecord, report: Report) -> None:
    """That what each rank holds is what the plan says, and fits.

    Args:
        plan: whose form is right.
        report: of its order.

    Raises:
        UsageError: a rank holds more than it has, or another amount than the plan says.
    """
    shape, cluster = plan.model.shape, plan.cluster
    used = set(plan.ranks)
    for rank, held in enumerate(plan.memory):
        if held and rank not in used:
            raise UsageError(
                f"memory: rank {rank} ({cluster.rank_names[rank]}) is said to hold {_gib(held)}, and it has no place"
            )
    parts = held_parts(plan, report.peaks)
    for place, needed in enumerate(held_total(plan, report.peaks)):
        for rank in plan.group(place):
            name = f"rank {rank} ({cluster.rank_names[rank]})"
            if needed > cluster.memory_bytes[rank] * (1 + 1e-9):
                largest = max((f.name for f in fields(parts)), key=lambda what: getattr(parts, what)[place])
                raise UsageError(
                    f"{name} at place {place} of the pipeline needs {_gib(needed)} for {shape.name}, most of it "
                    f"{largest}, and has {_gib(cluster.memory_bytes[rank])}: "
                    f"{_gib(needed - cluster.memory_bytes[rank])} too much"
                )
            if abs(plan.memory[rank] - needed) > _TOLERANCE * needed:
                raise UsageError(
                    f"memory: {name} is said to hold {_gib(plan.memory[rank])}, and its stages need {_gib(needed)}: "
                    "the plan was changed after it was searched; search again"
                )


def check_limits(plan: PlanRecord) -> None:
    """That a plan keeps the limits it says it keeps.

    Args:
        plan: whose form is right.

    Raises:
        UsageError: a limit that cannot be read, or is broken; the message has where.
    """
    limits = Limits.from_text(*plan.limits)
    broken = limits.broken_by(plan.job)
    if broken is not None:
        raise UsageError(f"the plan does not keep its limit {broken!r}: search again")
    for limit in limits.of("memory"):
        for rank, held in enumerate(plan.memory):
            if not limit.allows(held):
                raise UsageError(f"rank {rank} holds {_gib(held)}, against the plan's limit {limit.text!r}")
    for limit in limits.of("in node"):
        for group in _groups(plan, str(limit.values[0])):
            nodes = {plan.cluster.node_of(rank) for rank in group}
            if len(nodes) > 1:
                raise UsageError(f"ranks {list(group)} are on {len(nodes)} nodes, against the limit {limit.text!r}")
    for limit in limits.of("stage"):
        number, name = int(limit.values[0]), str(limit.values[1])
        if not -plan.num_stages <= number < plan.num_stages:
            raise UsageError(f"the limit {limit.text!r} names a stage, and the plan has {plan.num_stages}")
        for rank in plan.stage_ranks[number]:
            if name not in (plan.cluster.node_of(rank), plan.cluster.rank_names[rank]):
                raise UsageError(
                    f"stage {number} is on rank {rank} ({plan.cluster.rank_names[rank]}), against the limit "
                    f"{limit.text!r}"
                )


def _groups(plan: PlanRecord, degree: str) -> list[tuple[int, ...]]:
    """Ranks of every group of one direction."""
    mesh = plan.job.mesh
    places = np.array(plan.ranks).reshape(mesh.pp, mesh.dp, mesh.cp, mesh.tp)
    if degree == "ep":  # taken from replicas and contexts, neighbours first
        return [tuple(map(int, row)) for row in np.moveaxis(places, -1, 1).reshape(-1, mesh.ep)]
    axis = ("pp", "dp", "cp", "tp").index(degree)
    rows = np.moveaxis(places, axis, -1).reshape(-1, places.shape[axis])
    return [tuple(map(int, row)) for row in rows]


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def check_model(plan: PlanRecord, model: ModelDescription) -> None:
    """That a plan is for a model.

    Args:
        plan: to be examined.
        model: that is to be trained by it.

    Raises:
        UsageError: sizes or module names differ; the message names the first that does.
    """
    ours, theirs = plan.model.shape.to_json(), model.shape.to_json()
    for key, value in ours.items():
        if key != "name" and theirs[key] != value:
            raise UsageError(
                f"the plan is for {plan.model.shape.name!r} with {key} {value}, and {model.shape.name!r} has "
                f"{theirs[key]}: search for a plan of this model"
            )
    names = module_names(model)
    if names != plan.model.modules:
        _refuse_names(plan.model, names)


def _refuse_names(planned: PlannedModel, names: Sequence[str]) -> None:
    unknown = next((name for name in planned.modules if name not in names), None)
    if unknown is not None:
        raise UsageError(
            f"the plan cuts at module {unknown!r}, which the model does not have{nearest(unknown, names)}: search "
            "for a plan of this model"
        )
    extra = next((name for name in names if name not in planned.modules), None)
    if extra is not None:
        raise UsageError(
            f"the model has a module {extra!r}, which the plan does not name{nearest(extra, planned.modules)}: "
            "search for a plan of this model"
        )
    raise UsageError("the model runs its modules in another order than the plan names them: search again")


def _check_ranks(plan: PlanRecord) -> None:
    count = plan.cluster.num_ranks
    seen: dict[int, int] = {}
    for place, rank in enumerate(plan.ranks):
        if type(rank) is not int or not 0 <= rank < count:
            raise UsageError(
                f"mesh: place {place} is rank {rank!r}, and {plan.cluster.name} has ranks 0 to {count - 1}: "
                "name one of them"
            )
        if rank in seen:
            free = next((other for other in range(count) if other not in plan.ranks), None)
            way = f"rank {free} is free" if free is not None else "each rank has one place"
            raise UsageError(f"mesh: rank {rank} is at place {seen[rank]} and again at {place}; {way}")
        seen[rank] = place


def _check_cut(plan: PlanRecord) -> None:
    names = plan.model.modules
    position = {name: place for place, name in enumerate(names)}
    seen: dict[str, int] = {}
    for stage, modules in enumerate(plan.cut):
        if not modules:
            raise UsageError(f"cut: stage {stage} has no modules: give it some, or plan one stage less")
        for name in modules:
            if name not in position:
                raise UsageError(
                    f"cut: stage {stage} holds {name!r}, which {plan.model.shape.name} does not have"
                    f"{nearest(name, names)}"
                )
            if name in seen:
                raise UsageError(f"cut: module {name!r} is on stage {seen[name]} and again on stage {stage}")
            seen[name] = stage
    missing = next((name for name in names if name not in seen), None)
    if missing is not None:
        raise UsageError(f"cut: module {missing!r} is on no stage: add it where its neighbours are")
    flat = [name for modules in plan.cut for name in modules]
    for place, name in enumerate(flat):
        if position[name] != place:
            raise UsageError(
                f"cut: {name!r} on stage {seen[name]} is out of order: {names[place]!r} runs before it, and stages "
                "run one after the other"
            )


def _check_stages(plan: PlanRecord) -> None:
    order = plan.order
    job = plan.job
    if order.ranks != job.mesh.pp:
        raise UsageError(f"the order has {order.ranks} rows and the mesh pp={job.mesh.pp}; each place has one row")
    if order.num_stages != plan.num_stages:
        raise UsageError(f"the order has {order.num_stages} stages and the cut {plan.num_stages}; both must be equal")
    if order.num_micro_batches != job.num_micro_batches:
        raise UsageError(
            f"the order treats {order.num_micro_batches} micro-batches, and batch {job.global_batch} over "
            f"dp={job.mesh.dp} in micro-batches of {job.micro_batch} makes {job.num_micro_batches}"
            f"{' on the replica with the most' if job.shares else ''}"
        )
    if order.has_communication:
        raise UsageError("the order has messages among its actions; a plan's order has computations only")
    if order.routes is not None:
        raise UsageError("the order lets micro-batches skip stages, which trains another model than the plan's")
    for stage, ranks in enumerate(plan.stage_ranks):
        expected = plan.group(order.rank_of(stage))
        if ranks != expected:
            wrong = next(
                (at for at, pair in enumerate(zip(ranks, expected, strict=False)) if pair[0] != pair[1]), None
            )
            place = order.rank_of(stage)
            told = (
                f"{len(ranks)} ranks for the {len(expected)} of place {place}"
                if wrong is None
                else f"rank {ranks[wrong]} where the mesh has {expected[wrong]} at place {place}"
            )
            raise UsageError(f"stage_ranks: stage {stage} has {told}; it must be what the mesh and the order say")
    for place in range(order.ranks):
        held = len(order.stages_of(place))
        if held != job.chunks:
            raise UsageError(f"the order puts {held} stages at place {place}, and the job has {job.chunks} chunks")


def _check_layouts(plan: PlanRecord) -> None:
    tp, pieces = plan.job.mesh.tp, plan.job.coshard
    if tp == pieces == 1:
        if plan.layouts:
            raise UsageError("layouts are of tensor parallelism, and tp is 1: leave them out, or plan with tp=2")
        return
    if not plan.layouts:
        name, value, what = ("tp", tp, "shared") if tp > 1 else ("coshard", pieces, "cut into pieces")
        raise UsageError(
            f"{name}={value}, and no module has a layout: nothing would be {what}; describe the model with layouts, "
            f"or plan with {name}=1"
        )
    seen: set[str] = set()
    for pattern, layout in plan.layouts:
        if layout not in LAYOUTS:
            raise UsageError(
                f"layouts: {pattern} is {layout!r}{nearest(layout, LAYOUTS)}; one of {', '.join(LAYOUTS)}"
            )
        if pattern in seen:
            raise UsageError(f"layouts: {pattern} stands there a second time")
        seen.add(pattern)
        if not pattern_names(pattern, plan.model.modules):
            others = [*plan.model.modules, *(other for other, _ in plan.layouts if other != pattern)]
            raise UsageError(
                f"layouts: {pattern!r} names no module of {plan.model.shape.name}{nearest(pattern, others)}"
            )


def _check_times(plan: PlanRecord) -> None:
    """A step cannot be shorter than what the busiest place computes."""
    for replica in range(max(1, len(plan.job.shares))):
        load = [0.0] * plan.order.ranks
        for stage, seconds in enumerate(plan.seconds_of(replica)):
            load[plan.order.rank_of(stage)] += sum(seconds) * plan.job.batches_of(replica)
        busiest = max(range(len(load)), key=load.__getitem__)
        if load[busiest] > plan.predicted.seconds * 1.001:
            where = f" of replica {replica}" if plan.job.shares else ""
            raise UsageError(
                f"predicted: a step of {plan.predicted.seconds:.4g} s is shorter than what place {busiest}{where} "
                f"computes in it, {load[busiest]:.4g} s: the prediction or stage_seconds were changed; search again"
            )
    for replica, times in enumerate(plan.replica_seconds):
        for stage, (seconds, slowest) in enumerate(zip(times, plan.stage_seconds, strict=True)):
            if sum(seconds) > sum(slowest) * 1.001:
                raise UsageError(
                    f"replica_seconds: stage {stage} is said to take longer on replica {replica} than on its slowest "
                    "ranks: the times were changed; search again"
                )
