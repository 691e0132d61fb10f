"""A plan as data: what it says, whether it is right, why it was chosen, and what others read it as."""

from mycel.planning.plan.build import plan_of
from mycel.planning.plan.explain import Explanation, explain_plan
from mycel.planning.plan.plan import Plan, read_plan
from mycel.planning.plan.record import PLAN_VERSION, PlannedCluster, PlannedModel, RunnerUp

__all__ = [
    "PLAN_VERSION",
    "Explanation",
    "Plan",
    "PlannedCluster",
    "PlannedModel",
    "RunnerUp",
    "explain_plan",
    "plan_of",
    "read_plan",
]
