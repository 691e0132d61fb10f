"""Co-sharding: a layer's heads and inner columns in pieces, one after the other on the same rank, to hold less.

What tensor parallelism gives to several ranks, one rank does piece by piece: some columns of the first matrices and
the same rows of the last one. The results of all pieces add up to the block's. A piece keeps nothing for the backward
pass and is done again there, so that at any moment one piece of one block is in memory.

References:
    Lin et al., "nnScaler: Constraint-Guided Parallelization Plan Generation for Deep Learning Training", OSDI 2024,
    section 3.3 (co-shard).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from mycel.errors import UsageError
from mycel.parallel.chain import module_of
from mycel.parallel.planned.tensor import layout_of

__all__ = ["blocks_of", "coshard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A module that can be done in pieces.

    Attributes:
        name: in the model.
        columns: matrices in it that are cut by columns, by their names in it.
        row: the one behind them that is cut by rows.
    """

    name: str
    columns: tuple[str, ...]
    row: str


class _Original(nn.Module):
    """A block's own forward, without the hooks that its call has already run."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self._forward = block, block.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


def blocks_of(
    model: nn.Module, layers: Sequence[str], layouts: Sequence[tuple[str, str]], pieces: int
) -> tuple[Block, ...]:
    """The modules of layers that can be done in pieces.

    Args:
        model: the whole, or a part.
        layers: names of its layers.
        layouts: of the plan.
        pieces: to be cut into.

    Raises:
        UsageError: a layer without such a module, or with one that is made otherwise; the message says how.
    """
    found = []
    for layer in layers:
        inside = [f"{layer}.{name}" for name, _ in module_of(model, layer).named_modules() if name]
        shared = {name: kind for name in inside if (kind := layout_of(name, layouts)) != "replicate"}
        parents = list(dict.fromkeys(name.rpartition(".")[0] for name in shared))
        if not parents:
            raise UsageError(f"coshard={pieces}: {layer} has no matrix with a layout: search with --limit coshard=1")
        for parent in parents:
            own = {name: kind for name, kind in shared.items() if name.rpartition(".")[0] == parent}
            found.append(_block(model, parent, own, pieces))
    return tuple(found)


def _block(model: nn.Module, parent: str, own: dict[str, str], pieces: int) -> Block:
    columns = tuple(name for name, kind in own.items() if kind == "colwise")
    rows = tuple(name for name, kind in own.items() if kind == "rowwise")
    way = "make attention and feed-forward part a module each, or search with --limit coshard=1"
    if not columns or len(rows) != 1:
        raise UsageError(
            f"coshard={pieces}: {parent} holds {len(columns)} matrices that are cut by columns and {len(rows)} by "
            f"rows; a piece has some and one: {way}"
        )
    if names := [name for name, _ in module_of(model, parent).named_parameters(recurse=False)]:
        raise UsageError(
            f"coshard={pieces}: {parent} has a parameter {names[0]!r} of its own, outside of pieces: {way}"
        )
    for name in (*columns, *rows):
        matrix = module_of(model, name)
        if not isinstance(matrix, nn.Linear):
            raise UsageError(f"coshard={pieces}: {name} is a {type(matrix).__name__}; pieces are of Linear: {way}")
        size = matrix.out_features if name in columns else matrix.in_features
        if size % pieces:
            raise UsageError(f"coshard={pieces} does not divide the {size} columns of {name}: {way}")
    short = len(parent) + 1
    return Block(name=parent, columns=tuple(name[short:] for name in columns), row=rows[0][short:])


def coshard(model: nn.Module, layers: Sequence[str], layouts: Sequence[tuple[str, str]], pieces: int) -> None:
    """Have layers' blocks done in pieces, in place; names of parameters stay.

    Args:
        model: a part.
        layers: names of those of its layers that it has.
        layouts: of the plan.
        pieces: that each block is cut into.

    Raises:
        UsageError: as of ``blocks_of``.
    """
    for block in blocks_of(model, layers, layouts, pieces):
        module = module_of(model, block.name)
        # The forward of this one module: a wrapper would rename its parameters.
        module.forward = _in_pieces(_Original(module), block, pieces)


def _in_pieces(original: _Original, block: Block, pieces: int) -> Callable[..., Any]:
    def one(parameters: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return functional_call(original, parameters, args, kwargs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        # All pieces of a parameter at once: its gradient is put together once, when all of them have theirs.
        cut = _cut(original.block, block, pieces)
        result: Any = None
        for parameters in cut:
            more = checkpoint(one, parameters, args, kwargs, use_reentrant=False)
            result = more if result is None else _sum(result, more, block.name)
        return result

    return forward


def _cut(module: nn.Module, block: Block, pieces: int) -> list[dict[str, Tensor]]:
    """Parameters of each piece, by their names in an ``_Original``."""
    found: list[dict[str, Tensor]] = [{} for _ in range(pieces)]
    for name in (*block.columns, block.row):
        matrix = module_of(module, name)
        assert isinstance(matrix, nn.Linear)
        is_row = name == block.row
        dim = 1 if is_row else 0
        for own, part in zip(found, matrix.weight.chunk(pieces, dim), strict=True):
            own[f"block.{name}.weight"] = part
        if matrix.bias is None:
            continue
        # What is added to the sum of all pieces is in the first one.
        none = torch.zeros_like(matrix.bias)
        parts = (matrix.bias, *(none,) * (pieces - 1)) if is_row else matrix.bias.chunk(pieces)
        for own, part in zip(found, parts, strict=True):
            own[f"block.{name}.bias"] = part
    return found


def _sum(one: Any, other: Any, name: str) -> Any:
    """Of what two pieces give: tensors are added, and tuples whose first is one."""
    if isinstance(one, Tensor):
        return one + other
    if isinstance(one, tuple) and one and isinstance(one[0], Tensor) and all(part is None for part in one[1:]):
        return (one[0] + other[0], *one[1:])
    raise UsageError(
        f"{name} gives more than one tensor, and pieces of the others do not add up: do not ask for attention's "
        "weights, or search with --limit coshard=1"
    )
