"""Checkpoints of other libraries' layers, in the names and shapes of ours."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mycel.errors import UsageError

__all__ = ["read_megatron", "read_tutel"]

_State = Mapping[str, Any]


def read_tutel(states: _State | Sequence[_State], prefix: str = "") -> dict[str, Tensor]:
    """A layer of Tutel, for ``MoE(..., activation=..., bias=True).load_state_dict``.

    Tutel's default activation is ``relu``; it does not renormalise weights of one expert a token. The layer may be
    divided in any way: each rank takes its experts.

    Args:
        states: of all ranks, in their order; or of the only one. Ranks that share an expert are put together.
        prefix: of the layer in the states, with its point: ``"layers.3.moe."``.

    Returns:
        ``router.projection.weight``, ``experts.gate_up_proj``, ``experts.down_proj`` and both biases.

    Raises:
        UsageError: something is missing, or there is something that a layer of ours has no place for.

    References:
        Hwang et al., "Tutel", MLSys 2023; its ``moe_layer`` and ``FusedExpertsNetwork``, as of v0.4.

    Examples:
        >>> rows = {"batched_fc1_w": (2, 16, 8), "batched_fc2_w": (2, 16, 8)}
        >>> rows |= {"batched_fc1_bias": (2, 16), "batched_fc2_bias": (2, 8)}
        >>> state = {f"experts.{name}": torch.randn(shape) for name, shape in rows.items()}
        >>> state["gates.0.wg.weight"] = torch.randn(2, 8)
        >>> from mycel.moe import MoE
        >>> MoE(dim=8, hidden=16, num_experts=2, activation="relu", bias=True).load_state_dict(read_tutel(state))
        <All keys matched successfully>
    """
    ranks = [_within(one, prefix, "Tutel") for one in _each(states)]
    gate = _taken(ranks[0], "gates.0.wg.weight", prefix)
    gate_bias = ranks[0].pop("gates.0.wg.bias", None)
    E, dim = gate.shape  # noqa: N806
    parts = {
        name: [_taken(rank, f"experts.batched_{name}", prefix) for rank in ranks]
        for name in ("fc1_w", "fc2_w", "fc1_bias", "fc2_bias")
    }
    for rank in ranks:
        for name in ("_num_global_experts", "gates.0.wg.weight", "gates.0.wg.bias"):
            rank.pop(name, None)
        _refuse_rest(rank, prefix, "Tutel")
    here = sum(part.shape[0] for part in parts["fc1_w"])
    if here < E or here % E or (here > E and any(part.shape[0] != 1 for part in parts["fc1_w"])):
        raise UsageError(
            f"{prefix or 'the layer'}: the states have {here} experts, its gate {E}; give those of all ranks"
        )
    whole = {name: torch.cat(part) for name, part in parts.items()}
    if here > E:  # ranks in a row share an expert
        whole = {name: t.reshape(E, -1, *t.shape[2:]) for name, t in whole.items()}
    named = {
        "router.projection.weight": gate,
        "experts.gate_up_proj": whole["fc1_w"],
        "experts.down_proj": whole["fc2_w"].transpose(1, 2).contiguous(),
        "experts.gate_up_bias": whole["fc1_bias"],
        "experts.down_bias": whole["fc2_bias"][:, :dim],  # slices are rounded up
    }
    return named if gate_bias is None else {**named, "router.projection.bias": gate_bias}


def read_megatron(states: _State | Sequence[_State], prefix: str = "") -> dict[str, Tensor]:
    """A layer of Megatron-Core, for ``MoE.load_state_dict``.

    Experts in a list (``SequentialMLP``), in grouped maps (``TEGroupedMLP``) or in two long matrices
    (``GroupedMLP``); gated ones are SwiGLU of gates followed by ups, as ours. A shared expert is
    ``MoE(shared_hidden=...)``, a bias of the choice ``MoE(balancing=ExpertBias(num_experts))``.

    Args:
        states: of all expert-parallel ranks, in their order; or of the only one. Without tensor parallelism of
            experts: merge it before.
        prefix: of the layer in the states, with its point: ``"decoder.layers.3.mlp."``.

    Returns:
        Tensors by the names of ``MoE``.

    Raises:
        UsageError: something is missing, or there is something that a layer of ours has no place for.

    References:
        Megatron-Core, ``megatron/core/transformer/moe``: ``experts.py``, ``router.py``, ``shared_experts.py``.

    Examples:
        >>> state = {"mlp.router.weight": torch.randn(2, 8)}
        >>> for e in range(2):
        ...     state[f"mlp.experts.local_experts.{e}.linear_fc1.weight"] = torch.randn(32, 8)
        ...     state[f"mlp.experts.local_experts.{e}.linear_fc2.weight"] = torch.randn(8, 16)
        >>> from mycel.moe import MoE
        >>> MoE(dim=8, hidden=16, num_experts=2).load_state_dict(read_megatron(state, "mlp."))
        <All keys matched successfully>
    """
    ranks = [_within(one, prefix, "Megatron-Core") for one in _each(states)]
    gate = _taken(ranks[0], "router.weight", prefix)
    named = {"router.projection.weight": gate}
    for theirs, ours in _MEGATRON.items():
        if theirs in ranks[0]:
            named[ours] = ranks[0][theirs]
    parts: dict[str, list[Tensor]] = {}
    for rank in ranks:
        for name in ("router.weight", *_MEGATRON):
            rank.pop(name, None)
        for ours, part in _megatron_experts(rank, gate.shape[1], gate.shape[0] // len(ranks)).items():
            parts.setdefault(ours, []).append(part)
        _refuse_rest(rank, prefix, "Megatron-Core")
    named |= {f"experts.{ours}": torch.cat(part) for ours, part in parts.items()}
    for ours in ("gate_up_proj", "down_proj"):
        here = 0 if ours not in parts else named[f"experts.{ours}"].shape[0]
        if here != gate.shape[0]:
            raise UsageError(
                f"{prefix or 'the layer'}: the states have {here} experts, its router {gate.shape[0]}; give those of "
                "all expert-parallel ranks"
            )
    return named


_MEGATRON = {
    "router.expert_bias": "balancing.0.bias",
    "shared_experts.linear_fc1.weight": "shared.gate_up_proj.weight",
    "shared_experts.linear_fc2.weight": "shared.down_proj.weight",
    "shared_experts.linear_fc1.bias": "shared.gate_up_proj.bias",
    "shared_experts.linear_fc2.bias": "shared.down_proj.bias",
}
_OURS = {
    ("1", "weight"): "gate_up_proj",
    ("2", "weight"): "down_proj",
    ("1", "bias"): "gate_up_bias",
    ("2", "bias"): "down_bias",
}
_LISTED = re.compile(r"experts\.local_experts\.(?P<expert>\d+)\.linear_fc(?P<fc>[12])\.(?P<kind>weight|bias)")
_GROUPED = re.compile(r"experts\.linear_fc(?P<fc>[12])\.(?P<kind>weight|bias)(?P<expert>\d+)")


def _megatron_experts(rank: dict[str, Tensor], dim: int, num_experts: int) -> dict[str, Tensor]:
    """Stacks of one rank's experts; what is understood is taken out."""
    found: dict[str, dict[int, Tensor]] = {}
    for name in list(rank):
        match = _LISTED.fullmatch(name) or _GROUPED.fullmatch(name)
        if match is not None:
            found.setdefault(_OURS[match["fc"], match["kind"]], {})[int(match["expert"])] = rank.pop(name)
    stacks = {ours: torch.stack([one[e] for e in sorted(one)]) for ours, one in found.items()}
    if not stacks and {"experts.weight1", "experts.weight2"} <= rank.keys() and num_experts:
        # Both lie in memory as [experts, in, out], whatever their shapes say.
        first, second = rank.pop("experts.weight1"), rank.pop("experts.weight2")
        stacks["gate_up_proj"] = first.reshape(num_experts, dim, -1).transpose(1, 2).contiguous()
        stacks["down_proj"] = second.reshape(num_experts, -1, dim).transpose(1, 2).contiguous()
    return stacks


