"""When a step of a sharded model begins and ends, which FSDP2 tells nobody.

A step is a backward pass in which something is reduced. It begins where the root's output gets its gradient, and ends
in the last callback of autograd's engine, after FSDP2's own: units whose inputs need no gradient are reduced there.
Gradients inside a recomputed part of the model are another graph with callbacks of its own, so the beginning is taken
from the root's output wherever there is one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from mycel.data_parallel.feedback import ErrorFeedback
from mycel.data_parallel.open_step import OpenStep
from mycel.data_parallel.policy import CompressionPolicy
from mycel.data_parallel.stats import CommStats

__all__ = ["Steps"]


class Steps:
    """Counts steps, and settles what each has taught when it is over.

    Args:
        root: the model.
        policy: for gradients; ``None`` where they travel as they are.
        feedback: residuals; ``None`` keeps none.
        group: the ranks that hold the shards.
        stats: where steps are counted.
    """

    def __init__(
        self,
        root: nn.Module,
        policy: CompressionPolicy | None,
        feedback: ErrorFeedback | None,
        group: dist.ProcessGroup,
        stats: CommStats,
    ) -> None:
        self.feedback, self._group, self._stats = feedback, group, stats
        self._policy = policy or CompressionPolicy(None)
        self._learns = feedback is not None or self._policy.learns
        self._open = OpenStep(self._policy, feedback)
        self._is_open = self._has_reduced = False
        self._stream: torch.cuda.Stream | None = None
        self._watch = root.register_forward_hook(self._watch_output)

    def reduces(self) -> None:
        """Called before anything is reduced: a step is under way."""
        self._begin()
        self._has_reduced = True

    def add(self, applied: Tensor, means: dict[str, Tensor], step: int) -> None:
        """Some of the step's means; see ``OpenStep.add``."""
        if self._learns:
            self._open.add(applied, means, step)
            if applied.is_cuda:
                self._stream = torch.cuda.current_stream(applied.device)

    def close(self) -> None:
        """Watch no longer."""
        self._watch.remove()

    def _watch_output(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if self._is_open:  # the backward pass before has failed, and its step will not be applied
            self._end(counts=False)
        found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if found:
            register_multi_grad_hook(found, lambda _: self._begin(), mode="any")

    def _begin(self) -> None:
        if self._is_open:
            return
        self._is_open = True
        if self.feedback is not None:
            self.feedback.follow_scaler()
        Variable._execution_engine.queue_callback(self._end)

    @torch.no_grad()
    def _end(self, *, counts: bool = True) -> None:
        """Ranks agree whether all means are finite: each knows its shards' alone."""
        has_reduced, self._is_open, self._has_reduced = self._has_reduced, False, False
        if not has_reduced:
            return
        self._stats.steps += counts
        if not self._learns:
            return
        with torch.cuda.stream(
            self._stream
        ):  # what was reduced on another stream is read there; None changes nothing
            keep = counts and self._open.is_finite(self._group)
            self._open.settle(keep=keep)
