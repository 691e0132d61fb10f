"""What a step would change, until all of its means are known: residuals, warm starts, what policies have seen.

Mixed-precision training skips a step in which any gradient overflowed, for all parameters and on all ranks. So
nothing may be learnt from such a step, of no parameter. Means are the same on all ranks, or parts of them are:
``is_finite`` asks the ranks that hold the other parts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.data_parallel.feedback import ErrorFeedback
from mycel.data_parallel.policy import CompressionPolicy

__all__ = ["OpenStep"]


class OpenStep:
    """One step after the other, of one policy and its memory.

    Args:
        policy: sees the means of steps that count.
        feedback: keeps the residuals of steps that count; ``None`` where there are none.
    """

    def __init__(self, policy: CompressionPolicy, feedback: ErrorFeedback | None) -> None:
        self._policy, self._feedback = policy, feedback
        self._means: dict[int, dict[str, Tensor]] = {}
        self._largest: Tensor | None = None

    def add(self, applied: Tensor, means: Mapping[str, Tensor], step: int) -> None:
        """Some of the step's means.

        Args:
            applied: as the optimizer will see them; a mean that is finite in float32 may overflow in a half type.
            means: by parameter, for the policy; not to be changed before ``settle``.
            step: the policy's number of the step.
        """
        if applied.numel():
            largest = torch.linalg.vector_norm(applied, ord=torch.inf).float()
            self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
        self._means.setdefault(step, {}).update(means)

    def is_finite(self, group: dist.ProcessGroup | None = None) -> bool:
        """Whether all means so far are.

        Args:
            group: ranks that hold other parts of the means; a collective call then.
        """
        if self._largest is None and group is None:
            return True
        largest = torch.zeros(()) if self._largest is None else self._largest
        is_bad = (~largest.isfinite()).to(torch.uint8).view(1)
        if group is not None:
            dist.all_reduce(is_bad, op=dist.ReduceOp.MAX, group=group)
        return not bool(is_bad)

    def settle(self, *, keep: bool, unused: Collection[str] = ()) -> None:
        """The step is over, and counts or does not; see ``ErrorFeedback.settle``."""
        means, self._means, self._largest = self._means, {}, None
        if self._feedback is not None:
            self._feedback.settle(keep=keep, unused=unused)
        for compressor in self._policy.compressors():
            compressor.settle(keep=keep)
        for step, seen in means.items() if keep else ():
            self._policy.observe({name: mean for name, mean in seen.items() if name not in unused}, step)
