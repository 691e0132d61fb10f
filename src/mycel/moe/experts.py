"""The experts that a rank holds, as a module: stacked parameters, SwiGLU or a plain two-layer network."""

# ruff: noqa: N803  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mycel.errors import UsageError
from mycel.moe.activations import activation as activation_named
from mycel.moe.divided import stacks_of
from mycel.moe.expert_mlp import ExpertKind, ExpertWeights
from mycel.moe.overlap import Beside
from mycel.moe.parallel import ExpertParallel
from mycel.moe.routed import RoutedExperts
from mycel.moe.schedule import ExpertSchedule
from mycel.moe.slices import Cut, WeightUse, call_weights
from mycel.moe.slots import RoutingResult

__all__ = ["ExpertCall", "Experts", "SharedExpert", "parameters_of_experts", "take_own"]


class ExpertCall:
    """What one call of experts is told beside tokens. Wrappers of modules look into tensors and tuples, not in here.

    Args:
        routing: of the tokens.
        schedule: how the call is carried out; ``None``: as the layer chooses.
        beside: what else is to be computed, while tokens travel if they do.
    """

    def __init__(
        self, routing: RoutingResult, schedule: ExpertSchedule | None = None, beside: Beside | None = None
    ) -> None:
        self.routing, self.schedule, self.beside = routing, schedule, beside


class Experts(nn.Module):
    """The experts that one rank holds.

    Parameters are stacked as Hugging Face stacks them: ``gate_up_proj [E, 2F, D]`` (gates first; ``[E, F, D]``
    without a gate), ``down_proj [E, D, F]``, biases ``[E, 2F]`` and ``[E, D]``. The values of expert ``e`` of the
    layer follow from torch's seed and ``e`` alone, so that every division over ranks begins with the same model.

    Args:
        dim: D, width of tokens.
        hidden: F, width inside an expert.
        num_experts: in the whole layer.
        routed: how tokens come here; ``None``: all experts are here.
        owned: which of them are here, one a place; a negative number is a place without an expert; ``None``: those
            of ``routed``.
        shard: which slice of each is here, of how many: columns of ``F``, and of the last bias, of ``D``; ``None``:
            that of ``routed``.
        activation: a key of ``mycel.moe.activations.ACTIVATIONS``.
        bias: both maps add a vector.
        device, dtype: of the parameters.

    Raises:
        UsageError: an unknown activation, sizes below 1, or slices that are not equal.

    Examples:
        >>> experts = Experts(dim=4, hidden=8, num_experts=6, owned=range(2, 4))  # of a rank that has two of them
        >>> {name: tuple(parameter.shape) for name, parameter in experts.named_parameters()}
        {'gate_up_proj': (2, 16, 4), 'down_proj': (2, 4, 8)}
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        *,
        routed: RoutedExperts | None = None,
        owned: Sequence[int] | None = None,
        shard: tuple[int, int] | None = None,
        activation: str = "swiglu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if min(dim, hidden, num_experts) < 1:
            raise UsageError(f"experts: dim {dim}, hidden {hidden}, {num_experts} experts; all must be at least 1")
        wide, activate = activation_named(activation)
        self.kind = ExpertKind(activate, None if bias else activation)
        self.dim, self.hidden, self.num_experts = dim, hidden, num_experts
        self.routed = routed or RoutedExperts(num_experts, ExpertParallel())
        #: What carries a call out: the above, or what chooses how.
        self.route: Callable[..., Tensor] = self.routed
        self.owned: Sequence[int] = self.routed.owned if owned is None else owned
        self.shard = self.routed.shard if shard is None else shard
        shards = self.shard[1]
        if hidden % shards or (bias and dim % shards):
            raise UsageError(f"experts of hidden size {hidden}, width {dim} cannot be cut into {shards} equal slices")
        here, columns = len(self.owned), hidden // shards
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate_up_proj = nn.Parameter(torch.empty(here, wide * columns, dim, **like))
        self.down_proj = nn.Parameter(torch.empty(here, dim, columns, **like))
        self.gate_up_bias = nn.Parameter(torch.zeros(here, wide * columns, **like)) if bias else None
        self.down_bias = nn.Parameter(torch.zeros(here, dim // shards, **like)) if bias else None
        self.cuts = {
            "gate_up_proj": Cut(dim=1, blocks=wide),
            "down_proj": Cut(dim=2),
            "gate_up_bias": Cut(dim=1, blocks=wide),
            "down_bias": Cut(dim=1),
        }
        #: What makes a call's weights narrower, if anything does: see ``mycel.moe.elastic``.
        self.narrow: Callable[[ExpertWeights, WeightUse], ExpertWeights] | None = None
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(take_own)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw weights anew: normal, ``1/sqrt(fan in)``; biases zero. Nothing on the meta device."""
        seed = int(torch.randint(2**31, (), device="cpu"))
        index, shards = self.shard
        stacked = {stack: self.get_parameter(name) for name, stack in stacks_of(self).items()}
        for name in ("gate_up_proj", "down_proj"):
            weight, cut = stacked[name], self.cuts[name]
            seed += self.num_experts
            if weight.device.type == "meta":
                continue
            shape = cut.resized(weight.shape, 1, shards)
            for place, expert in enumerate(self.owned):
                generator = torch.Generator(weight.device).manual_seed(seed + expert)
                whole = weight[place : place + 1] if shards == 1 else weight.new_empty(shape)
                whole.normal_(std=1.0 / math.sqrt(shape[2]), generator=generator)
                if shards > 1:
                    weight[place] = cut.slice_of(whole, index, shards)[0]
        for name in ("gate_up_bias", "down_bias"):
            if name in stacked:
                stacked[name].zero_()

    def forward(self, x_TD: Tensor, call: ExpertCall) -> Tensor:
        """Tokens to their experts, through them, and back, shape ``[T, D]``.

        All of it happens within this module's call: FSDP2 has the parameters together just then.
        """
        return self.route(self, x_TD, call.routing, call.schedule, call.beside)

    def weights(self, use: WeightUse) -> ExpertWeights:
        """See ``HeldExperts``."""
        stacked = {name: getattr(self, name) for name in self.cuts if getattr(self, name) is not None}
        whole = call_weights(stacked, self.cuts, use, shard=self.shard)
        return whole if self.narrow is None else self.narrow(whole, use)

    def extra_repr(self) -> str:
        """Sizes, for ``print``."""
        here = "" if len(self.owned) == self.num_experts else f", here {', '.join(str(e) for e in self.owned)}"
        return f"dim={self.dim}, hidden={self.hidden}, num_experts={self.num_experts}{here}"


