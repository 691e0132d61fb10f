"""In what order the stages of a pipeline work: orders as data, found, proved and simulated; needs no torch.

::

    from mycel.pipeline import check, known_order

    order = known_order("zb_v", 4, 8)
    print(order.to_csv(), check(order).peaks)
"""

from __future__ import annotations

from mycel.pipeline.bounds import Binding, makespan_bound, period_bound
from mycel.pipeline.check import Memory, Report, check, check_collectives, check_mesh
from mycel.pipeline.known import known_order
from mycel.pipeline.lower import lower
from mycel.pipeline.order import Action, Kind, Order
from mycel.pipeline.placement import Block, Dependency, Placement
from mycel.pipeline.replay import Replay, replay
from mycel.pipeline.routes import Nodes, Routes, Visit, find_routes
from mycel.pipeline.search import Batch, Progress, Repetend, Steady, find_batch, find_steady
from mycel.pipeline.simulate import Exchange, Run, Sent, Times, simulate
from mycel.pipeline.timed import Timed

__all__ = [
    "Action",
    "Batch",
    "Binding",
    "Block",
    "Dependency",
    "Exchange",
    "Kind",
    "Memory",
    "Nodes",
    "Order",
    "Placement",
    "Progress",
    "Repetend",
    "Replay",
    "Report",
    "Routes",
    "Run",
    "Sent",
    "Steady",
    "Timed",
    "Times",
    "Visit",
    "check",
    "check_collectives",
    "check_mesh",
    "find_batch",
    "find_routes",
    "find_steady",
    "known_order",
    "lower",
    "makespan_bound",
    "period_bound",
    "replay",
    "simulate",
]
