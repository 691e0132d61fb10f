"""Collectives with gradients, each metered under a name that the caller gives, and ``NAME.backward`` on the way back.

Exchanges of rows can be under way while something else is computed: ``start_exchange`` gives what
to wait for. In the graph such an exchange is two nodes, start and wait. Backward, the second begins the exchange back
and the first waits for it, so that what overlaps on the way there overlaps on the way back as well.
"""

# ruff: noqa: N803  (the shape suffixes are capitals on purpose)
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm.messages import all_gather_single, reduce_scatter_single
from mycel.comm.meter import ByteMeter
from mycel.comm.nodes import planned_group
from mycel.comm.pending import Pending, communicate
from mycel.wire import WireCodec

__all__ = [
    "all_gather_rows",
    "copy_to_ranks",
    "reduce_scatter_rows",
    "start_counts",
    "start_exchange",
    "start_permute",
    "start_swap",
    "sum_over_ranks",
    "there_and_back",
]


def start_counts(counts_WE: Tensor, group: dist.ProcessGroup, meter: ByteMeter) -> Pending[Tensor]:
    """Row ``r`` goes to rank ``r``; what arrives has shape and type of ``counts``."""

    def launch() -> Pending[Tensor]:
        received = torch.empty_like(counts_WE, memory_format=torch.contiguous_format)
        work = dist.all_to_all_single(received, counts_WE.contiguous(), group=group, async_op=True)
        meter.add_even("counts", counts_WE[0].numel() * counts_WE.element_size(), group)
        return _brought(received, work)

    return communicate(launch)


def start_swap(
    rows: Tensor, gets: Sequence[int], gives: Sequence[int], group: dist.ProcessGroup, meter: ByteMeter, name: str
) -> Pending[Tensor]:
    """Uneven exchange of rows, without gradients."""

    def launch() -> Pending[Tensor]:
        sent = rows.contiguous()
        received = sent.new_empty(sum(gets), *sent.shape[1:])
        work = dist.all_to_all_single(received, sent, list(gets), list(gives), group=group, async_op=True)
        row_bytes = sent[:1].numel() * sent.element_size() if sent.shape[0] else 0
        meter.add(name, [rows_to * row_bytes for rows_to in gives], group)
        return _brought(received, work)

    return communicate(launch)


def start_permute(
    rows: Tensor,
    targets: Sequence[int | None],
    lengths: Sequence[int],
    group: dist.ProcessGroup,
    meter: ByteMeter,
    name: str,
) -> Pending[Tensor]:
    """Rows from each rank to one other, without gradients; how many, all ranks know.

    Over mycel's own groups they go over all links that can help, else as an uneven exchange.

    Args:
        rows: of this rank; of the same width on all.
        targets: of each rank the one that gets its rows; ``None``: none does.
        lengths: rows of each rank.
        group: the ranks.
        meter: counts what this rank gives, not what it relays.
        name: of the exchange.
    """
    own, size = group.rank(), group.size()
    source = next((rank for rank, target in enumerate(targets) if target == own and rank != own), None)
    gives = [lengths[own] if targets[own] == rank and rank != own else 0 for rank in range(size)]
    gets = [lengths[rank] if rank == source else 0 for rank in range(size)]
    if not rows.is_cpu or (planned := planned_group(group)) is None:
        return start_swap(rows, gets, gives, group, meter, name)

    def launch() -> Pending[Tensor]:
        sent = rows.contiguous()
        received = sent.new_empty(sum(gets), *sent.shape[1:])
        width = math.prod(sent.shape[1:])
        work = planned.permute(received, sent, targets, [length * width for length in lengths])
        meter.add(name, [rows_to * width * sent.element_size() for rows_to in gives], group)
        return _brought(received, work)

    return communicate(launch)


def _brought(received: Tensor, work: dist.Work) -> Pending[Tensor]:
    def finish() -> Tensor:
        work.wait()
        return received

    return Pending(finish)


def start_exchange(
    tensors: Sequence[Tensor],
    codecs: Sequence[WireCodec],
    *,
    gets: Sequence[int],
    gives: Sequence[int],
    group: dist.ProcessGroup,
    meter: ByteMeter,
    name: str,
) -> Pending[tuple[Tensor, ...]]:
    """Rows of several tensors to the ranks of a group, with gradients.

    One node of the autograd graph for all tensors, so that their exchanges back come in one order on every rank.

    Args:
        tensors: of equally many rows, sorted by the rank they go to.
        codecs: of each tensor.
        gets: rows from each rank.
        gives: rows to each rank.
        group: the ranks.
        meter: counts the bytes, as ``name`` and ``name.backward``.
        name: of the exchange.

    Returns:
        What arrives, in the order of the tensors sent.
    """
    flight = _Flight((list(gets), list(gives), group, meter, name, list(codecs)), [t.requires_grad for t in tensors])
    kinds = [(t.shape[-1], t.dtype) for t in tensors]
    started: tuple[Tensor, ...] = _Node.apply(  # type: ignore[no-untyped-call]
        partial(flight.launch, back=False), lambda grads, needed: flight.land(kinds, back=True), *tensors
    )

    def finish() -> tuple[Tensor, ...]:
        arrived: tuple[Tensor, ...] = _Node.apply(  # type: ignore[no-untyped-call]
            lambda xs: flight.land(kinds, back=False), lambda grads, needed: flight.launch(grads, back=True), *started
        )
        return arrived

    return Pending(finish)


