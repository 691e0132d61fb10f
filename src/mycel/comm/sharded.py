"""Which tensors and modules torch has sharded, without the second that importing their classes takes.

Where nobody imported the modules of these classes, nothing can be of them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["is_fully_sharded", "is_sharded", "param_groups"]


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Whether it is a ``DTensor``."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_fully_sharded(value: object) -> bool:
    """Whether it is a module that ``fully_shard`` was applied to."""
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and isinstance(value, module.FSDPModule)


def param_groups(module: Any) -> list[Any]:
    """Torch's records of the parameters that ``fully_shard`` cut of a module, those of one mesh each.

    A list from 2.12 on; one or none in 2.11, under another name.

    Args:
        module: that ``is_fully_sharded``.

    Raises:
        AttributeError: torch keeps them elsewhere.
    """
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
