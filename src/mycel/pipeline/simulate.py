"""Simulation: what an order would take on a fabric, action by action and message by message.

Every rank carries out its actions in their order, each as soon as the results that it needs are there. A result that
another rank needs is a message, sent as soon as it is made, one after the other between two ranks, over links that it
shares max-min fairly with whatever else is in flight, in either direction. Computation and messages go side by side.
A block on several ranks begins on all of them at once.

The events are played by the inner loop of the simulator of collectives (``mycel.collectives.fair_shares``), and a
message costs what the classes of its path's links say (``mycel.cost``): a rank's time is a link of its own that
nobody else uses, an action a message over the links of all its ranks. Exchanges inside an action, of tensor or data
parallelism, last as long as their own schedules take in simulation; they do not share links with messages.

A simulated makespan is never below the busiest rank's work, nor the bytes on the busiest link over its capacity.

References:
    D. Bertsekas, R. Gallager, "Data Networks", 2nd edition, 1992, section 6.5.2 (max-min fair rates). Yuan et al.,
    "OneFlow: Redesign the Distributed Deep Learning Framework from Scratch", arXiv:2110.15032, section 4 (credits).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mycel.arguments import real_number, whole_number
from mycel.brief import brief
from mycel.collectives.fair_shares import play
from mycel.cost import bytes_per_second, link_costs
from mycel.errors import ScheduleError, UsageError
from mycel.pipeline.flow import Exchange, Flow, Times
from mycel.pipeline.needs import Result
from mycel.pipeline.order import Order
from mycel.pipeline.placement import Placement
from mycel.pipeline.wires import path_between
from mycel.topology.model import Topology

__all__ = ["Exchange", "Run", "Sent", "Times", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A message of a simulated run.

    Attributes:
        result: what is sent: ``("F", stage, micro_batch)`` and the like.
        source, destination: ranks of the pipeline.
        num_bytes: of it.
        start_s, sent_s, done_s: its first byte leaves, its last byte leaves, it is there.

    Examples:
        >>> from mycel.pipeline.known import gpipe
        >>> from mycel.topology import load_topology
        >>> wires = load_topology("star:ranks=2,bandwidth=1 GB/s")
        >>> run = simulate(gpipe(2, 1), {"F": 0.01, "B": 0.02}, topology=wires, message_bytes=10**6)
        >>> [(sent.result, sent.source, round(sent.start_s, 3)) for sent in run.messages]
        [(('F', 0, 0), 0, 0.01), (('B', 1, 0), 1, 0.041)]
    """

    result: Result
    source: int
    destination: int
    num_bytes: float
    start_s: float
    sent_s: float
    done_s: float

    __repr__ = brief


@dataclass(frozen=True, kw_only=True)
class Run:
    """A simulated run of an order. Simulated figures are no measurements.

    Attributes:
        order: what ran; its computations only.
        starts: when every action starts, row by row, in seconds.
        ends: when it ends.
        messages: between ranks, by time of sending.
        link_busy: share of the makespan in which each link ``(src, dst)`` carried its full capacity.
        load_s: work of the busiest rank.
        link_s: bytes on the busiest link over its capacity.
        changes: what each action takes of memory as it starts, or gives back as it ends if negative, row by row.

    Examples:
        >>> from mycel.pipeline.known import gpipe, one_f_one_b
        >>> from mycel.topology import load_topology
        >>> wires = load_topology("star:ranks=2,bandwidth=1 GB/s")
        >>> run = simulate(one_f_one_b(2, 4), {"F": 0.01, "B": 0.02}, topology=wires, message_bytes=1 << 20)
        >>> run.load_s <= run.makespan, max(run.peak), max(simulate(gpipe(2, 4), {"F": 0.01, "B": 0.02}).peak)
        (True, 2.0, 4.0)
    """

    order: Order
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    messages: tuple[Sent, ...]
    link_busy: Mapping[tuple[int, int], float]
    load_s: float
    link_s: float
    changes: tuple[tuple[float, ...], ...]

    __repr__ = brief

    @cached_property
    def makespan(self) -> float:
        """Seconds from the first start to the last end over all ranks: a step, where ranks meet after it."""
        return max(map(max, self.ends)) - min(map(min, self.starts))

    @property
    def spans(self) -> tuple[float, ...]:
        """Seconds from each rank's own first start to its own last end."""
        return tuple(max(ends) - min(starts) for starts, ends in zip(self.starts, self.ends, strict=True))

    @property
    def busy(self) -> tuple[float, ...]:
        """Share of the makespan in which each rank computes."""
        work = [sum(e - s for s, e in zip(*rows, strict=True)) for rows in zip(self.starts, self.ends, strict=True)]
        return tuple(seconds / self.makespan if self.makespan else 1.0 for seconds in work)

    def memory(self, rank: int) -> tuple[tuple[float, float], ...]:
        """What a rank holds over time: ``(seconds, amount)`` from when on it holds so much.

        Args:
            rank: of the pipeline.
        """
        held, points = 0.0, []
        for start, end, change in zip(self.starts[rank], self.ends[rank], self.changes[rank], strict=True):
            if change:
                held += change
                points.append((start if change > 0 else end, held))
        return tuple(points)

    @property
    def peak(self) -> tuple[float, ...]:
        """The most that each rank holds."""
        return tuple(max((held for _, held in self.memory(rank)), default=0.0) for rank in range(self.order.ranks))


