"""A plan as data: what it says, whether it is right, why it was chosen, and what others read it as."""

from mycel.planning.plan.plan import PLAN_VERSION, Plan, PlannedCluster, PlannedModel, RunnerUp

__all__ = ["PLAN_VERSION", "Plan", "PlannedCluster", "PlannedModel", "RunnerUp"]
