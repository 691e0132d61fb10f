"""Dion: orthonormal updates of low rank, for which only two thin factors of each matrix travel.

    B = M + G,  P = B Q,  orthonormal P,  R = B^T P,  M = B - (1 - mu) P R^T,  Q = R with columns of length 1,
    X -= lr sqrt(rows / columns) P Q^T

What a step leaves out of B stays in M, which is momentum and error feedback in one. With a gradient of its own on
each rank, P and R are means over ranks: both are linear in B, so the mean of the ranks' M is the M of one process
with all data. A rank takes its own ``P (B^T P)^T`` off its M, as in PowerSGD; taking the mean's gives the same means,
but leaves in M whatever of this rank's gradients the mean has not, for ever.

With rows over ranks, a rank's rows of P need its rows of B only. The columns of P become orthonormal by way of
their Gram matrix, and R is a sum over ranks.

References:
    Ahn, Xu et al., "Dion: Distributed Orthonormalized Updates", 2025, arXiv 2504.05295, algorithms 1 and 3;
    Fukaya et al., "CholeskyQR2", 2014 (QR by way of the Gram matrix).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mycel.data_parallel.compress.context import Context
from mycel.data_parallel.compress.powersgd import directions, inverse_roots
from mycel.data_parallel.optimizers.entries import Change, Entry, Ranks, totals
from mycel.data_parallel.stats import CommStats

__all__ = ["changes", "gram_turns", "rank_of"]

#: Columns of length 1 that stand this little out of the ones before them depend on them, up to rounding.
_DEPENDENT = 1e-5


def changes(entries: Sequence[Entry], ranks: Ranks, stats: CommStats, seed: int) -> list[Change]:
    """A change for each entry; two collectives for all of them."""
    size = 1 if ranks.replicas is None else ranks.replicas.size()
    wires = [entry.options["wire"] or entry.gradient.dtype for entry in entries]
    sums = [entry.kept("momentum") + entry.gradient for entry in entries]
    starts = [_start(entry, b, seed) for entry, b in zip(entries, sums, strict=True)]
    products = [(b @ q).div_(size) for b, q in zip(sums, starts, strict=True)]
    lefts = _orthonormal(totals(products, wires, ranks.replicas, stats), ranks, stats)
    own = [(b.mT @ p).div_(size) for b, p in zip(sums, lefts, strict=True)]
    group = ranks.replicas or ranks.shards
    if group is not None:
        own = [part.to(wire).to(part.dtype) for part, wire in zip(own, wires, strict=True)]
    rights = totals(own, wires, group, stats)
    # Of replicas each takes off its own part; rows have nothing but the sum.
    taken = rights if ranks.replicas is None else [part.mul_(size) for part in own]
    return [
        _change(entry, b, p, right, off)
        for entry, b, p, right, off in zip(entries, sums, lefts, rights, taken, strict=True)
    ]


def rank_of(rank: float, shape: Sequence[int]) -> int:
    """Columns of the factors: a number of them, or a share of the shorter side.

    Examples:
        >>> rank_of(0.25, (384, 128)), rank_of(8, (384, 128)), rank_of(8, (4, 128))
        (32, 8, 4)
    """
    shorter = min(shape)
    return min(shorter, math.ceil(rank * shorter) if isinstance(rank, float) else rank)


def gram_turns(grams: Sequence[Tensor]) -> list[Tensor]:
    """What makes the columns of P orthonormal: ``P^T P = L L^T``, and ``P L^(-T)`` is the Q of P's QR decomposition.

    Columns are given length 1 before, so that strong directions do not drown weak ones. Where columns depend on each
    other there is no such factor, and the eigenvectors' basis of what they span takes its place.

    Args:
        grams: float64, shape ``[rank, rank]``; NaN makes NaN.
    """
    found: list[Tensor] = []
    hard = []
    for i, gram in enumerate(grams):
        lengths = gram.diagonal().clamp_min(torch.finfo(gram.dtype).tiny).rsqrt()
        lower, failed = torch.linalg.cholesky_ex(gram * lengths * lengths[:, None])
        if int(failed) or not bool((lower.diagonal() > _DEPENDENT).all()):
            hard.append(i)
        unit = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        found.append(lengths[:, None] * torch.linalg.solve_triangular(lower.mT, unit, upper=True))
    for i, turn in zip(hard, inverse_roots([grams[i] for i in hard]), strict=True):
        found[i] = turn
    return found


def _start(entry: Entry, matrix: Tensor, seed: int) -> Tensor:
    step = int(entry.state.get("step", 0))
    context = Context(name=entry.name, step=step, seed=seed)
    return directions(entry.state.get("q"), rank_of(entry.options["rank"], entry.parameter.shape), context, matrix)


def _orthonormal(ps: Sequence[Tensor], ranks: Ranks, stats: CommStats) -> list[Tensor]:
    exact = [p.double() for p in ps]
    grams = [p.mT @ p for p in exact]
    turns = gram_turns(totals(grams, [torch.float64] * len(grams), ranks.shards, stats))
    return [(p @ turn).to(like.dtype) for p, turn, like in zip(exact, turns, ps, strict=True)]


def _change(entry: Entry, b: Tensor, p: Tensor, right: Tensor, taken: Tensor) -> Change:
    def apply() -> None:
        torch.addmm(b, p, taken.mT, alpha=entry.options["momentum"] - 1, out=entry.kept("momentum"))
        lengths = torch.linalg.vector_norm(right, dim=0).clamp_min(torch.finfo(right.dtype).tiny)
        q = right / lengths
        entry.state["q"] = q
        entry.state["step"] = entry.state.get("step", torch.zeros(())) + 1
        entry.move(lambda x, factor: x.addmm_(p, q.mT, alpha=factor), entry.scale)

    return Change(values=right, apply=apply)
