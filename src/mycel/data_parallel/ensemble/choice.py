"""Which members of an ensemble learn an example: multiple choice learning, and the kind that stays honest.

Of M members K learn each example; the others are drawn to say that they do not know. What is made least is, over the
choice as well, ``sum_m [v_m CE_m + beta (1 - v_m) KL(U || P_m)]`` with ``sum_m v_m = K``. Whatever the choice, this
differs from ``beta sum_m KL_m`` by ``CE_m - beta KL_m`` of each member that is chosen: the K least of these are the
best choice, and two numbers an example and member are all that it takes.

References:
    K. Lee et al., "Confident Multiple Choice Learning", ICML 2017, arXiv 1706.03475, sections 2 (equations 3 and 4),
    3.2 (feature sharing) and 3.3 (stochastic labelling); A. Guzman-Rivera et al., "Multiple Choice Learning", NeurIPS
    2012.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from mycel.arguments import real_number, whole_number
from mycel.errors import UsageError

__all__ = ["MultipleChoice", "choose", "measures"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MultipleChoice:
    """How members share examples.

    Attributes:
        overlap: K, members that learn an example; at most as many as there are.
        beta: weight of not knowing, for those that do not; 0 is plain multiple choice learning.
        labels: what those that do not learn are drawn to: the uniform distribution itself (``exact``), or a label
            that is drawn anew from it every time (``stochastic``).

    Raises:
        UsageError: out of range.

    Examples:
        >>> MultipleChoice(overlap=4)
        MultipleChoice(overlap=4, beta=0.75, labels='exact')
    """

    overlap: int = 1
    beta: float = 0.75
    labels: Literal["exact", "stochastic"] = "exact"

    def __post_init__(self) -> None:
        whole_number(self.overlap, "overlap, members that learn an example", least=1)
        real_number(self.beta, "beta, the weight of not knowing", least=0)
        if self.labels not in ("exact", "stochastic"):
            raise UsageError(f"labels {self.labels!r} are neither 'exact' nor 'stochastic'")


def measures(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What a member says of its examples: how wrong it is, and how far from not knowing.

    Args:
        logits: ``[B, C]``.
        targets: right classes, ``[B]``.

    Returns:
        Cross entropies and divergences ``KL(U || P)`` from the uniform distribution, ``[B]`` each, with gradients.

    Examples:
        >>> errors, divergences = measures(torch.zeros(1, 4), torch.tensor([2]))
        >>> round(float(errors), 4), abs(float(divergences)) < 1e-6  # knows nothing, and says so
        (1.3863, True)
    """
    logs = functional.log_softmax(logits, dim=1)
    divergences = -logs.mean(dim=1) - math.log(logits.shape[1])
    return functional.nll_loss(logs, targets, reduction="none"), divergences


def choose(errors: Tensor, divergences: Tensor, choice: MultipleChoice) -> Tensor:
    """The members that learn each example.

    Args:
        errors, divergences: of all members, ``[M, B]``, as ``measures`` gives them.
        choice: how many, and the weight of not knowing.

    Returns:
        ``[M, B]``, true for K members an example; of equally good ones those with the lower number.

    Examples:
        >>> errors = torch.tensor([[0.1, 2.0], [0.3, 0.2], [0.3, 2.0]])
        >>> choose(errors, torch.zeros(3, 2), MultipleChoice(overlap=1)).int().T.tolist()
        [[1, 0, 0], [0, 1, 0]]
    """
    costs = errors.float() - choice.beta * divergences.float()
    order = torch.argsort(costs, dim=0, stable=True)
    chosen = torch.zeros_like(costs, dtype=torch.bool)
    return chosen.scatter_(0, order[: choice.overlap], True)
