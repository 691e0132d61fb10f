"""Replay: how long a schedule takes under the alpha-beta model, link by link, in the order of its transfers.

A message keeps every link of its path busy from its start on for the latency of the whole path, plus its bytes over
that link's rate; its chunks are there when the slowest link has passed them. Links serve one message at a time, in
the order of the schedule's transfers, and a message starts as soon as its chunks and its links are there.

That is the model in which schedules are sketched. It is coarser than ``simulate``, which cuts messages into pieces
and shares links between them, and it knows nothing of how a schedule was found: it is the check of what was.

References:
    A. Shah et al., "TACCL: Guiding Collective Algorithm Synthesis using Communication Sketches", NSDI 2023,
    section 4 (the cost of a link).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mycel.collectives.schedule import Schedule
from mycel.cost import bytes_per_second
from mycel.errors import ScheduleError

__all__ = ["Replay", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """When everything happened.

    Attributes:
        seconds: until the last chunk has arrived.
        starts_s: of each transfer, when its message started.
        ends_s: of each transfer, when its message had arrived.
    """

    seconds: float
    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]


def replay(
    schedule: Schedule,
    num_bytes: int,
    *,
    messages: Sequence[int] | None = None,
    ports: Sequence[Collection[tuple[int, int]]] = (),
) -> Replay:
    """The alpha-beta time of a schedule.

    Args:
        schedule: what runs; its transfers on one link go in the order of the tuple.
        num_bytes: of the collective's whole array (all_to_all: of a rank's part).
        messages: of each transfer, a number that those which travel as one message have in common; by default
            each is a message. A message goes where its first transfer stands.
        ports: sets of links of which only one works at a time.

    Raises:
        ScheduleError: a message has transfers of different paths, or waits for one that starts after it.

    Examples:
        >>> from mycel.collectives.spec import Collective
        >>> from mycel.collectives.synth import synthesize
        >>> from mycel.topology.builders import ring
        >>> fabric = ring(num_ranks=4, bandwidth="1 GB/s", latency="1us")
        >>> hop = synthesize(fabric, Collective(name="all_gather", num_ranks=4), method="ring")
        >>> round(replay(hop, 4000).seconds * 1e6, 3)  # three hops of 1 us and 1,000 bytes each
        6.0
    """
    topology = schedule.topology
    unit = bytes_per_second(topology)
    rate = {hop: capacity * unit for hop, capacity in topology.capacity.items()}
    latency = topology.latency_s
    port_of: dict[tuple[int, int], list[int]] = {}
    for number, hops in enumerate(ports):
        for hop in hops:
            port_of.setdefault(hop, []).append(number)
    unit_bytes = num_bytes * schedule.collective.num_parts / schedule.num_units
    together: dict[int, list[int]] = {}
    for number in range(len(schedule.transfers)):
        together.setdefault(number if messages is None else messages[number], []).append(number)

    free: dict[tuple[int, int] | int, float] = {}
    starts = [0.0] * len(schedule.transfers)
    ends: list[float | None] = [None] * len(schedule.transfers)
    for members in together.values():
        path = schedule.transfers[members[0]].path
        hops = list(pairwise(path))
        alpha = sum(latency[hop] for hop in hops)
        size = sum(schedule.chunks[schedule.transfers[i].chunk].num_units for i in members) * unit_bytes
        start = max([free.get(hop, 0.0) for hop in hops])
        start = max([start, *(free.get(port, 0.0) for hop in hops for port in port_of.get(hop, ()))])
        for i in members:
            if schedule.transfers[i].path != path:
                raise ScheduleError(f"transfers {members[0]} and {i} are one message, but take different paths")
            for earlier in schedule.transfers[i].after:
                arrived = ends[earlier]
                if arrived is None:
                    raise ScheduleError(
                        f"the message of transfer {i} waits for transfer {earlier}, which starts later"
                    )
                start = max(start, arrived)
        for hop in hops:
            free[hop] = start + alpha + size / rate[hop]
            for port in port_of.get(hop, ()):
                free[port] = max(free.get(port, 0.0), free[hop])
        end = start + alpha + size / min(rate[hop] for hop in hops)
        for i in members:
            starts[i], ends[i] = start, end
    finished = tuple(end or 0.0 for end in ends)
    return Replay(seconds=max(finished, default=0.0), starts_s=tuple(starts), ends_s=finished)
