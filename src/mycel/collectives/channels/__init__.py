"""A language for plans: ranks with buffers, thread blocks, and the channels on which these work.

Where ``mycel.collectives.language`` speaks of chunks and who sends them to whom, this speaks of what GPUs do: puts
and gets, sums over mapped memory, packets, switches that add, signals and waits. It makes MSCCL++ execution plans,
verified before anybody gets them; ``mycel.collectives.plan_programs`` runs them on CPU ranks.
"""

from __future__ import annotations

from mycel.collectives.channels.blocks import Block, Semaphore
from mycel.collectives.channels.ends import MemoryEnd, PortEnd, SwitchEnd
from mycel.collectives.channels.parts import Buffer, Part
from mycel.collectives.channels.plan import ChannelPlan, Group, Rank

__all__ = [
    "Block",
    "Buffer",
    "ChannelPlan",
    "Group",
    "MemoryEnd",
    "Part",
    "PortEnd",
    "Rank",
    "Semaphore",
    "SwitchEnd",
]
