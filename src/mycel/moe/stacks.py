"""Stacked parameters cut into the experts of a rank, put together again, and what follows: states and norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mycel.comm.messages import all_gather_single
from mycel.errors import UsageError
from mycel.moe.slices import Cut

__all__ = ["gather_stack", "keep_own", "require_no_graph"]

#: Key under which a node of the graph is marked.
_MARK = "mycel"


def _rows_of(stacked: Tensor, held: Sequence[int]) -> Tensor:
    """A copy of some experts; an expert below 0 is an empty slot, of zeros."""
    rows = stacked.new_zeros(len(held), *stacked.shape[1:])
    for slot, expert in enumerate(held):
        if expert >= 0:
            rows[slot].copy_(stacked[expert])
    return rows


def require_no_graph(experts: nn.Module, path: str) -> None:
    """Refuse to divide parameters that an earlier forward pass still holds.

    Autograd keeps, with a graph, where each parameter's gradient goes, and of which shape: that of the whole stack. A
    later backward pass would fail there, with a message that speaks of neither.

    Raises:
        UsageError: the graph of an earlier pass is alive.
    """
    for name, parameter in experts.named_parameters(recurse=False):
        if parameter.requires_grad and _is_in_a_graph(parameter):
            raise UsageError(
                f"{path}.{name}: the graph of an earlier forward pass is alive, and knows the experts undivided; run "
                "that pass under torch.no_grad(), or let go of what it returned before apply"
            )


def _is_in_a_graph(parameter: nn.Parameter) -> bool:
    """Whether somebody holds where the parameter's gradients go: what is written on it is still there."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        if parameter.is_inference():  # made where no graphs are, and never in one
            return False
        mark = object()
        _accumulator(parameter).metadata[_MARK] = mark
        return _accumulator(parameter).metadata.pop(_MARK, None) is mark


def _accumulator(parameter: nn.Parameter) -> Any:
    node: Any = parameter.view_as(parameter).grad_fn
    return node.next_functions[0][0]


@torch.no_grad()
def keep_own(experts: nn.Module, held: Sequence[int], cuts: Mapping[str, Cut], shard: tuple[int, int]) -> None:
    """Leave a module's parameters with slices of some experts; they stay the objects they are, for optimizers."""
    for name, parameter in experts.named_parameters(recurse=False):
        gradient, parameter.grad = parameter.grad, None
        parameter.data = cuts[name].slice_of(_rows_of(parameter.data, held), *shard).contiguous()
        own = None if gradient is None else cuts[name].slice_of(_rows_of(gradient, held), *shard).contiguous()
        parameter.grad = own


@torch.no_grad()
def gather_stack(experts: Any, name: str, stacked: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All experts of a layer, whole, on every rank, bit for bit.

    Args:
        experts: a divided module.
        name: of the parameter there.
        stacked: what this rank has of it.
        group: the ranks that share the layer.
    """
    held, (index, shards) = experts.owned, experts.shard
    size = dist.get_world_size(group)
    lengths = torch.empty(size, dtype=torch.int64, device=stacked.device)
    all_gather_single(lengths, lengths.new_tensor([len(held)]), group=group)
    width = int(lengths.max())
    numbers = lengths.new_full((width,), -1)  # of an expert and its slice
    numbers[: len(held)] = lengths.new_tensor([e * shards + index if e >= 0 else -1 for e in held])
    all_numbers = lengths.new_empty(size * width)
    all_gather_single(all_numbers, numbers, group=group)
    # As bytes: no backend has an opinion on those.
    rows = stacked.new_zeros(width, *stacked.shape[1:])
    rows[: len(held)].copy_(stacked)
    all_rows = stacked.new_empty(size * width, *stacked.shape[1:])
    all_gather_single(_bytes_of(all_rows), _bytes_of(rows), group=group)
    slices = [stacked.new_empty(experts.num_experts, *stacked.shape[1:]) for _ in range(shards)]
    for row, number in enumerate(all_numbers.tolist()):
        if number >= 0:
            slices[number % shards][number // shards].copy_(all_rows[row])
    return slices[0] if shards == 1 else experts.cuts[name].join(slices)


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.view(-1).view(torch.uint8)
