"""Chunks with a decay for each key by kernels, where those run: in the graph, a node for maps and one for outputs."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mycel.sequence.linear.chunks import Chunked
from mycel.triton_kernels import is_interpreted, runs_on

__all__ = ["fused_decay_chunks", "is_taken"]

#: Tokens of a chunk, and most keys, that a program holds.
_LENGTH, _MOST_KEYS = 16, 128


def is_taken(k: Tensor, v: Tensor, g: Tensor) -> bool:
    """Whether kernels compute these chunks: decays for each key, in float32, on a GPU or in Triton's interpreter.

    Args:
        k, v, g: as ``decay_chunks`` takes them.
    """
    if g.dim() != k.dim() or k.shape[-2] != _LENGTH or k.shape[-1] > _MOST_KEYS or not (k.numel() and v.numel()):
        return False
    if any(x.dtype != torch.float32 or type(x) not in (Tensor, torch.nn.Parameter) for x in (k, v, g)):
        return False
    if k.is_cuda:
        return bool(runs_on(k.device.index or 0))
    # Triton is not imported to find out that nobody has asked for its interpreter.
    return k.is_cpu and "triton" in sys.modules and bool(is_interpreted())


def fused_decay_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Chunked:
    """As ``decay_chunks``, with decays of shape (..., chunk, keys), for what ``is_taken`` takes.

    Args:
        q, k, v, g: as for ``decay_chunks``.
    """
    transition, update = _Maps.apply(k, v, g)  # type: ignore[no-untyped-call]

    def outputs(states: Tensor) -> tuple[Tensor, Tensor]:
        return _Outputs.apply(q, k, v, g, states), q * g.cumsum(-2).exp()  # type: ignore[no-untyped-call]

    return Chunked(transition=transition, update=update, outputs=outputs)


def _flat(x: Tensor, dims: int = 2) -> Tensor:
    """Chunks in one dimension, contiguous."""
    return x.flatten(0, -dims - 1).contiguous()


class _Maps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        from mycel.sequence.linear import launches

        ctx.save_for_backward(k, v, g)
        transition = k.new_empty(*k.shape[:-2], k.shape[-1])
        update = k.new_empty(*k.shape[:-2], k.shape[-1], v.shape[-1])
        launches.maps(_flat(k), _flat(v), _flat(g), transition, update).run()
        return transition, update

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_transition: Tensor, d_update: Tensor) -> Any:
        from mycel.sequence.linear import launches

        given = ctx.saved_tensors
        dk, dv, dg = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in given)
        k, v, g = (_flat(x) for x in given)
        launches.maps_back(k, v, g, _flat(d_transition, 1), _flat(d_update), dk, dv, dg).run()
        return dk, dv, dg


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        from mycel.sequence.linear import launches

        ctx.save_for_backward(*given)
        out = torch.empty_like(given[2], memory_format=torch.contiguous_format)
        q, k, v, g, state = (_flat(x) for x in given)
        launches.outputs(q, k, v, g, state, out).run()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Any:
        from mycel.sequence.linear import launches

        given = ctx.saved_tensors
        found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given]
        launches.outputs_back(tuple(_flat(x) for x in given), _flat(d_out), tuple(found)).run()
        return tuple(found)
