"""Rows that are near each other travel as their mean; what each differs from it by stays, and is added back."""

# ruff: noqa: N803, N806  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mycel.errors import UsageError
from mycel.moe.dispatch.base import Dispatched, SteppedDispatcher, Steps, TokenDispatcher
from mycel.moe.rows import SlotOrder, combine_rows, gather_rows, traceable
from mycel.moe.slots import RoutingResult, narrow, routing_from_slots

__all__ = ["LSHDispatcher"]


class LSHDispatcher(SteppedDispatcher):
    """Around another dispatcher: sends it centroids of rows in place of tokens.

    Rows (a token at one of its experts) of one expert that hash alike make a bucket. The bucket's mean ``c`` travels
    as a token with that one expert ``E``, and each of its rows ``x`` gets ``E(c) + (x - c)``. Rows further from ``c``
    than ``radius |x|`` travel by themselves and get ``E(x)``, as do rows that are alone in their bucket.

    Rows hash alike when in each of several random rotations the largest coordinate, with its sign, is the same one.
    Gradients are those of this formula with buckets as given. ``c`` is the mean of its whole bucket, rows that travel
    alone included. How many rows travel depends on the tokens; ``sent`` says it. The host waits for the device for
    numbers of rows.

    Args:
        inner: brings centroids to experts; its codec rounds them.
        num_hashes: more of them make smaller buckets.
        directions: of each rotation that are looked at: buckets of one hash are twice as many; at most the width.
        radius: distance from the centroid, as a part of the row's length, from which rows travel alone; ``None``: no
            row does. 0 sends all.
        residuals: add back what rows differ by from their centroid.
        seed: of the rotations.

    Attributes:
        sent: rows sent and rows there were, of the last call.

    Raises:
        UsageError: no hashes or directions, a negative radius, or ranks that all have the same tokens.

    References:
        Nie et al., "LSH-MoE: Communication-efficient MoE Training via Locality-Sensitive Hashing", NeurIPS 2024,
        arXiv 2411.08446, sections 3.2 and 3.3 (no radius there); Andoni et al., "Practical and Optimal LSH for
        Angular Distance", NeurIPS 2015, section 3 (cross-polytopes).

    Examples:
        >>> from mycel.moe import LinearProjection, TopKRouter, make_dispatcher
        >>> dispatcher = LSHDispatcher(make_dispatcher(None, num_experts=4, mesh=None))
        >>> x = torch.randn(1, 8).expand(6, 8)  # one token, six times
        >>> arrived = dispatcher.dispatch(x, TopKRouter(LinearProjection(8, 4), top_k=2)(x))
        >>> arrived.rows.shape, dispatcher.sent  # a centroid at each of its two experts, in place of 12 rows
        (torch.Size([2, 8]), (2, 12))
    """

    def __init__(
        self,
        inner: TokenDispatcher,
        *,
        num_hashes: int = 2,
        directions: int = 16,
        radius: float | None = 0.5,
        residuals: bool = True,
        seed: int = 0,
    ) -> None:
        if min(num_hashes, directions) < 1:
            raise UsageError(f"LSH: {num_hashes} hashes of {directions} directions; both must be at least 1")
        if radius is not None and not radius >= 0:
            raise UsageError(f"LSH: radius {radius}; expected a part of a row's length, 0 or more, or None")
        if inner.same_tokens:
            raise UsageError("LSH: all ranks of this dispatcher have the same tokens; nothing travels before experts")
        self.inner = inner
        self.num_hashes, self.directions, self.seed = num_hashes, directions, seed
        self.radius = radius
        self.residuals = residuals
        self.num_ranks, self.experts, self.tie = inner.num_ranks, inner.experts, inner.tie
        self.meter = inner.meter
        self.sent = (0, 0)
        self._rotations: dict[tuple[int, torch.device], Tensor] = {}

    def dispatch_steps(self, x_TD: Tensor, routing: RoutingResult) -> Steps[Dispatched]:
        """See ``TokenDispatcher``."""
        routing, num_rows = narrow(routing)
        order, new_R, expert_R = self._sort(x_TD.detach(), routing, num_rows)
        rows_RD = gather_rows(x_TD, order)
        lengths_B = new_R.nonzero().squeeze(1).diff(append=new_R.new_full((1,), num_rows, dtype=torch.int64))
        bucket_R = new_R.cumsum(0) - 1
        means_BD: Tensor = _Mean.apply(rows_RD, lengths_B, bucket_R)  # type: ignore[no-untyped-call]
        near_R = self._near(rows_RD.detach(), means_BD.detach(), bucket_R)
        near, far = near_R.nonzero().squeeze(1), (~near_R).nonzero().squeeze(1)
        served_B = torch.zeros_like(lengths_B).index_add_(0, bucket_R, near_R.long())
        kept = served_B.nonzero().squeeze(1)
        centroids_CD = torch.cat([means_BD.index_select(0, kept), rows_RD.index_select(0, far)])
        sharing = _sharing(bucket_R, near, far, served_B, kept)
        first_B = lengths_B.cumsum(0) - lengths_B
        expert_C = torch.cat([expert_R[first_B[kept]], expert_R[far]])
        self.sent = (expert_C.shape[0], num_rows)
        arrived = yield from self.inner.dispatch_steps(centroids_CD, _one_each(expert_C, routing))
        left_RD = rows_RD - _spread(centroids_CD, sharing) if self.residuals else None
        return Dispatched(
            arrived.rows, arrived.tokens_per_expert, (arrived, sharing, left_RD, order, routing.top_k_weights)
        )

    def combine_steps(self, rows_RD: Tensor, dispatched: Dispatched) -> Steps[Tensor]:
        """See ``TokenDispatcher``."""
        arrived, sharing, left_RD, order, weights_TK = dispatched.state
        results_CD = yield from self.inner.combine_steps(rows_RD, arrived)
        results_RD = _spread(results_CD, sharing)
        if left_RD is not None:
            results_RD = results_RD + left_RD.to(results_RD.dtype)
        return combine_rows(results_RD, weights_TK, order)

    def _sort(self, x_TD: Tensor, routing: RoutingResult, num_rows: int) -> tuple[SlotOrder, Tensor, Tensor]:
        """Slots by expert, then by hash; which rows begin a bucket; the expert of each row."""
        K = routing.top_k_index.shape[1]
        expert = routing.top_k_index.reshape(-1)
        code = self._hash(x_TD).repeat_interleave(K)
        by_code = code.argsort(stable=True)
        slots = by_code[expert[by_code].argsort(stable=True)]  # empty ones last
        row_of_slot = torch.empty_like(slots)
        row_of_slot[slots] = torch.arange(slots.numel(), device=slots.device)
        slots = slots[:num_rows]
        order = SlotOrder(slots, row_of_slot.view_as(routing.top_k_index), num_rows == row_of_slot.numel())
        expert_R, code_R = expert[slots], code[slots]
        new_R = torch.ones_like(expert_R, dtype=torch.bool)
        new_R[1:] = (expert_R[1:] != expert_R[:-1]) | (code_R[1:] != code_R[:-1])
        return order, new_R, expert_R

    def _hash(self, x_TD: Tensor) -> Tensor:
        """One number a token, ``int64``; unlike hashes may collide, as seldom as 64 bits do, and radii still hold."""
        T, D = x_TD.shape
        turned = x_TD.to(torch.float32) @ self._rotation(D, x_TD.device)
        turned = turned.view(T, self.num_hashes, min(self.directions, D))
        axis = turned.abs().argmax(dim=2, keepdim=True)
        vertex = (2 * axis + (turned.gather(2, axis) < 0)).squeeze(2)
        code = torch.zeros(T, dtype=torch.int64, device=x_TD.device)
        for number in range(self.num_hashes):
            code = (code + vertex[:, number] + 1) * _ODD  # wraps around
        return code

    def _rotation(self, width: int, device: torch.device) -> Tensor:
        """Orthonormal columns for each hash, one block after the other; alike on all ranks."""
        if (width, device) not in self._rotations:
            generator = torch.Generator().manual_seed(self.seed)
            blocks = torch.randn(self.num_hashes, width, min(self.directions, width), generator=generator)
            columns = torch.linalg.qr(blocks).Q
            self._rotations[width, device] = columns.transpose(0, 1).reshape(width, -1).to(device)
        return self._rotations[width, device]

    def _near(self, rows_RD: Tensor, means_BD: Tensor, bucket_R: Tensor) -> Tensor:
        """Which rows their bucket's mean stands for. A mean that is not finite stands for none."""
        if self.radius is None:
            return torch.ones_like(bucket_R, dtype=torch.bool)
        wide_RD = rows_RD.to(torch.promote_types(rows_RD.dtype, torch.float32))
        apart_RD = wide_RD - means_BD.index_select(0, bucket_R).to(wide_RD.dtype)
        length_R = torch.linalg.vector_norm(wide_RD, dim=1)
        near_R: Tensor = torch.linalg.vector_norm(apart_RD, dim=1) <= self.radius * length_R
        return near_R


