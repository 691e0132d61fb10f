"""Encrypted sums: what carries and adds gradients does not see them; the ranks, which share a key, do.

``IntegerSum``'s numbers are encrypted before they leave a rank and decrypted when their sum is back. Between, all
that ranks and switches do is to add int64, as for any other all_reduce. What this protects against, and what not, is
said in the page on encrypted sums of the documentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import ClassVar

import torch
from torch import Tensor

from mycel.data_parallel.compress.base import Compressor, numel
from mycel.data_parallel.compress.int_bucket import Quantised
from mycel.data_parallel.compress.integer_sum import IntegerSum
from mycel.data_parallel.compress.rounds import AllReduce, Conversation, Item
from mycel.data_parallel.compress.sum_key import SLOT_BITS, SLOTS, WORDS, SumKey
from mycel.errors import UsageError

__all__ = ["Encrypted"]


class Encrypted(IntegerSum):
    """Sums of whole numbers under encryption: 8.0, 5.4 and 3.2 bytes a value for 16, 8 and 4 bits and up to 8 ranks.

    All tensors of the model travel so, vectors and small ones too, unless a rule of a policy names them. In the clear
    are scales, one a bucket, and that a message is there, when and how long.

    Args:
        method: how values become whole numbers: ``Quantised(bits=8)``, or ``IntegerSum`` for more bits or ranks.
        key: of all ranks, or the file that holds it.
        max_ranks: for which sums have room; by default the method's, 8.

    Raises:
        MissingExtraError: tenseal is not installed.
        UsageError: no key or none of a kind, another method, or numbers that a slot does not hold.

    Examples:
        >>> encrypted = Encrypted(Quantised(bits=8), key=SumKey.make())
        >>> encrypted.per_word, encrypted.wire_bytes((12288,)) / 12288  # three codes a slot
        (3, 5.3...)
    """

    name: ClassVar[str] = "encrypted"
    covers_all: ClassVar[bool] = True

    def __init__(
        self,
        method: Quantised | IntegerSum,
        *,
        key: SumKey | str | PathLike[str] | None,
        max_ranks: int | None = None,
    ) -> None:
        if not isinstance(method, Quantised | IntegerSum) or isinstance(method, Encrypted):
            raise UsageError(
                f"Encrypted({type(method).__name__}): what it sends cannot be added; take Quantised(bits=8)"
            )
        if key is None:
            raise UsageError("Encrypted without a key: SumKey.make().save(path) makes one; key=path on every rank")
        given = method.max_ranks if isinstance(method, IntegerSum) else 8
        super().__init__(
            method.bits,
            bucket_size=method.bucket_size,
            stochastic=method.stochastic,
            max_ranks=given if max_ranks is None else max_ranks,
        )
        self.key = key if isinstance(key, SumKey) else SumKey.load(key)
        self._is_agreed = False

    def takes(self, shape: Sequence[int]) -> bool:
        """See ``Compressor``: everything, whatever it costs."""
        return numel(shape) > 0

    def levels(self) -> tuple[float, ...]:
        """See ``Compressor``: no choice."""
        return (0.0,)

    def at(self, level: float) -> Compressor:
        """See ``Compressor``."""
        return Compressor.at(self, level)

    def check_ranks(self, world_size: int) -> None:
        """See ``IntegerSum``; int64 has to hold the words' sums as well."""
        if world_size > self.key.most_sums:
            raise UsageError(
                f"encrypted: int64 holds sums of {self.key.most_sums} words, and the group has {world_size} ranks: "
                "add inside of groups first"
            )
        super().check_ranks(world_size)

    def converse(self, items: Sequence[Item], *, keep_residual: bool) -> Conversation:
        """See ``Compressor``: once, whether all ranks have one key; then as ``IntegerSum``."""
        if not self._is_agreed:
            own = self.key.fingerprint
            ends: Tensor = yield AllReduce(
                tensor=torch.tensor([own, -own], dtype=torch.int64, device=items[0].tensor.device), op="max"
            )
            largest, smallest = int(ends[0]), -int(ends[1])
            if largest != smallest:
                raise UsageError(
                    f"ranks have different keys: rank {items[0].context.rank} has {own:x}, others {largest:x} or "
                    f"{smallest:x}; give every rank the same file"
                )
            self._is_agreed = True
        return (yield from super().converse(items, keep_residual=keep_residual))

    def _slot_bits(self) -> int:
        return SLOT_BITS

    def _num_words(self, count: int) -> int:
        return WORDS * -(-count // (self.per_word * SLOTS))

    def _seal(self, slots: Tensor) -> Tensor:
        return torch.from_numpy(self.key.encrypt(slots.cpu().numpy())).to(slots.device)

    def _open(self, words: Tensor, count: int, *, world_size: int) -> Tensor:
        found = torch.from_numpy(self.key.decrypt(words.cpu().contiguous().numpy())).to(words.device)
        return found[: -(-count // self.per_word)]

    def _look_at(self, scales: Tensor, items: Sequence[Item]) -> None:
        """Encrypted numbers show nobody on the way that they are none; so nothing is encrypted.

        Raises:
            UsageError: on every rank, with the parameter.
        """
        wrong = (~scales.isfinite()).nonzero().flatten().tolist()
        if not wrong:
            return
        begin, end = wrong[0] * self.bucket_size, (wrong[0] + 1) * self.bucket_size
        at, names = 0, []
        for item in items:
            if at < end and at + item.tensor.numel() > begin:
                names.append(item.context.name)
            at += item.tensor.numel()
        here = "not here" if all(bool(item.tensor.isfinite().all()) for item in items) else "among them this one"
        raise UsageError(
            f"gradients of {' or '.join(names)} are not finite on some ranks ({here}, rank {items[0].context.rank}): "
            "nothing was encrypted; clip them, lower the learning rate, or leave out the step before backward"
        )
