"""Tensors that FSDP2 or tensor parallelism shards, without the second that importing their class takes.

Where nobody imported ``torch.distributed.tensor``, no tensor can be one of its class.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = ["is_sharded", "mesh_of", "plain", "trained"]


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Whether it is a ``DTensor``."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def mesh_of(tensor: Tensor) -> DeviceMesh | None:
    """Over which a tensor is sharded; ``None``: it is a plain one."""
    return tensor.device_mesh if is_sharded(tensor) else None


def plain(tensor: Tensor) -> Tensor:
    """The whole of it, an ordinary tensor; all ranks of its mesh call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def trained(parameter: nn.Parameter) -> nn.Parameter:
    """What has the gradient, and what optimizers step: the parameter, or its like in far memory."""
    return getattr(parameter, "mycel_far", parameter)
