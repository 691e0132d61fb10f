"""Known schedules, one generator a file, all called alike: ranks, micro-batches, chunks a rank."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from mycel.errors import UsageError
from mycel.pipeline.known.chimera import chimera
from mycel.pipeline.known.dualpipe import dualpipe
from mycel.pipeline.known.dualpipe_v import dualpipe_v
from mycel.pipeline.known.gpipe import gpipe
from mycel.pipeline.known.interleaved import interleaved
from mycel.pipeline.known.looped_bfs import looped_bfs
from mycel.pipeline.known.one_f_one_b import one_f_one_b
from mycel.pipeline.known.v_half import v_half
from mycel.pipeline.known.v_min import v_min
from mycel.pipeline.known.zb_h1 import zb_h1
from mycel.pipeline.known.zb_h2 import zb_h2
from mycel.pipeline.known.zb_v import zb_v
from mycel.pipeline.order import Order

__all__ = [
    "KNOWN",
    "Generator",
    "chimera",
    "dualpipe",
    "dualpipe_v",
    "gpipe",
    "interleaved",
    "known_order",
    "looped_bfs",
    "one_f_one_b",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zb_v",
]


class Generator(Protocol):
    """What makes the orders of one schedule."""

    def __call__(self, num_ranks: int, num_micro_batches: int, chunks: int = ...) -> Order:
        """The order for these counts."""


#: Generators by name.
KNOWN: Mapping[str, Generator] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved": interleaved,
        "looped_bfs": looped_bfs,
        "zb_h1": zb_h1,
        "zb_h2": zb_h2,
        "zb_v": zb_v,
        "v_half": v_half,
        "v_min": v_min,
        "dualpipe": dualpipe,
        "dualpipe_v": dualpipe_v,
        "chimera": chimera,
    }
)


def known_order(name: str, num_ranks: int, num_micro_batches: int, chunks: int | None = None) -> Order:
    """The order of a schedule given by its name.

    Args:
        name: key of ``KNOWN``.
        num_ranks: of the pipeline.
        num_micro_batches: of the batch.
        chunks: stages a rank; the schedule's own count if not given.

    Raises:
        UsageError: an unknown name, or counts for which the schedule is not defined.

    Examples:
        >>> known_order("1f1b", 4, 8).name
        '1F1B'
    """
    if name not in KNOWN:
        raise UsageError(f"no schedule is called {name!r}; known are {', '.join(KNOWN)}")
    if chunks is None:
        return KNOWN[name](num_ranks, num_micro_batches)
    return KNOWN[name](num_ranks, num_micro_batches, chunks)
