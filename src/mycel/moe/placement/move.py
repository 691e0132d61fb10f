"""Experts move: parameters and optimizer state travel to their new slots, and training goes on as if nothing were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mycel.errors import UsageError
from mycel.moe.divided import stacks_of
from mycel.moe.placement.dispatcher import PlacedDispatcher
from mycel.moe.sharded import is_sharded
from mycel.planning.placement import EMPTY, ExpertPlacement

__all__ = ["Moved", "move_experts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What a change of placement carried, over all ranks.

    Attributes:
        experts: that came to a rank which did not hold them.
        num_bytes: that this rank sent.
    """

    experts: int
    num_bytes: int


@torch.no_grad()
def move_experts(
    layer: object, placement: ExpertPlacement, optimizers: Iterable[torch.optim.Optimizer] = ()
) -> Moved:
    """Give a layer another placement, between two steps. All ranks of its mesh call this alike.

    An expert comes to its new rank from one that held it, of the same machine if there is one, with every tensor of
    optimizer state that has a row for each slot, whatever shape rows have; parameters stay the tensors they were. An
    expert that stays does not move, and one that is nowhere needed any more is overwritten or forgotten.

    Args:
        layer: made with a ``PlacedDispatcher``; or one of ``mycel.moe.apply(...).blocks``.
        placement: of as many experts, ranks and slots.
        optimizers: those that update the experts.

    Raises:
        UsageError: the layer has no placement or its experts are sharded further; the placement has other sizes; an
            expert would leave something behind, such as optimizer state that several experts share or an adapter.
    """
    dispatcher, experts = getattr(layer, "dispatcher", None), getattr(layer, "experts", None)
    if not isinstance(dispatcher, PlacedDispatcher) or not isinstance(experts, nn.Module):
        raise UsageError(f"{type(layer).__name__} was made without a PlacedDispatcher; its experts cannot move")
    stacks = list(_stacks(experts, optimizers))
    if any(is_sharded(stack) for stack in stacks):
        raise UsageError("experts that FSDP shards cannot move; shard the rest of the model only")
    before, rank, group = dispatcher.placement, dispatcher.rank, dispatcher.group
    dispatcher.replace(placement)
    arrivals = list(_arrivals(before, placement))
    own = before.slots[rank]
    rows = [
        stack.narrow(0, own.index(expert), 1)
        for _, source, expert, _ in sorted(arrivals)
        if source == rank
        for stack in stacks
    ]
    # Sorted by receiver: what goes to one rank lies together, and comes from each rank in the same order.
    sizes = [stack[0].numel() * stack.element_size() for stack in stacks]
    gives, gets = [0] * placement.num_ranks, [0] * placement.num_ranks
    for target, source, _, _ in arrivals:
        if source == rank:
            gives[target] += sum(sizes)
        if target == rank:
            gets[source] += sum(sizes)
    empty = torch.empty(0, dtype=torch.uint8, device=stacks[0].device)
    sent = torch.cat([empty, *(row.contiguous().view(torch.uint8).flatten() for row in rows)])
    received = sent.new_empty(sum(gets))
    if arrivals:
        dist.all_to_all_single(received, sent, gets, gives, group=group)
        dispatcher.meter.add("move", gives, group)
    after = placement.slots[rank]
    stay = [(place, own.index(e)) for place, e in enumerate(after) if e != EMPTY and e in own and own[place] != e]
    if stay:
        places, origins = (list(side) for side in zip(*stay, strict=True))
        for stack in stacks:
            stack[places] = stack[origins]
    begin = 0
    for target, _, _, place in sorted(arrivals):
        if target != rank:
            continue
        for stack, size in zip(stacks, sizes, strict=True):
            row = received[begin : begin + size].clone().view(stack.dtype)  # a copy is aligned
            stack[place] = row.view(stack.shape[1:])
            begin += size
    holder: Any = experts  # Experts, or a module of Hugging Face's that was given the attribute
    holder.owned = after
    return Moved(experts=len(arrivals), num_bytes=sum(gives))


def _stacks(experts: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Tensor]:
    """Every tensor with a row for each slot, in one order on all ranks."""
    parameters = dict(sorted((name, experts.get_parameter(name)) for name in stacks_of(experts)))
    slots = len(getattr(experts, "owned", ()))
    if not parameters or not slots:
        raise UsageError(
            f"{type(experts).__name__} stands in the place of the experts; take adapters away to move them"
        )
    for name, _ in experts.named_parameters():
        if name.startswith("parametrizations.") and name not in parameters:
            raise UsageError(f"{name} adapts the experts of this rank, which cannot move without it; merge it first")
    yield from parameters.values()
    for optimizer in optimizers:
        for name, parameter in parameters.items():
            for key, value in _tensors("", optimizer.state.get(parameter, {})):
                if value.dim() and value.shape[0] == slots:
                    yield value
                elif value.numel() > 1:
                    raise UsageError(
                        f"{type(optimizer).__name__} keeps {key!r} of {name} in shape {list(value.shape)}, with no "
                        f"row for each of the {slots} slots: experts cannot move with what several of them share"
                    )


def _tensors(key: str, state: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors of an optimizer's state, in one order on all ranks, also from within dictionaries and lists."""
    if isinstance(state, Tensor):
        yield key, state
    elif isinstance(state, Mapping):
        for name in sorted(state, key=str):
            yield from _tensors(f"{key}.{name}" if key else str(name), state[name])
    elif isinstance(state, list | tuple):
        for place, value in enumerate(state):
            yield from _tensors(f"{key}.{place}", value)


def _arrivals(before: ExpertPlacement, after: ExpertPlacement) -> Iterator[tuple[int, int, int, int]]:
    """Rank, the rank that sends, expert, and place on the rank, of every expert that comes to a rank."""
    machine = {rank: number for number, node in enumerate(before.machines) for rank in node}
    sending: Counter[int] = Counter()
    for target, (old, new) in enumerate(zip(before.slots, after.slots, strict=True)):
        for place, expert in enumerate(new):
            if expert == EMPTY or expert in old:
                continue
            source = min(
                before.replicas(expert), key=lambda rank: (machine[rank] != machine[target], sending[rank], rank)
            )
            sending[source] += 1
            yield target, source, expert, place
