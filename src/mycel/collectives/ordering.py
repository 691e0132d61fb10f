"""Puts transfers into the order in which everything may be done, which is also the order of pipelining."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mycel.collectives.schedule import Transfer

__all__ = ["in_level_order", "level_order", "renumbered"]


def in_level_order(transfers: Sequence[Transfer], tie: Callable[[Transfer], tuple[int, ...]]) -> tuple[Transfer, ...]:
    """The same transfers, those that can go first before those that wait, ``after`` renumbered.

    Args:
        transfers: each after those it names.
        tie: order within one level.
    """
    return renumbered(transfers, level_order(transfers, tie))


def level_order(transfers: Sequence[Transfer], tie: Callable[[Transfer], tuple[int, ...]]) -> list[int]:
    """The numbers of transfers in that order; arguments as for ``in_level_order``."""
    levels: list[int] = []
    for transfer in transfers:
        levels.append(1 + max((levels[i] for i in transfer.after), default=-1))
    return sorted(range(len(transfers)), key=lambda i: (levels[i], *tie(transfers[i]), i))


def renumbered(transfers: Sequence[Transfer], order: Sequence[int]) -> tuple[Transfer, ...]:
    """The same transfers in another order, ``after`` renumbered.

    Args:
        transfers: any.
        order: their numbers, each after those that it names.
    """
    place = {old: new for new, old in enumerate(order)}
    return tuple(replace(transfers[i], after=tuple(sorted(place[j] for j in transfers[i].after))) for i in order)
