"""Integers that the network adds: ranks agree on scales first, so that sums of codes are codes of sums.

Each bucket's scale is the largest magnitude of all ranks', by an all_reduce of maxima. Codes are shifted to be never
negative and several are put side by side into one whole number, each with as many bits more as the sum over all ranks
needs: adding the numbers adds every code. One all_reduce of int64 carries them, over any schedule, through whatever
adds on the way, and the result is exact and the same on all ranks. What lossy step there is comes before it.

References:
    Wen et al., "TernGrad", NeurIPS 2017, arXiv 1705.07878, section 3.2 (scaler sharing); Alistarh et al., "QSGD",
    NeurIPS 2017, arXiv 1610.02132, section 3 (stochastic levels).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from mycel.arguments import whole_number
from mycel.data_parallel.compress.aggregation import Aggregation, Scattered, Shapes, joined
from mycel.data_parallel.compress.base import Compressor, numel
from mycel.data_parallel.compress.context import Context
from mycel.data_parallel.compress.rounds import AllReduce, Conversation, Item, Outcome
from mycel.errors import UsageError
from mycel.wire.buckets import bucket_scales, bytes_of, floats_in, of_elements
from mycel.wire.noise import uniform

__all__ = ["IntegerSum"]

#: Bits of an int64 that sums may fill: its sign stays free.
_WORD_BITS = 63


class IntegerSum(Compressor):
    """``bits`` a value and guard bits for so many ranks, side by side in int64 that an all_reduce adds.

    Args:
        bits: of a rank's code, 2 to 16.
        bucket_size: elements that share a scale.
        stochastic: round by chance, unbiased; otherwise to the nearest.
        max_ranks: for which sums have room; more are refused.

    Attributes:
        field_bits: of a code and its guard bits.
        per_word: codes side by side in a number.

    Raises:
        UsageError: sizes out of range.

    Examples:
        >>> IntegerSum(8).per_word, IntegerSum(8, max_ranks=512).per_word, IntegerSum(4).per_word
        (5, 3, 9)
        >>> IntegerSum(8).sent_bytes([(5, 1024)], rank=0, world_size=2)  # 1,024 numbers and 5 scales, once
        8212.0
    """

    name: ClassVar[str] = "integer_sum"
    aggregation: ClassVar[Aggregation] = Scattered()
    is_elementwise: ClassVar[bool] = True

    def __init__(
        self, bits: int = 8, *, bucket_size: int = 1024, stochastic: bool = True, max_ranks: int = 8
    ) -> None:
        self.bits = whole_number(bits, "bits of a code", least=2, most=16)
        self.bucket_size = whole_number(bucket_size, "elements a bucket", least=1)
        self.max_ranks = whole_number(max_ranks, "max_ranks, for which sums have room", least=1)
        self.stochastic = bool(stochastic)
        self.is_unbiased = self.stochastic
        self.is_contractive = not self.stochastic
        self._largest = (1 << (self.bits - 1)) - 1
        self.field_bits = (2 * self._largest * self.max_ranks).bit_length()
        self.per_word = self._slot_bits() // self.field_bits
        if not self.per_word:
            raise UsageError(
                f"codes of {self.bits} bits summed over {self.max_ranks} ranks need {self.field_bits} bits, and a "
                f"number has {self._slot_bits()}: fewer bits, or a smaller max_ranks"
            )

    def wire_bytes(self, shape: Sequence[int]) -> int:
        """See ``Compressor``: of a tensor alone, scales first."""
        return 4 * -(-numel(shape) // self.bucket_size) + 8 * self._num_words(numel(shape))

    def sent_bytes(self, shapes: Shapes, *, rank: int, world_size: int) -> float:
        """See ``Compressor``: scales, then numbers, of all tensors joined."""
        count = sum(map(numel, shapes))
        total = 4 * -(-count // self.bucket_size) + 8 * self._num_words(count)
        return 2 * (world_size - 1) / world_size * total

    def compress(self, tensor: Tensor, context: Context) -> Tensor:
        """See ``Compressor``: with scales of this tensor's own."""
        flat = tensor.reshape(-1).float()
        scales = _seen(bucket_scales(flat, self.bucket_size))
        words = self._seal(self._packed(self._codes(flat, scales, context)))
        return torch.cat([bytes_of(scales), bytes_of(words)])

    def decompress(self, payload: Tensor, shape: Sequence[int], context: Context) -> Tensor:
        """See ``Compressor``."""
        count = numel(shape)
        cut = 4 * -(-count // self.bucket_size)
        slots = self._open(payload[cut:].clone().view(torch.int64), count, world_size=1)
        values = self._summed(slots, count, 1).float()
        return values.mul_(self._steps(floats_in(payload[:cut]), count)).view(tuple(shape))

    def converse(self, items: Sequence[Item], *, keep_residual: bool) -> Conversation:
        """See ``Compressor``: largest magnitudes, then sums."""
        context = items[0].context
        world_size = context.world_size
        self.check_ranks(world_size)
        vector = joined([item.tensor.float() for item in items])
        count = len(vector)
        scales: Tensor = yield AllReduce(tensor=_seen(bucket_scales(vector, self.bucket_size)), op="max")
        self._look_at(scales, items)
        codes = self._codes(vector, scales, context)
        steps = self._steps(scales, count)
        total: Tensor = yield AllReduce(tensor=self._seal(self._packed(codes)))
        sums = self._summed(self._open(total, count, world_size=world_size), count, world_size)
        mean = sums.float().mul_(steps).div_(world_size)
        residual = vector - codes * steps if keep_residual else None
        lengths = [item.tensor.numel() for item in items]
        rests = [None] * len(items) if residual is None else residual.split_with_sizes(lengths)
        return [
            Outcome(mean=m.view(item.tensor.shape), residual=None if r is None else r.view(item.tensor.shape))
            for item, m, r in zip(items, mean.split_with_sizes(lengths), rests, strict=True)
        ]

    def check_ranks(self, world_size: int) -> None:
        """Refuse ranks for whose sums there is no room.

        Raises:
            UsageError: says what would have.
        """
        most = ((1 << self.field_bits) - 1) // (2 * self._largest)
        if world_size > most:
            raise UsageError(
                f"{self.name}: {self.field_bits} bits hold sums of {most} codes of {self.bits} bits, and the group "
                f"has {world_size} ranks: give max_ranks={world_size}"
            )

    def levels(self) -> tuple[float, ...]:
        """Bits."""
        return tuple(float(bits) for bits in range(16, 1, -1) if bits <= self.bits)

    def at(self, level: float) -> Compressor:
        """The same with other bits."""
        super().at(level)
        return IntegerSum(
            int(level), bucket_size=self.bucket_size, stochastic=self.stochastic, max_ranks=self.max_ranks
        )

    # -- what encryption changes ----------------------------------------------------------------------------------

    def _slot_bits(self) -> int:
        """Bits of a number that sums may fill."""
        return _WORD_BITS

    def _num_words(self, count: int) -> int:
        """Of so many values."""
        return -(-count // self.per_word)

    def _seal(self, slots: Tensor) -> Tensor:
        """What travels instead of the numbers, int64 too, and is added instead of them."""
        return slots

    def _open(self, words: Tensor, count: int, *, world_size: int) -> Tensor:
        """The sums of numbers in what has arrived."""
        return words

    def _look_at(self, scales: Tensor, items: Sequence[Item]) -> None:
        """Before anything is coded: an infinite scale says that some rank's bucket is not finite."""

    # -- codes ----------------------------------------------------------------------------------------------------

    def _steps(self, scales: Tensor, count: int) -> Tensor:
        """Of each element, from one code to the next; not a number where a bucket is not finite."""
        finite = torch.where(scales.isfinite(), scales, torch.nan)
        return of_elements(finite / self._largest, self.bucket_size, count)

    def _codes(self, flat: Tensor, scales: Tensor, context: Context) -> Tensor:
        """Whole numbers within the largest code, float32."""
        steps = self._steps(scales, flat.numel())
        exact = torch.where(steps > 0, flat / steps, 0.0)
        if self.stochastic:
            exact = exact + uniform(context.random_seed(shared=False), flat.numel(), flat.device)
            exact = exact.floor()
        else:
            exact = exact.round()
        return exact.nan_to_num_(0.0).clamp_(-self._largest, self._largest)

    def _packed(self, codes: Tensor) -> Tensor:
        """Codes side by side, never negative: ``[numbers]``, int64."""
        shifted = codes.long() + self._largest
        slots = -(-len(shifted) // self.per_word)
        padded = torch.nn.functional.pad(shifted, (0, slots * self.per_word - len(shifted)))
        places = torch.arange(self.per_word, device=codes.device) * self.field_bits
        return (padded.view(slots, self.per_word) << places).sum(1)

    def _summed(self, slots: Tensor, count: int, world_size: int) -> Tensor:
        """Sums of codes from sums of numbers."""
        places = torch.arange(self.per_word, device=slots.device) * self.field_bits
        fields = (slots.unsqueeze(1) >> places) & ((1 << self.field_bits) - 1)
        return fields.view(-1)[:count] - world_size * self._largest


def _seen(scales: Tensor) -> Tensor:
    """Not by nan_to_num, which makes the largest finite number of an infinity, and hides it."""
    return torch.where(scales.isfinite(), scales, torch.inf)
