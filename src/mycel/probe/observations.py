"""What one concurrent pattern of traffic showed: rates of flows, from what their receivers counted."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Observation", "Pair", "Record", "common_window", "observe", "rate_between", "wire_share"]

#: Sender and receiver, as ranks.
Pair = tuple[int, int]

#: Headers of a full packet as a link's shaper or counter sees it: Ethernet, IP, TCP with time stamps.
_HEADER_BYTES = 14 + 20 + 32
#: Points of a window through which a line is laid.
_POINTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one receiver counted of one flow.

    Attributes:
        samples: seconds since the start, and payload bytes until then; both never fall.
        segment: payload bytes of a full packet.
    """

    samples: tuple[tuple[float, int], ...]
    segment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Rates of flows that ran at the same time.

    Attributes:
        pattern: what it was, for people.
        rates: of each flow in bytes a second on the links, headers included.
    """

    pattern: str
    rates: Mapping[Pair, float]


def wire_share(segment: int) -> float:
    """Payload bytes for each byte on the link.

    Examples:
        >>> round(wire_share(1448), 3)
        0.956
    """
    return segment / (segment + _HEADER_BYTES)


def rate_between(samples: Sequence[tuple[float, int]], begin_s: float, end_s: float) -> float:
    """Bytes a second between two times: the slope of the straight line nearest to the counts.

    Kernels hand on up to 64 KB at once, a hundredth of a second at 50 Mbit/s. What came at the very first and last
    moment thus says little, and the difference of two counts twice as little as the line through all of them.

    Examples:
        >>> round(rate_between([(0.0, 0), (1.0, 10), (2.0, 20)], 0.5, 1.5), 6)
        10.0
    """
    step, middle = (end_s - begin_s) / _POINTS, (_POINTS - 1) / 2
    # Counts from the middle, so that large ones cancel nothing.
    weighed = sum((i - middle) * _bytes_at(samples, begin_s + (i + 0.5) * step) for i in range(_POINTS))
    return weighed / (step * sum((i - middle) ** 2 for i in range(_POINTS)))


def _bytes_at(samples: Sequence[tuple[float, int]], when_s: float) -> float:
    after = bisect_left(samples, (when_s, -1))
    if after == 0:
        return float(samples[0][1])
    if after == len(samples):
        return float(samples[-1][1])
    (left, low), (right, high) = samples[after - 1], samples[after]
    return low + (high - low) * (when_s - left) / (right - left) if right > left else float(high)


def common_window(records: Mapping[Pair, Record], warm_s: float) -> tuple[float, float] | None:
    """When all flows ran: from ``warm_s`` until the first of them ended; ``None`` if that is no time at all.

    A flow that never brought a byte ends nothing: it is a flow of rate 0.
    """
    ends = [_last_progress(record.samples) for record in records.values() if record.samples[-1][1] > 0]
    if not ends or min(ends) <= warm_s:
        return None
    return warm_s, min(ends)


def _last_progress(samples: Sequence[tuple[float, int]]) -> float:
    """When the last byte had come."""
    return samples[bisect_left(samples, samples[-1][1], key=lambda sample: sample[1])][0]


def observe(pattern: str, records: Mapping[Pair, Record], *, warm_s: float, window_s: float) -> Observation | None:
    """Rates over the common window of a pattern's flows; ``None`` where there was none.

    Args:
        pattern: what it was.
        records: of each flow, as its receiver counted it.
        warm_s: seconds from the start that do not count, in which buckets empty and windows open.
        window_s: at most so much is counted.
    """
    window = common_window(records, warm_s)
    if window is None:
        return None
    begin, end = window[0], min(window[1], warm_s + window_s)
    rates = {
        pair: rate_between(record.samples, begin, end) / wire_share(record.segment)
        for pair, record in records.items()
    }
    return Observation(pattern=pattern, rates=rates)
