"""The places of the largest magnitudes of a vector, by counting the bits of its numbers; and places as a bitmap.

Two passes count, one over the upper and one over the lower half of the bits of those that may be the smallest of
them; a third collects. That takes a few steps an element however many are wanted, and ties go to the first places,
so the answer does not depend on how a machine sorts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mycel.compiled import compiled_without_lock
from mycel.wire.buckets import unpack

__all__ = ["largest_places", "places_in"]


def largest_places(values: Tensor, count: int) -> Tensor:
    """Places of the ``count`` largest magnitudes that are not zero, rising; NaN counts as the largest of all.

    Compiled for CPU tensors; elsewhere ``torch.topk`` decides which of several equal ones are taken.

    Args:
        values: float32, 1-D, contiguous.
        count: at most as many as there are values.

    Examples:
        >>> largest_places(torch.tensor([1.0, -3.0, 0.0, 2.0, -2.0]), 2).tolist()
        [1, 3]
    """
    if values.is_cpu:
        places = torch.empty(count + 1, dtype=torch.int64)  # one more is written, and not kept
        found = _largest(values.numpy().view(np.uint32), count, places.numpy()) if count else 0
        return places[:found]
    places = torch.topk(values.abs(), count, sorted=False).indices.sort().values
    return places[values[places] != 0]


@compiled_without_lock
def _largest(words: Any, count: int, places: Any) -> int:
    """Magnitudes of floats are in the order of their bits without the sign, NaN above infinity."""
    upper = np.zeros(1 << 15, dtype=np.int64)
    for i in range(len(words)):
        upper[(words[i] & np.uint32(0x7FFFFFFF)) >> np.uint32(16)] += 1
    left, high = count, len(upper) - 1
    while upper[high] < left:
        left -= upper[high]
        high -= 1
    lower = np.zeros(1 << 16, dtype=np.int64)
    for i in range(len(words)):
        word = words[i] & np.uint32(0x7FFFFFFF)
        if word >> np.uint32(16) == high:
            lower[word & np.uint32(0xFFFF)] += 1
    low = len(lower) - 1
    while lower[low] < left:
        left -= lower[low]
        low -= 1
    bound, found = np.int64(high) << 16 | np.int64(low), 0
    for i in range(len(words)):
        word = np.int64(words[i] & np.uint32(0x7FFFFFFF))
        is_equal = (word == bound) & (left > 0)
        places[found] = i
        found += ((word > bound) | is_equal) & (word != 0)
        left -= is_equal
    return found


def places_in(bitmap: Tensor, count: int) -> Tensor:
    """The places (``int64``, rising) of the bits that are set among the first ``count``.

    Args:
        bitmap: ``uint8``, 1-D, the first bit lowest, as ``mycel.wire.buckets.pack`` writes it.
        count: bits, the last byte's others being zero.

    Examples:
        >>> places_in(torch.tensor([0b101, 0b1], dtype=torch.uint8), 9).tolist()
        [0, 2, 8]
    """
    if not bitmap.is_cpu:
        return unpack(bitmap, count, 1).nonzero().view(-1)
    places = torch.empty(_num_set(bitmap.numpy()) + 1, dtype=torch.int64)  # one more is written, and not kept
    _places_in(bitmap.numpy(), places.numpy())
    return places[:-1]


@compiled_without_lock
def _num_set(bitmap: Any) -> int:
    found = 0
    for byte in bitmap:
        pairs = byte - ((byte >> 1) & 0x55)
        fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
        found += (fours + (fours >> 4)) & 0x0F
    return found


@compiled_without_lock
def _places_in(bitmap: Any, places: Any) -> None:
    found = 0
    for i in range(len(bitmap)):
        for bit in range(8):
            places[found] = 8 * i + bit
            found += (bitmap[i] >> bit) & 1
