"""Which ranks share which sequences: groups of different degrees side by side in one step."""

from mycel.planning.grouping.candidates import aligned_groups, candidates_of
from mycel.planning.grouping.check import check_groups, check_plan
from mycel.planning.grouping.instance import Candidate, SequenceInstance
from mycel.planning.grouping.plan import PlannedGroup, SequencePlan
from mycel.planning.grouping.planner import SequencePlanner
from mycel.planning.grouping.search import Progress, greedy_plan, plan_sequences, static_plans

__all__ = [
    "Candidate",
    "PlannedGroup",
    "Progress",
    "SequenceInstance",
    "SequencePlan",
    "SequencePlanner",
    "aligned_groups",
    "candidates_of",
    "check_groups",
    "check_plan",
    "greedy_plan",
    "plan_sequences",
    "static_plans",
]
