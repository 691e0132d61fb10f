"""What operations on elements and rows compute, of all rows of an array or of some."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from mycel.overlap.language.program import Node

__all__ = ["apply"]

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "neg": torch.neg,
}
_BINARY: dict[str, Callable[[Tensor, Tensor | float], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
}


def apply(node: Node, inputs: Sequence[Tensor], begin: int, stop: int) -> Tensor:
    """A result, or some rows of it.

    Args:
        node: a pointwise operation or a norm.
        inputs: their rows of the same numbers, and what is the same for all rows.
        begin, stop: which rows of the whole array.
    """
    first = inputs[0]
    if node.operation in _UNARY:
        return _UNARY[node.operation](first)
    if node.operation in _BINARY:
        return _BINARY[node.operation](first, inputs[1] if len(inputs) > 1 else node.number)
    if node.operation == "dropout":
        # The mask of all rows, of which these are taken: slices on ranks and tiles have one mask.
        drawn = torch.Generator(first.device).manual_seed(node.seed)
        mask = first.new_empty(node.rows, node.columns).bernoulli_(1 - node.number, generator=drawn)
        return first * mask[begin:stop].div_(1 - node.number)
    weight = inputs[1].reshape(-1) if len(inputs) > 1 else None
    if node.operation == "layer_norm":
        return functional.layer_norm(first, (node.columns,), weight, None, node.number)
    return functional.rms_norm(first, (node.columns,), weight, node.number)
