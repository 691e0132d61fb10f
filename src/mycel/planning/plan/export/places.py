"""What several forms say in the same way: on which rank of the cluster a reader's own rank has to start."""

from __future__ import annotations

from mycel.errors import UsageError
from mycel.planning.plan.record import PlanRecord

__all__ = ["layers_by_stage", "one_a_rank", "rank_order", "refused"]


def rank_order(plan: PlanRecord) -> dict[str, str]:
    """A file that says where each rank has to start; none where ranks start in the order of the cluster.

    Every reader here nests its groups as a plan does, tensor parallelism innermost and the pipeline outermost, so
    that its rank ``g`` is place ``g`` of the mesh.

    Args:
        plan: of which.
    """
    names = plan.cluster.rank_names
    if plan.ranks == tuple(range(plan.cluster.num_ranks)):
        return {}
    rows = [f"{place} {names[rank]}" for place, rank in enumerate(plan.ranks)]
    head = "# rank of the job, and where it has to start: the plan places ranks otherwise than in the cluster's order"
    return {"rank_order.txt": "\n".join([head, *rows]) + "\n"}


def layers_by_stage(plan: PlanRecord) -> tuple[int, ...]:
    """How many layers each stage has.

    Args:
        plan: of which.
    """
    layers = set(plan.model.layers)
    return tuple(sum(name in layers for name in modules) for modules in plan.cut)


def one_a_rank(plan: PlanRecord) -> bool:
    """Whether stage ``s`` is at place ``s`` modulo ``pp``, as readers take it that have no map of stages.

    Args:
        plan: of which.
    """
    return all(place == stage % plan.job.mesh.pp for stage, place in enumerate(plan.stage_places))


def refused(form: str, why: str, way: str) -> UsageError:
    """The error of a plan that a reader cannot carry out.

    Args:
        form: of which reader.
        why: it cannot.
        way: out.
    """
    return UsageError(f"{form} cannot carry out this plan: {why}; {way}")
