"""Combiners that need of the tasks only their losses: a number a task, and an all_reduce.

The training loop says what a step's loss was, before its backward pass; the ranks then hear each other's, every one
finds the weights of all, multiplies its own gradient by its own, and the sum is an ordinary all_reduce. Nothing waits
for the last gradient: buckets travel as they become ready.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm.bundle import Bundle
from mycel.data_parallel.combine.tasks.base import TaskCombiner
from mycel.data_parallel.combine.tasks.quadratic import Matrix, Vector
from mycel.errors import UsageError

__all__ = ["ByLoss"]


class ByLoss(TaskCombiner):
    """The combination ``sum w_i g_i`` with weights that follow from the tasks' losses.

    Args:
        tasks: number of each rank's task, by rank; by default every rank is a task.

    Attributes:
        known: every task's weight in the step, ``[K]``; ``None`` before the first.
    """

    whole = False

    def __init__(self, *, tasks: Sequence[int] | None = None) -> None:
        super().__init__(tasks=tasks)
        self.known: Vector | None = None
        self._own: float | None = None
        self._heard = False

    def tell(self, loss: Tensor | float) -> None:
        """This rank's loss in the step; call it on every rank between the forward and the backward pass.

        Args:
            loss: of this rank's task, as it is before any weight.
        """
        self._own = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
        self._heard = False

    @abstractmethod
    def update(self, heard: Matrix) -> Vector:
        """Weights for this step, ``[K]``; learns from what was heard of the tasks.

        Args:
            heard: ``numbers`` of each task, ``[K, n]``, finite; the first is the loss.
        """

    def numbers(self, loss: float) -> list[float]:
        """What the others hear of this rank in a step: its loss, and whatever else a method wants."""
        return [loss]

    def combine(self, bundles: Sequence[Bundle], group: dist.ProcessGroup, shares: Matrix) -> None:
        """See ``TaskCombiner``."""
        own = float((self.weights_of_step(group, shares, bundles[0].flat.device) @ shares)[group.rank()])
        for bundle in bundles:
            bundle.flat.mul_(own)
            if group.size() > 1:
                dist.all_reduce(bundle.flat, group=group)

    def weights_of_step(self, group: dist.ProcessGroup, shares: Matrix, device: torch.device) -> Vector:
        """The tasks' weights; exchanges what they follow from where that was not done in this step.

        Raises:
            UsageError: no loss was told since the process began.
        """
        if self._own is None:
            raise UsageError(
                f"{type(self).__name__} weighs tasks by losses: call its tell(loss) between forward and backward"
            )
        if self.known is None or not self._heard:
            heard = shares @ _by_rank(self.numbers(self._own), group, device)
            # A loss that is none makes its gradient none, which shows in the sum; what was learned stays as it was.
            if np.isfinite(heard).all():
                self.known = self.update(heard)
            elif self.known is None:
                self.known = np.full(len(heard), 1 / len(heard))
            self._heard = True
        return self.known

    def state_dict(self) -> dict[str, Any]:
        """See ``TaskCombiner``."""
        return {**super().state_dict(), **{k: torch.tensor(v) for k, v in self.learned().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``TaskCombiner``."""
        super().load_state_dict(state)
        self.relearn({k: v.double().numpy().copy() for k, v in state.items() if isinstance(v, Tensor)})

    @abstractmethod
    def learned(self) -> dict[str, Vector]:
        """What was learned so far, by name; nothing before the first step."""

    @abstractmethod
    def relearn(self, state: Mapping[str, Vector]) -> None:
        """Takes it back."""


def _by_rank(own: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> Matrix:
    """Every rank's numbers, ``[W, n]``."""
    mine = torch.tensor(own, dtype=torch.float64, device=device)
    all_of_them = [torch.empty_like(mine) for _ in range(group.size())]
    if group.size() == 1:
        all_of_them = [mine]
    else:
        dist.all_gather(all_of_them, mine, group=group)
    found: Matrix = torch.stack(all_of_them).cpu().numpy()
    return found
