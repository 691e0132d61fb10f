"""Simulation: what a schedule would take on its fabric, message by message, without running anything.

What is simulated are the lowered programs, so pieces, their order and who waits for whom are those of a real run:

- A channel sends one message at a time, in the order of its program, each as soon as what it needs is complete.
- Messages in flight share links max-min fairly: no message can go faster without a slower one going slower still.
- A message arrives ``latency`` of its path plus ``overhead_s`` after its last byte has left; the channel goes on
  with its next message meanwhile. Receivers have room for everything that arrives.
- Sums, copies and the processors' time cost nothing beyond ``overhead_s``.

A simulated time is never below the bytes on the busiest link over its capacity, and so never below the bound.

References:
    D. Bertsekas, R. Gallager, "Data Networks", 2nd edition, 1992, section 6.5.2 (max-min fair rates by progressive
    filling). R. W. Hockney, "The communication challenge for MPP", Parallel Computing 20(3), 1994 (alpha-beta).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mycel.brief import brief
from mycel.collectives.cost import PIECE_BYTES
from mycel.collectives.lower import lower
from mycel.collectives.program import Channel, Op, Program
from mycel.collectives.schedule import Schedule
from mycel.compiled import compiled_at_once
from mycel.cost import bytes_per_second
from mycel.cost.processors import EMULATED_EFFICIENCY, EMULATED_START_S, MESSAGE_S, WAKE_S
from mycel.errors import ScheduleError, UsageError

__all__ = ["EVENTS", "OVERHEAD_S", "Machine", "Simulation", "simulate"]

#: Seconds from a message's arrival until what waits for it can start, beyond the links' latency.
OVERHEAD_S = MESSAGE_S + WAKE_S
_ELEMENT_BYTES = 4

#: One row a message: its channel (index into ``Simulation.channels``), bytes, and when its first byte left, its last
#: byte left, and it was complete at the receiver.
EVENTS = np.dtype(
    [
        ("channel", np.int64),
        ("num_bytes", np.int64),
        ("start_s", np.float64),
        ("sent_s", np.float64),
        ("done_s", np.float64),
    ]
)
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine that plays all ranks, as in emulation.

    Attributes:
        cores: that the ranks share.
        start_s: of a core's time for each rank, before anything moves.
        efficiency: part of a link's capacity that is left for the bytes of messages.

    Raises:
        UsageError: less than one core, a negative time, or an efficiency outside 0 to 1.
    """

    cores: int
    start_s: float = EMULATED_START_S
    efficiency: float = EMULATED_EFFICIENCY

    def __post_init__(self) -> None:
        if self.cores < 1 or not 0 < self.efficiency <= 1 or self.start_s < 0:
            raise UsageError(f"{self}: needs a core, a time from 0 and an efficiency from 0 to 1")


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """A simulated run. Simulated figures are no measurements and never share a column with them.

    Attributes:
        schedule: what ran.
        num_bytes: of the collective's whole array, rounded up to whole elements of every block.
        piece_bytes: longest message.
        seconds: from the start until every rank has finished.
        least_s: bytes on the busiest link over its capacity; ``seconds`` is never below it.
        link_busy: share of the time in which each link ``(src, dst)`` carried its full capacity, 0 to 1.
        channels: who sends to whom along which path.
        events: one row a message, dtype ``EVENTS``, by channel and then in order of sending.

    Examples:
        >>> from mycel.collectives.synth import synthesize
        >>> from mycel.topology import load_topology
        >>> run = simulate(synthesize(load_topology("ring:ranks=4,bandwidth=1 GB/s"), "all_gather"), 1 << 20)
        >>> run.least_s < run.seconds, round(run.algbw, 2), round(run.link_busy[0, 1], 2)  # GB/s
        (True, 2.48, 0.93)
    """

    schedule: Schedule
    num_bytes: int
    piece_bytes: int
    seconds: float
    least_s: float
    link_busy: dict[tuple[int, int], float]
    channels: tuple[Channel, ...]
    events: npt.NDArray[Any]

    __repr__ = brief

    @property
    def algbw(self) -> float:
        """Size over simulated time, in the topology's unit (links of capacity 1 GB/s where it is relative)."""
        return float(self.schedule.algbw) * self.least_s / self.seconds


