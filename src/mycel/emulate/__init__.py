"""A cluster on one machine: network namespaces with shaped links, and programs that run on them."""

from __future__ import annotations

from mycel.emulate.cluster import EmulatedCluster, LinkCounters
from mycel.emulate.launch import Run, launch, start
from mycel.emulate.support import acquire_privileges, check_support

__all__ = [
    "EmulatedCluster",
    "LinkCounters",
    "Run",
    "acquire_privileges",
    "check_support",
    "launch",
    "start",
]