#: For mixing hashes: 2^64 divided by the golden ratio, as a signed number.
_ODD = -7046029254386353131


class _Sharing(NamedTuple):
    """Which centroid stands for each row.

    Attributes:
        of_row: centroid, shape ``[R]``.
        order: rows sorted by it.
        lengths: rows of each centroid.
    """

    of_row: Tensor
    order: Tensor
    lengths: Tensor


def _sharing(bucket_R: Tensor, near: Tensor, far: Tensor, served_B: Tensor, kept: Tensor) -> _Sharing:
    """Centroids of kept buckets first, then rows that travel alone."""
    place_B = torch.zeros_like(served_B)
    place_B[kept] = torch.arange(kept.numel(), device=kept.device)
    centroid_R = place_B[bucket_R]
    centroid_R[far] = kept.numel() + torch.arange(far.numel(), device=far.device)
    return _Sharing(centroid_R, torch.cat([near, far]), torch.cat([served_B[kept], torch.ones_like(far)]))


def _one_each(expert_C: Tensor, routing: RoutingResult) -> RoutingResult:
    """Centroids as tokens of one expert each, of weight 1."""
    nothing = routing.top_k_weights.new_empty(0, routing.num_experts)
    index_C1 = expert_C.unsqueeze(1)
    ones_C1 = torch.ones_like(index_C1, dtype=routing.top_k_weights.dtype)
    return routing_from_slots(index_C1, ones_C1, nothing, nothing, routing.num_experts, full=True)


