"""What a program of overlapped operators computes, on all ranks at once in one process, node by node, in float64.

Written from the meaning of the operations alone: stages say how nodes run and not what they are, so they are not
looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from mycel.overlap.language import Program

#: A result on each rank.
Everywhere = list[Tensor]


def chunks(whole: Tensor, size: int) -> list[Tensor]:
    each = -(-whole.shape[0] // size)
    return [whole[rank * each : (rank + 1) * each] for rank in range(size)]


def _norm(kind: str, x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(1, keepdim=True) if kind == "layer_norm" else x
    return centred / (centred.square().mean(1, keepdim=True) + eps).sqrt()


def _mask(rows: int, columns: int, share: float, seed: int) -> Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return torch.empty(rows, columns, dtype=torch.float64).bernoulli_(1 - share, generator=drawn) / (1 - share)


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "sqrt": lambda x: x**0.5,
    "square": lambda x: x * x,
    "neg": lambda x: -x,
}
BINARY: dict[str, Callable[[Tensor, Tensor | float], Tensor]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
}


def evaluate(program: Program, inputs: Mapping[str, Everywhere], size: int) -> dict[str, Everywhere]:
    """Results on each rank; inputs are whole or, where sliced, each rank's rows."""
    values: dict[str, Everywhere] = {}
    for node in program.nodes:
        taken = [values[name] for name in node.inputs]
        if node.operation == "input":
            found = [t.double() for t in inputs[node.name]]
        elif node.operation == "all_reduce":
            found = [torch.stack(taken[0]).sum(0)] * size
        elif node.operation == "reduce_scatter":
            found = chunks(torch.stack(taken[0]).sum(0), size)
        elif node.operation == "all_gather":
            found = [torch.cat(taken[0])] * size
        elif node.operation == "slice":
            found = [chunks(taken[0][rank], size)[rank] for rank in range(size)]
        elif node.operation == "total":
            sums = [t.sum().reshape(1, 1) for t in taken[0]]
            is_sliced = program.node(node.inputs[0]).layout == "sliced"
            found = [torch.stack(sums).sum(0)] * size if is_sliced else sums
        elif node.operation == "dropout":
            mask = _mask(node.rows, node.columns, node.number, node.seed)
            masks = chunks(mask, size) if node.layout == "sliced" else [mask] * size
            found = [x * m for x, m in zip(taken[0], masks, strict=True)]
        elif node.operation == "matmul":
            found = [a @ b for a, b in zip(*taken, strict=True)]
        elif node.operation in UNARY:
            found = [UNARY[node.operation](x) for x in taken[0]]
        elif node.operation in BINARY:
            others = taken[1] if len(taken) > 1 else [node.number] * size
            found = [BINARY[node.operation](a, b) for a, b in zip(taken[0], others, strict=True)]
        else:
            found = [_norm(node.operation, x, node.number) for x in taken[0]]
            if len(taken) > 1:
                found = [x * w for x, w in zip(found, taken[1], strict=True)]
        values[node.name] = found
    return {name: values[of] for name, of in program.outputs}
