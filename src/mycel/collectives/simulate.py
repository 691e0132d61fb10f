"""Simulation: what a schedule would take on its fabric, message by message, without running anything.

What is simulated are the lowered programs, so pieces, their order and who waits for whom are those of a real run:

- A channel sends one message at a time, in the order of its program, each as soon as what it needs is complete.
- Messages in flight share links max-min fairly by the weights of their channels (``mycel.collectives.weights``): no
  message can go faster without one that is slower for its weight going slower still. Equal shares can be asked for.
- A message costs what the classes of its path's links say (``mycel.cost.links``): work of its sender before its first
  byte leaves, a latency after its last one, the waking of its receiver, and work of that. A rank works at one message
  at a time. The channel goes on with its next message meanwhile. Receivers have room for everything that arrives.
- Sums and copies cost nothing.

A simulated time is never below the bytes on the busiest link over its capacity, and so never below the bound.

References:
    D. Bertsekas, R. Gallager, "Data Networks", 2nd edition, 1992, section 6.5.2 (max-min fair rates). R. W.
    Hockney, "The communication challenge for MPP", Parallel Computing 20(3), 1994 (alpha-beta).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mycel.arguments import the, whole_number
from mycel.brief import brief
from mycel.collectives.cost import PIECE_BYTES
from mycel.collectives.fair_shares import play
from mycel.collectives.lower import lower
from mycel.collectives.program import Channel, Op, Program
from mycel.collectives.schedule import Schedule
from mycel.cost import LinkCosts, bytes_per_second, link_costs
from mycel.cost.processors import EMULATED_EFFICIENCY, EMULATED_START_S
from mycel.errors import ScheduleError, UsageError

__all__ = ["EVENTS", "Attained", "Machine", "Simulation", "attained", "simulate"]

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
        (True, 2.19, 0.82)
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
    overhead_s: float | None = None,
    links: str | None = None,
    machine: Machine | None = None,
    is_weighted: bool = True,
) -> Simulation:
    """Run a schedule in simulation.

    Args:
        schedule: a verified schedule.
        num_bytes: of the collective's whole array; for all_to_all of one rank's part of it.
        piece_bytes: longest message.
        overhead_s: seconds added to every message's latency, instead of what its links' classes say.
        links: class of all links, a key of ``mycel.cost.LINK_CLASSES``, instead of those of the topology.
        machine: the one that plays all ranks; if not given, every rank starts at once and links carry nothing but
            the bytes of messages.
        is_weighted: whether channels share links by what they carry, as paced ones do, or equally.

    Returns:
        The run: its time, each link's share of it, and every message.

    Raises:
        UsageError: no bytes, a piece of less than an element, a negative overhead, or an unknown class.
        ScheduleError: the schedule cannot be lowered, or its programs wait for each other for ever.

    Examples:
        >>> from mycel.collectives.synth import synthesize
        >>> from mycel.topology import load_topology
        >>> hop = synthesize(load_topology("ring:ranks=4,bandwidth=1 GB/s"), "all_gather", "ring")
        >>> run = simulate(hop, 1_000_000, overhead_s=0)
        >>> round(1e6 * run.seconds), round(1e6 * simulate(hop, 2_000_000, overhead_s=0).seconds)  # microseconds
        (750, 1500)
    """
    schedule = the(Schedule, schedule, "a schedule", hint="mycel.synthesize makes one")
    num_bytes, piece_bytes = whole_number(num_bytes, "size in bytes"), whole_number(piece_bytes, "longest message")
    if num_bytes <= 0 or piece_bytes < _ELEMENT_BYTES:
        raise UsageError(
            f"cannot simulate {num_bytes} bytes in pieces of {piece_bytes}; at least 1 byte and {_ELEMENT_BYTES} "
            "bytes are needed"
        )
    costs = link_costs(schedule.topology, links=links, overhead_s=overhead_s)
    return _simulated(schedule, num_bytes, piece_bytes, costs, machine, is_weighted=is_weighted)


def _simulated(
    schedule: Schedule,
    num_bytes: int,
    piece_bytes: int,
    costs: LinkCosts | None,
    machine: Machine | None,
    *,
    is_weighted: bool,
) -> Simulation:
    """What ``simulate`` gives; without costs, links have no latencies either."""
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
    delay, work = np.zeros(len(paths)), np.zeros(len(paths))
    if costs is not None:
        delay[:], work[:] = np.array([costs.message(channel.path) for channel in traffic.channels]).T
    ends = np.array([[channel.src for channel in traffic.channels], [channel.dst for channel in traffic.channels]])
    size = (traffic.num_elements * _ELEMENT_BYTES).astype(np.float64)
    start_s, efficiency = 0.0, 1.0
    if machine is not None:
        start_s, efficiency = machine.start_s * topology.num_ranks / machine.cores, machine.efficiency
    times, finished = play(
        traffic.channel,
        size,
        *_rows(paths),
        capacity * efficiency,
        traffic.weight if is_weighted else np.ones(len(paths)),
        delay,
        ends.ravel(),
        work,
        start_s,
        traffic.waits_for.copy(),
        *traffic.successors,
    )
    if finished < len(traffic.waits_for):
        raise ScheduleError(f"{len(traffic.waits_for) - finished} instructions wait for each other for ever")
    events = np.zeros(len(size), dtype=EVENTS)
    events["channel"], events["num_bytes"] = traffic.channel, size
    events["start_s"], events["sent_s"], events["done_s"] = times
    sent = np.bincount(traffic.channel, size, minlength=len(paths))
    path_start, path_link = _rows(paths)
    carried = np.bincount(path_link, np.repeat(sent, np.diff(path_start)), minlength=len(capacity))
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


#: Pieces that the longest chunk is cut into where only the order and the sharing of links are to count.
_MANY_PIECES, _FEW_PIECES = 256, 16
#: Messages that are played out for that, at most.
_MOST_MESSAGES = 200_000
#: Messages times channels: rates are shared anew, between all that have something to send, whenever one is through.
_MOST_SHARES = 1_000_000_000
#: Elements that a unit of the array stands for there: enough that rounding plays no part.
_UNIT_ELEMENTS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Attained:
    """Which part of its own rate (``Schedule.algbw``) a schedule gets where nothing but links takes time.

    Attributes:
        by_load: where channels share links by what they carry, 0 to 1.
        equally: where all that share a link have the same rate.
        num_pieces: of the longest chunk.
    """

    by_load: float
    equally: float
    num_pieces: int


def attained(schedule: Schedule) -> Attained | None:
    """Play a schedule out in many pieces, without latency and without costs of messages.

    What is lost then is the pipeline's fill and drain, and what channels lose that wait for others.

    Returns:
        Simulated shares; ``None`` where that would be too many messages.

    Examples:
        >>> from mycel.collectives.synth import synthesize
        >>> from mycel.topology import load_topology
        >>> found = attained(synthesize(load_topology("ring:ranks=4,bandwidth=1 GB/s"), "all_gather"))
        >>> found.num_pieces, 0.99 < found.by_load <= 1
        (256, True)
    """
    units = schedule.chunk_stops - schedule.chunk_starts
    longest = int(units.max())
    if schedule.num_units * _UNIT_ELEMENTS >= 1 << 60:  # elements are counted in 64 bits
        return None
    columns = schedule.columns if schedule.orbit is None else schedule.orbit.columns
    copies = 1 if schedule.orbit is None else schedule.collective.num_ranks
    sent = float(units[columns.chunk].astype(np.float64).sum()) * copies / longest
    most = min(_MOST_MESSAGES, _MOST_SHARES // (copies * len(np.unique(columns.path))))
    num_pieces = min(_MANY_PIECES, int((most - len(columns) * copies) / sent))
    if num_pieces < _FEW_PIECES:
        return None
    num_bytes = schedule.num_units * _UNIT_ELEMENTS * _ELEMENT_BYTES // schedule.collective.num_parts
    piece_bytes = -(-longest * _UNIT_ELEMENTS // num_pieces) * _ELEMENT_BYTES
    runs = [
        _simulated(schedule, num_bytes, piece_bytes, None, None, is_weighted=is_weighted)
        for is_weighted in (True, False)
    ]
    by_load, equally = (min(1.0, run.least_s / run.seconds) for run in runs)  # both are sums of rounded times
    return Attained(by_load=by_load, equally=equally, num_pieces=num_pieces)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Traffic:
    """All ranks' instructions as one graph: first the sends, then the receives in the same order, then local ones.

    Attributes:
        channels: all channels of all ranks.
        channel: of each message; messages stand by channel, then in order.
        num_elements: of each message.
        weight: of each channel.
        waits_for: of each instruction, how many others, and for a receive the arrival, must come before it.
        successors: instructions that wait for each one, in compressed rows (starts, indices).
    """

    channels: tuple[Channel, ...]
    channel: Ints
    num_elements: Ints
    weight: Floats
    waits_for: Ints
    successors: tuple[Ints, Ints]

    @classmethod
    def of(cls, programs: Sequence[Program]) -> _Traffic:
        channels = tuple(sorted({channel for program in programs for channel in program.channels}))
        number = {channel: i for i, channel in enumerate(channels)}
        weight = np.ones(len(channels))
        for program in programs:
            for channel, units in zip(program.channels, program.weights or (), strict=program.weights is not None):
                weight[number[channel]] = units
        first_row = np.cumsum([0, *(len(p.columns) for p in programs)])
        columns = np.concatenate([p.columns for p in programs])
        wire = np.concatenate(
            [np.array([number[c] for c in p.channels] + [-1], dtype=np.int64)[p.columns["channel"]] for p in programs]
        )
        sends = np.flatnonzero(columns["op"] == Op.SEND)
        sends = sends[np.argsort(wire[sends], kind="stable")]
        receives = np.flatnonzero((columns["op"] == Op.RECV) | (columns["op"] == Op.RECV_REDUCE))
        receives = receives[np.argsort(wire[receives], kind="stable")]
        local = np.flatnonzero(columns["op"] >= Op.COPY)
        if not np.array_equal(wire[sends], wire[receives]):
            raise ScheduleError("sends and receives of the programs do not match; verify them first")
        order = np.concatenate([sends, receives, local])
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        before, after = [], []
        for start, program in zip(first_row, programs, strict=False):
            waiting = np.repeat(np.arange(len(program.columns)), np.diff(program.need_start))
            before.append(place[start + program.need_index])
            after.append(place[start + waiting])
        wires = wire[sends]
        follows = np.flatnonzero(wires[1:] == wires[:-1])  # one message after the other on a channel, at both ends
        before += [follows, follows + len(sends)]
        after += [follows + 1, follows + 1 + len(sends)]
        source, target = np.concatenate(before), np.concatenate(after)
        waits_for = np.bincount(target, minlength=len(order)).astype(np.int64)
        waits_for[len(sends) : 2 * len(sends)] += 1
        starts = np.zeros(len(order) + 1, dtype=np.int64)
        np.cumsum(np.bincount(source, minlength=len(order)), out=starts[1:])
        return cls(
            channels=channels,
            channel=wires,
            num_elements=columns["count"][sends],
            weight=weight,
            waits_for=waits_for,
            successors=(starts, target[np.argsort(source, kind="stable")]),
        )


def _rows(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Lists of different lengths as starts and values."""
    starts = np.cumsum([0, *(len(row) for row in lists)]).astype(np.int64)
    return starts, np.array([value for row in lists for value in row], dtype=np.int64)
