"""What a schedule will take at a size: the alpha-beta model that chooses a schedule and its pieces.

The estimate is made of three things: the time of the bytes on the busiest link, of the processors' work (messages,
bytes copied, bytes added) on the busiest machine, and of the first piece on its way through the deepest chain of
transfers (the pipeline's fill). Links work while processors do, so that most of the shorter of these two is hidden by
the longer one; where a topology gives no rates the ranks are taken to be on one machine, whose processors are the
links, and the two add up. It is a model that ranks alternatives, never shown as a measurement. What the processors
need for their work differs between machines: ``Costs``, which the runtime measures.

References:
    R. W. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20(3),
    1994 (the alpha-beta model).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mycel.collectives.schedule import Schedule
from mycel.cost import Costs, bytes_per_second
from mycel.units import format_seconds, format_size

__all__ = [
    "LOCAL_PIECE_BYTES",
    "PIECE_BYTES",
    "WHOLE_BYTES",
    "Choice",
    "choose",
    "estimate_seconds",
    "longest_piece",
]

#: Part of the shorter of the links' and the processors' time that the longer one does not hide. Fitted, with the
#: choice of pieces, to 136 collectives of 256 KB to 16 MB on emulated fabrics: 0.1 chose the wrong piece at 1 MB and
#: above in 3 of them, the plain sum in 7 (by 5 to 12 %).
NOT_HIDDEN = 0.1
#: Piece sizes worth trying. Over links peers take turns by pieces, and a long one holds up all others (all_gather of
#: 256 KB between 4 ranks of 400 Mbit/s in pieces of 16, 32 and 64 KB: 4.0, 4.5 and 5.1 ms; of 16 MB in two nodes in
#: pieces of 32 and 256 KB: 365 and 418 ms).
PIECE_BYTES = (1 << 14, 1 << 15)
#: The same between ranks that share one machine's memory, to which unix sockets come near: fewer messages are less
#: work, as long as a piece is still in the cache when it is reduced (all_reduce in pieces of 32, 64, 128 and 256 KB,
#: medians in ms: between 2 ranks 16 MB 9.3, 8.8, 7.7, 6.9, 64 MB 38.8, 33.8, 30.3, 27.7; between 4 ranks 4 MB 5.5,
#: 5.0, 4.7, 5.7, 16 MB 19.6, 19.7, 17.4, 17.6). Over TCP they lose there as well (4 ranks, 16 MB: 22, 32, 31, 27).
LOCAL_PIECE_BYTES = (*PIECE_BYTES, 1 << 16, 1 << 17)
#: Between such ranks, where nobody waits for a piece, neither to add to it nor to pass it on, there is nothing to cut
#: for: this is the longest message then.
WHOLE_BYTES = 1 << 18

#: Of the machines on which the constants were measured.
_USUAL = Costs()


def estimate_seconds(
    schedule: Schedule,
    num_bytes: int,
    piece_bytes: int,
    costs: Costs = _USUAL,
    machines: Sequence[int] | None = None,
) -> float:
    """Modelled time of a schedule.

    Every link's bytes are counted once, so a pipeline's fill is the time until its last stage can begin.

    The same numbers give the same estimate on every rank: it is made of sums and products of Python's floats in a
    fixed order, and of nothing that a library could compute differently elsewhere.

    Args:
        schedule: what runs.
        num_bytes: of the collective's whole array.
        piece_bytes: longest message.
        costs: of the machines' processors.
        machines: number of the machine each rank runs on; if not given, every rank has one to itself.
    """
    topology, orbit = schedule.topology, schedule.orbit
    rate = bytes_per_second(topology)
    columns = schedule.columns if orbit is None else orbit.columns
    paths = [
        (min(topology.capacity[hop] for hop in hops) * rate, sum(topology.latency_s[hop] for hop in hops))
        for hops in (list(pairwise(path)) for path in columns.paths)
    ]
    units = (schedule.chunk_stops - schedule.chunk_starts if orbit is None else orbit.units).tolist()
    arrival = [0.0] * len(columns)
    piece_s = [0.0] * len(columns)
    work = [0.0] * schedule.num_compute_vertices
    copy_s, add_s = costs.copy_s_per_gb * 1e-9, costs.add_s_per_gb * 1e-9
    rows = zip(
        *(c.tolist() for c in (columns.chunk, columns.src, columns.dst, columns.reduce, columns.path)), strict=True
    )
    after, begin = columns.after.tolist(), columns.after_start.tolist()
    previous = schedule.slots.previous.tolist() if schedule.has_places else ()
    for number, (chunk, src, dst, reduce, path) in enumerate(rows):
        chunk_bytes = num_bytes * units[chunk] / schedule.num_units
        pieces = max(1, -(-int(chunk_bytes) // piece_bytes))
        slowest, hops_s = paths[path]
        start = max((arrival[i] + piece_s[i] for i in after[begin[number] : begin[number + 1]]), default=0.0)
        arrival[number] = start + hops_s + costs.message_s + costs.wake_s
        if schedule.has_places and previous[number] >= 0:  # sums of one rank are formed one after the other
            arrival[number] = max(arrival[number], arrival[previous[number]])
        piece_s[number] = chunk_bytes / pieces / slowest
        work[src] += pieces * costs.message_s + chunk_bytes * copy_s
        work[dst] += pieces * costs.message_s + chunk_bytes * (copy_s + (add_s if reduce else 0.0))
    if orbit is not None:  # every rank does what all ranks do for rank 0's chunks
        work = [sum(work)] * len(work)
    links = num_bytes / schedule.collective.num_parts / (float(schedule.algbw) * rate)
    processors = _busiest(work, machines, costs.cores)
    hidden = 0.0 if topology.bytes_per_second_per_unit is None else (1 - NOT_HIDDEN) * min(links, processors)
    return links + processors - hidden + max(arrival, default=0.0)


def _busiest(work: Sequence[float], machines: Sequence[int] | None, cores: int) -> float:
    """Time of the machine with the most work: its ranks share its cores, and a rank uses one."""
    longest = max(work)
    if machines is None:
        return longest
    sums: dict[int, float] = {}
    for machine, seconds in zip(machines, work, strict=False):  # switches that compute do so themselves
        sums[machine] = sums.get(machine, 0.0) + seconds
    return max(longest, max(sums.values()) / cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which schedule to run, in pieces of which size, and what the model expects of it.

    Attributes:
        method: of the schedule.
        piece_bytes: longest message.
        seconds: expected.
        others: the other methods, each at its best piece size, the quickest first.
    """

    method: str
    piece_bytes: int
    seconds: float
    others: tuple[Choice, ...] = ()

    def explain(self) -> str:
        """The comparison, in a line.

        Examples:
            >>> tree = Choice(method="tree", piece_bytes=32768, seconds=0.25)
            >>> Choice(method="forest", piece_bytes=16384, seconds=0.125, others=(tree,)).explain()
            'forest in pieces of 16KB: 125 ms expected; tree (32KB) 250 ms'
        """
        others = "".join(
            f"; {c.method} ({format_size(c.piece_bytes)}) {format_seconds(c.seconds)}" for c in self.others
        )
        expected = format_seconds(self.seconds)
        return f"{self.method} in pieces of {format_size(self.piece_bytes)}: {expected} expected{others}"


