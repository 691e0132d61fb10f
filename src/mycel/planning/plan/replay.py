"""A plan in simulation: its order action by action, over the wires of a cluster."""

from __future__ import annotations

from mycel.errors import UsageError
from mycel.pipeline.order import Action, Kind
from mycel.pipeline.simulate import Run, simulate
from mycel.planning.cluster import Cluster
from mycel.planning.plan.record import PlanRecord

__all__ = ["boundary_bytes", "check_cluster", "simulate_plan"]

#: Of a whole backward, the share that the gradient of a stage's input takes where the two are apart.
_INPUT_SHARE = 0.5


def boundary_bytes(plan: PlanRecord) -> float:
    """Bytes of one message between stages, as one rank sends it: activations in 16 bits.

    Args:
        plan: whose stages.
    """
    job = plan.job
    share = job.mesh.tp if job.is_scattered or job.is_sequence_parallel else 1
    return 2.0 * job.micro_batch * job.seq / job.mesh.cp * plan.model.shape.hidden / share


def simulate_plan(plan: PlanRecord, cluster: Cluster | None = None) -> Run:
    """The plan's pipeline, simulated: one chain of ranks, the first replica's.

    Args:
        plan: a right one.
        cluster: whose wires messages take; without one they take no time.

    Raises:
        UsageError: the cluster has other ranks than the plan's.
    """
    seconds = plan.stage_seconds

    def lasts(action: Action) -> float:
        forward, backward = seconds[action.stage]
        if action.kind is Kind.FORWARD:
            return forward
        if action.kind is Kind.BACKWARD:
            return backward
        share = _INPUT_SHARE if action.kind is Kind.INPUT else 1.0 - _INPUT_SHARE
        return backward * share

    if cluster is None or cluster.fabric is None:
        return simulate(plan.order, lasts)
    check_cluster(plan, cluster)
    first = [plan.group(place)[0] for place in range(plan.order.ranks)]
    return simulate(plan.order, lasts, topology=cluster.fabric, ranks=first, message_bytes=boundary_bytes(plan))


def check_cluster(plan: PlanRecord, cluster: Cluster) -> None:
    """That a plan is for a cluster of so many ranks, with names as it knows them.

    Args:
        plan: to be examined.
        cluster: that it is to run on.

    Raises:
        UsageError: ranks differ; the message has the first that does.
    """
    if cluster.num_ranks != plan.cluster.num_ranks:
        raise UsageError(
            f"the plan is for the {plan.cluster.num_ranks} ranks of {plan.cluster.name}, and {cluster.name} has "
            f"{cluster.num_ranks}: search for a plan of this cluster"
        )
    for rank, (ours, theirs) in enumerate(zip(plan.cluster.rank_names, cluster.rank_names, strict=True)):
        if ours != theirs:
            raise UsageError(
                f"the plan knows rank {rank} as {ours!r}, and in {cluster.name} it is {theirs!r}: search for a plan "
                "of this cluster"
            )
    for rank, (planned, there) in enumerate(zip(plan.cluster.memory_bytes, cluster.memory_bytes, strict=True)):
        if there < plan.memory[rank]:
            raise UsageError(
                f"rank {rank} ({cluster.rank_names[rank]}) is planned to hold {plan.memory[rank] / 2**30:.1f} GiB, "
                f"and in {cluster.name} it has {there / 2**30:.1f} (the plan knew {planned / 2**30:.1f})"
            )
