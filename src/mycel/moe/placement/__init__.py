"""Placement carried out: tokens to slots, experts that move while training, and traces of what routers chose.

Which placement there should be is decided in ``mycel.planning.placement``.
"""

from __future__ import annotations

from mycel.moe.placement.dispatcher import PlacedDispatcher
from mycel.moe.placement.move import Moved, move_experts
from mycel.moe.placement.rebalance import Rebalancer
from mycel.moe.placement.trace import RoutingTrace, TraceRecorder, replay

__all__ = ["Moved", "PlacedDispatcher", "Rebalancer", "RoutingTrace", "TraceRecorder", "move_experts", "replay"]
