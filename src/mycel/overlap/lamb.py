"""LAMB: Adam whose steps are as long, layer by layer, as the layer's weights are large."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mycel.errors import UsageError

__all__ = ["Lamb", "direction", "squares", "trust_ratio"]


class Lamb(Optimizer):
    """LAMB on whole parameters, each of which is a layer of its own.

    Args:
        params: parameters, named parameters or groups.
        lr: learning rate.
        betas: of the means of gradients and of their squares.
        eps: added to the root of the latter.
        weight_decay: times the weights, part of a step's direction.

    Raises:
        UsageError: a rate, mean or decay out of range.

    Examples:
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = Lamb([weight], lr=0.1, weight_decay=0.0)
        >>> weight.grad = torch.tensor([1.0, 1.0])
        >>> optimizer.step()
        >>> [round(x, 4) for x in weight.tolist()]  # as long as 0.1 times the weights
        [2.6464, 3.6464]

    References:
        Y. You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020,
        algorithm 2.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise UsageError(
                f"Lamb: lr {lr}, betas {betas}, eps {eps}, weight_decay {weight_decay}; expected numbers from 0, "
                "betas below 1"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Change parameters that have gradients.

        Args:
            closure: computes the loss and gradients anew, if given.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                step = direction(parameter, parameter.grad, self.state[parameter], group)
                ratio = trust_ratio(squares(parameter), squares(step))
                parameter.sub_(step * (ratio * group["lr"]).to(step.dtype))
        return loss


def direction(values: Tensor, gradient: Tensor, state: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """Where to go, before it is known how far; the means are brought up to date.

    Args:
        values: of the weights, or of some of them.
        gradient: of these.
        state: of these.
        options: of the group.
    """
    if not state:
        state["step"] = torch.zeros(())
        state["exp_avg"] = torch.zeros_like(values)
        state["exp_avg_sq"] = torch.zeros_like(values)
    state["step"] += 1
    first: Tensor = state["exp_avg"]
    second: Tensor = state["exp_avg_sq"]
    steps = float(state["step"])
    beta1, beta2 = options["betas"]
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (second / (1 - beta2**steps)).sqrt_().add_(options["eps"])
    step: Tensor = (first / (1 - beta1**steps)).div_(root)
    step.add_(values, alpha=options["weight_decay"])
    return step


def squares(values: Tensor) -> Tensor:
    """Their sum, in float64: the same to many digits however the values are divided over ranks."""
    return values.double().square().sum()


def trust_ratio(weights: Tensor, steps: Tensor) -> Tensor:
    """By which steps are stretched, of the two sums of squares; 1 where one of them is zero."""
    ratio = (weights / steps).sqrt()
    return torch.where((weights > 0) & (steps > 0), ratio, torch.ones_like(ratio))
