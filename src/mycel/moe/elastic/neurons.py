"""The neurons inside a layer's experts: where each one's weights lie, put in another order, cut to a prefix."""

# ruff: noqa: N803  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mycel.errors import UsageError
from mycel.moe.divided import stacks_of
from mycel.moe.expert_mlp import ExpertWeights
from mycel.moe.sharded import is_sharded
from mycel.moe.slices import Cut

__all__ = ["Neurons", "neurons_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Neurons:
    """How a layer's stacked parameters are made of neurons.

    A neuron is a row of the first map, or a gate's and an up's, and a column of the second.

    Attributes:
        count: inside an expert, ``F``.
        blocks: rows of the first map a neuron: 2 with gates, else 1.
        interleaved: each gate has its up beside it; else all gates come first.
        names: of the stacked parameters: first map, second map, first bias where there is one.
        cuts: of each of these, along which dimension its neurons are.
    """

    count: int
    blocks: int
    interleaved: bool
    names: tuple[str, ...]
    cuts: tuple[Cut, ...]

    def apart(self, stacked: Tensor, dim: int, blocks: int) -> Tensor:
        """The dimension of rows as two: neurons, and a neuron's rows; in the order they have in memory."""
        inner = (self.count, blocks) if self.interleaved else (blocks, self.count)
        return stacked.reshape(*stacked.shape[:dim], *inner, *stacked.shape[dim + 1 :])

    def neuron_dim(self, dim: int) -> int:
        """Of what ``apart`` gives, the dimension of neurons."""
        return dim if self.interleaved else dim + 1

    def prefix(self, stacked: Tensor, width: int, *, dim: int, blocks: int) -> Tensor:
        """The first ``width`` neurons of a stacked parameter.

        Args:
            stacked: experts first.
            width: neurons kept.
            dim: that has the rows.
            blocks: rows a neuron.
        """
        if blocks == 1:
            return stacked.narrow(dim, 0, width)
        kept = self.apart(stacked, dim, blocks).narrow(self.neuron_dim(dim), 0, width)
        return kept.flatten(dim, dim + 1)

    def narrowed(self, whole: ExpertWeights, width: int) -> ExpertWeights:
        """Weights of a call with only the first neurons.

        Args:
            whole: with all of them, matrices ``[E, out, in]``.
            width: neurons kept.
        """
        bias = whole.gate_up_bias
        return ExpertWeights(
            self.prefix(whole.gate_up, width, dim=1, blocks=self.blocks),
            self.prefix(whole.down, width, dim=2, blocks=1),
            None if bias is None else self.prefix(bias, width, dim=1, blocks=self.blocks),
            whole.down_bias,
        )

    def reorder(self, experts: nn.Module, order_EF: Tensor) -> None:
        """Put the neurons of a module's experts in an order, in place.

        Args:
            experts: the module with the stacked parameters.
            order_EF: for each expert here, which neuron comes at each place.
        """
        for name, cut in zip(self.names, self.cuts, strict=True):
            parameter = experts.get_parameter(name)
            blocks = parameter.shape[cut.dim] // self.count
            data = parameter.data if blocks == 1 else self.apart(parameter.data, cut.dim, blocks)
            dim = cut.dim if blocks == 1 else self.neuron_dim(cut.dim)
            shape = [1] * data.dim()
            shape[0], shape[dim] = order_EF.shape
            sorted_ = torch.take_along_dim(data, order_EF.to(data.device).view(shape), dim=dim)
            parameter.data.copy_(sorted_ if blocks == 1 else sorted_.flatten(cut.dim, cut.dim + 1))


def neurons_of(experts: Any, path: str) -> Neurons:
    """Of a layer's experts, ours or those of Hugging Face under ``mycel.moe.apply``.

    Args:
        experts: the module with stacked parameters.
        path: for messages.

    Raises:
        UsageError: they are slices of experts or shards, or it is not known which gate each up belongs to.
    """
    holder = getattr(experts, "mycel_experts", experts)
    stacks = {stack: name for name, stack in stacks_of(experts).items()}
    cuts: dict[str, Cut] = dict(holder.cuts)
    if getattr(experts, "shard", (0, 1))[1] > 1:
        raise UsageError(
            f"{path}: this rank has slices of experts; elastic widths are for whole ones: tensor_shards=1"
        )
    if any(is_sharded(experts.get_parameter(name)) for name in stacks.values()):
        raise UsageError(f"{path}: FSDP2 shards these experts; make them elastic first, or divide experts instead")
    first, second, *biases = [stack for stack in holder.cuts if stack in stacks]
    count = experts.get_parameter(stacks[second]).shape[cuts[second].dim]
    blocks, rest = divmod(experts.get_parameter(stacks[first]).shape[cuts[first].dim], count)
    if rest or blocks > 2 or (blocks == 2 and not getattr(holder, "knows_gates", True)):
        raise UsageError(f"{path}: it is not known which rows of {first} belong to one neuron")
    own = [first, second, *biases[:1]]
    return Neurons(
        count=count,
        blocks=blocks,
        interleaved=blocks == 2 and cuts[first].blocks == 1,
        names=tuple(stacks[stack] for stack in own),
        cuts=tuple(cuts[stack] for stack in own),
    )
