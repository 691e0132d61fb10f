"""A plan as data: what it says, whether it is right, why it was chosen, and what others read it as."""

from mycel.planning.plan.plan import Plan, read_plan
from mycel.planning.plan.record import PLAN_VERSION, PlannedCluster, PlannedModel, RunnerUp

__all__ = ["PLAN_VERSION", "Plan", "PlannedCluster", "PlannedModel", "RunnerUp", "read_plan"]
