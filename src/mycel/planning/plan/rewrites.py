"""Rewrites of a plan that change what is sent and not what is computed, each with its cost before and after.

A sum over ranks (all_reduce) is a reduce_scatter and an all_gather. What stands after it can be moved between the
two, where it needs a share only:

- a stage's boundary: each of ``t`` tensor-parallel ranks sends its share, ``1/t`` of the bytes on the slow link, and
  the far side gathers it over its fast ones;
- the optimizer: each of ``d`` replicas updates its share of the parameters, with ``1/d`` of the state, and the gather
  is of parameters instead of gradients. That is ZeRO-1.

References:
    Jangda et al., "Breaking the Computation and Communication Abstraction Barrier in Distributed Machine Learning
    Workloads" (CoCoNet), ASPLOS 2022, section 3 (split, reorder); Narayanan et al., SC 2021, section 4.1
    (scatter/gather); Rajbhandari et al., "ZeRO", SC 2020, section 5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mycel.errors import UsageError
from mycel.planning.cluster import Cluster
from mycel.planning.job import Job
from mycel.planning.plan.record import PlanRecord
from mycel.planning.search.score import candidate_of, pipeline_seconds
from mycel.planning.search.stages import Stages, stages_of
from mycel.units import format_seconds

__all__ = ["Cost", "Rewrite", "rewrites_of"]

_GIB = float(1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a plan takes, before or after.

    Attributes:
        seconds: of a step.
        part_s: of the part that is rewritten.
        wire_bytes: that one rank sends in that part in a step.
        memory_bytes: of the fullest rank.
    """

    seconds: float
    part_s: float
    wire_bytes: float
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """One rewrite.

    Attributes:
        name: ``scatter_boundaries`` or ``shard_optimizer``.
        job: after it.
        before, after: what the plan takes.
        is_done: the plan has it already; then ``before`` is the plan without.
        told: to people.
    """

    name: str
    job: Job
    before: Cost
    after: Cost
    is_done: bool
    told: str

    def to_json(self) -> dict[str, object]:
        """A JSON object of it."""
        costs = {
            when: {
                "seconds": cost.seconds,
                "part_s": cost.part_s,
                "wire_bytes": cost.wire_bytes,
                "memory_bytes": cost.memory_bytes,
            }
            for when, cost in (("before", self.before), ("after", self.after))
        }
        return {"name": self.name, "is_done": self.is_done, **costs, "told": self.told}


def rewrites_of(plan: PlanRecord, cluster: Cluster) -> tuple[Rewrite, ...]:
    """Every rewrite that a plan allows, done already or not.

    Args:
        plan: a right one.
        cluster: that it is for.
    """
    job, mesh = plan.job, plan.job.mesh
    found = []
    if mesh.pp > 1 and mesh.tp > 1:
        apart = replace(job, is_scattered=False, is_sequence_parallel=False)
        scattered = replace(job, is_scattered=True) if not job.is_sequence_parallel else job
        whole, share = _message(plan, 1), _message(plan, mesh.tp)
        count = 2.0 * job.num_micro_batches * job.chunks
        before = _cost(plan, cluster, apart, "boundary", whole * count)
        after = _cost(plan, cluster, scattered, "boundary", share * count)
        is_done = job.is_scattered or job.is_sequence_parallel
        found.append(
            Rewrite(
                name="scatter_boundaries",
                job=scattered,
                before=before,
                after=after,
                is_done=is_done,
                told=_told("scatter and gather at boundaries", before, after, is_done=is_done),
            )
        )
    replicas = mesh.dp * mesh.cp
    if replicas > 1 and job.zero <= 1:
        before = _cost(plan, cluster, replace(job, zero=0), "optimizer", _gradients(plan, job, is_split=False))
        after = _cost(plan, cluster, replace(job, zero=1), "optimizer", _gradients(plan, job, is_split=True))
        found.append(
            Rewrite(
                name="shard_optimizer",
                job=replace(job, zero=1),
                before=before,
                after=after,
                is_done=job.zero == 1,
                told=_told(
                    "the optimizer between the halves of the gradients' sum", before, after, is_done=job.zero == 1
                ),
            )
        )
    return tuple(found)


def _message(plan: PlanRecord, share: int) -> float:
    job, shape = plan.job, plan.model.shape
    return shape.element_bytes * job.micro_batch * job.seq / job.mesh.cp * shape.hidden / share


def _gradients(plan: PlanRecord, job: Job, *, is_split: bool) -> float:
    """Bytes that a rank sends in a sum of gradients: two halves of them, or one and parameters."""
    replicas = job.mesh.dp * job.mesh.cp
    shape = plan.model.shape
    count = shape.num_parameters / (job.mesh.pp * job.mesh.tp)
    each = job.gradient_bytes + (shape.element_bytes if is_split else job.gradient_bytes)
    return (replicas - 1.0) / replicas * count * each


def _cost(plan: PlanRecord, cluster: Cluster, job: Job, part: str, wire_bytes: float) -> Cost:
    stages = stages_of(cluster, plan.model.shape, job, plan.ranks, cluster.memory_bytes)
    cut = _by_place(plan, stages)
    one = candidate_of(stages, cut, pipeline_seconds(stages, cut))
    parts = one.seconds.parts or {}
    return Cost(
        seconds=one.seconds.seconds,
        part_s=parts[part],
        wire_bytes=wire_bytes,
        memory_bytes=max(one.memory),
    )


def _by_place(plan: PlanRecord, stages: Stages) -> tuple[int, ...]:
    """Layers of every place of the pipeline."""
    layers = set(plan.model.layers)
    counts = [0] * len(stages.groups)
    for stage, modules in enumerate(plan.cut):
        counts[plan.order.rank_of(stage)] += sum(name in layers for name in modules)
    if sum(counts) != plan.model.shape.num_layers:
        raise UsageError("the plan's stages do not hold all layers of its model: mycel plan check says where")
    return tuple(counts)


def _told(what: str, before: Cost, after: Cost, *, is_done: bool) -> str:
    bytes_told = f"{before.wire_bytes / _GIB:.3g} to {after.wire_bytes / _GIB:.3g} GiB sent by a rank in a step"
    memory = f"{before.memory_bytes / _GIB:.1f} to {after.memory_bytes / _GIB:.1f} GiB on the fullest rank"
    gain = f"{format_seconds(before.seconds)} to {format_seconds(after.seconds)} a step"
    return f"Rewrite, {'done' if is_done else 'not done'}: {what}: {gain}, {bytes_told}, {memory}."
