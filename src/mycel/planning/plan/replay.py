"""A plan in simulation: its order action by action, over the wires of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from mycel.errors import UsageError
from mycel.pipeline.needs import Result
from mycel.pipeline.order import Action, Kind
from mycel.pipeline.simulate import Run, simulate
from mycel.planning.cluster import Cluster
from mycel.planning.plan.record import PlanRecord
from mycel.planning.search.stages import stages_of
from mycel.planning.step.wires import message_rate

__all__ = ["check_cluster", "simulate_plan"]

#: Of a whole backward, the share that the gradient of a stage's input takes where the two are apart.
_INPUT_SHARE = 0.5


def simulate_plan(plan: PlanRecord, cluster: Cluster | None = None) -> Run:
    """The plan's pipeline, simulated: one chain of ranks, the first replica's.

    Where replicas have unlike many micro-batches it is the one that is done last.

    Args:
        plan: a right one.
        cluster: whose wires messages take; without one they take no time.

    Raises:
        UsageError: the cluster has other ranks than the plan's.
    """
    if cluster is not None and cluster.fabric is not None:
        check_cluster(plan, cluster)
    # Replicas of equal shares and times are simulated once.
    differ = {(plan.job.batches_of(replica), plan.seconds_of(replica)): replica for replica in _replicas(plan)}
    runs = [_simulated(plan, cluster, replica) for replica in sorted(differ.values())]
    return max(runs, key=lambda run: run.makespan)


def _replicas(plan: PlanRecord) -> range:
    return range(plan.job.mesh.dp) if plan.job.shares else range(1)


def _simulated(plan: PlanRecord, cluster: Cluster | None, replica: int) -> Run:
    """The first chain of ranks of a replica."""
    order, seconds = plan.order_of(replica), plan.seconds_of(replica)

    def lasts(action: Action) -> float:
        forward, backward = seconds[action.stage]
        if action.kind is Kind.FORWARD:
            return forward
        if action.kind is Kind.BACKWARD:
            return backward
        share = _INPUT_SHARE if action.kind is Kind.INPUT else 1.0 - _INPUT_SHARE
        return backward * share

    if cluster is None or cluster.fabric is None:
        return simulate(order, lasts)
    width = plan.job.mesh.cp * plan.job.mesh.tp
    first = [plan.group(place)[replica * width] for place in range(order.ranks)]
    sizes = _sizes(plan, cluster, first)
    return simulate(order, lasts, topology=cluster.fabric, ranks=first, message_bytes=sizes)


def _sizes(plan: PlanRecord, cluster: Cluster, first: list[int]) -> Callable[[Result], float]:
    """Bytes of each message so that alone it takes as long as it does beside those of the other replicas."""
    fabric = cluster.fabric
    assert fabric is not None
    stages = stages_of(cluster, plan.model.shape, plan.job, plan.ranks, cluster.memory_bytes)
    rates = [message_rate(fabric, (pair,)) for pair in pairwise(first)]
    between = [seconds * rate for seconds, rate in zip(stages.message_s, rates, strict=True)]
    # Between the last and the first place chunks meet over no boundary of their own.
    around = max(stages.message_s, default=0.0) * message_rate(fabric, ((first[-1], first[0]),)) if between else 0.0

    def size(result: Result) -> float:
        kind, stage, _ = result
        assert isinstance(stage, int)  # a block on several ranks has a name; its results are no messages
        other = stage + 1 if kind == "F" else stage - 1
        ends = sorted((plan.order.rank_of(stage), plan.order.rank_of(other)))
        return between[ends[0]] if ends[1] - ends[0] == 1 else around

    return size


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
