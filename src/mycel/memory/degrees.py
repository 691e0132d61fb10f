"""What ``fit`` has to know of ranks that may share sequences: those who divide sequences say it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch import nn

from mycel.comm.handle import Handle

__all__ = ["Degrees", "Shared"]


class Shared(Protocol):
    """A step on one rank's tokens, of which sizes are known and nothing is sent."""

    def batch(self) -> Any:
        """What this rank calls the model with, where tensors are fake."""

    @property
    def exchange_s(self) -> float:
        """Seconds of the exchanges of the pass that was traced last, one after the other."""


@runtime_checkable
class Degrees(Protocol):
    """Ranks that may share sequences, in groups of equal size; all ranks ask, in one order.

    Attributes:
        group: all of them; they choose alike.
        degrees: sizes of groups that can be, in rising order.
    """

    group: dist.ProcessGroup
    degrees: tuple[int, ...]

    def traced(self, model: nn.Module, batch: Any, degree: int) -> AbstractContextManager[Shared]:
        """While it is entered, the model is one that computes on a rank's tokens, and its exchanges move nothing.

        Args:
            model: as one rank would have it for itself.
            batch: whole.
            degree: ranks that share it.
        """

    def apply(self, model: nn.Module, degree: int) -> Handle:
        """Have the model compute on sequences that so many ranks share, until the handle is closed.

        Args:
            model: the same on all ranks.
            degree: ranks that share a sequence.
        """
