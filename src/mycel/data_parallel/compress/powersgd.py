"""PowerSGD: gradient matrices as products of two thin ones, found by one step of power iteration.

    P = sum M Q,  orthonormal P,  Q = sum M^T P,  mean = P Q^T

Q is kept for the next step, where it is nearly right already, once all of its step's means are known to be finite.
Both sums are linear, so each is one all_reduce for all layers together. A rank's residual is its own matrix minus its
own share of the product, ``M - P (M^T P)^T``, as in the paper; taking the mean's product instead gives the same
means, but lets the residuals of ranks drift apart.

References:
    Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019, arXiv 1905.13727, algorithms 1 and 2;
    Yamamoto et al., "Shifted Cholesky QR", SIAM J. Sci. Comput. 42(1), 2020 (why Gram matrices need care).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from mycel.arguments import real_number, whole_number
from mycel.data_parallel.compress.aggregation import Aggregation, Linear
from mycel.data_parallel.compress.base import Compressor, numel
from mycel.data_parallel.compress.context import Context
from mycel.data_parallel.compress.rounds import AllReduce, Conversation, Item, Outcome
from mycel.errors import UsageError

__all__ = ["PowerSGD", "directions", "inverse_roots", "orthonormal"]

#: Directions this much weaker than the strongest are rounding errors of float32, and are dropped.
_WEAKEST = 1e-6
#: Matrices of up to so many elements are multiplied several at once.
_SMALL = 1 << 14
#: Steps of power iteration with which a gradient's strongest directions are found before it is first compressed.
_PRIMING = 3
#: Ranks that adaptive policies choose from.
_RANKS = (64, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)


class PowerSGD(Compressor):
    """Matrices of rank ``rank``; a tensor is seen as a matrix of its first dimension by all others.

    Args:
        rank: columns of P and Q.
        wire: type in which factors travel; ``torch.bfloat16`` halves the bytes, and rounds sums to 8 bits.
        min_ratio: tensors that would not become so many times smaller travel exact.

    Raises:
        UsageError: a rank below 1, or a type that is not floating.

    Examples:
        >>> PowerSGD(rank=4).wire_bytes((256, 100))
        5696
    """

    name: ClassVar[str] = "powersgd"
    aggregation: ClassVar[Aggregation] = Linear()
    is_contractive = True

    def __init__(self, rank: int = 4, *, wire: torch.dtype = torch.float32, min_ratio: float = 2.0) -> None:
        rank = whole_number(rank, "PowerSGD's rank", least=1)
        if wire not in (torch.float32, torch.bfloat16, torch.float16):
            raise UsageError(f"PowerSGD's factors travel as float32, bfloat16 or float16, not as {wire}")
        self.rank, self.wire, self.min_ratio = rank, wire, real_number(min_ratio, "min_ratio", least=0)
        self._q: dict[str, Tensor] = {}
        self._next_q: dict[str, Tensor] = {}  # of the step under way

    def wire_bytes(self, shape: Sequence[int]) -> int:
        """See ``Compressor``: both factors."""
        rows, columns = _as_matrix(shape)
        return self.wire.itemsize * min(self.rank, rows, columns) * (rows + columns)

    def takes(self, shape: Sequence[int]) -> bool:
        """See ``Compressor``: compared with float32."""
        return self.wire_bytes(shape) * self.min_ratio < 4 * numel(shape)

    def compress(self, tensor: Tensor, context: Context) -> Tensor:
        """See ``Compressor``: this rank's own factors, P and then Q. Ranks that work together use ``converse``."""
        matrix = tensor.reshape(_as_matrix(tensor.shape))
        p = _rounded(orthonormal(matrix @ self._start(context, matrix)), self.wire)
        return torch.cat([p.reshape(-1), (matrix.t() @ p).reshape(-1)]).to(self.wire)

    def decompress(self, payload: Tensor, shape: Sequence[int], context: Context) -> Tensor:
        """See ``Compressor``."""
        rows, columns = _as_matrix(shape)
        rank = min(self.rank, rows, columns)
        p, q = payload.float().split_with_sizes([rows * rank, columns * rank])
        return (p.view(rows, rank) @ q.view(columns, rank).t()).view(tuple(shape))

    def converse(self, items: Sequence[Item], *, keep_residual: bool) -> Conversation:
        """See ``Compressor``: two sums, of all P and of all Q."""
        world_size = items[0].context.world_size
        stacks = _stacks(items)
        matrices = [
            torch.stack([_matrix(items[i]) for i in s]) if len(s) > 1 else _matrix(items[s[0]]) for s in stacks
        ]
        starts = [
            torch.stack([self._start(items[i].context, _matrix(items[i])) for i in s])
            if len(s) > 1
            else self._start(items[s[0]].context, matrices[k])
            for k, s in enumerate(stacks)
        ]
        ps = [(m @ q).div_(world_size) for m, q in zip(matrices, starts, strict=True)]
        summed: Tensor = yield AllReduce(tensor=torch.cat([p.reshape(-1) for p in ps]).to(self.wire))
        parts = summed.float().split_with_sizes([p.numel() for p in ps])
        ps = orthonormals([part.view(p.shape) for part, p in zip(parts, ps, strict=True)])
        own = [_rounded((m.mT @ p).div_(world_size), self.wire) for m, p in zip(matrices, ps, strict=True)]
        summed = yield AllReduce(tensor=torch.cat([q.reshape(-1) for q in own]).to(self.wire))
        parts = summed.float().split_with_sizes([q.numel() for q in own])
        outcomes: dict[int, Outcome] = {}
        for k, s in enumerate(stacks):
            q = parts[k].view(own[k].shape)
            mean, residual = ps[k] @ q.mT, None
            if keep_residual:
                multiply = torch.addmm if mean.dim() == 2 else torch.baddbmm
                residual = multiply(matrices[k], ps[k], own[k].mT, alpha=-world_size)
            for j, i in enumerate(s):
                pick: slice | int = j if len(s) > 1 else slice(None)
                self._next_q[items[i].context.name] = q[pick].contiguous()
                shape = items[i].tensor.shape
                rest = None if residual is None else residual[pick].reshape(shape)
                outcomes[i] = Outcome(mean=mean[pick].reshape(shape), residual=rest)
        return [outcomes[i] for i in range(len(items))]

    def levels(self) -> tuple[float, ...]:
        """Ranks."""
        return tuple(float(rank) for rank in _RANKS)

    def at(self, level: float) -> Compressor:
        """The same of another rank, with no memory of earlier directions."""
        super().at(level)
        return PowerSGD(int(level), wire=self.wire, min_ratio=self.min_ratio)

    def error(self, tensor: Tensor, level: float) -> float:
        """See ``Compressor``: of the best matrix of that rank, which power iteration comes near to in a few steps."""
        return self.errors(tensor)[level]

    def errors(self, tensor: Tensor) -> dict[float, float]:
        """``error`` at every level, from one singular value decomposition."""
        values = torch.linalg.svdvals(tensor.detach().float().reshape(_as_matrix(tensor.shape))).double()
        return {level: float(values[int(level) :].square().sum().sqrt()) for level in self.levels()}

    def prime(self, name: str, mean: Tensor) -> None:
        """See ``Compressor``: Q begins with the strongest directions of ``mean`` instead of random ones."""
        matrix = mean.detach().float().reshape(_as_matrix(mean.shape))
        q = self._start(Context(name=name), matrix)
        for _ in range(_PRIMING):
            q = matrix.t() @ orthonormal(matrix @ q)
        if bool(torch.isfinite(q.sum())):
            self._q[name] = q

    def settle(self, *, keep: bool) -> None:
        """See ``Compressor``: Q of the step becomes what the next one starts with."""
        if keep:
            self._q.update(self._next_q)
        self._next_q = {}

    def state_dict(self) -> dict[str, Tensor]:
        """Q by parameter name, the same on all ranks."""
        return dict(self._q)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take Q back; those of another rank or shape are replaced when they are needed."""
        self._q = {name: q.detach().clone() for name, q in state.items()}

    def _start(self, context: Context, matrix: Tensor) -> Tensor:
        """Q of the last step; where it has no direction (at first, after zeros), a random one that all agree on."""
        return directions(self._q.get(context.name), min(self.rank, *matrix.shape[-2:]), context, matrix)


def orthonormal(p: Tensor) -> Tensor:
    """Orthonormal columns that span what the columns of ``p`` span; zeros where they span less.

    By way of the small Gram matrix, in float64: ``P V L^(-1/2)`` with the eigenvectors and eigenvalues of ``P^T P``.
    All its cost is two products; nothing is divided by zero.

    Args:
        p: float32, shape ``[..., rows, rank]``.
    """
    return orthonormals([p])[0]


def orthonormals(ps: Sequence[Tensor]) -> list[Tensor]:
    """``orthonormal`` for many at once: their Gram matrices of one size are decomposed together."""
    exact = [p.double() for p in ps]
    turns = inverse_roots([p.mT @ p for p in exact])
    return [(p @ turn).float() for p, turn in zip(exact, turns, strict=True)]


def inverse_roots(grams: Sequence[Tensor]) -> list[Tensor]:
    """``V L^(-1/2)`` for each Gram matrix ``P^T P = V L V^T``: times it, P is orthonormal, and zero where it is weak.

    Args:
        grams: float64, shape ``[..., rank, rank]``; NaN makes NaN.
    """
    found: list[Tensor] = list(grams)
    for rank in {g.shape[-1] for g in grams} - {0}:
        members = [i for i, g in enumerate(grams) if g.shape[-1] == rank]
        flat = torch.cat([grams[i].reshape(-1, rank, rank) for i in members])
        good = torch.isfinite(flat).all(dim=-1).all(dim=-1)
        values, vectors = torch.linalg.eigh(torch.where(good[:, None, None], flat, 0.0))
        weakest = values[:, -1:] * _WEAKEST**2
        scale = torch.where((values > weakest) & (values > 0), values.clamp_min(1e-300).rsqrt(), 0.0)
        scale = torch.where(good[:, None], scale, torch.nan)
        turns = vectors * scale[:, None, :]
        counts = [grams[i].numel() // (rank * rank) for i in members]
        for i, turn in zip(members, turns.split_with_sizes(counts), strict=True):
            found[i] = turn.view(grams[i].shape)
    return found


def directions(known: Tensor | None, rank: int, context: Context, matrix: Tensor) -> Tensor:
    """What power iteration starts with: the directions of the last step; random ones, that all ranks agree on, where
    there are none (at first, after zeros).

    Args:
        known: shape ``[columns, rank]``; ``None``, or another shape or device, where there is nothing to start with.
        context: which matrix, and when.
        matrix: shape ``[rows, columns]``, whose type and device the answer has.
    """
    columns = matrix.shape[-1]
    if known is None or known.shape != (columns, rank) or known.device != matrix.device:
        known = matrix.new_zeros(columns, rank)
    empty = ~known.any(dim=0)
    if not bool(empty.any()):
        return known
    fresh = torch.randn(columns, rank, generator=context.generator(shared=True)).to(matrix)
    return torch.where(empty, fresh, known)


def _as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    rows = shape[0] if shape else 1
    return rows, numel(shape[1:])


def _matrix(item: Item) -> Tensor:
    return item.tensor.view(_as_matrix(item.tensor.shape))


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if dtype == tensor.dtype else tensor.to(dtype).float()


def _stacks(items: Sequence[Item]) -> list[list[int]]:
    """Which items are multiplied together: small ones of one shape; each other one alone."""
    stacks: dict[object, list[int]] = {}
    for i, item in enumerate(items):
        small = item.tensor.numel() <= _SMALL
        stacks.setdefault((_as_matrix(item.tensor.shape), "small") if small else i, []).append(i)
    return list(stacks.values())