def _spread(centroids_CD: Tensor, sharing: _Sharing) -> Tensor:
    spread: Tensor = _Spread.apply(centroids_CD, *sharing)  # type: ignore[no-untyped-call]
    return spread


def _segment_sums(rows_RD: Tensor, lengths: Tensor) -> Tensor:
    """Sums of neighbouring rows, in float32 at least; in a fixed order, where adding by index has none on GPUs."""
    wide = rows_RD.to(torch.promote_types(rows_RD.dtype, torch.float32))
    if not rows_RD.numel():
        return wide.new_zeros(lengths.numel(), rows_RD.shape[1])
    return torch.segment_reduce(wide.contiguous(), "sum", lengths=lengths, unsafe=True)


class _Mean(torch.autograd.Function):
    """Of each bucket's rows, which are neighbours."""

    @staticmethod
    def forward(rows_RD: Tensor, lengths_B: Tensor, bucket_R: Tensor) -> Tensor:
        return traceable((_segment_sums(rows_RD, lengths_B) / lengths_B.unsqueeze(1)).to(rows_RD.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        lengths_B, bucket_R = ctx.saved_tensors
        return (grads[0] / lengths_B.unsqueeze(1)).index_select(0, bucket_R), None, None


class _Spread(torch.autograd.Function):
    """A copy of its centroid for every row."""

    @staticmethod
    def forward(centroids_CD: Tensor, centroid_R: Tensor, order_R: Tensor, lengths_C: Tensor) -> Tensor:
        return centroids_CD.index_select(0, centroid_R)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        order_R, lengths_C = ctx.saved_tensors
        return _segment_sums(grads[0].index_select(0, order_R), lengths_C).to(grads[0].dtype), None, None, None
