"""CO2's outer step: momentum over changes that are one round old, with a penalty for their age and a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from mycel.errors import UsageError

__all__ = ["CO2"]


class CO2(torch.optim.Optimizer):
    """``m <- clip(beta m + change / gap)``, then ``x <- x - lr m``. For changes that come one round late.

    A change was measured from where the parameters were one round ago; meanwhile the outer step has moved them by
    ``lr m``. The gap compares that way with the change itself, tensor by tensor: ``1 + |lr m| / |change|``. Momentum
    that runs ahead of what local training finds is held back; with ``momentum=0.5`` and steady changes the
    parameters move by just one change a round.

    The published algorithm names a staleness gap; the published code divides by a constant, and its clipping has no
    effect, because the clamped tensor is thrown away. The ratio here is that of gap-aware training, and
    clipping clips: each number of ``m`` is kept within ``clip``, and what is cut off is forgotten.

    Args:
        params: the shared parameters; their gradients are the changes of the round before the last.
        lr: outer learning rate.
        momentum: ``beta``.
        penalty: divide by the gap.
        clip: limit of each number of the momentum, ``None`` for none.

    Raises:
        UsageError: a learning rate or clip that is not positive, or momentum not in [0, 1).

    References:
        W. Sun et al., "CO2: Efficient Distributed Training with Full Communication-Computation Overlap", ICLR 2024,
        arXiv 2401.16265, sections 3.2 and 3.3; S. Barkai, I. Hakimi, A. Schuster, "Gap Aware Mitigation of Gradient
        Staleness", ICLR 2020, arXiv 1909.10802, section 4.

    Examples:
        >>> shared = torch.zeros(2)
        >>> outer = CO2([shared], momentum=0.5)
        >>> for _ in range(3):
        ...     shared.grad = torch.tensor([3.0, -4.0])
        ...     outer.step()
        >>> shared.tolist()  # just one steady change a round
        [-9.0, 12.0]
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        lr: float = 1.0,
        momentum: float = 0.5,
        penalty: bool = True,
        clip: float | None = None,
    ) -> None:
        if not lr > 0 or not 0 <= momentum < 1:
            raise UsageError(f"CO2: lr {lr} must be positive and momentum {momentum} in [0, 1)")
        if clip is not None and not clip > 0:
            raise UsageError(f"CO2: clip must be positive or None, got {clip}")
        super().__init__(params, {"lr": lr, "momentum": momentum, "penalty": penalty, "clip": clip})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One outer step; ``closure`` as everywhere in ``torch.optim``."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return loss

    def _move(self, parameter: Tensor, change: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"]
        share: Tensor | float = 1.0
        if group["penalty"]:
            own, way = change.norm(), momentum.norm() * group["lr"]
            share = torch.where(own > 0, own / (own + way), 1.0)  # 1 / (1 + way / own)
        momentum.mul_(group["momentum"]).add_(change * share)
        if group["clip"] is not None:
            momentum.clamp_(-group["clip"], group["clip"])
        parameter.add_(momentum, alpha=-group["lr"])
