"""The experts themselves: stacked parameters, SwiGLU or a plain two-layer network, on rows sorted by expert."""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mycel.brief import brief
from mycel.errors import UsageError
from mycel.moe.activations import activation as activation_named
from mycel.moe.flex.weights import Cut, WeightGather
from mycel.moe.grouped import grouped_linear
from mycel.moe.kernels import fused
from mycel.moe.kernels.choice import triton_takes
from mycel.moe.routing import RoutingResult, narrow

__all__ = [
    "Compute",
    "ExpertWeights",
    "Experts",
    "SharedExpert",
    "UsedExperts",
    "Work",
    "bias_of_rows",
    "compute_dtype",
    "group_of_rows",
    "parameters_of_experts",
    "scaled_gradient",
    "take_own",
]


class ExpertWeights(NamedTuple):
    """Parameters as one call uses them: ``gate_up_proj``, ``down_proj`` and their biases, if there are any."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    def __repr__(self) -> str:
        return brief(self)

    def split(self, parts: Sequence[range]) -> list[ExpertWeights]:
        """Those of consecutive experts each; experts that are not there are left out."""
        if len(parts) < 2:
            return [self]
        here = self.gate_up.shape[0]
        sizes = [min(part.stop, here) - min(part.start, here) for part in parts]
        each = [[None] * len(parts) if t is None else torch.split(t, sizes) for t in self]
        return [ExpertWeights(*part) for part in zip(*each, strict=True)]


#: Rows sorted by expert and each expert's number of rows, to rows.
Compute = Callable[[Tensor, Tensor], Tensor]

#: Something done with experts: tokens, and for each part of the experts its ``Compute``, to what comes out.
Work = Callable[[Tensor, Sequence[Compute]], Tensor]


class Experts(nn.Module):
    """The experts that one rank holds.

    Parameters are stacked as Hugging Face stacks them: ``gate_up_proj [E, 2F, D]`` (gates first; ``[E, F, D]``
    without a gate), ``down_proj [E, D, F]``, biases ``[E, 2F]`` and ``[E, D]``. The values of expert ``e`` of the
    layer follow from torch's seed and ``e`` alone, so that every division over ranks begins with the same model.

    Args:
        dim: D, width of tokens.
        hidden: F, width inside an expert.
        num_experts: in the whole layer.
        owned: which of them are here, one a place; a negative number is a place without an expert.
        shard: which slice of each is here, of how many: columns of ``F``, and of the last bias, of ``D``.
        activation: a key of ``mycel.moe.activations.ACTIVATIONS``.
        bias: both maps add a vector.
        device, dtype: of the parameters.

    Raises:
        UsageError: an unknown activation, sizes below 1, or slices that are not equal.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        *,
        owned: Sequence[int] | None = None,
        shard: tuple[int, int] = (0, 1),
        activation: str = "swiglu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if min(dim, hidden, num_experts) < 1:
            raise UsageError(f"experts: dim {dim}, hidden {hidden}, {num_experts} experts; all must be at least 1")
        wide, self._act = activation_named(activation)
        self.activation = activation
        self.dim, self.hidden, self.num_experts = dim, hidden, num_experts
        self.owned: Sequence[int] = range(num_experts) if owned is None else owned
        #: Where several ranks hold an expert: what gives their parameters one gradient.
        self.tie: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = None
        self.shard = shard
        #: The ranks that have the other slices.
        self.team: Callable[[], DeviceMesh] | None = None
        shards = shard[1]
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
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(take_own)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw weights anew: normal, ``1/sqrt(fan in)``; biases zero. Nothing on the meta device."""
        seed = int(torch.randint(2**31, ()))
        index, shards = self.shard
        for name in ("gate_up_proj", "down_proj"):
            weight, cut = self.get_parameter(name), self.cuts[name]
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
        for bias in (self.gate_up_bias, self.down_bias):
            if bias is not None:
                bias.zero_()

    def forward(
        self,
        rows_RD: Tensor,
        counts_E: Tensor | Work,
        *,
        gradient_scale: float = 1.0,
        gather: WeightGather | None = None,
        parts: Sequence[range] = (),
    ) -> Tensor:
        """Every row through its expert.

        Args:
            rows_RD: sorted by expert.
            counts_E: rows of each expert here, ``int64``; or work to be done with the experts, to which ``rows_RD``
                are handed as they are.
            gradient_scale: factor of the parameters' gradients, not of the rows'.
            gather: brings slices of other ranks.
            parts: of the experts, for work that wants them apart; one after the other.

        Returns:
            Shape ``[R, D]``; rows after the last expert's are zero. Of work, what comes out.
        """
        weights = self.weights(compute_dtype(rows_RD), gradient_scale, gather)
        if isinstance(counts_E, Tensor):
            return self.compute(weights, rows_RD, counts_E)
        return counts_E(rows_RD, [UsedExperts(self, part) for part in weights.split(parts)])

    def weights(
        self, dtype: torch.dtype, gradient_scale: float = 1.0, gather: WeightGather | None = None
    ) -> ExpertWeights:
        """Parameters for a call, in its type.

        Args:
            dtype: to compute in.
            gradient_scale: factor of the parameters' gradients.
            gather: brings slices of other ranks.
        """
        names = [name for name in self.cuts if getattr(self, name) is not None]
        stacked: Sequence[Tensor] = [self.get_parameter(name) for name in names]
        if self.tie is not None:
            stacked = self.tie(stacked)
        used = [scaled_gradient(parameter, gradient_scale).to(dtype) for parameter in stacked]
        if gather is not None:
            used = list(gather(used, [self.cuts[name] for name in names]))
        gate_up, down, *biases = used
        if not biases:
            return ExpertWeights(gate_up, down, None, None)
        down_bias = biases[1]
        if down_bias.shape[1] < self.dim:  # other members of the party add the rest
            index, shards = self.shard
            party = shards if gather is None else gather.r
            parts = down_bias.new_zeros(down_bias.shape[0], shards, self.dim // shards)
            parts[:, index % party :: party] = down_bias.view(down_bias.shape[0], shards // party, -1)
            down_bias = parts.view(down_bias.shape[0], self.dim)
        return ExpertWeights(gate_up, down, biases[0], down_bias)

    def compute(self, weights: ExpertWeights, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """``forward`` with given weights; counts of experts that are not there are zero, and left out."""
        counts_E = counts_E[: weights.gate_up.shape[0]]
        if self._fused(weights):
            rows_RD = rows_RD.to(weights.gate_up.dtype)
            return fused.experts_of_rows(rows_RD, counts_E, weights.gate_up, weights.down, self.activation)
        with torch.autocast(rows_RD.device.type, enabled=False):
            z_RF = grouped_linear(rows_RD.to(weights.gate_up.dtype), weights.gate_up, counts_E)
            if weights.gate_up_bias is None or weights.down_bias is None:
                return grouped_linear(self._act(z_RF), weights.down, counts_E)
            group_R = group_of_rows(counts_E, rows_RD.shape[0])
            z_RF = z_RF + bias_of_rows(weights.gate_up_bias, group_R)
            y_RD = grouped_linear(self._act(z_RF), weights.down, counts_E)
            return y_RD + bias_of_rows(weights.down_bias, group_R)

    def compute_tokens(self, weights: ExpertWeights, x_TD: Tensor, routing: RoutingResult) -> Tensor | None:
        """Tokens whose experts are all here to their weighted sums, at once; ``None`` where that is not one node."""
        if not self._fused(weights):
            return None
        num_rows = None
        if not routing.full and not torch.compiler.is_compiling():
            routing, num_rows = narrow(routing)
        order = fused.sort_slots(routing.top_k_index, routing.num_experts, full=routing.full)
        order = order._replace(
            slot_of_row=order.slot_of_row[:num_rows], counts=order.counts[: weights.gate_up.shape[0]]
        )
        x_TD = x_TD.to(weights.gate_up.dtype)
        arguments = (routing.top_k_weights, weights.gate_up, weights.down, self.activation)
        return fused.experts_of_tokens(x_TD, order, *arguments)

    def _fused(self, weights: ExpertWeights) -> bool:
        """Whether both maps and the activation are one node of the graph: on GPUs, and wherever Triton computes."""
        known = self.activation in fused.ACTIVATIONS and weights.gate_up_bias is None
        return known and (weights.gate_up.is_cuda or triton_takes(weights.gate_up))

    def extra_repr(self) -> str:
        """Sizes, for ``print``."""
        here = "" if len(self.owned) == self.num_experts else f", here {', '.join(str(e) for e in self.owned)}"
        return f"dim={self.dim}, hidden={self.hidden}, num_experts={self.num_experts}{here}"


class UsedExperts:
    """Experts with a call's weights: a ``Compute``.

    Args:
        experts: which.
        weights: of this call.
    """

    def __init__(self, experts: Experts, weights: ExpertWeights) -> None:
        self.experts, self.weights = experts, weights

    def __call__(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Rows sorted by expert to rows."""
        return self.experts.compute(self.weights, rows_RD, counts_E)

    def of_tokens(self, x_TD: Tensor, routing: RoutingResult) -> Tensor | None:
        """``Experts.compute_tokens``."""
        return self.experts.compute_tokens(self.weights, x_TD, routing)


