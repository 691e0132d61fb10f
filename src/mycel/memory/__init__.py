"""Models larger than the device: what they need, and what of it is near, far, or computed again."""

from __future__ import annotations

from mycel.extras import needs

needs("mycel.memory", "torch")

from mycel.memory.fit import Choice, Fitted, fit
from mycel.memory.needs import Needs, needs_of
from mycel.memory.swap import Moved, Swapping, attach, measure, offload_contexts
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
from mycel.memory.trainer import trainer_callback

__all__ = [
    "Choice",
    "CudaLink",
    "EmulatedLink",
    "FarMemory",
    "Fitted",
    "Link",
    "Moved",
    "Needs",
    "Swapping",
    "allocator_limit",
    "attach",
    "fit",
    "in_folder",
    "in_host",
    "measure",
    "needs_of",
    "offload_contexts",
    "on_disk",
    "pinned",
    "trainer_callback",
]
