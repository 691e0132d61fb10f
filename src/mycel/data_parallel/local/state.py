"""State of optimizers by parameters' names: plain containers of tensors and numbers, which load anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mycel.comm.sharded import is_sharded
from mycel.errors import UsageError

__all__ = ["as_saved", "load_tensors", "local_part", "read_optimizer", "write_optimizer"]


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: all of a plain one, the shard of one that is divided."""
    found = tensor.detach()
    return found.to_local() if is_sharded(found) else found


def as_saved(local: Tensor, like: Tensor) -> Tensor:
    """A copy for a checkpoint: divided over ranks as ``like`` is, so that it loads at another division."""
    copy = local.detach().clone()
    if is_sharded(like):
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            copy, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    return copy


def load_tensors(kind: str, saved: dict[str, Tensor], names: Sequence[str], into: Sequence[Tensor]) -> None:
    """Copy saved tensors to where they belong.

    Raises:
        UsageError: a name is missing, or a shape differs.
    """
    missing = [name for name in names if name not in saved]
    if missing:
        raise UsageError(f"the saved {kind} have no {', '.join(missing[:3])}: they are those of another model")
    for name, target in zip(names, into, strict=True):
        value = local_part(saved[name])
        if value.shape != target.shape:
            raise UsageError(f"saved {kind}, {name}: shape {tuple(value.shape)}, the model has {tuple(target.shape)}")
        target.detach().copy_(value)


def read_optimizer(optimizer: torch.optim.Optimizer, names: Sequence[str], likes: Sequence[Tensor]) -> dict[str, Any]:
    """State of an optimizer whose parameters have these names, in order."""
    saved = optimizer.state_dict()
    state = {}
    for index, entry in saved["state"].items():
        like = likes[index]
        state[names[index]] = {
            key: as_saved(v, like) if isinstance(v, Tensor) and v.shape == local_part(like).shape else v
            for key, v in entry.items()
        }
    groups = [{k: v for k, v in group.items() if k != "params"} for group in saved["param_groups"]]
    return {"state": state, "groups": groups}


def write_optimizer(optimizer: torch.optim.Optimizer, names: Sequence[str], saved: dict[str, Any]) -> None:
    """The reverse of ``read_optimizer``.

    Raises:
        UsageError: the number of parameter groups differs.
    """
    now = optimizer.state_dict()["param_groups"]
    if len(saved["groups"]) != len(now):
        raise UsageError(f"the saved outer optimizer has {len(saved['groups'])} groups, this one {len(now)}")
    state = {
        index: {key: local_part(v) if isinstance(v, Tensor) else v for key, v in saved["state"][name].items()}
        for index, name in enumerate(names)
        if name in saved["state"]
    }
    groups = [{**old, "params": group["params"]} for old, group in zip(saved["groups"], now, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
