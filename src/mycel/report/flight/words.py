"""Findings of flight records in sentences and rows, for pages, terminals and programs alike."""

from __future__ import annotations

from typing import Any

from mycel.report.flight.findings import Findings, Kind, Unfinished
from mycel.report.flight.links import Carried, Suspect
from mycel.units import format_seconds, format_size

__all__ = [
    "KIND_HEADS",
    "headline",
    "kind_row",
    "late_sentence",
    "plural",
    "summary",
    "suspect_sentence",
    "unfinished_sentence",
]

#: Columns of ``kind_row``; the first two are text.
KIND_HEADS = (
    "collective",
    "schedule",
    "size",
    "count",
    "queued",
    "waiting",
    "moving",
    "median",
    "of bound",
)
#: Waiting for ranks is worth the headline from this part of the time on.
_MUCH = 0.25
#: Processes that were asked for their records, or ended well, are no failure.
_FINE = ("asked for by the program", "the group was closed", "the process ended", "SIGUSR2")


def plural(count: int) -> str:
    """So many collectives.

    Examples:
        >>> plural(1), plural(2)
        ('1 collective', '2 collectives')
    """
    return f"{count} collective" if count == 1 else f"{count} collectives"


def headline(findings: Findings, slow: Suspect | None) -> str:
    """What a person should know first."""
    failures = [dump.why for dump in findings.dumps if dump.why not in _FINE]
    if failures:
        return failures[0].partition(": ")[2] or failures[0]
    if findings.unfinished:
        return unfinished_sentence(findings.unfinished[0])
    queued, waiting, moving = findings.parts_s
    total = queued + waiting + moving
    if total == 0:
        return "No collective was recorded by every rank"
    if slow is not None:
        return suspect_sentence(slow)
    if waiting > _MUCH * total:
        return f"{_percent(waiting / total)} of the time in collectives went into waiting for the last rank to begin"
    return f"{_percent(moving / total)} of the time in collectives went into moving bytes"


def late_sentence(findings: Findings) -> str:
    """Who was late most."""
    latest = findings.latest
    if latest is None:
        return "No rank was late."
    return (
        f"Rank {latest.rank} was awaited longest: it was called last in {plural(latest.late)}, and the others "
        f"waited {format_seconds(latest.awaited_s)} for it in all, on average."
    )


def suspect_sentence(slow: Suspect) -> str:
    """The cable that explains the slow connections."""
    text = (
        f"The cable between {slow.ends[0]} and {slow.ends[1]} is slow: connections over it got at most "
        f"{_percent(slow.reached)} of their part of it"
    )
    if slow.others:
        others = ", ".join(f"{a} and {b}" for a, b in slow.others[:4])
        text += f" (the records fit as well to the cable between {others})"
    return text


def unfinished_sentence(unfinished: Unfinished) -> str:
    """A collective that did not end everywhere, and the ranks that say so."""
    by_state: dict[str, list[int]] = {}
    for rank, state in unfinished.states.items():
        by_state.setdefault(state, []).append(rank)
    ranks = "; ".join(
        f"{'ranks' if len(some) > 1 else 'rank'} {_numbers(some)}: {state}" for state, some in by_state.items()
    )
    call = unfinished.call
    return f"{call.what} #{call.sequence} of {format_size(call.num_bytes)} did not end everywhere ({ranks})"


def kind_row(kind: Kind) -> list[str]:
    """Cells under ``KIND_HEADS``."""
    return [
        f"{kind.what} of {kind.num_ranks}",
        f"{kind.method}, {format_size(kind.piece_bytes)}",
        format_size(kind.num_bytes),
        str(kind.count),
        *(_seconds(value) for value in (kind.queued_s, kind.waiting_s, kind.moving_s, kind.median_moving_s)),
        "" if kind.of_bound is None else f"{kind.of_bound:.2f}",
    ]


def summary(findings: Findings, connections: list[Carried], slow: Suspect | None) -> dict[str, Any]:
    """Everything as one JSON object."""
    queued, waiting, moving = findings.parts_s
    return {
        "headline": headline(findings, slow),
        "world_size": findings.dumps[0].world_size,
        "ranks_without_records": list(findings.silent),
        "clocks": {"how": findings.clocks.how, "uncertainty_s": findings.clocks.uncertainty_s},
        "collectives": len(findings.whole),
        "not_on_all_ranks": findings.skipped,
        "queued_s": queued,
        "waiting_s": waiting,
        "moving_s": moving,
        "kinds": [
            {
                "what": kind.what,
                "num_ranks": kind.num_ranks,
                "bytes": kind.num_bytes,
                "dtype": kind.dtype,
                "method": kind.method,
                "piece_bytes": kind.piece_bytes,
                "count": kind.count,
                "queued_s": kind.queued_s,
                "waiting_s": kind.waiting_s,
                "moving_s": kind.moving_s,
                "median_moving_s": kind.median_moving_s,
                "fraction_of_bound": kind.of_bound,
            }
            for kind in findings.kinds
        ],
        "ranks": [
            {
                "rank": r.rank,
                "host": r.host,
                "collectives": r.collectives,
                "window_s": r.window_s,
                "inside_s": r.inside_s,
                "waiting_s": r.waiting_s,
                "moving_s": r.moving_s,
                "late": r.late,
                "awaited_s": r.awaited_s,
            }
            for r in findings.ranks
        ],
        "slowest_rank": None if findings.latest is None else findings.latest.rank,
        "slowest_link": None
        if slow is None
        else {"ends": list(slow.ends), "reached": slow.reached, "or": [list(ends) for ends in slow.others]},
        "connections": [
            {
                "src": c.src,
                "dst": c.dst,
                "path": list(c.path),
                "bytes": c.num_bytes,
                "bytes_per_second": c.rate,
                "reached": c.reached,
                "path_bytes_per_second": c.limit,
                "of_path": c.of_path,
                "receiver_full_s": c.receiver_full_s,
                "retransmitted": c.retransmitted,
            }
            for c in connections
        ],
        "unfinished": [
            {
                "what": u.call.what,
                "sequence": u.call.sequence,
                "bytes": u.call.num_bytes,
                "group": list(u.group.ranks),
                "states": {str(rank): state for rank, state in u.states.items()},
                "stalled_channels": [
                    {"src": src, "dst": dst, "messages_done": done, "messages": every, "seen_by": by}
                    for src, dst, done, every, by in u.stalled
                ],
            }
            for u in findings.unfinished
        ],
    }


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def _seconds(value: float) -> str:
    return "0" if value == 0 else format_seconds(value)


def _numbers(ranks: list[int]) -> str:
    """Ranks as text, the first few of many.

    Examples:
        >>> _numbers([1, 2, 3])
        '1, 2, 3'
    """
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
