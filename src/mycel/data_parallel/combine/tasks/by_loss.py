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
        self._own: list[float] | None = None
        self._heard = False

    def tell(self, loss: Tensor | float | Sequence[Tensor | float]) -> None:
        """This rank's loss in the step; call it on every rank between the forward and the backward pass.

        Args:
            loss: of this rank's task, as it is before any weight; or of each of its tasks.
        """
        self._own = numbers_of(loss)
        self._heard = False

    @abstractmethod
    def update(self, heard: Matrix) -> Vector:
        """Weights for this step, ``[K]``; learns from what was heard of the tasks.

        Args:
            heard: ``numbers`` of each task, ``[K, n]``, finite; the first is the loss.
        """

    def numbers(self, losses: Sequence[float]) -> list[list[float]]:
        """What the others hear of this rank's versions in a step: the loss of each, and what else a method wants."""
        return [[loss] for loss in losses]

    def combine(self, versions: Sequence[Sequence[Bundle]], group: dist.ProcessGroup, shares: Matrix) -> None:
        """See ``TaskCombiner``."""
        if self._own is not None and len(self._own) != len(versions):
            raise UsageError(
                f"{type(self).__name__}.tell was given {len(self._own)} losses, and this rank has the gradients of "
                f"{len(versions)} task(s): a loss for each"
            )
        weights = self.weights_of_step(group, shares, versions[0][0].flat.device) @ shares
        begin = group.rank() * len(versions)
        own = [float(weight) for weight in weights[begin : begin + len(versions)]]
        for bundle, *others in zip(*versions, strict=True):
            bundle.flat.mul_(own[0])
            for other, weight in zip(others, own[1:], strict=True):
                bundle.flat.add_(other.flat, alpha=weight)
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
            heard = shares @ _by_version(self.numbers(self._own), group, device)
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


def numbers_of(losses: Tensor | float | Sequence[Tensor | float]) -> list[float]:
    """Of one task or several.

    Examples:
        >>> numbers_of(torch.tensor(0.5)), numbers_of([1, torch.tensor(2.0)])
        ([0.5], [1.0, 2.0])
    """
    given = [losses] if isinstance(losses, Tensor | float | int) else losses
    return [float(loss.detach()) if isinstance(loss, Tensor) else float(loss) for loss in given]


def _by_version(own: Sequence[Sequence[float]], group: dist.ProcessGroup, device: torch.device) -> Matrix:
    """Every version's numbers, those of rank 0 first, ``[V, n]``."""
    mine = torch.tensor(own, dtype=torch.float64, device=device)
    all_of_them = [torch.empty_like(mine) for _ in range(group.size())]
    if group.size() == 1:
        all_of_them = [mine]
    else:
        dist.all_gather(all_of_them, mine, group=group)
    found: Matrix = torch.cat(all_of_them).cpu().numpy()
    return found
