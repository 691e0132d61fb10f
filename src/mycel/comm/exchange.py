"""Collectives with gradients, each metered: what dispatchers are made of.

Those of the all-to-all dispatchers can be under way while something else is computed: ``start_exchange`` gives what
to wait for. In the graph such an exchange is two nodes, start and wait. Backward, the second begins the exchange back
and the first waits for it, so that what overlaps on the way there overlaps on the way back as well.
"""

# ruff: noqa: N803  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm.meter import ByteMeter
from mycel.comm.pending import Pending, communicate
from mycel.wire import WireCodec

__all__ = [
    "Exchange",
    "all_gather_rows",
    "copy_to_ranks",
    "reduce_scatter_rows",
    "start_counts",
    "start_exchange",
    "start_swap",
    "sum_over_ranks",
]


def start_counts(counts_WE: Tensor, group: dist.ProcessGroup, meter: ByteMeter) -> Pending:
    """Row ``r`` goes to rank ``r``; what arrives has shape and type of ``counts``."""

    def launch() -> Pending:
        received = torch.empty_like(counts_WE, memory_format=torch.contiguous_format)
        work = dist.all_to_all_single(received, counts_WE.contiguous(), group=group, async_op=True)
        meter.add_even("counts", counts_WE[0].numel() * counts_WE.element_size(), group)
        return Pending(received, work)

    return communicate(launch)


def start_swap(
    rows: Tensor, gets: Sequence[int], gives: Sequence[int], group: dist.ProcessGroup, meter: ByteMeter, name: str
) -> Pending:
    """Uneven exchange of rows, without gradients."""

    def launch() -> Pending:
        sent = rows.contiguous()
        received = sent.new_empty(sum(gets), *sent.shape[1:])
        work = dist.all_to_all_single(received, sent, list(gets), list(gives), group=group, async_op=True)
        row_bytes = sent[:1].numel() * sent.element_size() if sent.shape[0] else 0
        meter.add(name, [rows_to * row_bytes for rows_to in gives], group)
        return Pending(received, work)

    return communicate(launch)


class Exchange:
    """An exchange under way, with gradients.

    One node of the autograd graph for all its tensors, so that their exchanges back come in one order on every rank.
    """

    def __init__(self, tensors: Sequence[Tensor], route: _Route) -> None:
        flight = _Flight(route, [t.requires_grad for t in tensors])
        started: tuple[Tensor, ...] = _Start.apply(flight, *tensors)  # type: ignore[no-untyped-call]
        self._flight, self._started = flight, started

    def wait(self) -> tuple[Tensor, ...]:
        """What arrived, in the order of the tensors sent."""
        arrived: tuple[Tensor, ...] = _Wait.apply(self._flight, *self._started)  # type: ignore[no-untyped-call]
        return arrived


def start_exchange(
    tensors: Sequence[Tensor],
    codecs: Sequence[WireCodec],
    *,
    gets: Sequence[int],
    gives: Sequence[int],
    group: dist.ProcessGroup,
    meter: ByteMeter,
    name: str,
) -> Exchange:
    """Rows of several tensors to the ranks of a group.

    Args:
        tensors: of equally many rows, sorted by the rank they go to.
        codecs: of each tensor.
        gets: rows from each rank.
        gives: rows to each rank.
        group: the ranks.
        meter: counts the bytes, as ``name`` and ``name.backward``.
        name: of the exchange.
    """
    return Exchange(tensors, (list(gets), list(gives), group, meter, name, list(codecs)))


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
        self.under_way: list[Pending | None] = []

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


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(flight: _Flight, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return flight.launch(tensors, back=False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.flight = inputs[0]
        ctx.kinds = [(t.shape[-1], t.dtype) for t in inputs[1:]]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *ctx.flight.land(ctx.kinds, back=True)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(flight: _Flight, *started: Tensor) -> tuple[Tensor | None, ...]:
        return flight.land([(s.shape[-1], s.dtype) for s in started], back=False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.flight = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *ctx.flight.launch(grads, back=True)


#: A group, and what counts the bytes.
_How = tuple[dist.ProcessGroup, ByteMeter]


def _gather(x: Tensor, how: _How, name: str) -> Tensor:
    def launch() -> Pending:
        group, meter = how
        gathered = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        meter.add_even(name, x.numel() * x.element_size(), group)
        return Pending(gathered)

    return communicate(launch).wait()


def _scatter(x: Tensor, how: _How, name: str) -> Tensor:
    def launch() -> Pending:
        group, meter = how
        size = dist.get_world_size(group)
        scattered = x.new_empty(x.shape[0] // size, *x.shape[1:])
        dist.reduce_scatter_tensor(scattered, x.contiguous(), group=group)
        meter.add_even(name, scattered.numel() * scattered.element_size(), group)
        return Pending(scattered)

    return communicate(launch).wait()


def _reduce(x: Tensor, how: _How, name: str) -> Tensor:
    def launch() -> Pending:
        group, meter = how
        summed = x.contiguous().clone()
        dist.all_reduce(summed, group=group)
        meter.add_even(name, 2 * x.numel() * x.element_size() // dist.get_world_size(group), group)
        return Pending(summed)

    return communicate(launch).wait()


def all_gather_rows(tensors: Sequence[Tensor], group: dist.ProcessGroup, meter: ByteMeter) -> tuple[Tensor, ...]:
    """Equally many rows of every rank, those of rank 0 first; gradients are added up over ranks."""
    gathered: tuple[Tensor, ...] = _AllGather.apply((group, meter), *tensors)  # type: ignore[no-untyped-call]
    return gathered


def reduce_scatter_rows(x: Tensor, group: dist.ProcessGroup, meter: ByteMeter) -> Tensor:
    """The ranks' sum of each rank's rows, on that rank; gradients are gathered."""
    scattered: Tensor = _ReduceScatter.apply((group, meter), x)  # type: ignore[no-untyped-call]
    return scattered


def copy_to_ranks(tensors: Sequence[Tensor], group: dist.ProcessGroup, meter: ByteMeter) -> tuple[Tensor, ...]:
    """Identity on tensors that all ranks have alike; gradients, of which each rank has a part, are added up."""
    copies: tuple[Tensor, ...] = _CopyToRanks.apply((group, meter), *tensors)  # type: ignore[no-untyped-call]
    return copies


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup, meter: ByteMeter) -> Tensor:
    """The ranks' sum on all of them; the gradient, which all have alike, passes as it is."""
    summed: Tensor = _SumOverRanks.apply((group, meter), x)  # type: ignore[no-untyped-call]
    return summed


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(how: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(_gather(x, how, "dispatch") for x in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.how = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        needed = ctx.needs_input_grad[1:]
        parts = [_scatter(g, ctx.how, "dispatch.backward") if n else None for g, n in zip(grads, needed, strict=True)]
        return None, *parts


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(how: Any, x: Tensor) -> Tensor:
        return _scatter(x, how, "combine")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.how = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, _gather(grads[0], ctx.how, "combine.backward")


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(how: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.how = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        needed = ctx.needs_input_grad[1:]
        sums = [_reduce(g, ctx.how, "dispatch.backward") if n else None for g, n in zip(grads, needed, strict=True)]
        return None, *sums


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(how: Any, x: Tensor) -> Tensor:
        return _reduce(x, how, "combine")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, grads[0]
