"""SlowMo: momentum over rounds, in units of the learning rate with which the rounds were trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from mycel.errors import UsageError

__all__ = ["SlowMo"]


class SlowMo(torch.optim.Optimizer):
    """``u <- beta u + change / rate``, then ``x <- x - lr rate u``, with ``rate`` the local learning rate.

    Whoever drives it puts the rate into ``local_lr`` of the parameter groups before each step. With a constant rate
    this is SGD with momentum on the change; with a schedule, old momentum shrinks and grows with the rate.

    Args:
        params: the shared parameters; their gradients are what a round has taken away.
        lr: outer learning rate, ``alpha`` of the paper.
        momentum: ``beta``.

    Raises:
        UsageError: a learning rate that is not positive, or momentum not in [0, 1).

    References:
        J. Wang et al., "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum", ICLR 2020,
        arXiv 1910.00643, algorithm 1.

    Examples:
        >>> shared = torch.zeros(2)
        >>> outer = SlowMo([shared], momentum=0.5)
        >>> for _ in range(2):
        ...     shared.grad = torch.tensor([1.0, -1.0])
        ...     outer.step()
        >>> shared.tolist()  # one change, and then one and a half
        [-2.5, 2.5]
    """

    def __init__(self, params: Iterable[Tensor], *, lr: float = 1.0, momentum: float = 0.5) -> None:
        if not lr > 0 or not 0 <= momentum < 1:
            raise UsageError(f"SlowMo: lr {lr} must be positive and momentum {momentum} in [0, 1)")
        super().__init__(params, {"lr": lr, "momentum": momentum, "local_lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One outer step; ``closure`` as everywhere in ``torch.optim``."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            rate = group["local_lr"]
            if not rate > 0:
                continue  # nothing was trained in this round
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                momentum = state["momentum_buffer"]
                momentum.mul_(group["momentum"]).add_(parameter.grad, alpha=1 / rate)
                parameter.add_(momentum, alpha=-group["lr"] * rate)
        return loss
