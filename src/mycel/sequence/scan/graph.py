"""A scan as two nodes of the autograd graph, start and wait: what is between them waits neither forwards nor back.

The gradient of an exclusive scan is one from the other end: what leaves run ``p`` gets ``L_p = dH_(p+1) +
M_(p+1)^T L_(p+1)``, so the maps ``(M^T, dH)`` are scanned in reverse, ``dU_p = L_p`` and ``dM_p = L_p H_p^T``.
Between start and wait there is only what one function of this package computes, so that collectives of a group come
in one order on all ranks, whichever thread begins them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mycel.comm import Pending
from mycel.comm.pending import communicate
from mycel.sequence.scan.maps import Maps

__all__ = ["attached", "begin"]

#: Begins a scan of maps, forwards or (second argument) backwards.
Launch = Callable[[Maps, bool], Pending[Tensor]]


class _Flight:
    """What the two nodes of a scan share."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.there: Pending[Tensor] | None = None
        self.back: tuple[Pending[Tensor], Tensor] | None = None


def begin(maps: Maps, launch: Launch) -> Pending[Tensor]:
    """Begin a scan.

    Args:
        maps: of the runs here.
        launch: sends; called again for the way back.

    Returns:
        States that come in, of the shape of the maps' updates. The way back begins when its gradient is there, and is
        waited for where that of the maps is needed.
    """
    flight = _Flight(launch)
    token: Tensor = _Start.apply(flight, maps.transition, maps.update)  # type: ignore[no-untyped-call]

    def finish() -> Tensor:
        states: Tensor = _Wait.apply(flight, token, maps.transition)  # type: ignore[no-untyped-call]
        return states

    return Pending(finish)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: _Flight, transition: Tensor, update: Tensor) -> Tensor:
        ctx.flight, ctx.order = flight, transition.dim() - 2
        maps = Maps(transition=transition, update=update)
        flight.there = communicate(lambda: flight.launch(maps, False))
        return update.new_zeros(()).expand(update.shape)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        (pending, states), ctx.flight.back = ctx.flight.back, None
        reached = pending.wait().flip(0)
        wanted = None
        if ctx.needs_input_grad[1]:
            if ctx.order == 0:
                wanted = (reached * states).sum((-2, -1))
            elif ctx.order == 1:
                wanted = (reached * states).sum(-2)
            else:
                wanted = reached.mT @ states
        return None, wanted, reached


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: _Flight, token: Tensor, transition: Tensor) -> Tensor:
        pending, flight.there = flight.there, None
        if pending is None:
            raise AssertionError("a scan is waited for once")
        ctx.flight = flight
        states = pending.wait()
        ctx.save_for_backward(transition, states)
        return states

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        transition, states = ctx.saved_tensors
        flight: _Flight = ctx.flight
        back = Maps(transition=transition, update=gradient.contiguous()).transposed()
        flight.back = flight.launch(back, True), states
        return None, gradient.new_zeros(()).expand(gradient.shape), None


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(other.shape, other.dtype, other.device) for other in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, *(torch.zeros(s, dtype=t, device=d) for s, t, d in ctx.others)


def attached(x: Tensor, *others: Tensor) -> Tensor:
    """A tensor whose gradient also begins the way back of others that it does not depend on.

    A rank into which no state comes still has to join the scan of gradients, which others wait for.
    """
    result: Tensor = _Attached.apply(x, *others)  # type: ignore[no-untyped-call]
    return result