def choose(
    candidates: Mapping[str, Schedule],
    num_bytes: int,
    *,
    piece_bytes: int | None = None,
    is_local: bool = False,
    costs: Costs = _USUAL,
    machines: Sequence[int] | None = None,
) -> Choice:
    """The candidate and piece size with the least estimate; ties go to the earlier name and the larger piece.

    Args:
        candidates: schedules of one collective on one topology, by method.
        num_bytes: of the whole array.
        piece_bytes: a piece size that is given, instead of those worth trying.
        is_local: all ranks share one machine's memory, and no link is slower.
        costs, machines: as for ``estimate_seconds``.
    """
    found: list[Choice] = []
    for method, schedule in candidates.items():
        sizes = (piece_bytes,) if piece_bytes else _piece_sizes(schedule, is_local)
        tried = [(estimate_seconds(schedule, num_bytes, size, costs, machines), size) for size in sizes]
        seconds, size = min(tried, key=lambda pair: pair[0])
        found.append(Choice(method=method, piece_bytes=size, seconds=seconds))
    if not found:
        raise ValueError("no candidate schedules")
    found.sort(key=lambda choice: choice.seconds)  # stable: the earlier of equals stays first
    best, *others = found
    return replace(best, others=tuple(others))


def longest_piece(*, is_local: bool) -> int:
    """The longest message worth sending where nobody waits for a piece, in bytes."""
    return WHOLE_BYTES if is_local else PIECE_BYTES[-1]


def _piece_sizes(schedule: Schedule, is_local: bool) -> tuple[int, ...]:
    """Sizes worth trying, the largest first."""
    if not is_local:
        return PIECE_BYTES[::-1]
    nobody_waits = schedule.depth == 1 and not schedule.collective.reduces
    return (*((WHOLE_BYTES,) if nobody_waits else ()), *LOCAL_PIECE_BYTES[::-1])
