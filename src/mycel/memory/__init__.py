"""Models larger than the device: what they need, and what of it is near, far, or computed again."""

from __future__ import annotations

from mycel.extras import needs

needs("mycel.memory", "torch")

from mycel.memory.swap import Moved, Swapping, attach, measure
from mycel.memory.tiers import (
    CudaLink,
    EmulatedLink,
    FarMemory,
    Link,
    allocator_limit,
    in_folder,
    in_host,
    on_disk,
    pinned,
)

__all__ = [
    "CudaLink",
    "EmulatedLink",
    "FarMemory",
    "Link",
    "Moved",
    "Swapping",
    "allocator_limit",
    "attach",
    "in_folder",
    "in_host",
    "measure",
    "on_disk",
    "pinned",
]
