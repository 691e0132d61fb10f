"""Error feedback: what compression loses of a gradient, its *residual*, is added to the next one.

Over time everything arrives: the sum of what was applied differs from the sum of the gradients by the residuals that
are kept, and a contractive compressor keeps those bounded. They are float32, by parameter name. For gradients that
are sharded they take as much memory as a whole model's gradients on every rank, which is what FSDP saves elsewhere:
for unbiased compressors, leave feedback out there; for others, keep residuals in eight bits.

A step counts as a whole. Residuals of its parameters wait until all of its means are known (``settle``): where one
of them is not finite the step will not be applied, so what it was to pay is still owed, and the memory stays.

References:
    Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019,
    arXiv 1901.09847, algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, MutableMapping
from typing import Literal, Protocol

import torch
from torch import Tensor

from mycel.data_parallel.compress.base import Compressor
from mycel.data_parallel.residual_store import EightBits, Rounded
from mycel.errors import UsageError

__all__ = ["ErrorFeedback", "Scaler", "check_residuals"]


class Scaler(Protocol):
    """What is asked of ``torch.amp.GradScaler``, or of whatever else scales the loss."""

    def get_scale(self) -> float:
        """By how much the loss is multiplied before the backward pass; the same on all ranks."""
        ...


def check_residuals(compressors: Collection[Compressor], feedback: bool | None, precision: str) -> None:
    """Refuse a precision for residuals where none are kept.

    Args:
        compressors: whose losses may be remembered.
        feedback: what the user wants; ``None``: what each compressor does.
        precision: of residuals.

    Raises:
        UsageError: there would be none to keep so.
    """
    keeps = any(c.wants_feedback for c in compressors) if feedback is None else feedback
    if precision == "int8" and not keeps:
        names = ", ".join(dict.fromkeys(c.name for c in compressors)) or "nothing"
        why = "feedback=False" if feedback is not None else f"{names} is unbiased, and then none are by default"
        raise UsageError(f'residuals="int8", but none are kept: {why}; pass feedback=True')


class ErrorFeedback:
    """The residuals of one rank.

    Args:
        decay: share of a residual that survives a step; 1 keeps everything.
        scaler: whose scale the memory follows; ``None`` where losses are not scaled, or ``rescale`` is called.
        precision: ``"float32"``, or ``"int8"`` for a quarter of the memory, rounded by chance.

    Raises:
        UsageError: the decay is not in (0, 1], or residuals cannot be kept so.

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

    def __init__(
        self,
        *,
        decay: float = 1.0,
        scaler: Scaler | None = None,
        precision: Literal["float32", "int8"] = "float32",
    ) -> None:
        if not 0 < decay <= 1:
            raise UsageError(f"error feedback with decay {decay}: it must be above 0 and at most 1")
        if precision not in ("float32", "int8"):
            raise UsageError(f'residuals in {precision!r}: they are kept in "float32" or in "int8"')
        self.decay, self._scaler = decay, scaler
        self.scale = 1.0 if scaler is None else float(scaler.get_scale())
        self._rounds = precision == "int8"
        self.memory: MutableMapping[str, Tensor] = EightBits() if self._rounds else {}
        self._open: dict[str, Tensor | Rounded | None] = {}

    @property
    def num_bytes(self) -> int:
        """Of the residuals that are kept."""
        return sum((held.payload if isinstance(held, Rounded) else held).nbytes for held in self._held())

    def compensate(self, name: str, gradient: Tensor) -> Tensor:
        """The gradient in float32 with its residual added: a new tensor."""
        residual = self._open[name] if name in self._open else self.memory.get(name)
        if isinstance(residual, Rounded):
            residual = residual.read()
        if residual is None:
            return gradient.detach().to(torch.float32, copy=True)
        if gradient.dtype == torch.float32:
            return torch.add(gradient.detach(), residual)
        return gradient.detach().float().add_(residual)

    def remember(self, name: str, residual: Tensor) -> None:
        """Keep a residual, which belongs to the memory from now on, if the step counts."""
        if self.decay != 1:
            residual.mul_(self.decay)
        # At once, or residuals of a whole step would wait in float32 for its end.
        self._open[name] = Rounded.of(name, _made_finite(residual)) if self._rounds else residual

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
            elif isinstance(residual, Rounded):
                assert isinstance(self.memory, EightBits)
                self.memory.kept[name] = residual
            else:
                self.memory[name] = _made_finite(residual)

    def rescale(self, factor: float) -> None:
        """Multiply the memory: losses are scaled by so many times as much from the next step on.

        Raises:
            UsageError: the factor is not a positive number.
        """
        if not (factor > 0 and math.isfinite(factor)):
            raise UsageError(f"a memory cannot be rescaled by {factor}: the factor must be positive and finite")
        self.scale *= factor
        for residual in (*self._held(), *self._open.values()):
            if isinstance(residual, Rounded):
                residual.factor *= factor
            elif residual is not None:
                residual.mul_(factor)

    def follow_scaler(self) -> None:
        """Rescale to the scaler's scale; called when a step begins."""
        if self._scaler is not None and (now := float(self._scaler.get_scale())) != self.scale:
            self.rescale(now / self.scale)
            self.scale = now

    def load_state_dict(self, memory: Mapping[str, Tensor], scale: float = 1.0) -> None:
        """Replace the whole memory by copies of these, of losses of that scale."""
        self._open.clear()
        self.memory.clear()
        for name, kept in memory.items():
            self.memory[name] = kept.detach().to(torch.float32, copy=True)
        self.scale = scale

    def _held(self) -> list[Tensor | Rounded]:
        return list(self.memory.kept.values() if isinstance(self.memory, EightBits) else self.memory.values())


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are; in one pass, and not misled by a sum that overflows."""
    return not tensor.numel() or math.isfinite(float(torch.linalg.vector_norm(tensor, ord=torch.inf)))


def _made_finite(residual: Tensor) -> Tensor:
    """Where means are finite although this rank's tensor was not, a compressor hid it: no later step may pay it."""
    return residual if is_finite(residual) else residual.nan_to_num_(0.0, 0.0, 0.0)
