"""Error feedback: what compression loses of a gradient, its *residual*, is added to the next one.

Over time everything arrives: the sum of what was applied differs from the sum of the gradients by the residuals that
are kept, and a contractive compressor keeps those bounded. They are float32, by parameter name. For gradients that
are sharded they take as much memory as a whole model's gradients on every rank, which is what FSDP saves elsewhere:
for unbiased compressors, leave feedback out there.

References:
    Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019,
    arXiv 1901.09847, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mycel.errors import UsageError

__all__ = ["ErrorFeedback"]


class ErrorFeedback:
    """The residuals of one rank.

    Args:
        decay: share of a residual that survives a step; 1 keeps everything.

    Raises:
        UsageError: the decay is not in (0, 1].

    Attributes:
        residuals: by parameter name, in the shape in which this rank sends the parameter's gradient.

    Examples:
        >>> feedback, gradient = ErrorFeedback(), torch.tensor([1.0, 0.25])
        >>> feedback.remember("w", gradient - torch.tensor([1.0, 0.0]))  # the second number was not sent
        >>> feedback.compensate("w", gradient).tolist()  # and weighs twice in the next step
        [1.0, 0.5]
    """

    def __init__(self, *, decay: float = 1.0) -> None:
        if not 0 < decay <= 1:
            raise UsageError(f"error feedback with decay {decay}: it must be above 0 and at most 1")
        self.decay = decay
        self.residuals: dict[str, Tensor] = {}

    def compensate(self, name: str, gradient: Tensor) -> Tensor:
        """The gradient in float32 with its residual added: a new tensor."""
        residual = self.residuals.get(name)
        if residual is None:
            return gradient.detach().to(torch.float32, copy=True)
        if gradient.dtype == torch.float32:
            return torch.add(gradient.detach(), residual)
        return gradient.detach().float().add_(residual)

    def remember(self, name: str, residual: Tensor, *, mean: Tensor | None = None) -> None:
        """Keep a residual; nothing where the mean is not finite.

        Mixed-precision training skips a step whose gradients overflowed, on all ranks, since all see the same mean.
        Then the residual stays what it was before.

        Args:
            name: of the parameter.
            residual: belongs to the memory from now on.
            mean: what all ranks see; ``None`` where no rank sees all of it, as with shards.
        """
        if mean is None or bool(torch.isfinite(mean.sum())):
            self.residuals[name] = residual if self.decay == 1 else residual.mul_(self.decay)

    def state_dict(self) -> dict[str, Tensor]:
        """The residuals."""
        return dict(self.residuals)

    def load_state_dict(self, residuals: Mapping[str, Tensor]) -> None:
        """Replace all residuals by copies of these."""
        self.residuals = {name: kept.detach().to(torch.float32, copy=True) for name, kept in residuals.items()}
