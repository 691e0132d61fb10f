"""Tiers: near memory with a limit, far memory, and links between them."""

from __future__ import annotations

from mycel.memory.tiers.far import FarMemory, in_folder, in_host, pinned
from mycel.memory.tiers.files import on_disk
from mycel.memory.tiers.limit import allocator_limit
from mycel.memory.tiers.link import Copies, CudaLink, EmulatedLink, Link
from mycel.memory.tiers.ring import SectionRing

__all__ = [
    "Copies",
    "CudaLink",
    "EmulatedLink",
    "FarMemory",
    "Link",
    "SectionRing",
    "allocator_limit",
    "in_folder",
    "in_host",
    "on_disk",
    "pinned",
]
