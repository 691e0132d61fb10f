"""Models larger than the device: what they need, and what of it is near, far, or computed again."""

from __future__ import annotations

from mycel.extras import needs

needs("mycel.memory", "torch")

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
    "allocator_limit",
    "in_folder",
    "in_host",
    "on_disk",
    "pinned",
]
