"""Whether an order is right: examined without looking at how it was made."""

from __future__ import annotations

from mycel.pipeline.check.collectives import check_collectives
from mycel.pipeline.check.memory import Memory
from mycel.pipeline.check.mesh import check_mesh
from mycel.pipeline.check.report import Executor, Report, check

__all__ = ["Executor", "Memory", "Report", "check", "check_collectives", "check_mesh"]
