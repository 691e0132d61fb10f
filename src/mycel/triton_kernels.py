"""One call of a Triton kernel as a value, and where kernels run. Imports no Triton before one does."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

__all__ = ["Launch", "has_triton", "is_interpreted", "runs_on"]

_F = TypeVar("_F", bound=Callable[..., Any])

#: Tensor cores of bfloat16, and asynchronous loads into shared memory, begin here (NVIDIA A100).
_LEAST_CAPABILITY = 80


def _constant_when_compiled(function: _F) -> _F:
    """What ``torch.compiler.assume_constant_result`` comes to, importing whose module takes seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant_when_compiled
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@_constant_when_compiled
def runs_on(index: int) -> bool:
    """Whether kernels run on a GPU of this process.

    Args:
        index: of the device.
    """
    if torch.version.cuda is None or not has_triton():
        return False
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor >= _LEAST_CAPABILITY


@_constant_when_compiled
def is_interpreted() -> bool:
    """Whether kernels run on this processor, in Triton's interpreter: ``TRITON_INTERPRET=1`` asks for that."""
    if not has_triton():
        return False
    from triton import knobs  # type: ignore[import-untyped]

    return bool(knobs.runtime.interpret)


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
