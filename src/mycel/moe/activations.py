"""Activations inside experts, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mycel.names import spelled

__all__ = ["ACTIVATIONS", "activation"]


class _SwiGLU(torch.autograd.Function):
    """``silu(gate) * up``. Keeps its input only, and writes the gradient's two halves where they belong."""

    @staticmethod
    def forward(z: Tensor) -> Tensor:
        gate, up = z.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (z,) = ctx.saved_tensors
        gate, up = z.chunk(2, dim=-1)
        of_z = torch.empty_like(z)
        of_gate, of_up = of_z.chunk(2, dim=-1)
        torch.mul(grads[0], functional.silu(gate), out=of_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=of_gate)
        return of_z


def _swiglu(z: Tensor) -> Tensor:
    if torch.compiler.is_compiling():  # which fuses the plain form, and does not trace writes into halves
        gate, up = z.chunk(2, dim=-1)
        return functional.silu(gate) * up
    activated: Tensor = _SwiGLU.apply(z)  # type: ignore[no-untyped-call]
    return activated


#: Name of an activation, how many numbers in it takes for each one out, and the function.
ACTIVATIONS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "swiglu": (2, _swiglu),
    "silu": (1, functional.silu),
    "gelu": (1, functional.gelu),
    "relu": (1, functional.relu),
}


def activation(name: str) -> tuple[int, Callable[[Tensor], Tensor]]:
    """The entry of ``ACTIVATIONS``.

    Raises:
        UsageError: no activation has that name.
    """
    return ACTIVATIONS[spelled(name, sorted(ACTIVATIONS), "activation")]
