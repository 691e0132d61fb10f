"""Plans as others read them: one form a file, one line in the registry."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from mycel.names import spelled
from mycel.planning.plan.export.accelerate import accelerate
from mycel.planning.plan.export.csv import csv
from mycel.planning.plan.export.deepspeed import deepspeed
from mycel.planning.plan.export.megatron import layout_string, megatron
from mycel.planning.plan.export.mesh import mesh
from mycel.planning.plan.export.places import refused
from mycel.planning.plan.export.torchtitan import torchtitan
from mycel.planning.plan.record import PlanRecord

__all__ = ["FORMS", "Form", "export_plan", "layout_string"]


class Form(Protocol):
    """What writes a plan for one reader."""

    def __call__(self, plan: PlanRecord) -> dict[str, str]:
        """Text of each file, by its name, the most important first."""


#: Forms by name.
FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "torchtitan": torchtitan,
        "megatron": megatron,
        "accelerate": accelerate,
        "deepspeed": deepspeed,
        "csv": csv,
        "mesh": mesh,
    }
)


def export_plan(plan: PlanRecord, form: str) -> dict[str, str]:
    """A plan in a form.

    Args:
        plan: a right one.
        form: key of ``FORMS``.

    Returns:
        Text of each file, by its name, the most important first.

    Raises:
        UsageError: an unknown form, or a plan that its reader cannot carry out, with the reason.
    """
    write = FORMS[spelled(form, FORMS, "form of plans")]
    if plan.job.shares and form != "mesh":
        shares = ", ".join(map(str, plan.job.shares))
        why = f"its replicas have equally many micro-batches, and the plan's have {shares}"
        raise refused(form, why, "search with --limit shares=equal")
    if plan.job.coshard > 1 and form not in ("csv", "mesh"):
        why = f"it does layers whole, and the plan's are in {plan.job.coshard} pieces on each rank"
        raise refused(form, why, "search with --limit coshard=1")
    return write(plan)