def simulate(
    schedule: Schedule,
    num_bytes: int,
    *,
    piece_bytes: int = PIECE_BYTES[-1],
    overhead_s: float = OVERHEAD_S,
    machine: Machine | None = None,
) -> Simulation:
    """Run a schedule in simulation.

    Args:
        schedule: a verified schedule.
        num_bytes: of the collective's whole array; for all_to_all of one rank's part of it.
        piece_bytes: longest message.
        overhead_s: seconds added to every message's latency.
        machine: the one that plays all ranks; if not given, every rank starts at once and links carry nothing but
            the bytes of messages.

    Returns:
        The run: its time, each link's share of it, and every message.

    Raises:
        UsageError: no bytes, a piece of less than an element, or a negative overhead.
        ScheduleError: the schedule cannot be lowered, or its programs wait for each other for ever.

    Examples:
        >>> from mycel.collectives.synth import synthesize
        >>> from mycel.topology import load_topology
        >>> hop = synthesize(load_topology("ring:ranks=4,bandwidth=1 GB/s"), "all_gather", "ring")
        >>> run = simulate(hop, 1_000_000, overhead_s=0)
        >>> round(1e6 * run.seconds), round(1e6 * simulate(hop, 2_000_000, overhead_s=0).seconds)  # microseconds
        (750, 1500)
    """
    if num_bytes <= 0 or piece_bytes < _ELEMENT_BYTES or not 0 <= overhead_s < float("inf"):
        raise UsageError(
            f"cannot simulate {num_bytes} bytes in pieces of {piece_bytes} with {overhead_s} s a message; "
            f"at least 1 byte, {_ELEMENT_BYTES} bytes and 0 s are needed"
        )
    collective, parts = schedule.collective, schedule.collective.num_parts
    share = _ELEMENT_BYTES * collective.total_weight
    blocks = [-(-num_bytes * parts * weight // share) for weight in collective.block_weights]
    elements = sum(blocks)
    programs = lower(schedule, elements, piece_elements=piece_bytes // _ELEMENT_BYTES, block_elements=blocks)
    traffic = _Traffic.of(programs)
    topology = schedule.topology
    rate = bytes_per_second(topology)
    link_number = {(link.src, link.dst): number for number, link in enumerate(topology.links)}
    paths = [[link_number[hop] for hop in pairwise(channel.path)] for channel in traffic.channels]
    capacity = np.array([link.capacity * rate for link in topology.links])
    delay = np.array([sum(topology.links[i].latency_s for i in path) + overhead_s for path in paths])
    size = (traffic.num_elements * _ELEMENT_BYTES).astype(np.float64)
    start_s, efficiency = 0.0, 1.0
    if machine is not None:
        start_s, efficiency = machine.start_s * topology.num_ranks / machine.cores, machine.efficiency
    times, finished = _run(
        traffic.channel,
        size,
        *_rows(paths),
        capacity * efficiency,
        delay,
        start_s,
        traffic.waits_for.copy(),
        *traffic.successors,
    )
    if finished < len(traffic.waits_for):
        raise ScheduleError(f"{len(traffic.waits_for) - finished} instructions wait for each other for ever")
    events = np.zeros(len(size), dtype=EVENTS)
    events["channel"], events["num_bytes"] = traffic.channel, size
    events["start_s"], events["sent_s"], events["done_s"] = times
    carried = np.zeros(len(capacity))
    for number, path in enumerate(paths):
        carried[path] += size[traffic.channel == number].sum()
    seconds = float(times[2].max(initial=0.0))
    return Simulation(
        schedule=schedule,
        num_bytes=elements * _ELEMENT_BYTES // parts,
        piece_bytes=piece_bytes,
        seconds=seconds,
        least_s=float((carried / capacity).max()),
        link_busy={hop: float(carried[i] / capacity[i]) / seconds for hop, i in link_number.items()},
        channels=traffic.channels,
        events=events,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Traffic:
    """All ranks' instructions as one graph: first the sends, then the receives in the same order, then copies.

    Attributes:
        channels: all channels of all ranks.
        channel: of each message; messages stand by channel, then in order.
        num_elements: of each message.
        waits_for: of each instruction, how many others, and for a receive the arrival, must come before it.
        successors: instructions that wait for each one, in compressed rows (starts, indices).
    """

    channels: tuple[Channel, ...]
    channel: Ints
    num_elements: Ints
    waits_for: Ints
    successors: tuple[Ints, Ints]

    @classmethod
    def of(cls, programs: Sequence[Program]) -> _Traffic:
        channels = tuple(sorted({channel for program in programs for channel in program.channels}))
        number = {channel: i for i, channel in enumerate(channels)}
        first_row = np.cumsum([0, *(len(p.columns) for p in programs)])
        columns = np.concatenate([p.columns for p in programs])
        wire = np.concatenate(
            [np.array([number[c] for c in p.channels] + [-1], dtype=np.int64)[p.columns["channel"]] for p in programs]
        )
        sends = np.flatnonzero(columns["op"] == Op.SEND)
        sends = sends[np.argsort(wire[sends], kind="stable")]
        receives = np.flatnonzero((columns["op"] == Op.RECV) | (columns["op"] == Op.RECV_REDUCE))
        receives = receives[np.argsort(wire[receives], kind="stable")]
        copies = np.flatnonzero(columns["op"] == Op.COPY)
        if not np.array_equal(wire[sends], wire[receives]):
            raise ScheduleError("sends and receives of the programs do not match; verify them first")
        order = np.concatenate([sends, receives, copies])
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        before, after = [], []
        for start, program in zip(first_row, programs, strict=False):
            waiting = np.repeat(np.arange(len(program.columns)), np.diff(program.need_start))
            before.append(place[start + program.need_index])
            after.append(place[start + waiting])
        channel = wire[sends]
        follows = np.flatnonzero(
            channel[1:] == channel[:-1]
        )  # one message after the other on a channel, at both ends
        before += [follows, follows + len(sends)]
        after += [follows + 1, follows + 1 + len(sends)]
        source, target = np.concatenate(before), np.concatenate(after)
        waits_for = np.bincount(target, minlength=len(order)).astype(np.int64)
        waits_for[len(sends) : 2 * len(sends)] += 1
        starts = np.zeros(len(order) + 1, dtype=np.int64)
        np.cumsum(np.bincount(source, minlength=len(order)), out=starts[1:])
        return cls(
            channels=channels,
            channel=channel,
            num_elements=columns["count"][sends],
            waits_for=waits_for,
            successors=(starts, target[np.argsort(source, kind="stable")]),
        )


def _rows(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Lists of different lengths as starts and values."""
    starts = np.cumsum([0, *(len(row) for row in lists)]).astype(np.int64)
    return starts, np.array([value for row in lists for value in row], dtype=np.int64)


# -- compiled ---------------------------------------------------------------------------------------------------


@compiled_at_once
def _share(
    active: Ints, num_active: int, channel: Ints, path_start: Ints, path_link: Ints, capacity: Floats, rate: Floats
) -> None:
    """Max-min fair rates of the active messages into ``rate``, by progressive filling."""
    left = capacity.copy()
    users = np.zeros(len(capacity), dtype=np.int64)
    tight = np.zeros(len(capacity), dtype=np.bool_)
    for i in range(num_active):
        c = channel[active[i]]
        rate[i] = -1.0
        for p in range(path_start[c], path_start[c + 1]):
            users[path_link[p]] += 1
    unsettled = num_active
    while unsettled > 0:
        share = np.inf
        for link in range(len(capacity)):
            if users[link] > 0:
                share = min(share, left[link] / users[link])
        for link in range(len(capacity)):
            tight[link] = users[link] > 0 and left[link] / users[link] <= share * (1.0 + 1e-9)
        for i in range(num_active):
            if rate[i] >= 0.0:
                continue
            c = channel[active[i]]
            stopped = False
            for p in range(path_start[c], path_start[c + 1]):
                stopped = stopped or tight[path_link[p]]
            if stopped:
                rate[i] = share
                unsettled -= 1
                for p in range(path_start[c], path_start[c + 1]):
                    left[path_link[p]] = max(left[path_link[p]] - share, 0.0)
                    users[path_link[p]] -= 1


@compiled_at_once
def _run(
    channel: Ints,
    size: Floats,
    path_start: Ints,
    path_link: Ints,
    capacity: Floats,
    delay: Floats,
    start_s: float,
    waits_for: Ints,
    next_start: Ints,
    next_index: Ints,
) -> tuple[Floats, int]:
    """Times ``[3, messages]`` of first byte, last byte and completion, and how many instructions completed."""
    num_messages = len(size)
    times = np.zeros((3, num_messages))
    remaining = size.copy()
    active = np.empty(len(delay), dtype=np.int64)
    rate = np.empty(len(delay))
    num_active = 0
    arrivals = [(0.0, 0)]
    arrivals.pop()
    ready = [i for i in range(len(waits_for)) if waits_for[i] == 0]
    now, finished, changed = start_s, 0, False
    while True:
        while len(ready) > 0:
            node = ready.pop()
            if node < num_messages and remaining[node] > 0.0:
                times[0, node] = now
                active[num_active] = node
                num_active += 1
                changed = True
                continue
            finished += 1
            if node < num_messages:
                times[1, node] = now
                heapq.heappush(arrivals, (now + delay[channel[node]], node))
            elif node < 2 * num_messages:
                times[2, node - num_messages] = now
            for i in range(next_start[node], next_start[node + 1]):
                waits_for[next_index[i]] -= 1
                if waits_for[next_index[i]] == 0:
                    ready.append(next_index[i])
        if num_active == 0 and len(arrivals) == 0:
            return times, finished
        if changed:
            _share(active, num_active, channel, path_start, path_link, capacity, rate)
            changed = False
        then = arrivals[0][0] if len(arrivals) > 0 else np.inf
        for i in range(num_active):
            then = min(then, now + remaining[active[i]] / rate[i])
        before, now = now, then
        i = 0
        while i < num_active:
            message = active[i]
            last = before + remaining[message] / rate[i] <= now  # the one that ends now ends, however time is rounded
            remaining[message] -= rate[i] * (now - before)
            if last or remaining[message] <= 1e-9 * size[message]:
                remaining[message] = 0.0
                ready.append(message)
                num_active -= 1
                active[i] = active[num_active]
                rate[i] = rate[num_active]
                changed = True
            else:
                i += 1
        while len(arrivals) > 0 and arrivals[0][0] <= now:
            node = heapq.heappop(arrivals)[1] + num_messages
            waits_for[node] -= 1
            if waits_for[node] == 0:
                ready.append(node)
