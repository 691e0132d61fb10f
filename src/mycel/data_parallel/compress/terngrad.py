"""TernGrad: each value becomes -s, 0 or s by chance, with one s for a layer that all ranks agree on.

Values beyond 2.5 standard deviations, about zero, are cut off first, so that s is small. Because
s is shared, ternary digits of all ranks can be added as integers. Digits travel five to a byte; sums, which are known
to lie within the number of ranks, as few bits as hold them. The second half of the exchange loses nothing.

References:
    Wen et al., "TernGrad", NeurIPS 2017, arXiv 1705.07878, algorithm 1, sections 3.3 (layer-wise, clipped) and
    3.2 (scaler sharing).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mycel.data_parallel.compress.aggregation import Aggregation, Scattered, Shapes, joined, share_sizes
from mycel.data_parallel.compress.base import Compressor, numel
from mycel.data_parallel.compress.context import Context
from mycel.data_parallel.compress.rounds import AllGather, AllReduce, AllToAll, Conversation, Item, Outcome
from mycel.errors import UsageError
from mycel.wire.buckets import bytes_of, floats_in
from mycel.wire.digits import digits_bytes, pack_digits, unpack_digits
from mycel.wire.noise import ternary

__all__ = ["TernGrad"]


class TernGrad(Compressor):
    """1.6 or 2 bits a value and four bytes a tensor.

    Args:
        clip: cut off beyond so many standard deviations; ``None`` for not at all, which alone is unbiased.
        packing: ``trits``, five digits a byte, or ``bits``, four.

    Raises:
        UsageError: a clip that is not positive, or another packing.

    Examples:
        >>> TernGrad().wire_bytes((1000,)), TernGrad(packing="bits").wire_bytes((1000,))
        (204, 254)
    """

    name: ClassVar[str] = "terngrad"
    aggregation: ClassVar[Aggregation] = Scattered()

    def __init__(self, clip: float | None = 2.5, *, packing: Literal["trits", "bits"] = "trits") -> None:
        if clip is not None and not clip > 0:
            raise UsageError(f"TernGrad cut off at {clip} standard deviations: it must be positive, or None")
        if packing not in ("trits", "bits"):
            raise UsageError(f"TernGrad packs digits as 'trits' or 'bits', not {packing!r}")
        self.clip, self.packing = clip, packing
        self.is_unbiased = clip is None
        self._base = 3 if packing == "trits" else 4

    @property
    def wants_feedback(self) -> bool:
        """No: rounding by chance can lose more than there was, and averages out."""
        return False

    def wire_bytes(self, shape: Sequence[int]) -> int:
        """See ``Compressor``: of a tensor alone, with its own scale."""
        count = numel(shape)
        return 4 * (count > 0) + digits_bytes(count, self._base)

    def compress(self, tensor: Tensor, context: Context) -> Tensor:
        """See ``Compressor``: the scale, then digits."""
        flat = self._clipped(tensor.reshape(-1))
        if not len(flat):
            return flat.new_zeros(0, dtype=torch.uint8)
        scale = _largest(flat)
        digits = _digits(flat, scale, context)
        return torch.cat([bytes_of(scale.view(1)), pack_digits(digits + 1, self._base)])

    def decompress(self, payload: Tensor, shape: Sequence[int], context: Context) -> Tensor:
        """See ``Compressor``."""
        count = numel(shape)
        if not count:
            return torch.zeros(tuple(shape), device=payload.device)
        values = unpack_digits(payload[4:], count, self._base).float().sub_(1)
        return values.mul_(_finite(floats_in(payload[:4]))).view(tuple(shape))

    def sent_bytes(self, shapes: Shapes, *, rank: int, world_size: int) -> float:
        """See ``Compressor``: scales, digits to their owners, sums to everybody."""
        sizes = share_sizes(sum(map(numel, shapes)), world_size)
        scales = 2 * (world_size - 1) / world_size * 4 * len(shapes)
        digits = sum(digits_bytes(n, self._base) for i, n in enumerate(sizes) if i != rank)
        return scales + digits + (world_size - 1) * digits_bytes(sizes[rank], 2 * world_size + 1)

    def converse(self, items: Sequence[Item], *, keep_residual: bool) -> Conversation:
        """See ``Compressor``: largest magnitudes, digits, sums of digits."""
        rank, world_size = items[0].context.rank, items[0].context.world_size
        clipped = [self._clipped(item.tensor.reshape(-1)) for item in items]
        own = torch.stack([_largest(flat) for flat in clipped])
        # Not by nan_to_num, which makes the largest finite number of an infinity, and hides it.
        seen = torch.where(own.isfinite(), own, torch.inf)
        scales: Tensor = _finite((yield AllReduce(tensor=seen, op="max")))
        digits = joined([_digits(f, s, item.context) for f, s, item in zip(clipped, scales, items, strict=True)])
        sizes = share_sizes(len(digits), world_size)
        shares = digits.split_with_sizes(sizes)
        parts = [
            pack_digits(share + 1, self._base) if i != rank else digits.new_zeros(0, dtype=torch.uint8)
            for i, share in enumerate(shares)
        ]
        length = digits_bytes(sizes[rank], self._base)
        heard: list[Tensor] = yield AllToAll(parts=parts, sizes=[length * (i != rank) for i in range(world_size)])
        total = shares[rank].to(torch.int16)
        for i in range(world_size):
            if i != rank:
                total += unpack_digits(heard[i], sizes[rank], self._base).to(torch.int16) - 1
        base = 2 * world_size + 1
        together: list[Tensor] = yield AllGather(
            tensor=pack_digits(total + world_size, base), sizes=[digits_bytes(n, base) for n in sizes]
        )
        sums = torch.cat([unpack_digits(t, n, base) for t, n in zip(together, sizes, strict=True)])
        values = (sums.float() - world_size) / world_size
        lengths = [item.tensor.numel() for item in items]
        outcomes = []
        for item, value, digit, scale in zip(
            items, values.split_with_sizes(lengths), digits.split_with_sizes(lengths), scales, strict=True
        ):
            shape = item.tensor.shape
            residual = item.tensor - (digit.float() * scale).view(shape) if keep_residual else None
            outcomes.append(Outcome(mean=(value * scale).view(shape), residual=residual))
        return outcomes

    def _clipped(self, flat: Tensor) -> Tensor:
        if self.clip is None or flat.numel() < 2:
            return flat
        bound = self.clip * flat.square().mean().sqrt()
        return torch.where(bound.isfinite(), flat.clamp(-bound, bound), flat)


def _largest(flat: Tensor) -> Tensor:
    return flat.abs().max() if flat.numel() else flat.new_zeros(())


def _finite(scales: Tensor) -> Tensor:
    """Overflow becomes NaN, which is seen; 0 times infinity would be as well, but not by every digit."""
    return torch.where(scales.isfinite(), scales, torch.nan)


def _digits(flat: Tensor, scale: Tensor, context: Context) -> Tensor:
    return ternary(flat.contiguous(), scale, context.random_seed(shared=False))
