"""Kernels of linear attention in Triton's interpreter beside float64; a process of its own, started by the tests.

    TRITON_INTERPRET=1 python tests/unit/checks/sequence_kernels.py [--all]

prints one JSON object: for each case, the largest errors of outputs and of each gradient, over those of plain torch.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

from mycel.planning.sequence import contiguous
from mycel.sequence import SequenceContext, linear_attention
from mycel.sequence.linear import fused, launches  # noqa: F401  (brings Triton, whose interpreter is asked for)
from mycel.sequence.linear.chunks import Chunked, decay_chunks

#: Keys and values of a chunk; how strong decays are.
CASES = {
    "two blocks of values": (24, 40, 1.0),
    "narrow, strong decays": (5, 3, 30.0),
    "even": (16, 32, 0.1),
    "no decay": (16, 16, 0.0),
}
FIRST = 2
LENGTH = 16
NAMES = ("q", "k", "v", "g", "state")


def given(keys: int, values: int, strength: float, dtype: torch.dtype) -> list[Tensor]:
    """Two heads of two chunks, not contiguous."""
    torch.manual_seed(0)
    shapes = [(2, 1, 2, LENGTH, keys)] * 2 + [
        (2, 1, 2, LENGTH, values),
        (2, 1, 2, LENGTH, keys),
        (2, 1, 2, keys, values),
    ]
    made = [torch.randn(*shape, dtype=torch.float64) for shape in shapes]
    made[3] = -strength * torch.rand(shapes[3], dtype=torch.float64)
    return [x.transpose(0, 1).contiguous().transpose(0, 1).to(dtype).requires_grad_() for x in made]


def results(chunks: Chunked, inputs: list[Tensor]) -> list[Tensor]:
    """Maps, outputs, queries, and the gradients of everything through all of them."""
    out, queries = chunks.outputs(inputs[4])
    parts = [chunks.transition, chunks.update, out, queries]
    torch.manual_seed(1)
    factors = [torch.randn(part.shape, dtype=torch.float64).to(part.dtype) for part in parts]
    total = sum((part * factor).sum() for part, factor in zip(parts, factors, strict=True))
    return [*(part.detach() for part in parts), *torch.autograd.grad(total, inputs)]


def off(found: Tensor, exact: Tensor) -> float:
    """Relative to the largest number."""
    return float((found.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30))


def chunk(keys: int, values: int, strength: float) -> dict[str, float]:
    """Errors of kernels, over twice those of plain torch in float32 or ten roundings, whichever is more."""
    form = (keys, values, strength)
    inputs, exact_inputs = given(*form, torch.float32), given(*form, torch.float64)
    if not fused.is_taken(*inputs[1:4]):
        raise SystemExit("the kernels were not taken")
    exact = results(decay_chunks(*exact_inputs[:4]), exact_inputs)
    plain = results(decay_chunks(*inputs[:4]), inputs)
    kernels = results(fused.fused_decay_chunks(*inputs[:4]), inputs)
    names = ("transition", "update", "outputs", "queries", *(f"d{name}" for name in NAMES))
    return {
        name: off(kernel, wanted) / max(2 * off(torched, wanted), 1e-6)
        for name, kernel, torched, wanted in zip(names, kernels, plain, exact, strict=True)
    }


def whole() -> dict[str, float]:
    """Linear attention over documents by kernels, beside itself in float64, which they do not take."""
    torch.manual_seed(2)
    context = SequenceContext(contiguous([35, 5], 1))
    exact = [torch.randn(1, 1, 40, 12, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    exact.append((-torch.rand(1, 1, 40, 12, dtype=torch.float64)).requires_grad_())
    single = [x.detach().float().requires_grad_() for x in exact]
    found = []
    for q, k, v, g in (single, exact):
        out = linear_attention(q, k, v, context, decay=g)
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v, g))])
    names = ("outputs", "dq", "dk", "dv", "dg")
    return {name: off(one, wanted) for name, one, wanted in zip(names, *found, strict=True)}


if __name__ == "__main__":
    chosen = list(CASES)[: None if "--all" in sys.argv else FIRST]
    print(json.dumps({name: chunk(*CASES[name]) for name in chosen} | {"linear attention": whole()}))
