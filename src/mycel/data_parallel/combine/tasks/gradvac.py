"""GradVac: PCGrad with a similarity to be reached that is learned from those seen so far, instead of none.

References:
    Z. Wang et al., "Gradient Vaccine: Investigating and Improving Multi-task Optimization in Massively Multilingual
    Models", ICLR 2021, arXiv 2010.05874, section 3.2 (equation 4) and algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mycel.data_parallel.combine.tasks.pcgrad import PCGrad
from mycel.data_parallel.combine.tasks.quadratic import Matrix, Vector
from mycel.errors import UsageError

__all__ = ["GradVac"]


class GradVac(PCGrad):
    """A sum over tasks, as PCGrad, of gradients that are turned towards each other.

    Args:
        decay: share of a step's similarity that enters what is expected of a pair of tasks.
        seed: of the order in which others are looked at.
        tasks: number of each rank's task, by rank; by default every rank is a task.
        shards: ranks that hold the other shards of this replica, over which inner products are sums.

    Attributes:
        expected: cosine of each pair of tasks, ``[K, K]``; ``None`` before the first step.

    Raises:
        UsageError: a decay outside of 0 to 1.

    Examples:
        >>> GradVac().weights(np.array([[1.0, -0.5], [-0.5, 1.0]])).round(6).tolist()  # the first step is PCGrad's
        [1.5, 1.5]
    """

    def __init__(
        self,
        *,
        decay: float = 0.5,
        seed: int = 0,
        tasks: Sequence[int] | None = None,
        shards: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(seed=seed, tasks=tasks, shards=shards)
        if not 0 <= decay <= 1:
            raise UsageError(f"GradVac with decay {decay}: it is a share, from 0 to 1")
        self.decay = decay
        self.expected: Matrix | None = None

    def weights(self, gram: Matrix) -> Vector:
        """See ``ByGram``. Learns from what it sees."""
        size = len(gram)
        expected = np.zeros((size, size)) if self.expected is None else self.expected
        total = np.zeros(size)
        for own, others in enumerate(self.orders(size)):
            held = np.zeros(size)
            held[own] = 1.0
            for other in others:
                length, other_length = sqrt(max(float(held @ gram @ held), 0.0)), sqrt(gram[other, other])
                if not length * other_length > 0:
                    continue
                cosine = min(1.0, max(-1.0, float(held @ gram[:, other]) / (length * other_length)))
                wanted = float(expected[own, other])
                if cosine < wanted < 1:
                    apart, wanted_apart = sqrt(1 - cosine**2), sqrt(1 - wanted**2)
                    held[other] += length * (wanted * apart - cosine * wanted_apart) / (other_length * wanted_apart)
                expected[own, other] = (1 - self.decay) * wanted + self.decay * cosine
            total += held
        self.expected = expected
        return total

    def state_dict(self) -> dict[str, Any]:
        """See ``TaskCombiner``: with the similarities that are expected."""
        known = {} if self.expected is None else {"expected": torch.tensor(self.expected)}
        return {**super().state_dict(), **known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``TaskCombiner``."""
        super().load_state_dict(state)
        self.expected = state["expected"].double().numpy().copy() if "expected" in state else None
