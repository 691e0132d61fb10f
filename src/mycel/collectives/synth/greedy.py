"""Greedy: all_gather, reduce_scatter and all_reduce for one size, planned message by message in time.

Between the smallest arrays, where the fewest messages one after the other win (``tree``, ``exchange``), and the
largest, where full links do (``forest``), both count. Here a message costs its latency, an overhead, and its bytes on
every link of its path, and time is played through: whenever the links of a path are free, the rank at its beginning
sends what the rank at its end lacks, the part that the fewest ranks have first. Every block is cut into a few parts.
Which parts and which ties are best is tried: some plans are made, and the quickest is kept. A plan gives a message
its links alone, which channels that share a link do not do, and its messages may be cut into pieces, which flow side
by side where a plan waits for the whole. So the quickest plan, of every number of parts, is the one that is simulated
to be, uncut and in pieces.
Programs keep its order (``Schedule.is_timed``): channels that sent by depth would take up to a fifth longer.

reduce_scatter is an all_gather on the fabric with every link turned round, backwards in time, and all_reduce is both.

References:
    W. Won, M. Elavazhagan, S. Srinivasan, S. Gupta, T. Krishna, "TACOS: Topology-Aware Collective Algorithm
    Synthesizer for Distributed Machine Learning", MICRO 2024, section IV (matching of links and chunks in a
    time-expanded network; there by chance, and of equal steps).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mycel.collectives.routes import shortest_routes
from mycel.collectives.schedule import Chunk, Schedule, Transfer
from mycel.collectives.simulate import simulate
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth.classics.strands import check_served
from mycel.cost import LinkCosts, bytes_per_second, link_costs
from mycel.errors import SynthesisError, UsageError
from mycel.topology.model import Topology

__all__ = ["SERVES", "synthesize"]

SERVES: tuple[CollectiveName, ...] = ("all_gather", "reduce_scatter", "all_reduce")
#: Parts of a block that are tried, as long as twice as many are quicker; plans of each, which break ties otherwise.
_PARTS, _TRIES = (1, 2, 4, 8, 16), 3
#: Messages up to which plans are made that differ in ties: in large ones ties matter less, and plans take longer.
_FEW_MESSAGES = 1_000
#: Messages of a plan at most: beyond, forests are near the bound at any size that is worth a plan.
_MOST_MESSAGES = 4_000
#: Pieces of all its messages up to which a schedule is also simulated in pieces.
_MOST_PIECES = 8_000


@dataclass(frozen=True, slots=True)
class _Arc:
    """A way from a rank to another without a third: its links by number, seconds a byte on each, and costs."""

    src: int
    dst: int
    path: tuple[int, ...]
    links: tuple[int, ...]
    per_byte: tuple[float, ...]
    latency_s: float
    work_s: float


@dataclass(frozen=True, slots=True)
class _Message:
    start_s: float
    part: int
    arc: _Arc


def synthesize(
    topology: Topology,
    collective: Collective,
    *,
    num_bytes: int = 1 << 20,
    links: str | None = None,
    overhead_s: float | None = None,
) -> Schedule:
    """The quickest of some plans for an array of a size; right for any other, too.

    Args:
        topology: the fabric.
        collective: what to move, in equal blocks.
        num_bytes: of the whole array.
        links: class of all links, instead of those of the topology, as for ``mycel.cost.link_costs``.
        overhead_s: of a message, beyond the latency of its links, instead of what classes say.

    Raises:
        UsageError: no bytes, a negative overhead, or an unknown class.
        SynthesisError: another collective, more messages than are planned, or a rank that no other sends to directly.
    """
    check_served(topology, collective, "greedy", SERVES)
    n = collective.num_ranks
    if num_bytes <= 0:
        raise UsageError(f"cannot plan {num_bytes} bytes; at least one is needed")
    costs = link_costs(topology, links=links, overhead_s=overhead_s)
    if n * (n - 1) > _MOST_MESSAGES or collective.weights is not None:
        what = f"up to {_MOST_MESSAGES} messages" if collective.weights is None else "equal blocks only"
        raise SynthesisError(f"greedy on {topology.name}: plans {what}; forest and tree serve others")
    arcs = _arcs(topology, costs)
    turned = replace(topology, links=tuple(replace(link, src=link.dst, dst=link.src) for link in topology.links))
    back = (
        arcs
        if collective.name == "all_gather"
        else _arcs(turned, link_costs(turned, links=links, overhead_s=overhead_s))
    )
    plans: list[tuple[float, int, list[_Message], list[_Message]]] = []
    for parts in _PARTS:
        quickest = min((plan[:2] for plan in plans), default=(0.0, parts))
        if n * (n - 1) * parts > _MOST_MESSAGES or quickest[1] < parts // 2:
            break
        part_bytes = num_bytes / n / parts
        for seed in range(_TRIES if n * (n - 1) * parts <= _FEW_MESSAGES else 1):
            down_s, up_s, down, up = 0.0, 0.0, list[_Message](), list[_Message]()
            if collective.name != "reduce_scatter":
                down_s, down = _play(n, parts, arcs, part_bytes, seed)
            if collective.reduces:
                up_s, up = _play(n, parts, back, part_bytes, seed)
            plans.append((down_s + up_s, parts, up, down))
    if not plans:
        raise SynthesisError(f"greedy on {topology.name}: one rank has nothing to plan for")
    best: tuple[float, Schedule] | None = None
    seen: set[int] = set()
    for planned_s, parts, up, down in sorted(plans, key=lambda plan: plan[0]):
        # Uncut, a plan is hardly quicker than it was planned.
        lengths = [4 + num_bytes] if best is None or planned_s < best[0] else []
        if parts not in seen:
            seen.add(parts)
            lengths += _pieces(len(up) + len(down), num_bytes, parts * n, costs)
        if not lengths:
            continue
        schedule = _schedule(topology, collective, parts, up, down)
        for piece in lengths:
            seconds = simulate(schedule, num_bytes, piece_bytes=piece, links=links, overhead_s=overhead_s).seconds
            if best is None or seconds < best[0]:
                best = seconds, schedule
    assert best is not None
    return best[1]


def _pieces(num_messages: int, num_bytes: int, num_parts: int, costs: LinkCosts) -> list[int]:
    """Lengths of the pieces into which a schedule's messages may be cut, where these are few."""
    part_bytes = -(-num_bytes // num_parts)
    worth = [piece for piece in costs.pieces(num_bytes) if piece < part_bytes]
    return [piece for piece in worth if num_messages * -(-part_bytes // piece) <= _MOST_PIECES]


def _arcs(topology: Topology, costs: LinkCosts) -> list[_Arc]:
    rate, number = bytes_per_second(topology), {(k.src, k.dst): i for i, k in enumerate(topology.links)}
    n, arcs = topology.num_ranks, list[_Arc]()
    for src in range(n):
        for dst, route in shortest_routes(topology, src, relays=False).items():
            hops = list(pairwise(route.vertices))
            latency_s, work_s = costs.message(route.vertices)
            arcs.append(
                _Arc(
                    src,
                    dst,
                    route.vertices,
                    tuple(number[hop] for hop in hops),
                    tuple(1.0 / (topology.capacity[hop] * rate) for hop in hops),
                    latency_s,
                    work_s,
                )
            )
    return sorted(arcs, key=lambda arc: ((arc.dst - arc.src) % n, arc.src))


def _play(n: int, parts: int, arcs: Sequence[_Arc], part_bytes: float, seed: int) -> tuple[float, list[_Message]]:
    """An all_gather in time: when it is over, and its messages in the order in which they begin."""
    chance = random.Random(seed)
    order = list(range(n * parts))
    chance.shuffle(order)
    rank_of_part = {part: place for place, part in enumerate(order)}  # how ties between parts are broken
    holds = [((1 << parts) - 1) << rank * parts for rank in range(n)]
    expects = list(holds)
    holders = [1] * (n * parts)
    free = dict.fromkeys((link for arc in arcs for link in arc.links), 0.0)
    busy = [0.0] * n  # until when each rank works at the messages that it has begun with
    arriving: list[tuple[float, int, int, float]] = []  # when, where, which part, and the work that it will take
    whole, now, messages = (1 << n * parts) - 1, 0.0, list[_Message]()
    while True:
        for arc in arcs:
            lacking = holds[arc.src] & ~expects[arc.dst]
            if not lacking or busy[arc.src] > now or any(free[link] > now for link in arc.links):
                continue
            part = _rarest(lacking, holders, rank_of_part)
            expects[arc.dst] |= 1 << part
            holders[part] += 1
            leaves = busy[arc.src] = now + arc.work_s
            for link, per_byte in zip(arc.links, arc.per_byte, strict=True):
                free[link] = leaves + part_bytes * per_byte
            arrives = leaves + part_bytes * max(arc.per_byte) + arc.latency_s
            heapq.heappush(arriving, (arrives, arc.dst, part, arc.work_s))
            messages.append(_Message(now, part, arc))
        if not arriving and all(held == whole for held in holds):
            return now, messages
        later = [when for when in (*free.values(), *busy) if when > now]
        if not arriving and not later:
            raise SynthesisError("greedy: some rank is sent nothing by any other without a third between them")
        now = min([*later, arriving[0][0]] if arriving else later)
        while arriving and arriving[0][0] <= now:
            _, rank, part, work_s = heapq.heappop(arriving)
            if work_s:
                busy[rank] = max(busy[rank], now) + work_s
                heapq.heappush(arriving, (busy[rank], rank, part, 0.0))
            else:
                holds[rank] |= 1 << part


def _rarest(lacking: int, holders: Sequence[int], turn: dict[int, int]) -> int:
    found, fewest = -1, (0, 0)
    while lacking:
        low = lacking & -lacking
        part = low.bit_length() - 1
        lacking ^= low
        cost = (holders[part], turn[part])
        if found < 0 or cost < fewest:
            found, fewest = part, cost
    return found


def _schedule(
    topology: Topology, collective: Collective, parts: int, up: Sequence[_Message], down: Sequence[_Message]
) -> Schedule:
    """Parts up in the time of their plan turned round, and then down."""
    transfers: list[Transfer] = []
    into: dict[tuple[int, int], tuple[int, ...]] = {}
    for message in reversed(up):
        src, dst = message.arc.dst, message.arc.src
        after = into.get((message.part, src), ())
        into[message.part, dst] = (*into.get((message.part, dst), ()), len(transfers))
        transfers.append(_transfer(message, src, dst, message.arc.path[::-1], after, reduce=True))
    for message in down:
        src, dst = message.arc.src, message.arc.dst
        after = into.get((message.part, src), ())
        into[message.part, dst] = (len(transfers),)
        transfers.append(_transfer(message, src, dst, message.arc.path, after, reduce=False))
    count = collective.num_ranks * parts
    return Schedule(
        collective=collective,
        topology=topology,
        method="greedy",
        num_units=count,
        chunks=tuple(Chunk(start=part, stop=part + 1) for part in range(count)),
        transfers=tuple(transfers),
        is_timed=True,
    )


def _transfer(
    message: _Message, src: int, dst: int, path: tuple[int, ...], after: tuple[int, ...], *, reduce: bool
) -> Transfer:
    return Transfer(chunk=message.part, src=src, dst=dst, reduce=reduce, path=path, after=after)