class SharedExpert(nn.Module):
    """One network that every token passes, beside the experts it is routed to.

    Args:
        dim: width of tokens.
        hidden: width inside.
        activation: a key of ``mycel.moe.activations.ACTIVATIONS``.
        bias: both maps add a vector.
        device, dtype: of the parameters.
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
            names = (name for name, _ in module.named_parameters(recurse=False))
            found |= {f"{path}.{name}" if path else name: owned for name in names}
    return found


def take_own(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """From a checkpoint of all experts, those of this rank."""
    owned: Sequence[int] = getattr(module, "owned", ())
    num_experts: int = getattr(module, "num_experts", 0)
    cuts: Mapping[str, Cut] = getattr(module, "cuts", {})
    index, shards = getattr(module, "shard", (0, 1))
    if shards == 1 and list(owned) == list(range(num_experts)):
        return  # all of them, perhaps as DTensors
    for name, parameter in module.named_parameters(recurse=False):
        whole = state.get(prefix + name)
        cut = cuts[name] if shards > 1 else Cut(dim=1)
        expected = cut.resized(parameter.shape, num_experts, shards)
        if isinstance(whole, Tensor) and parameter.dim() > 1 and whole.shape == expected:
            state[prefix + name] = cut.slice_of(whole[[max(0, expert) for expert in owned]], index, shards)


def compute_dtype(rows: Tensor) -> torch.dtype:
    """The type of autocast where that is on and takes such rows, else the rows' own."""
    kind = rows.device.type
    if torch.is_autocast_enabled(kind) and rows.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return rows.dtype


def group_of_rows(counts_E: Tensor, num_rows: int) -> Tensor:
    """Expert of each row; the number of experts for rows after the last one's."""
    rows = torch.arange(num_rows, device=counts_E.device)
    return torch.searchsorted(counts_E.cumsum(0), rows, right=True)


def bias_of_rows(bias_EO: Tensor, group_R: Tensor) -> Tensor:
    """Each row's vector of its group; zeros for rows after the last group's."""
    padded = torch.cat([bias_EO, bias_EO.new_zeros(1, bias_EO.shape[1])])
    return padded.index_select(0, group_R)


def scaled_gradient(x: Tensor, factor: float) -> Tensor:
    """Identity whose gradient has a factor."""
    scaled: Tensor = _ScaledGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return scaled


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (grads[0] if ctx.factor == 1.0 else grads[0] * ctx.factor), None
