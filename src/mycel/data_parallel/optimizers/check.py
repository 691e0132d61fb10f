"""What the algorithms can do, and words for what they cannot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.arguments import real_number
from mycel.data_parallel.optimizers.demo_update import LARGEST_CHUNK
from mycel.errors import UsageError

__all__ = ["ALGORITHMS", "check_group", "check_together"]

ALGORITHMS = ("dion", "muon", "demo", "one_bit_adam", "adamw")
#: Whose parameters are matrices.
_OF_MATRICES = ("dion", "muon")
#: Whose gradients DDP would average and whose parameters are whole: of shards, FSDP2 has averaged gradients already.
_OF_REPLICAS = ("demo", "one_bit_adam")
_WIRES = (None, torch.float32, torch.bfloat16)


def check_group(group: dict[str, Any]) -> None:
    """Refuse a group of parameters whose algorithm cannot move them.

    Raises:
        UsageError: says which parameter or option, and what to do.
    """
    algorithm = group["algorithm"]
    if algorithm not in ALGORITHMS:
        raise UsageError(f"no algorithm {algorithm!r}; there are {', '.join(ALGORITHMS)}")
    _check_options(group)
    names = group.get("param_names") or [str(place) for place in range(len(group["params"]))]
    for name, parameter in zip(names, group["params"], strict=True):
        if parameter.dtype not in (torch.float32, torch.float64):
            raise UsageError(
                f"parameter {name} is {parameter.dtype}: parameters and momenta are float32 or float64 here; for "
                "lower precision, use torch.autocast or FSDP2's MixedPrecisionPolicy"
            )
        if algorithm in _OF_MATRICES and (parameter.dim() != 2 or not parameter.numel()):
            raise UsageError(
                f"parameter {name} of shape {tuple(parameter.shape)} is no matrix, which {algorithm} needs: put it "
                'in a group with algorithm="adamw", as matrix_groups does'
            )
        if algorithm in _OF_MATRICES:
            _check_placements(name, parameter)
        if algorithm in _OF_REPLICAS and any(not p.is_replicate() for p in getattr(parameter, "placements", ())):
            raise UsageError(
                f"parameter {name} is sharded, and {algorithm} saves what DDP sends for averages: FSDP2 has averaged "
                "gradients before an optimizer sees them. Take Dion or Muon, or compress(model, QSDP())"
            )


def check_together(parameters: Iterable[Tensor]) -> dist.ProcessGroup | None:
    """The ranks over which the parameters are sharded; ``None`` where they are whole.

    Raises:
        UsageError: they are sharded over different groups of ranks, or some are and some are not.
    """
    groups = {id(group): group for group in map(_shards, parameters)}
    if len(groups) > 1:
        raise UsageError(
            "the optimizer's parameters are sharded over different groups of ranks, or only some are: make one "
            "optimizer for each kind"
        )
    return next(iter(groups.values()), None)


def _check_options(group: dict[str, Any]) -> None:
    for name in ("lr", "weight_decay", "momentum", "eps", "rank"):
        value = group[name]
        real_number(value.item() if isinstance(value, Tensor) and value.numel() == 1 else value, name)
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise UsageError(f"betas {betas!r}: want two, such as (0.9, 0.95)")
    for beta in betas:
        if not 0 <= real_number(beta, "a beta") < 1:
            raise UsageError(f"betas {betas}: each must be at least 0 and below 1")
    rank = group["rank"]
    if rank <= 0 or (isinstance(rank, float) and rank > 1):
        raise UsageError(f"rank {rank}: want a share of the shorter side in (0, 1], or a whole number of columns")
    if not 0 <= group["momentum"] < 1:
        raise UsageError(f"momentum {group['momentum']}: it must be at least 0 and below 1")
    if group["lr"] < 0 or group["weight_decay"] < 0:
        raise UsageError(f"lr {group['lr']}, weight_decay {group['weight_decay']}: must not be negative")
    if not 1 <= group["chunk"] <= LARGEST_CHUNK:
        raise UsageError(f"chunks of {group['chunk']} by {group['chunk']}: want sides of 1 to {LARGEST_CHUNK}")
    if group["top_k"] < 1 or group["warm_up"] < 1:
        raise UsageError(f"top_k {group['top_k']}, warm_up {group['warm_up']}: want at least 1 of each")
    if group["newton_schulz_steps"] < 1:
        raise UsageError(f"{group['newton_schulz_steps']} steps of Newton and Schulz: want at least 1")
    if group["wire"] not in _WIRES:
        raise UsageError(f"factors and updates travel as float32 or bfloat16, not as {group['wire']}")


def _check_placements(name: str, parameter: Tensor) -> None:
    placements = getattr(parameter, "placements", ())
    cut = [p for p in placements if not p.is_replicate()]
    if len(cut) > 1 or any(not p.is_shard(0) or type(p).__name__ != "Shard" for p in cut):
        raise UsageError(
            f"parameter {name} is placed as {placements}: matrices may be cut by rows over one dimension of a mesh, "
            "as fully_shard does without shard_placement_fn"
        )


def _shards(parameter: Tensor) -> dist.ProcessGroup | None:
    for dim, placement in enumerate(getattr(parameter, "placements", ())):
        if placement.is_shard():
            group: dist.ProcessGroup = parameter.device_mesh.get_group(dim)  # type: ignore[attr-defined]
            return group
    return None
