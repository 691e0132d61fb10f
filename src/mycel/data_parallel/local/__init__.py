"""Local updates: when ranks synchronise, what becomes of what they have learned, and the hooks that do it."""

from __future__ import annotations

from mycel.data_parallel.local.entry import local_updates
from mycel.data_parallel.local.members import Members
from mycel.data_parallel.local.outer import CO2, MakeOuter, SlowMo, co2, diloco, slowmo
from mycel.data_parallel.local.streaming import Streaming
from mycel.data_parallel.local.synchronizer import QSR, Delayed, EveryStep, Periodic, PostLocal, Synchronizer
from mycel.data_parallel.local.updates import LocalUpdates

__all__ = [
    "CO2",
    "QSR",
    "Delayed",
    "EveryStep",
    "LocalUpdates",
    "MakeOuter",
    "Members",
    "Periodic",
    "PostLocal",
    "SlowMo",
    "Streaming",
    "Synchronizer",
    "co2",
    "diloco",
    "local_updates",
    "slowmo",
]
