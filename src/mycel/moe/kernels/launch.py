"""One call of a Triton kernel as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Launch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A kernel, its arguments by name, and how many programs.

    Attributes:
        kernel: a ``triton.jit`` function.
        grid: programs in each dimension.
        arguments: by name, compile-time constants included.
        num_warps: of a program.
        num_stages: loads that a loop has under way.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 1

    def run(self) -> None:
        """Queue it on the current stream (Triton's interpreter: do it); nothing where there is no program."""
        if min(self.grid):
            tensor = next(value for value in self.arguments.values() if isinstance(value, torch.Tensor))
            with torch.cuda.device_of(tensor):  # type: ignore[no-untyped-call]
                self.kernel[self.grid](**self.arguments, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """How Triton compiles it."""
        # Triton's default for multiply-add in one rounding changes with 3.10, and it warns of that.
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}
