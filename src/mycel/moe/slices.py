"""From stacked parameters to the weights of a call: how they are cut and put together, and their gradients back."""

# ruff: noqa: N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm.messages import all_gather_single, reduce_scatter_single
from mycel.comm.meter import ByteMeter
from mycel.comm.pending import Pending, communicate
from mycel.moe.expert_mlp import ExpertWeights
from mycel.planning.placement import ExpertLayout

__all__ = ["Cut", "WeightGather", "WeightUse", "call_weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Along which dimension a stacked parameter is divided.

    Attributes:
        dim: of the parameter; 0 is that of experts.
        blocks: parts of that dimension of which every slice has its share: 2 for gates followed by ups.
    """

    dim: int
    blocks: int = 1

    def slice_of(self, whole: Tensor, index: int, shards: int) -> Tensor:
        """One of ``shards`` equal slices."""
        if shards == 1:
            return whole
        shape = whole.shape
        width = shape[self.dim] // (self.blocks * shards)
        apart = whole.reshape(*shape[: self.dim], self.blocks, shards, width, *shape[self.dim + 1 :])
        taken = apart.select(self.dim + 1, index)
        return taken.reshape(*shape[: self.dim], self.blocks * width, *shape[self.dim + 1 :])

    def join(self, slices: Sequence[Tensor]) -> Tensor:
        """All slices, in order, to the whole again: undoes ``slice_of`` bit for bit."""
        shape, dim = slices[0].shape, self.dim
        apart = [s.reshape(*shape[:dim], self.blocks, shape[dim] // self.blocks, *shape[dim + 1 :]) for s in slices]
        return torch.cat(apart, dim=dim + 1).reshape(*shape[:dim], shape[dim] * len(slices), *shape[dim + 1 :])

    def split(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Numbers of one expert before the divided width, that width in one block, and numbers after it."""
        outer = math.prod(shape[1 : self.dim]) * self.blocks
        return outer, shape[self.dim] // self.blocks, math.prod(shape[self.dim + 1 :])

    def resized(self, shape: Sequence[int], num_experts: int, members: int) -> tuple[int, ...]:
        """Shape of so many experts with so many slices."""
        return (num_experts, *shape[1 : self.dim], shape[self.dim] * members, *shape[self.dim + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGather:
    """For one rank and one ``r``: an all_gather of all parameters at once; gradients come back by a reduce_scatter.

    Attributes:
        layout: where experts lie.
        rank: in the layout.
        r: below the number of shards.
        group: the layout's ``members``.
        meter: counts the bytes, as ``weights`` and ``weights.backward``.
    """

    layout: ExpertLayout
    rank: int
    r: int
    group: dist.ProcessGroup
    meter: ByteMeter

    @property
    def teams(self) -> int:
        """Teams whose experts are put together."""
        return self.layout.num_teams if self.r == 0 else 1

    def __call__(self, slices: Sequence[Tensor], cuts: Sequence[Cut]) -> tuple[Tensor, ...]:
        """Parameters with the slices of all members; with ``r = 0``, of all experts.

        Args:
            slices: of this rank, experts first.
            cuts: how each is divided.
        """
        gathered: tuple[Tensor, ...] = _Gather.apply(self, tuple(cuts), *slices)  # type: ignore[no-untyped-call]
        return gathered

    def together(self, slices: Sequence[Tensor], cuts: Sequence[Cut]) -> tuple[Tensor, ...]:
        """``__call__`` without gradients."""
        width, size, teams = self.layout.width, dist.get_world_size(self.group), self.teams
        flat = [torch.cat([s, s.new_zeros(width - s.shape[0], *s.shape[1:])]).reshape(-1) for s in slices]

        def launch() -> Pending[Tensor]:
            own = torch.cat(flat)
            everything = own.new_empty(size * own.numel())
            all_gather_single(everything, own, group=self.group)
            self.meter.add_even("weights", own.numel() * own.element_size(), self.group)
            return Pending.done(everything)

        parts = torch.split(communicate(launch).wait().view(size, -1), [f.numel() for f in flat], dim=1)
        num_experts = self.layout.num_experts if self.r == 0 else slices[0].shape[0]
        wholes = []
        for part, s, cut in zip(parts, slices, cuts, strict=True):
            outer, F, inner = cut.split(s.shape)
            by_member = part.reshape(teams, size // teams, width, outer, F, inner)
            by_expert = by_member.permute(0, 2, 3, 1, 4, 5)
            wholes.append(by_expert.reshape(cut.resized(s.shape, teams * width, size // teams))[:num_experts])
        return tuple(wholes)

    def apart(self, grads: Sequence[Tensor], cuts: Sequence[Cut], shapes: Sequence[torch.Size]) -> list[Tensor]:
        """The sum over members of their gradients of this rank's slices."""
        width, size, teams = self.layout.width, dist.get_world_size(self.group), self.teams
        flat = []
        for grad, cut, shape in zip(grads, cuts, shapes, strict=True):
            outer, F, inner = cut.split(shape)
            missing = grad.new_zeros(teams * width - grad.shape[0], *grad.shape[1:])
            by_expert = torch.cat([grad, missing]).reshape(teams, width, outer, size // teams, F, inner)
            flat.append(by_expert.permute(0, 3, 1, 2, 4, 5).reshape(size, -1))
        everything = torch.cat(flat, dim=1)
        own = everything.new_empty(everything.shape[1])
        reduce_scatter_single(own, everything.view(-1), group=self.group)
        self.meter.add_even("weights.backward", own.numel() * own.element_size(), self.group)
        parts = torch.split(own, [f.shape[1] for f in flat])
        return [part.view(width, *shape[1:])[: shape[0]] for part, shape in zip(parts, shapes, strict=True)]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(gather: WeightGather, cuts: tuple[Cut, ...], *slices: Tensor) -> tuple[Tensor, ...]:
        return gather.together(slices, cuts)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.gather, ctx.cuts = inputs[:2]
        ctx.shapes = [s.shape for s in inputs[2:]]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *ctx.gather.apart(grads, ctx.cuts, ctx.shapes)


class WeightUse(NamedTuple):
    """How one call uses the weights of its experts.

    Attributes:
        dtype: to compute in.
        gradient_scale: factor of the parameters' gradients.
        gather: brings slices of other ranks.
        tie: where several ranks hold an expert, what gives their parameters one gradient.
    """

    dtype: torch.dtype
    gradient_scale: float = 1.0
    gather: WeightGather | None = None
    tie: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = None


def call_weights(
    stacked: Mapping[str, Tensor],
    cuts: Mapping[str, Cut],
    use: WeightUse,
    *,
    shard: tuple[int, int] = (0, 1),
    transposed: bool = False,
) -> ExpertWeights:
    """Stacked parameters as a call uses them; ours and those of foreign models alike.

    Args:
        stacked: the first map, the second, and their biases if there are any.
        cuts: of each.
        use: of the call.
        shard: which slice is here, of how many.
        transposed: matrices are stored ``[in, out]``.
    """
    tied = list(stacked.values()) if use.tie is None else use.tie(list(stacked.values()))
    used = [_ScaledGradient.apply(t, use.gradient_scale).to(use.dtype) for t in tied]  # type: ignore[no-untyped-call]
    if use.gather is not None:
        used = list(use.gather(used, [cuts[name] for name in stacked]))
    gate_up, down, *biases = used
    if transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    if not biases:
        return ExpertWeights(gate_up, down)
    down_bias, width = biases[1], down.shape[1]
    if down_bias.shape[1] < width:  # other members of the party add the rest
        index, shards = shard
        party = shards if use.gather is None else use.gather.r
        parts = down_bias.new_zeros(down_bias.shape[0], shards, width // shards)
        parts[:, index % party :: party] = down_bias.view(down_bias.shape[0], shards // party, -1)
        down_bias = parts.view(down_bias.shape[0], width)
    return ExpertWeights(gate_up, down, biases[0], down_bias)


class _ScaledGradient(torch.autograd.Function):
    """Identity whose gradient has a factor."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (grads[0] if ctx.factor == 1.0 else grads[0] * ctx.factor), None
