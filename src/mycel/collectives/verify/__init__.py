"""Says whether schedules and programs are right, by what they do and never by how they were made.

Nothing in here imports synthesis: the checker of a planner must not share the planner's mistakes.
"""

from __future__ import annotations

from mycel.collectives.verify.agreement import program_sums_agree, sums_agree
from mycel.collectives.verify.own import verify_own_program
from mycel.collectives.verify.plan import check_plan, verify_plan
from mycel.collectives.verify.program import verify_programs
from mycel.collectives.verify.schedule import verify_schedule

__all__ = [
    "check_plan",
    "program_sums_agree",
    "sums_agree",
    "verify_own_program",
    "verify_plan",
    "verify_programs",
    "verify_schedule",
]
