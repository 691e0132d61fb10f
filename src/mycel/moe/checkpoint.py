"""Checkpoints that know experts by their number in the layer, so that any division over ranks can load them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mycel.errors import UsageError
from mycel.moe.divided import stacks_of
from mycel.moe.experts import parameters_of_experts
from mycel.moe.sharded import is_sharded
from mycel.moe.slices import Cut

__all__ = ["experts_apart"]


def experts_apart(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with one entry for each expert in place of each stacked tensor of experts.

    Entries are views: ``torch.distributed.checkpoint.load`` into the result fills the state it was made of. Every
    rank has the entries of the experts it holds, also where FSDP2 shards them further. Where ranks share an expert,
    entries are DTensors over those ranks, which all have to make this call.

    Args:
        model: with MoE layers.
        state: a state dictionary of the model, or of its optimizer as
            ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` gives it.

    Raises:
        UsageError: experts are sharded along another dimension than that of experts.

    Examples:
        >>> from mycel.moe import Experts
        >>> layer = Experts(dim=4, hidden=8, num_experts=2)
        >>> sorted(experts_apart(layer, layer.state_dict()))
        ['down_proj.0', 'down_proj.1', 'gate_up_proj.0', 'gate_up_proj.1']
    """
    return _apart(state, parameters_of_experts(model), _slices(model))


#: For parameters that can be cut: how, and the ranks that have the other slices.
_Slices = dict[str, tuple[Cut, DeviceMesh | None]]


def _slices(model: nn.Module) -> _Slices:
    found: _Slices = {}
    for path, module in model.named_modules():
        cuts: Mapping[str, Cut] = getattr(module, "cuts", {})
        if cuts:
            held: Any = module  # Experts, or those of a Hugging Face model
            team = held.routed.team() if held.shard[1] > 1 else None
            for name, stack in stacks_of(module).items():
                found[f"{path}.{name}" if path else name] = (cuts[stack], team)
    return found


def _apart(state: Mapping[str, Any], owned: Mapping[str, Sequence[int]], slices: _Slices) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in state.items():
        experts = owned.get(key)
        how = slices.get(key)
        if experts is None:
            out[key] = _apart(value, owned, slices) if isinstance(value, Mapping) else value
        elif isinstance(value, Mapping):  # of an optimizer: several tensors for the parameter
            out[key] = {}
            for name, part in value.items():
                stacked = isinstance(part, Tensor) and part.dim() > 0 and part.shape[0] == len(experts)
                out[key] |= _by_expert(name, part, experts, how) if stacked else {name: part}
        else:
            out |= _by_expert(key, value, experts, how)
    return out


def _by_expert(
    name: str, stacked: Tensor, experts: Sequence[int], how: tuple[Cut, DeviceMesh | None] | None
) -> dict[str, Tensor]:
    local = stacked
    if is_sharded(stacked):
        from torch.distributed.tensor import Shard
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        if any(isinstance(p, Shard) and p.dim != 0 for p in stacked.placements):
            raise UsageError(
                f"{name}: sharded as {stacked.placements}; experts can be told apart along dimension 0 only"
            )
        _, offset = compute_local_shape_and_global_offset(stacked.shape, stacked.device_mesh, stacked.placements)
        local = stacked.to_local()
        experts = experts[offset[0] : offset[0] + local.shape[0]]
    with torch.no_grad():
        rows = zip(experts, local.detach().unbind(0), strict=True)
        return {f"{name}.{expert}": _whole(row, how) for expert, row in rows if expert >= 0}


def _whole(row: Tensor, how: tuple[Cut, DeviceMesh | None] | None) -> Tensor:
    """One expert's parameter; a slice as a part of it. Gates and ups are a dimension of their own: both are cut."""
    if how is None:
        return row
    cut, team = how
    dim = cut.dim - 1
    if cut.blocks > 1:
        shape = row.shape
        row, dim = row.view(*shape[:dim], cut.blocks, -1, *shape[dim + 1 :]), dim + 1
    if team is None:
        return row
    from torch.distributed.tensor import DTensor, Shard  # nearly a second, for those who have slices

    return DTensor.from_local(row, team, [Shard(dim)], run_check=False)