def simulate(
    order: Order,
    times: Times | Placement,
    *,
    unit_s: float = 1.0,
    topology: Topology | None = None,
    ranks: Sequence[int] | None = None,
    message_bytes: float | Callable[[Result], float] = 0,
    exchanges: Mapping[str, Exchange] | None = None,
    credits: int | Sequence[int] | None = None,
    held: float | Mapping[int, float] = 1.0,
    overhead_s: float | None = None,
) -> Run:
    """Run an order in simulation.

    Args:
        order: a right one; messages among its actions are passed over, as they follow from its computations.
        times: seconds of every action, or a placement whose blocks the order carries out: then times, delays (where
            no topology is given) and memory are those of its blocks.
        unit_s: seconds of a placement's unit of time.
        topology: the fabric; without one messages take no time.
        ranks: for each rank of the order the rank of the topology that plays it; the same if not given.
        message_bytes: of every message, or a function from a result to its bytes.
        exchanges: collectives by kind (``F``) or stage and kind (``3F``); ``REDUCE_GRAD`` comes once a stage, after
            all of a rank's work.
        credits: micro-batches that a stage may have in flight, or a number for each.
        held: memory that a forward takes and its backward gives back, or for each stage.
        overhead_s: of every message, instead of what its links' classes say.

    Returns:
        Starts, ends, messages, memory, and the bounds that hold.

    Raises:
        UsageError: a negative time or size, no time for an action, ranks that the topology does not have.
        ScheduleError: actions wait for each other for ever; with credits the message names a stage.

    Examples:
        >>> from mycel.pipeline.known import one_f_one_b
        >>> simulate(one_f_one_b(4, 8), {"F": 1, "B": 2}).makespan  # (m + p - 1) (F + B)
        33.0
    """
    flow = Flow(order, times, real_number(unit_s, "unit_s", above=0), exchanges or {}, is_wired=topology is not None)
    if credits is not None:
        flow.limit(credits)
    return _played(flow, topology, ranks, message_bytes, held, overhead_s)


def _played(
    flow: Flow,
    topology: Topology | None,
    ranks: Sequence[int] | None,
    message_bytes: float | Callable[[Result], float],
    held: float | Mapping[int, float],
    overhead_s: float | None,
) -> Run:
    order = flow.order
    players = _players(order, topology, ranks)
    # Channels: of messages one a pair of ranks, of computations one a set of ranks, of delays one each.
    paths: list[list[int]] = []
    delays: list[float] = []
    works: list[float] = []
    ends: list[tuple[int, int]] = []
    capacity: list[float] = []
    link_number: dict[tuple[int, int], int] = {}
    if topology is not None:
        rate = bytes_per_second(topology)
        link_number = {(link.src, link.dst): number for number, link in enumerate(topology.links)}
        capacity = [link.capacity * rate for link in topology.links]
        costs = link_costs(topology, overhead_s=overhead_s)
    first_own = len(capacity)
    capacity += [1.0] * order.ranks  # a rank does a second's work in a second
    rows: list[tuple[int, float, int]] = []  # of each message channel, size, and the node or what is sent
    number = 0
    for node, (_, on) in enumerate(flow.nodes):
        paths.append([first_own + rank for rank in on])
        delays.append(0.0)
        works.append(0.0)
        ends.append((on[0], on[0]))
        rows.append((number, flow.seconds[node], node))
        number += 1
    sizes = []
    channel_of: dict[tuple[int, int], int] = {}
    for result, source, destination, _, _ in flow.sent:
        pair = (source, destination)
        if pair not in channel_of:
            assert topology is not None
            path = path_between(topology, players[source], players[destination])
            delay, work_s = costs.message(path)
            channel_of[pair] = number
            paths.append([link_number[hop] for hop in pairwise(path)])
            delays.append(delay)
            works.append(work_s)
            ends.append((source, destination))
            number += 1
        size = message_bytes(result) if callable(message_bytes) else message_bytes
        sizes.append(real_number(size, "bytes of a message", least=0))
        # A message of nothing still has a latency: the smallest size is below what any rate shows.
        rows.append((channel_of[pair], max(sizes[-1], 1e-9), len(flow.nodes)))
    for _, _, seconds in flow.delayed:
        paths.append([])
        delays.append(seconds)
        works.append(0.0)
        ends.append((0, 0))
        rows.append((number, 0.0, 0))
        number += 1
    times = _times(flow, rows, paths, delays, works, ends, capacity)
    starts = tuple(tuple(float(times[0, node]) for node in nodes) for nodes in flow.rows)
    finish = [[float(times[2, node]) for node in nodes] for nodes in flow.rows]
    made = tuple(tuple(flow.nodes[node][0] for node in nodes) for nodes in flow.rows)
    if flow.reduce_s:
        for rank, mine in enumerate(finish):
            mine[-1] += flow.reduce_s * len(order.stages_of(rank))
    done = tuple(map(tuple, finish))
    messages = []
    carried = np.zeros(len(capacity))
    for at, (result, source, destination, _, _) in enumerate(flow.sent):
        place = len(flow.nodes) + at
        begin, last, there = (float(times[k, place]) for k in range(3))
        carried[paths[rows[place][0]]] += sizes[at]
        messages.append(
            Sent(
                result=result,
                source=source,
                destination=destination,
                num_bytes=sizes[at],
                start_s=begin,
                sent_s=last,
                done_s=there,
            )
        )
    work = [0.0] * order.ranks
    for rank, nodes in enumerate(flow.rows):
        work[rank] = sum(flow.seconds[node] for node in nodes) + flow.reduce_s * len(order.stages_of(rank))
    busy = carried / np.array(capacity)
    makespan = max(map(max, done)) or 1.0
    return Run(
        order=Order(
            rows=made,
            num_stages=order.num_stages,
            num_micro_batches=order.num_micro_batches,
            name=order.name,
            routes=order.routes,
            feeds=order.feeds,
        ),
        starts=starts,
        ends=done,
        messages=tuple(sorted(messages, key=lambda message: message.start_s)),
        link_busy={hop: float(busy[i]) / makespan for hop, i in link_number.items()},
        load_s=max(work),
        link_s=float(busy[:first_own].max(initial=0.0)),
        changes=tuple(tuple(flow.change(action, rank, held) for action in row) for rank, row in enumerate(made)),
    )