def _each(states: _State | Sequence[_State]) -> Sequence[_State]:
    several = [states] if isinstance(states, Mapping) else states
    if not isinstance(several, Sequence) or not several or not all(isinstance(one, Mapping) for one in several):
        raise UsageError(f"expected the state_dict of a layer, or those of all ranks, got {type(states).__name__}")
    return several


def _within(state: _State, prefix: str, whose: str) -> dict[str, Tensor]:
    """The layer's own tensors, without the prefix; what libraries keep beside them is no tensor."""
    found = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    found = {name: value for name, value in found.items() if isinstance(value, Tensor) and "_extra_state" not in name}
    if not found:
        raise UsageError(
            f"no tensors of a layer of {whose} under {prefix!r}; the state begins with {list(state)[:3]}"
        )
    return found


def _taken(state: dict[str, Tensor], name: str, prefix: str) -> Tensor:
    if name not in state:
        raise UsageError(f"{prefix}{name} is missing; there are {', '.join(sorted(state)[:8])}")
    return state.pop(name)


def _refuse_rest(state: Mapping[str, Tensor], prefix: str, whose: str) -> None:
    if state:
        raise UsageError(
            f"{prefix}{min(state)}: a layer of {whose} has it, and one of ours has no place for it; "
            f"{len(state)} such tensors"
        )
