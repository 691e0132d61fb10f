"""Error feedback: what compression loses of a gradient, its *residual*, is added to the next one.

Over time everything arrives: the sum of what was applied differs from the sum of the gradients by the residuals that
are kept, and a contractive compressor keeps those bounded. They are float32, by parameter name. For gradients that
are sharded they take as much memory as a whole model's gradients on every rank, which is what FSDP saves elsewhere:
for unbiased compressors, leave feedback out there.

A step counts as a whole. Residuals of its parameters wait until all of its means are known (``settle``): where one
of them is not finite the step will not be applied, so what it was to pay is still owed, and the memory stays.

References:
    Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019,
    arXiv 1901.09847, algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor

from mycel.errors import UsageError

__all__ = ["ErrorFeedback", "Scaler"]


class Scaler(Protocol):
    """What is asked of ``torch.amp.GradScaler``, or of whatever else scales the loss."""

    def get_scale(self) -> float:
        """By how much the loss is multiplied before the backward pass; the same on all ranks."""
        ...


class ErrorFeedback:
    """The residuals of one rank.

    Args:
        decay: share of a residual that survives a step; 1 keeps everything.
        scaler: whose scale the memory follows; ``None`` where losses are not scaled, or ``rescale`` is called.

    Raises:
        UsageError: the decay is not in (0, 1].

    Attributes:
        memory: residuals by parameter name, in the shape in which this rank sends the parameter's gradient, as they
            are after the last step that counted.
        scale: of the losses whose gradients the residuals are part of.

    Examples:
        >>> feedback, gradient = ErrorFeedback(), torch.tensor([1.0, 0.25])
        >>> feedback.remember("w", gradient - torch.tensor([1.0, 0.0]))  # the second number was not sent
        >>> feedback.settle(keep=True)
        >>> feedback.compensate("w", gradient).tolist()  # and weighs twice in the next step
        [1.0, 0.5]
    """

    def __init__(self, *, decay: float = 1.0, scaler: Scaler | None = None) -> None:
        if not 0 < decay <= 1:
            raise UsageError(f"error feedback with decay {decay}: it must be above 0 and at most 1")
        self.decay, self._scaler = decay, scaler
        self.scale = 1.0 if scaler is None else float(scaler.get_scale())
        self.memory: dict[str, Tensor] = {}
        self._open: dict[str, Tensor | None] = {}

    def compensate(self, name: str, gradient: Tensor) -> Tensor:
        """The gradient in float32 with its residual added: a new tensor."""
        residual = self._open[name] if name in self._open else self.memory.get(name)
        if residual is None:
            return gradient.detach().to(torch.float32, copy=True)
        if gradient.dtype == torch.float32:
            return torch.add(gradient.detach(), residual)
        return gradient.detach().float().add_(residual)

    def remember(self, name: str, residual: Tensor) -> None:
        """Keep a residual, which belongs to the memory from now on, if the step counts."""
        self._open[name] = residual if self.decay == 1 else residual.mul_(self.decay)

    def release(self, name: str) -> None:
        """A residual has been sent and nothing is left of it, if the step counts."""
        self._open[name] = None

    def settle(self, *, keep: bool, unused: Collection[str] = ()) -> None:
        """The step is over.

        Args:
            keep: all of its means are finite, on all ranks. Otherwise nothing changes: mixed-precision training
                skips a step whose gradients overflowed.
            unused: parameters that nobody used in the step, so that no mean was applied: theirs stay too.
        """
        settled, self._open = self._open, {}
        for name, residual in settled.items() if keep else ():
            if name in unused:
                continue
            if residual is None:
                self.memory.pop(name, None)
            else:
                # Means are finite although this rank's tensor was not: a compressor hid it. No later step may pay it.
                self.memory[name] = residual if is_finite(residual) else residual.nan_to_num_(0.0, 0.0, 0.0)

    def rescale(self, factor: float) -> None:
        """Multiply the memory: losses are scaled by so many times as much from the next step on.

        Raises:
            UsageError: the factor is not a positive number.
        """
        if not (factor > 0 and math.isfinite(factor)):
            raise UsageError(f"a memory cannot be rescaled by {factor}: the factor must be positive and finite")
        self.scale *= factor
        for residual in (*self.memory.values(), *self._open.values()):
            if residual is not None:
                residual.mul_(factor)

    def follow_scaler(self) -> None:
        """Rescale to the scaler's scale; called when a step begins."""
        if self._scaler is not None and (now := float(self._scaler.get_scale())) != self.scale:
            self.rescale(now / self.scale)
            self.scale = now

    def load_state_dict(self, memory: Mapping[str, Tensor], scale: float = 1.0) -> None:
        """Replace the whole memory by copies of these, of losses of that scale."""
        self._open.clear()
        self.memory = {name: kept.detach().to(torch.float32, copy=True) for name, kept in memory.items()}
        self.scale = scale


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are; in one pass, and not misled by a sum that overflows."""
    return not tensor.numel() or math.isfinite(float(torch.linalg.vector_norm(tensor, ord=torch.inf)))
