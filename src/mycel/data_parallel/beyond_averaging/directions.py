"""Directions of a weight matrix: its strongest singular vectors, divided over ranks, and what moving along them does.

A direction is a row ``[a, b]`` of ``inputs + outputs`` numbers: ``a = sqrt(s) v`` and ``b = sqrt(s) u`` of one
singular value ``s``. The directions of a matrix are a tensor ``[directions, inputs + outputs]``, whose left part is
``A`` and whose right part, transposed, is ``B`` of a low-rank adapter ``B A``; those of a rank are some of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mycel.comm.bundle import Packed
from mycel.data_parallel.stats import CommStats

__all__ = ["gather_rows", "move", "principal_directions", "rows_of_ranks", "witness"]


@torch.no_grad()
def principal_directions(weight: Tensor, count: int) -> Tensor:
    """The strongest directions of a matrix, the strongest first.

    Args:
        weight: shape ``[outputs, inputs]``.
        count: how many; a matrix has no more than its shorter side.

    Returns:
        Shape ``[count, inputs + outputs]``, float32 at least.

    Examples:
        >>> principal_directions(torch.tensor([[0.0, 4.0], [1.0, 0.0]]), 1).abs()
        tensor([[0., 2., 2., 0.]])
    """
    exact = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    u, s, vh = torch.linalg.svd(exact, full_matrices=False)
    count = min(count, len(s))
    roots = s[:count].sqrt().unsqueeze(1)
    return torch.cat((roots * vh[:count], roots * u[:, :count].t()), dim=1)


def rows_of_ranks(count: int, world_size: int) -> list[int]:
    """Directions of each rank, as even as can be.

    Examples:
        >>> rows_of_ranks(10, 4)
        [3, 3, 2, 2]
    """
    return [count // world_size + (rank < count % world_size) for rank in range(world_size)]


@torch.no_grad()
def move(weight: Tensor, directions: Tensor, changes: Tensor) -> None:
    """Add ``(B + dB)(A + dA) - B A`` to a matrix, in place.

    Args:
        weight: shape ``[outputs, inputs]``.
        directions: ``[A, B^T]``, shape ``[directions, inputs + outputs]``.
        changes: ``[dA, dB^T]``, the same shape.
    """
    sizes = [weight.shape[1], weight.shape[0]]
    (a, b), (da, db) = torch.split(directions, sizes, dim=1), torch.split(changes, sizes, dim=1)
    weight.addmm_(db.t(), a + da).addmm_(b.t(), da)


def witness(output: Tensor, x: Tensor, change: Tensor, directions: Tensor) -> Tensor:
    """The output of a linear layer, whose gradient also says what moving along directions would do to the loss.

    With the gradient ``g`` of the output, the weight's is ``g^T x``. Those of ``A`` and ``B`` are ``(g B)^T x`` and
    ``g^T (x A^T)``: for ``n`` rows and ``r`` directions ``4 n r (inputs + outputs)`` operations, where the weight's
    own gradient takes ``2 n`` times ``inputs`` times ``outputs``, and memory for it. The forward pass costs nothing.

    Args:
        output: of the layer, shape ``[..., outputs]``; marked in place, no number of it changes.
        x: what the layer was given, shape ``[..., inputs]``.
        change: gets the gradient, shape ``[directions, inputs + outputs]``; its values are taken as zero.
        directions: where the gradient is taken, the same shape.
    """
    seen: Tensor = _Witness.apply(output, x, change, directions)  # type: ignore[no-untyped-call]
    return seen


class _Witness(torch.autograd.Function):
    """See ``witness``. In place, so that layers that work in place may follow."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, x: Tensor, change: Tensor, directions: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        ctx.save_for_backward(x, directions)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor, None]:
        x, directions = ctx.saved_tensors
        g = gradient.reshape(-1, gradient.shape[-1])
        rows = x.reshape(-1, x.shape[-1]).to(g.dtype)
        a, b = directions.to(g.dtype).split([rows.shape[1], g.shape[1]], dim=1)
        found = torch.cat(((g @ b.t()).t() @ rows, (rows @ a.t()).t() @ g), dim=1)
        return gradient, None, found.to(directions.dtype), None


@torch.no_grad()
def gather_rows(
    parts: Sequence[Tensor], counts: Sequence[int], group: dist.ProcessGroup, stats: CommStats
) -> list[Tensor]:
    """Matrices whose rows are divided over the ranks, as wholes on every rank. All ranks call it.

    Args:
        parts: this rank's rows of each matrix, as ``rows_of_ranks`` divides them.
        counts: rows of each whole matrix.
        group: the ranks.
        stats: counts ``(W-1)`` times this rank's rows, filled up to those of the first rank.
    """
    size, rank = group.size(), group.rank()
    if size == 1:
        return [part.clone() for part in parts]
    shares = [rows_of_ranks(count, size) for count in counts]
    blocks = [part.new_zeros(share[0], part.shape[1]) for part, share in zip(parts, shares, strict=True)]
    outgoing = Packed(blocks)
    for block, part in zip(outgoing.parts, parts, strict=True):
        block[: len(part)] = part
    incoming = [Packed(blocks) for _ in range(size)]
    for place, bundle in enumerate(outgoing.bundles):
        dist.all_gather([other.bundles[place].flat for other in incoming], bundle.flat, group=group)
        stats.sent((size - 1) * bundle.flat.numel() * bundle.flat.element_size())
    assert all(len(part) == share[rank] for part, share in zip(parts, shares, strict=True))
    return [torch.cat([incoming[r].parts[i][: share[r]] for r in range(size)]) for i, share in enumerate(shares)]
