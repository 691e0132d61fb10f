"""Outer optimizers: what becomes of the parameters when a round's change is known.

Any ``torch.optim`` optimizer is one: its gradients are the changes, with the sign of a gradient (where the round
began, minus where it ended). One kind of our own a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from mycel.data_parallel.local.outer.co2 import CO2
from mycel.data_parallel.local.outer.slowmo import SlowMo

__all__ = ["CO2", "MakeOuter", "SlowMo", "co2", "diloco", "slowmo"]

#: Makes an outer optimizer for the shared parameters.
MakeOuter = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def diloco(*, lr: float = 0.7, momentum: float = 0.9) -> MakeOuter:
    """DiLoCo's: SGD with Nesterov momentum.

    Args:
        lr: outer learning rate.
        momentum: of the outer steps.

    Returns:
        Makes the optimizer of the shared parameters.

    References:
        A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, arXiv
        2311.08105, section 2.

    Examples:
        >>> diloco(lr=0.5)([torch.zeros(2)]).defaults["nesterov"]
        True
    """
    return partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=True)


def slowmo(*, lr: float = 1.0, momentum: float = 0.5) -> MakeOuter:
    """``SlowMo`` with these settings.

    Args:
        lr: outer learning rate.
        momentum: ``beta``, in [0, 1).

    Returns:
        Makes the optimizer of the shared parameters.

    Examples:
        >>> type(slowmo(momentum=0.9)([torch.zeros(2)])).__name__
        'SlowMo'
    """
    return partial(SlowMo, lr=lr, momentum=momentum)


def co2(*, lr: float = 1.0, momentum: float = 0.5, penalty: bool = True, clip: float | None = None) -> MakeOuter:
    """``CO2`` with these settings; belongs to ``Delayed`` rounds.

    Args:
        lr: outer learning rate.
        momentum: ``beta``, in [0, 1).
        penalty: divide by the gap between where a change was measured and where it is used.
        clip: limit of each number of the momentum, ``None`` for none.

    Returns:
        Makes the optimizer of the shared parameters.

    Examples:
        >>> co2(clip=1.0)([torch.zeros(2)]).defaults["clip"]
        1.0
    """
    return partial(CO2, lr=lr, momentum=momentum, penalty=penalty, clip=clip)
