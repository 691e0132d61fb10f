"""What a schedule will take at a size: the alpha-beta model that chooses a schedule and its pieces.

The estimate adds three things: the time of the bytes on the busiest link, of the messages at the busiest rank, and
of the first piece on its way through the deepest chain of transfers (the pipeline's fill). They overlap in part, so
the sum is pessimistic; it is a model that ranks alternatives, never shown as a measurement.

References:
    R. W. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20(3),
    1994 (the alpha-beta model).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from mycel.collectives.schedule import Schedule

__all__ = ["MESSAGE_S", "PIECE_BYTES", "Choice", "choose", "estimate_seconds"]

#: Seconds of one rank's time for one message (system calls and bookkeeping), measured on loopback sockets.
MESSAGE_S = 4e-6
#: Seconds between a message's arrival and the reaction of a sleeping receiver, measured on loopback sockets.
WAKE_S = 25e-6
#: Part of an emulated link's capacity that bytes of messages get: what headers of 1,500-byte packets leave, 0.956,
#: of a channel paced at 0.97 of its path.
EMULATED_EFFICIENCY = 0.956 * 0.97
#: Seconds of a core that each rank of an emulated cluster takes to get going, fitted to the recorded runs.
EMULATED_START_S = 3e-4
#: Bytes a second that capacity 1 stands for where a topology gives only relative capacities.
_ASSUMED_RATE = 1e9
#: Piece sizes worth trying. Larger ones lose on sockets even where links are fast: a piece should still be in the
#: cache when it is reduced (16 MB all_reduce on loopback, medians in ms, pieces of 32 KB, 64 KB, 256 KB and 1 MB:
#: 2 ranks 6.6, 6.6, 14.6, 12.4; 4 ranks 34, 53, 54, 54).
PIECE_BYTES = (1 << 14, 1 << 15)


def estimate_seconds(schedule: Schedule, num_bytes: int, piece_bytes: int) -> float:
    """Modelled time of a schedule.

    Args:
        schedule: what runs.
        num_bytes: of the collective's whole array.
        piece_bytes: longest message.
    """
    topology = schedule.topology
    rate = float(topology.bytes_per_second_per_unit or _ASSUMED_RATE)
    capacity, latency = topology.capacity, topology.latency_s
    arrival = [0.0] * len(schedule.transfers)
    messages = [0] * schedule.num_nodes
    for number, t in enumerate(schedule.transfers):
        chunk_bytes = num_bytes * schedule.chunks[t.chunk].num_units / schedule.num_units
        pieces = max(1, -(-int(chunk_bytes) // piece_bytes))
        slowest = min(capacity[hop] for hop in pairwise(t.path)) * rate
        hops = sum(latency[hop] for hop in pairwise(t.path))
        start = max((arrival[i] for i in t.after), default=0.0)
        arrival[number] = start + chunk_bytes / pieces / slowest + hops + MESSAGE_S + WAKE_S
        messages[t.src] += pieces
        messages[t.dst] += pieces
    links = num_bytes / schedule.collective.num_parts / (float(schedule.algbw) * rate)
    return links + max(messages) * MESSAGE_S + max(arrival, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which schedule to run, in pieces of which size, and what the model expects of it."""

    method: str
    piece_bytes: int
    seconds: float


def choose(candidates: dict[str, Schedule], num_bytes: int, *, piece_bytes: int | None = None) -> Choice:
    """The candidate and piece size with the least estimate; ties go to the earlier name and the larger piece.

    Args:
        candidates: schedules of one collective on one topology, by method.
        num_bytes: of the whole array.
        piece_bytes: a piece size that is given, instead of those in ``PIECE_BYTES``.
    """
    sizes = (piece_bytes,) if piece_bytes else PIECE_BYTES[::-1]
    best: Choice | None = None
    for method, schedule in candidates.items():
        for size in sizes:
            seconds = estimate_seconds(schedule, num_bytes, size)
            if best is None or seconds < best.seconds:
                best = Choice(method=method, piece_bytes=size, seconds=seconds)
    if best is None:
        raise ValueError("no candidate schedules")
    return best
