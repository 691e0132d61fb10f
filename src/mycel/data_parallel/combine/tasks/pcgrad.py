"""PCGrad: of each gradient, what points against another one is taken away, one by one; the results are added.

Everything that is projected stays a sum of the gradients, so that coefficients and inner products are enough: no
vector is touched until the end.

References:
    T. Yu et al., "Gradient Surgery for Multi-Task Learning", NeurIPS 2020, arXiv 2001.06782, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from mycel.arguments import whole_number
from mycel.data_parallel.combine.tasks.by_gram import ByGram
from mycel.data_parallel.combine.tasks.quadratic import Matrix, Vector

__all__ = ["PCGrad"]


class PCGrad(ByGram):
    """A sum over tasks, as published: K times as long as a mean where there are no conflicts.

    With two tasks no conflict is left; with more, a later projection may bring an earlier one back.

    Args:
        seed: of the order in which others are looked at; with the number of the step it is the same on all ranks.
        tasks: number of each rank's task, by rank; by default every rank is a task.
        shards: ranks that hold the other shards of this replica, over which inner products are sums.

    Examples:
        >>> PCGrad().weights(np.array([[1.0, -0.5], [-0.5, 1.0]])).tolist()
        [1.5, 1.5]
    """

    def __init__(
        self, *, seed: int = 0, tasks: Sequence[int] | None = None, shards: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(tasks=tasks, shards=shards)
        self.seed = whole_number(seed, "seed, of the order of tasks", least=0)

    def weights(self, gram: Matrix) -> Vector:
        """See ``ByGram``."""
        total = np.zeros(len(gram))
        for own, others in enumerate(self.orders(len(gram))):
            held = np.zeros(len(gram))
            held[own] = 1.0
            for other in others:
                along = held @ gram[:, other]
                if along < 0:  # never against a gradient of zeros
                    held[other] -= along / gram[other, other]
            total += held
        return total

    def orders(self, size: int) -> list[list[int]]:
        """For each task, the others in the order in which it looks at them in this step."""
        generator = np.random.default_rng([self.seed, self.step])
        return [[int(j) for j in generator.permutation(size) if j != own] for own in range(size)]
