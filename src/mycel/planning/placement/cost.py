"""What a placement costs in a step, by a model: the busiest rank's work, its traffic, and its replicas' gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mycel.errors import UsageError
from mycel.planning.placement.model import EMPTY

__all__ = ["PlacementCost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementCost:
    """Seconds of a layer's step, forward and backward.

    The sum of three, each for the rank where it is largest: its tokens through experts; its tokens that came from
    elsewhere, which travel four times (there and back, forward and backward); and the gradients of its experts that
    have n replicas, of which it sends and receives ``2 (n-1)/n`` each. Tokens of an expert are taken to come from all
    ranks equally.

    Attributes:
        token_s: of one token in an expert, forward and backward.
        carry_s: of one token on its way once.
        expert_s: of one expert's gradients on their way once.

    Raises:
        UsageError: a negative time.

    References:
        Nie et al., "FlexMoE: Scaling Large-scale Sparse Pre-trained Model Training via Dynamic Device Placement",
        SIGMOD 2023 (computation, all-to-all and synchronisation of replicas as a placement's cost);
        He et al., "FasterMoE", PPoPP 2022, section 4.1 (broadcast of an expert against transport of its tokens).
    """

    token_s: float
    carry_s: float = 0.0
    expert_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.token_s, self.carry_s, self.expert_s) < 0:
            raise UsageError(f"times cannot be negative: {self}")

    def of(self, slots: Sequence[Sequence[int]], loads: Sequence[float]) -> float:
        """Seconds of a step.

        Args:
            slots: of each rank, as in ``ExpertPlacement``.
            loads: tokens of each expert.
        """
        counts = Counter(expert for held in slots for expert in held if expert != EMPTY)
        tokens, own, sums = [], [], []
        for held in slots:
            experts = [expert for expert in held if expert != EMPTY]
            tokens.append(sum(loads[expert] / counts[expert] for expert in experts))
            # A rank keeps all its own tokens for an expert that it holds: 1/W of them all.
            own.append(sum(loads[expert] for expert in experts) / len(slots))
            sums.append(sum(2 * (counts[expert] - 1) / counts[expert] for expert in experts))
        return float(self.of_ranks(np.array(tokens, float), np.array(own, float), np.array(sums, float)))

    def of_ranks(self, tokens: NDArray[Any], own: NDArray[Any], replicas: NDArray[Any]) -> NDArray[Any]:
        """Seconds of a step, of one placement or of many at once.

        Args:
            tokens: on each rank, shape ``[..., ranks]``.
            own: those among them that did not travel.
            replicas: sum of ``2 (n-1)/n`` of a rank's experts with n replicas.
        """
        work, traffic = tokens.max(axis=-1), np.maximum((tokens - own).max(axis=-1), 0.0)
        total: NDArray[Any] = self.token_s * work + 4 * self.carry_s * traffic + self.expert_s * replicas.max(axis=-1)
        return total