def _players(order: Order, topology: Topology | None, ranks: Sequence[int] | None) -> list[int]:
    """The rank of the topology that plays each rank of the order."""
    players = list(range(order.ranks)) if ranks is None else [whole_number(rank, "ranks") for rank in ranks]
    if len(players) != order.ranks or len(set(players)) < len(players):
        raise UsageError(f"ranks {players} for an order of {order.ranks} ranks; name one for each, each once")
    if topology is not None and not all(0 <= rank < topology.num_ranks for rank in players):
        raise UsageError(
            f"the order has {order.ranks} ranks, played by {players}; {topology.name} has 0..{topology.num_ranks - 1}"
        )
    return players


def _times(
    flow: Flow,
    rows: list[tuple[int, float, int]],
    paths: list[list[int]],
    delays: list[float],
    works: list[float],
    ends: list[tuple[int, int]],
    capacity: list[float],
) -> npt.NDArray[np.float64]:
    """First byte, last byte and arrival of everything that is played: nodes, then messages, then delays."""
    count = len(rows)
    before: list[tuple[int, int]] = [(first + count, then) for first, then in flow.after]
    first_message = len(flow.nodes)
    last: dict[int, int] = {}
    for at, (_, _, _, maker, nodes) in enumerate(flow.sent):
        place = first_message + at
        before.append((maker + count, place))
        before += [(place + count, node) for node in nodes]
        channel = rows[place][0]
        if channel in last:
            before += [(last[channel], place), (last[channel] + count, place + count)]
        last[channel] = place
    for at, (maker, node, _) in enumerate(flow.delayed):
        place = first_message + len(flow.sent) + at
        before += [(maker + count, place), (place + count, node)]
    source = np.array([first for first, _ in before], dtype=np.int64)
    target = np.array([then for _, then in before], dtype=np.int64)
    waits_for = np.bincount(target, minlength=2 * count).astype(np.int64)
    waits_for[count:] += 1
    next_start = np.zeros(2 * count + 1, dtype=np.int64)
    np.cumsum(np.bincount(source, minlength=2 * count), out=next_start[1:])
    path_start = np.cumsum([0, *map(len, paths)]).astype(np.int64)
    found, finished = play(
        np.array([row[0] for row in rows], dtype=np.int64),
        np.array([row[1] for row in rows], dtype=np.float64),
        path_start,
        np.array([link for path in paths for link in path], dtype=np.int64),
        np.array(capacity),
        np.ones(len(paths)),
        np.array(delays),
        np.array([end[0] for end in ends] + [end[1] for end in ends], dtype=np.int64),
        np.array(works),
        0.0,
        waits_for,
        next_start,
        target[np.argsort(source, kind="stable")],
    )
    if finished < 2 * count:
        raise ScheduleError("actions of the order wait for each other for ever; mycel plan check names them")
    _mark_empty(flow, rows, found)
    return found


def _mark_empty(flow: Flow, rows: list[tuple[int, float, int]], found: npt.NDArray[np.float64]) -> None:
    """Actions that take no time have no first byte: they start where they end."""
    for node in range(len(flow.nodes)):
        if rows[node][1] == 0:
            found[0, node] = found[2, node]
