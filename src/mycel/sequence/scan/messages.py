"""What a way of scanning sends, without sending it: rounds of messages, for formulas, predictions and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mycel.brief import brief

__all__ = ["Round", "total_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Messages that are under way at the same time; the next round begins when all have arrived.

    Attributes:
        numbers: sent, by sender and receiver.
        is_gather: whether it is a gather, where every rank has what another one sends.
    """

    numbers: dict[tuple[int, int], int]
    is_gather: bool = False

    __repr__ = brief


def total_bytes(rounds: Sequence[Round], itemsize: int) -> dict[tuple[int, int], int]:
    """Bytes of all rounds, by sender and receiver.

    Examples:
        >>> total_bytes([Round(numbers={(0, 1): 4}), Round(numbers={(0, 1): 2, (1, 2): 4})], 8)
        {(0, 1): 48, (1, 2): 32}
    """
    found: dict[tuple[int, int], int] = {}
    for each in rounds:
        for pair, numbers in each.numbers.items():
            found[pair] = found.get(pair, 0) + numbers * itemsize
    return found
