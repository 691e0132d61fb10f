"""Tensors that FSDP2 or tensor parallelism shards, without the second that importing their class takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from mycel.comm.sharded import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["is_sharded", "mesh_of", "plain", "trained"]


def mesh_of(tensor: Tensor) -> DeviceMesh | None:
    """Over which a tensor is sharded; ``None``: it is a plain one."""
    return tensor.device_mesh if is_sharded(tensor) else None


def plain(tensor: Tensor) -> Tensor:
    """The whole of it, an ordinary tensor; all ranks of its mesh call this."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def trained(parameter: nn.Parameter) -> nn.Parameter:
    """What has the gradient, and what optimizers step: the parameter, or its like in far memory."""
    return getattr(parameter, "mycel_far", parameter)
