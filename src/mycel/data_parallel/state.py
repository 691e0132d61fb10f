"""State of compression that outlives a run: by parameter name, for any number of ranks, tensors and numbers only.

Residuals matter only in the mean: the mean gradient of the next step has their mean added. So a
checkpoint holds that mean, one tensor a parameter, and every rank of the next run, however many there are, begins
with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.data_parallel.compress.base import Compressor
from mycel.data_parallel.feedback import ErrorFeedback
from mycel.errors import UsageError

__all__ = ["mean_residuals", "pack_state", "unpack_state"]

#: Of the layout below.
_VERSION = 2


def mean_residuals(
    feedback: ErrorFeedback, shapes: Mapping[str, torch.Size], group: dist.ProcessGroup
) -> dict[str, Tensor]:
    """The mean over ranks of their residuals. Every rank of the group calls it.

    Args:
        feedback: this rank's residuals.
        shapes: of all parameters, in the same order on all ranks; those without a residual anywhere are left out.
        group: whose mean it is.
    """
    device = next((kept.device for kept in feedback.memory.values()), torch.device("cpu"))
    known = torch.tensor([name in feedback.memory for name in shapes], dtype=torch.uint8, device=device)
    dist.all_reduce(known, op=dist.ReduceOp.MAX, group=group)
    means = {}
    for (name, shape), is_known in zip(shapes.items(), known.tolist(), strict=True):
        if is_known:
            kept = feedback.memory.get(name)
            mean = torch.zeros(shape, device=device) if kept is None else kept.clone()
            dist.all_reduce(mean, group=group)
            means[name] = mean.div_(group.size())
    return means


def pack_state(
    step: int,
    residuals: Mapping[str, Tensor],
    compressors: Iterable[Compressor],
    owner: tuple[int, int] | None,
    *,
    scale: float = 1.0,
) -> dict[str, Any]:
    """A state as ``torch.save`` takes it and ``torch.load(weights_only=True)`` gives it back.

    Args:
        owner: rank and world size where residuals are one rank's own and not the mean.
        scale: of the losses whose gradients the residuals are part of.
    """
    held: dict[str, dict[str, Tensor]] = {}
    for compressor in compressors:
        held.setdefault(compressor.name, {}).update({k: v.clone() for k, v in compressor.state_dict().items()})
    return {
        "version": _VERSION,
        "step": step,
        "scale": scale,
        "residuals": {name: kept.clone() for name, kept in residuals.items()},
        "compressors": {name: state for name, state in held.items() if state},
        "owner": None if owner is None else list(owner),
    }


def unpack_state(
    state: Mapping[str, Any],
    shapes: Mapping[str, torch.Size],
    compressors: Iterable[Compressor],
    feedback: ErrorFeedback,
    owner: tuple[int, int],
) -> int:
    """Gives feedback and compressors what a state holds, and returns its step.

    Args:
        shapes: of the model's parameters.
        owner: this rank and the world size.

    Raises:
        UsageError: the state is not one, is of another model, or is another rank's own.
    """
    if state.get("version") != _VERSION:
        raise UsageError(
            f"not a state of compression, or of another version: {state.get('version')!r}, not {_VERSION}"
        )
    if state["owner"] is not None and tuple(state["owner"]) != owner:
        rank, size = state["owner"]
        raise UsageError(
            f"this is the own state of rank {rank} of {size}, and this is rank {owner[0]} of {owner[1]}; "
            "state_dict() without own=True fits any number of ranks"
        )
    for name, kept in state["residuals"].items():
        if name not in shapes or kept.shape != shapes[name]:
            have = "no such parameter" if name not in shapes else f"shape {tuple(shapes[name])}"
            raise UsageError(f"the state is of another model: {name} has shape {tuple(kept.shape)}, here: {have}")
    for compressor in compressors:
        if found := state["compressors"].get(compressor.name):
            compressor.load_state_dict(found)
    feedback.load_state_dict(state["residuals"], scale=state["scale"])
    return int(state["step"])
