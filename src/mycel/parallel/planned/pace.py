"""Stages that take as long as a plan says: for trying plans on machines that are not the cluster's.

On an emulated cluster links are as slow as the file says, and processors are whatever this machine has. A paced stage
computes, really, and then sleeps until its modelled time is over; so messages, orders and losses are real, and
computation takes what the plan's devices would. What is slower here than there stays slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mycel.planning.plan import Plan

__all__ = ["Paced", "paced"]


class _Begin(torch.autograd.Function):
    """Last in a forward, so first in a backward: takes the time, and has the end of the backward wait."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        end = time.perf_counter() + ctx.backward_s
        engine: Any = torch.autograd.Variable._execution_engine  # as FSDP2 and DDP end their backwards
        engine.queue_callback(lambda: _sleep_until(end))
        return grad, None


class Paced(nn.Module):
    """A stage whose forward and backward last at least so long.

    Args:
        inner: the stage, which gives one tensor.
        forward_s: of one micro-batch.
        backward_s: likewise.

    Examples:
        >>> stage = Paced(nn.Linear(4, 2), 0.01, 0.02)
        >>> begun = time.perf_counter()
        >>> y = stage(torch.ones(3, 4))
        >>> tuple(y.shape), time.perf_counter() - begun >= 0.01
        ((3, 2), True)
    """

    def __init__(self, inner: nn.Module, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.inner = inner
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The stage's result, when its time is over.

        Args:
            args: of the stage.
            kwargs: of the stage.
        """
        end = time.perf_counter() + self.forward_s
        y: Tensor = self.inner(*args, **kwargs)
        if y.requires_grad:
            y = _Begin.apply(y, self.backward_s)  # type: ignore[no-untyped-call]
        _sleep_until(end)
        return y


def paced(plan: Plan) -> Callable[[int, nn.Module], nn.Module]:
    """For ``apply(..., wrap=paced(plan))``: every stage lasts as long as the plan says of it.

    Args:
        plan: whose ``stage_seconds`` hold, those of this rank's replica where they differ; of a backward in two
            halves the first takes all the time.

    Examples:
        ::

            trained = mycel.parallel.apply(model, plan, wrap=mycel.parallel.paced(plan))
    """

    def wrap(stage: int, module: nn.Module) -> nn.Module:
        rank = dist.get_rank() if plan.replica_seconds else plan.ranks[0]
        return Paced(module, *plan.seconds_of(plan.replica_of(rank) or 0)[stage])

    return wrap


def _sleep_until(end: float) -> None:
    time.sleep(max(0.0, end - time.perf_counter()))
