"""What lies where in the flat tensors that FSDP2 hands to its collectives.

A row is what one rank holds of one FSDP unit: its shard of each parameter, padded to the largest, one after the
other. An all-gather's output and a reduce-scatter's input are one row for each rank.

Names and sizes come from classes that torch does not promise to keep; what is missing is said by ``units_of``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from mycel.comm.sharded import param_groups
from mycel.errors import UsageError

__all__ = ["Segment", "Unit", "layout_of", "rows_of", "units_of", "whole_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One parameter's part of a row.

    Attributes:
        name: of the parameter, from the root module.
        numel: elements in each row, padding included.
        shape: of the whole parameter.
        shard_shape: of its part in each row, padding included.
        shard_dim: dimension in which it is cut.
        trainable: whether it has gradients.
    """

    name: str
    numel: int
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    shard_dim: int
    trainable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What one call of ``fully_shard`` made, and communicates as one.

    Attributes:
        name: of the module, from the root; ``""`` is the root itself.
        module: the module.
        param_group: torch's own record of it.
        group: process group over which it is sharded.
        segments: of its rows, in order.
    """

    name: str
    module: Any
    param_group: Any
    group: torch.distributed.ProcessGroup
    segments: tuple[Segment, ...]


def units_of(model: nn.Module) -> list[Unit]:
    """Every FSDP unit in a model, in the order of its modules.

    Raises:
        UsageError: no module is fully sharded, or this version of torch keeps its records elsewhere, or a unit is
            replicated too (a mesh of two dimensions), or has parameters on several meshes.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass the root has its parameters whole, and shards have no names
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    units = []
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        for needed in ("set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"):
            if not hasattr(module, needed):
                raise UsageError(
                    f"torch {torch.__version__} has no FSDPModule.{needed}; compression needs torch 2.11"
                )
        try:
            groups = param_groups(module)
        except AttributeError as error:
            raise UsageError(f"torch {torch.__version__} keeps FSDP2's parameter groups elsewhere: {error}") from None
        if len(groups) > 1:
            raise UsageError(f"module {name!r} is sharded over {len(groups)} meshes; compression takes one a module")
        units += [_unit(name, module, group, names) for group in groups]
    if not units:
        raise UsageError("no module of the model is fully sharded; call torch.distributed.fsdp.fully_shard first")
    return units


def _unit(name: str, module: Any, param_group: Any, names: dict[int, str]) -> Unit:
    try:
        mesh = param_group.mesh_info.mesh
        group = param_group._all_gather_process_group if mesh.ndim == 1 else None
        segments = tuple(
            Segment(
                name=names[id(param.sharded_param)],
                numel=param.padded_sharded_param_size.numel(),
                shape=tuple(param._orig_size),
                shard_shape=tuple(param.padded_sharded_param_size),
                shard_dim=param.fsdp_placement.dim,
                trainable=param.sharded_param.requires_grad,
            )
            for param in param_group.fsdp_params
        )
    except AttributeError as error:
        raise UsageError(f"torch {torch.__version__} describes FSDP2's parameters otherwise: {error}") from None
    if group is None:
        raise UsageError(
            f"module {name!r} is sharded and replicated over a mesh of {mesh.ndim} dimensions, where torch reduces "
            "between replicas itself: shard it over the inner dimension alone, fully_shard(module, "
            "mesh=mesh['shard']), and give the outer one as replicas=mesh['replicate']"
        )
    return Unit(name=name, module=module, param_group=param_group, group=group, segments=segments)


@lru_cache(maxsize=1024)
def layout_of(segments: tuple[Segment, ...], row_numel: int) -> tuple[Segment, ...] | None:
    """Which parameters' gradients a row of so many elements holds: those that have any, in order.

    Torch leaves out frozen parameters and those a backward pass did not reach, and does not say which.

    Returns:
        ``None`` where several sets of parameters have that many elements.

    Examples:
        >>> a, b, c = (Segment(name=n, numel=k, shape=(k,), shard_shape=(k,), shard_dim=0, trainable=True)
        ...     for n, k in (("a", 5), ("b", 3), ("c", 2)))
        >>> [s.name for s in layout_of((a, b, c), 8)], layout_of((a, b, c), 5)
        (['a', 'b'], None)
    """
    live = tuple(segment for segment in segments if segment.trainable and segment.numel)
    if sum(segment.numel for segment in live) == row_numel:
        return live
    # Ways to reach each number of elements, told apart only as far as none, one, several.
    ways: dict[int, tuple[Segment, ...] | None] = {0: ()}
    for segment in live:
        for reached, chosen in list(ways.items()):
            total = reached + segment.numel
            if total <= row_numel:
                ways[total] = None if total in ways or chosen is None else (*chosen, segment)
    return ways.get(row_numel)


def whole_of(rows: Tensor, segment: Segment) -> Tensor:
    """The whole parameter from its parts of all rows, shape ``[ranks, segment.numel]``."""
    parts = [row.reshape(segment.shard_shape) for row in rows]
    return torch.cat(parts, dim=segment.shard_dim).narrow(segment.shard_dim, 0, segment.shape[segment.shard_dim])


def rows_of(whole: Tensor, segment: Segment, num_rows: int) -> Tensor:
    """The reverse of ``whole_of``, with zeros for padding."""
    dim, length = segment.shard_dim, segment.shard_shape[segment.shard_dim] if segment.shard_shape else 0
    padded = whole.new_zeros([*whole.shape[:dim], num_rows * length, *whole.shape[dim + 1 :]])
    padded.narrow(dim, 0, whole.shape[dim]).copy_(whole)
    return torch.stack([part.reshape(-1) for part in padded.tensor_split(num_rows, dim=dim)])
