"""What of a model's activations is kept, moved to far memory or computed again, and when."""

from mycel.planning.residency.check import check_plan
from mycel.planning.residency.instance import Block, MemoryInstance
from mycel.planning.residency.listed import known_plans, listed_plan, load_loops
from mycel.planning.residency.plan import MemoryPlan, Policy, Step
from mycel.planning.residency.search import Progress, fast_plan, plan_memory

__all__ = [
    "Block",
    "MemoryInstance",
    "MemoryPlan",
    "Policy",
    "Progress",
    "Step",
    "check_plan",
    "fast_plan",
    "known_plans",
    "listed_plan",
    "load_loops",
    "plan_memory",
]
