"""MSCCL++ execution plans, of ours or anybody's within the operations that ``verify`` understands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mycel.collectives.imports.content import Content
from mycel.collectives.verify import check_plan

__all__ = ["check", "is_mine"]


def is_mine(content: Content) -> bool:
    """Whether a file is a JSON object that lists GPUs, right or wrong, and is no topology."""
    return isinstance(content.data, Mapping) and "gpus" in content.data and "nodes" not in content.data


def check(content: Content) -> dict[str, Any]:
    """Facts of a right plan.

    Raises:
        ScheduleError: malformed.
        VerificationError: wrong, or right only in some runs.
    """
    facts = check_plan(content.data)
    where = "in place" if facts["in_place"] else "out of place"
    summary = (
        f"{facts['collective']} over {facts['num_ranks']} ranks, {where}, {facts['num_chunks']} chunks, at most "
        f"{facts['num_thread_blocks']} thread blocks a rank, {facts['num_operations']} operations"
    )
    return {"summary": summary, **facts}