class SharedExpert(nn.Module):
    """One network that every token passes, beside the experts it is routed to.

    Args:
        dim: width of tokens.
        hidden: width inside.
        activation: a key of ``mycel.moe.activations.ACTIVATIONS``.
        bias: both maps add a vector.
        device, dtype: of the parameters.

    Raises:
        UsageError: an unknown activation.

    Examples:
        >>> from mycel.moe import MoE
        >>> layer = MoE(dim=4, hidden=8, num_experts=2, shared_hidden=16)
        >>> type(layer.shared).__name__, layer.shared(torch.randn(3, 4)).shape
        ('SharedExpert', torch.Size([3, 4]))
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        wide, self._act = activation_named(activation)
        self.gate_up_proj = nn.Linear(dim, wide * hidden, bias=bias, device=device, dtype=dtype)
        self.down_proj = nn.Linear(hidden, dim, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Shape as ``x``."""
        mapped: Tensor = self.down_proj(self._act(self.gate_up_proj(x)))
        return mapped


def parameters_of_experts(model: nn.Module) -> dict[str, Sequence[int]]:
    """Names of the parameters that are stacks of experts, and which experts of their layer this rank holds.

    They are those of every module that says with ``owned`` which experts it has.
    """
    found: dict[str, Sequence[int]] = {}
    for path, module in model.named_modules():
        owned = getattr(module, "owned", None)
        if isinstance(owned, range | tuple):
            found |= {f"{path}.{name}" if path else name: owned for name in stacks_of(module)}
    return found


def take_own(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """From a checkpoint of all experts, those of this rank."""
    owned: Sequence[int] = getattr(module, "owned", ())
    num_experts: int = getattr(module, "num_experts", 0)
    cuts: Mapping[str, Cut] = getattr(module, "cuts", {})
    index, shards = getattr(module, "shard", (0, 1))
    if shards == 1 and list(owned) == list(range(num_experts)):
        return  # all of them, perhaps as DTensors
    for name, stack in stacks_of(module).items():
        parameter, whole = module.get_parameter(name), state.get(prefix + name)
        cut = cuts[stack] if shards > 1 else Cut(dim=1)
        expected = cut.resized(parameter.shape, num_experts, shards)
        if isinstance(whole, Tensor) and parameter.dim() > 1 and whole.shape == expected:
            state[prefix + name] = cut.slice_of(whole[[max(0, expert) for expert in owned]], index, shards)
