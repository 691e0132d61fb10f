"""Parameters, gradients and optimizer in far memory, near when they are needed: chunks, plans, and their executor."""

from __future__ import annotations

from mycel.memory.residency.chunks import ChunkLayout, layout_of, search_layout
from mycel.memory.residency.executor import Residency, is_resident
from mycel.memory.residency.plan import (
    Demand,
    ResidencyPlan,
    by_next_use,
    check_residency,
    fixed_set,
    least_recently_used,
    ring,
)
from mycel.memory.residency.schedule import Parts, Schedule, demand_of, parts_of, schedule_of
from mycel.memory.residency.sharded import sharded_parts

__all__ = [
    "ChunkLayout",
    "Demand",
    "Parts",
    "Residency",
    "ResidencyPlan",
    "Schedule",
    "by_next_use",
    "check_residency",
    "demand_of",
    "fixed_set",
    "is_resident",
    "layout_of",
    "least_recently_used",
    "parts_of",
    "ring",
    "schedule_of",
    "search_layout",
    "sharded_parts",
]
