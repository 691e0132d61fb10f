"""When a plan has each action begin and end, to be put beside when it did."""

from __future__ import annotations

from mycel.pipeline.simulate import simulate
from mycel.planning.plan import Plan
from mycel.topology.model import Topology

__all__ = ["planned_actions"]


def planned_actions(
    plan: Plan, topology: Topology | None = None, *, replica: int = 0, shard: int = 0
) -> dict[str, tuple[float, float]]:
    """Seconds since a step's begin at which each computation of a pipeline is planned to begin and to end.

    Args:
        plan: with the seconds of every stage.
        topology: on which messages take their time; ``None``: they take none.
        replica: which pipeline.
        shard: which of its ranks, where matrices are shared.
    """
    data = replica // plan.job.mesh.cp
    times = {f"{stage}F": forward for stage, (forward, _) in enumerate(plan.seconds_of(data))}
    for stage, (_, backward) in enumerate(plan.seconds_of(data)):
        # Of a backward in two halves each is planned to take half of it.
        times |= {f"{stage}B": backward, f"{stage}I": backward / 2, f"{stage}W": backward / 2}
    job, mesh = plan.job, plan.job.mesh
    width = mesh.dp * mesh.cp * mesh.tp
    ranks = [plan.ranks[place * width + replica * mesh.tp + shard] for place in range(mesh.pp)]
    shape = plan.model.shape
    num_bytes = shape.element_bytes * job.micro_batch * job.seq * shape.hidden
    num_bytes /= mesh.cp * mesh.tp**job.is_scattered
    run = simulate(
        plan.order_of(data),
        times,
        topology=topology,
        ranks=ranks if topology is not None else None,
        message_bytes=num_bytes,
    )
    return {
        str(action): (start, end)
        for row, starts, ends in zip(run.order.rows, run.starts, run.ends, strict=True)
        for action, start, end in zip(row, starts, ends, strict=True)
    }
