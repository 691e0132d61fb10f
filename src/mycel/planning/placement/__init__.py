"""Which ranks hold which experts: consecutive shares, slots with replicas, their cost, and policies."""

from __future__ import annotations

from mycel.planning.placement.cost import PlacementCost
from mycel.planning.placement.layout import ExpertLayout
from mycel.planning.placement.model import EMPTY, ExpertPlacement
from mycel.planning.placement.policies import POLICIES, Policy, eplb, flex, make_policy, shadow, static

__all__ = [
    "EMPTY",
    "POLICIES",
    "ExpertLayout",
    "ExpertPlacement",
    "PlacementCost",
    "Policy",
    "eplb",
    "flex",
    "make_policy",
    "shadow",
    "static",
]
