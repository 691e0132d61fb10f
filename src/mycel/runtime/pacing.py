"""Pacing: how fast each channel sends at most.

A channel paced at what its path carries leaves the queues on the way empty, as long as it has the path for itself.
Where several channels share a link, and all are busy, they overrun it together. In a collective that takes long
enough for queues to matter, each is therefore paced at its share: what it needs to be busy as long as the busiest
link is. Short ones are not: a channel that got started late could not catch up. Where a single rank sends, all its
channels start together, and even short collectives are shared out.

Only rates that were given hold anybody back (``mycel.runtime.membership``): on cards of 25 Gbit/s and more, what is
assumed of an unknown network would be a brake.
"""

from __future__ import annotations

import ctypes
import logging
import socket
import struct
from collections.abc import Hashable, Mapping
from fractions import Fraction
from itertools import pairwise

from mycel.collectives.program import Channel
from mycel.collectives.schedule import Schedule
from mycel.collectives.weights import channel_weights
from mycel.topology.model import Topology

__all__ = ["LONG_S", "SO_MAX_PACING_RATE", "Pacer", "is_unpaced", "path_pace", "shared_paces"]

_log = logging.getLogger(__name__)

#: Faster than this the kernel's timers do not pace well, in bytes a second.
_FASTEST = 1_000_000_000
#: Collectives expected to take this long get shared paces.
LONG_S = 0.1
#: Room above its share for a channel that also waits for others: it may have to catch up.
_ROOM = Fraction(11, 10)
SO_MAX_PACING_RATE = 47  # Linux; the socket module has no name for it


def path_pace(topology: Topology, channel: Channel, part: float) -> int | None:
    """Bytes a second at which a channel may send: as much as its path carries, headers aside; ``None``: no limit.

    Sending faster only fills queues on the way. Acknowledgements of the other direction then wait behind them,
    and a connection that has been idle (every training step has such a pause) needs tenths of a second, not
    milliseconds, to get up to speed again.

    Args:
        topology: the fabric.
        channel: whose path it is.
        part: of the path's bandwidth; 0 for no pacing.
    """
    unit = topology.bytes_per_second_per_unit
    if unit is None or part == 0:
        return None
    capacity = min(topology.capacity[hop] for hop in pairwise(channel.path))
    pace = int(capacity * unit * Fraction(part))
    return pace if pace < _FASTEST else None


def is_unpaced(topology: Topology, part: float) -> bool:
    """Whether no channel has a pace, whatever its path: all links are too fast for one, or none is to have any.

    Args:
        topology, part: as for ``path_pace``.
    """
    hops = (Channel(src=0, dst=0, path=hop) for hop in topology.capacity)
    return all(path_pace(topology, hop, part) is None for hop in hops)


def shared_paces(schedule: Schedule, rank: int, part: float) -> dict[Channel, int]:
    """Paces at which the channels of a rank are busy for as long as the schedule's busiest link; paced ones only.

    Args:
        schedule: what runs on them.
        rank: whose channels, those on which it sends.
        part: of a path's bandwidth; no channel is paced faster than alone on its path.
    """
    weights = channel_weights(schedule, rank)
    units = {channel: load for channel, load in weights.items() if channel.src == rank}
    # All units cross in num_units / (algbw * parts); a channel with some of them needs as many in that time.
    per_unit = schedule.algbw * schedule.collective.num_parts / schedule.num_units
    room = _ROOM if schedule.depth > 1 else Fraction(1)
    paces: dict[Channel, int] = {}
    for channel, load in units.items():
        alone = path_pace(schedule.topology, channel, part)
        unit = schedule.topology.bytes_per_second_per_unit
        if alone is not None and unit is not None:
            paces[channel] = min(alone, int(load * per_unit * unit * Fraction(part) * room))
    return paces


class Pacer:
    """Sets the paces of one rank's channels.

    Args:
        rank: whose.
        part: of a path's bandwidth; 0 for no pacing.
    """

    def __init__(self, rank: int, part: float) -> None:
        self._rank, self._part = rank, part
        #: By name of the schedule: the schedule, and a channel's pace when alone and when others are busy.
        self._known: dict[Hashable, tuple[Schedule, dict[Channel, tuple[int, int]]]] = {}
        self._current: dict[Channel, tuple[int, int]] = {}
        self._last: tuple[Schedule, bool] | None = None
        self._name: Hashable = None
        self._libc = ctypes.CDLL(None, use_errno=True)

    def adapt(self, name: Hashable, schedule: Schedule, seconds: float, descriptors: Mapping[Channel, int]) -> None:
        """Pace the channels for a run of a schedule; costs next to nothing where the run before was of the same.

        Args:
            name: to know the schedule by.
            schedule: what runs.
            seconds: it is expected to take.
            descriptors: sockets of open channels.
        """
        long = seconds >= LONG_S
        if self._last is not None and self._last[0] is schedule and self._last[1] is long:
            return
        self._last = (schedule, long)
        self._name = name
        self._apply(name, schedule, long or schedule.is_from_one, descriptors)

    def extend(self, descriptors: Mapping[Channel, int]) -> None:
        """Pace channels that have been opened since as those that were open before.

        Args:
            descriptors: sockets of open channels.
        """
        if self._last is not None:
            schedule, long = self._last
            self._apply(self._name, schedule, long or schedule.is_from_one, descriptors)

    def _apply(self, name: Hashable, schedule: Schedule, share: bool, descriptors: Mapping[Channel, int]) -> None:
        for channel, (alone, shared) in self._paces(name, schedule).items():
            descriptor = descriptors.get(channel)
            if descriptor is None:
                continue
            wanted = shared if share else alone
            if self._current.get(channel, (descriptor, alone)) != (descriptor, wanted):
                self._set(descriptor, wanted)
            self._current[channel] = (descriptor, wanted)

    def _paces(self, name: Hashable, schedule: Schedule) -> dict[Channel, tuple[int, int]]:
        known = self._known.get(name)
        if known is None or known[0] is not schedule:
            paces = {}
            for channel, shared in shared_paces(schedule, self._rank, self._part).items():
                alone = path_pace(schedule.topology, channel, self._part)
                paces[channel] = (shared if alone is None else alone, shared)
            known = self._known[name] = (schedule, paces)
        return known[1]

    def _set(self, descriptor: int, pace: int) -> None:
        value = struct.pack("=Q", pace)
        if self._libc.setsockopt(descriptor, socket.SOL_SOCKET, SO_MAX_PACING_RATE, value, len(value)) != 0:
            _log.debug("descriptor %d cannot be paced: errno %d", descriptor, ctypes.get_errno())
