"""The widest experts that a rank can afford: by the memory it has, and by the rows that come to it."""

from __future__ import annotations

from collections.abc import Sequence

from mycel.arguments import real_number, whole_number
from mycel.errors import UsageError
from mycel.moe.elastic.elastic import ElasticExperts

__all__ = ["width_for_load", "width_for_memory"]


def width_for_memory(elastic: ElasticExperts, widths: Sequence[int], num_bytes: int, *, num_experts: int) -> int:
    """The widest prefix of which a rank can hold so many experts of every layer: for ``keep``.

    Args:
        elastic: whose experts.
        widths: to choose from, in neurons.
        num_bytes: for all of them.
        num_experts: of each layer that this rank has.

    Raises:
        UsageError: not even the narrowest fits; says how many bytes that takes.

    Examples:
        >>> from mycel.moe import MoE
        >>> from mycel.moe.elastic import elastic_experts
        >>> with elastic_experts(MoE(dim=4, hidden=8, num_experts=2)) as elastic:
        ...     width_for_memory(elastic, [2, 4, 8], 600, num_experts=2)
        4
    """
    whole_number(num_bytes, "num_bytes", least=0)
    needed = {width: num_experts * sum(elastic.expert_bytes(width)) for width in widths}
    fitting = [width for width, need in needed.items() if need <= num_bytes]
    if not fitting:
        raise UsageError(
            f"{num_experts} experts of each of {len(elastic.num_neurons)} layers take at least "
            f"{min(needed.values(), default=0)} bytes, and there are {num_bytes}: hold fewer experts"
        )
    return max(fitting)


def width_for_load(widths: Sequence[int], rows: int, *, width_rows_a_second: float, deadline_s: float) -> int:
    """The widest prefix at which a rank has computed its rows in time; the narrowest where none is in time.

    Ranks whose experts are popular compute with narrower ones, so that nobody waits for them; each decides for
    itself, from the rows that came to it.

    Args:
        widths: to choose from, in neurons.
        rows: that came to this rank.
        width_rows_a_second: rows times neurons that it computes in a second.
        deadline_s: when it ought to be through.

    Raises:
        UsageError: no widths, or numbers that cannot be.

    Examples:
        >>> some = {"width_rows_a_second": 32_000, "deadline_s": 1.0}
        >>> [width_for_load([8, 16, 32], rows, **some) for rows in (900, 2000, 9000)]
        [32, 16, 8]
    """
    rows = whole_number(rows, "rows", least=0)
    speed = real_number(width_rows_a_second, "width_rows_a_second", above=0)
    deadline_s = real_number(deadline_s, "deadline_s", above=0)
    if not widths:
        raise UsageError("give at least one width")
    return max((width for width in widths if width * rows <= speed * deadline_s), default=min(widths))