#: Rows from and to each rank, the ranks, what counts the bytes, its name for them, codecs.
_Route = tuple[list[int], list[int], dist.ProcessGroup, ByteMeter, str, list[WireCodec]]

#: Width and type of rows.
_Kind = tuple[int, torch.dtype]


class _Flight:
    """What the two nodes of an exchange share.

    Between them stand expanded zeros of the right shape: rows are not there yet, and may have another type.
    """

    def __init__(self, route: _Route, needed: list[bool]) -> None:
        self.route = route
        self.needed = needed
        self.under_way: list[Pending[Tensor] | None] = []

    def launch(self, tensors: Sequence[Tensor], *, back: bool) -> tuple[Tensor | None, ...]:
        gets, gives, group, meter, name, codecs = self.route
        if back:
            gets, gives, name = gives, gets, f"{name}.backward"
        self.under_way = [
            start_swap(codec.encode(rows, gradient=back), gets, gives, group, meter, name)
            if needed or not back
            else None
            for rows, codec, needed in zip(tensors, codecs, self.needed, strict=True)
        ]
        return tuple(
            None
            if pending is None
            else rows.new_zeros(()).expand(rows.shape[0] if back else sum(gets), *rows.shape[1:])
            for rows, pending in zip(tensors, self.under_way, strict=True)
        )

    def land(self, kinds: Sequence[_Kind], *, back: bool) -> tuple[Tensor | None, ...]:
        codecs, under_way, self.under_way = self.route[5], self.under_way, []
        return tuple(
            None if pending is None else codec.decode(pending.wait(), *kind, gradient=back)
            for pending, codec, kind in zip(under_way, codecs, kinds, strict=True)
        )


class _Node(torch.autograd.Function):
    """One node of the graph: what is done with tensors, and with the gradients of what comes of them."""

    @staticmethod
    def forward(there: Any, back: Any, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        moved: tuple[Tensor | None, ...] = there(tensors)
        return moved

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.back = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *ctx.back(grads, ctx.needs_input_grad[2:])


#: What is done with one tensor: gives a new one.
_Move = Callable[[Tensor], Tensor]


def there_and_back(tensors: Sequence[Tensor], there: _Move, back: _Move) -> tuple[Tensor, ...]:
    """Tensors moved in one way, and their gradients in another, which is its adjoint.

    One node of the graph for all of them, so that collectives come in one order on every rank, on the way back too.

    Args:
        tensors: what is moved.
        there: of each tensor; gives a new one, or a view of it.
        back: of the gradient of each tensor that needs one.
    """

    def moved_back(grads: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
        return [back(g) if n else None for g, n in zip(grads, needed, strict=True)]

    moved: tuple[Tensor, ...] = _Node.apply(  # type: ignore[no-untyped-call]
        lambda xs: tuple(there(x) for x in xs), moved_back, *tensors
    )
    return moved


def _gather(x: Tensor, group: dist.ProcessGroup, meter: ByteMeter, name: str) -> Tensor:
    def launch() -> Pending[Tensor]:
        gathered = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
        all_gather_single(gathered, x.contiguous(), group=group)
        meter.add_even(name, x.numel() * x.element_size(), group)
        return Pending.done(gathered)

    return communicate(launch).wait()


def _scatter(x: Tensor, group: dist.ProcessGroup, meter: ByteMeter, name: str) -> Tensor:
    def launch() -> Pending[Tensor]:
        scattered = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
        reduce_scatter_single(scattered, x.contiguous(), group=group)
        meter.add_even(name, scattered.numel() * scattered.element_size(), group)
        return Pending.done(scattered)

    return communicate(launch).wait()


def _reduce(x: Tensor, group: dist.ProcessGroup, meter: ByteMeter, name: str) -> Tensor:
    def launch() -> Pending[Tensor]:
        summed = x.contiguous().clone()
        dist.all_reduce(summed, group=group)
        meter.add_even(name, 2 * x.numel() * x.element_size() // dist.get_world_size(group), group)
        return Pending.done(summed)

    return communicate(launch).wait()


def all_gather_rows(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, meter: ByteMeter, name: str
) -> tuple[Tensor, ...]:
    """Equally many rows of every rank, those of rank 0 first; gradients are added up over ranks."""
    return there_and_back(
        tensors,
        partial(_gather, group=group, meter=meter, name=name),
        partial(_scatter, group=group, meter=meter, name=f"{name}.backward"),
    )


def reduce_scatter_rows(x: Tensor, group: dist.ProcessGroup, meter: ByteMeter, name: str) -> Tensor:
    """The ranks' sum of each rank's rows, on that rank; gradients are gathered."""
    (scattered,) = there_and_back(
        [x],
        partial(_scatter, group=group, meter=meter, name=name),
        partial(_gather, group=group, meter=meter, name=f"{name}.backward"),
    )
    return scattered


def copy_to_ranks(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, meter: ByteMeter, name: str
) -> tuple[Tensor, ...]:
    """Identity on tensors that all ranks have alike; gradients, of which each rank has a part, are added up."""
    back = partial(_reduce, group=group, meter=meter, name=f"{name}.backward")
    return there_and_back(tensors, lambda x: x.view_as(x), back)


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup, meter: ByteMeter, name: str) -> Tensor:
    """The ranks' sum on all of them; the gradient, which all have alike, passes as it is."""
    (summed,) = there_and_back([x], partial(_reduce, group=group, meter=meter, name=name), lambda gradient: gradient)
    return summed
