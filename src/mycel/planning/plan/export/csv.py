"""The order as torch's CSV, which ``torch.distributed.pipelining`` loads."""

from __future__ import annotations

from mycel.planning.plan.export.places import rank_order
from mycel.planning.plan.record import PlanRecord

__all__ = ["csv"]


def csv(plan: PlanRecord) -> dict[str, str]:
    """One row a place of the pipeline, computations only.

    Args:
        plan: a right one.
    """
    return {"schedule.csv": plan.order.torch_csv(), **rank_order(plan)}
