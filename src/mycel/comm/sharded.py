"""Which tensors and modules torch has sharded, without the second that importing their classes takes.

Where nobody imported the modules of these classes, nothing can be of them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["is_fully_sharded", "is_sharded"]


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Whether it is a ``DTensor``."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_fully_sharded(value: object) -> bool:
    """Whether it is a module that ``fully_shard`` was applied to."""
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and isinstance(value, module.FSDPModule)
