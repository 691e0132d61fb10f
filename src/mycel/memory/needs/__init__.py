"""What a training step holds, moment by moment, from sizes alone; and what the allocator was really asked for."""

from __future__ import annotations

from mycel.memory.needs.blocks import blocks_of, innermost, recomputed
from mycel.memory.needs.counted import counted_peak
from mycel.memory.needs.groups import groups_of
from mycel.memory.needs.moments import KINDS, Block, Kind, Moment, Needs
from mycel.memory.needs.sources import Subject, subject
from mycel.memory.needs.storages import Storages
from mycel.memory.needs.trace import loss_of, needs_of

__all__ = [
    "KINDS",
    "Block",
    "Kind",
    "Moment",
    "Needs",
    "Storages",
    "Subject",
    "blocks_of",
    "counted_peak",
    "groups_of",
    "innermost",
    "loss_of",
    "needs_of",
    "recomputed",
    "subject",
]
