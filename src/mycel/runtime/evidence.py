"""Which links have failed: what the kernel knows of every connection, put together over all ranks.

The kernel of a sender knows whether its packets are acknowledged, the kernel of a receiver how many have come,
whatever their programs do. So each rank sends one byte out of band over every channel (it takes no place among the
data), waits for a moment, and reports. A channel whose bytes are not acknowledged and do not arrive has a dead link
on its path; links of channels on which bytes arrive are alive; the fewest links that explain all dead channels are
named. An acknowledgement that is lost on its way back says nothing about the way there: the packets that were sent
and those that have come are compared for that.

References:
    ``struct tcp_info`` of Linux (include/uapi/linux/tcp.h).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mycel.collectives.program import Channel
from mycel.runtime.fields import Fields
from mycel.runtime.transport.tcp_info import raw_tcp_info
from mycel.topology.model import Topology

__all__ = ["Evidence", "Hop", "collect", "failed_links", "has_stalled", "link_names", "probe"]

Hop = tuple[int, int]
Path = tuple[int, ...]

_U32 = struct.Struct("=I")
_RETRANSMITS, _PROBES, _UNACKED, _LAST_ACK_MS, _ROUND_TRIP_US, _TOTAL_RETRANS = 2, 3, 24, 56, 68, 100
_UNSENT, _DATA_SEGS_IN, _DATA_SEGS_OUT, _WINDOW = 144, 152, 156, 228
_LENGTH = 232
#: How often in a row the kernel has tried again, and seconds without any acknowledgement, that are no hiccup.
_MANY_TRIES = 3
_LONG_S = 2.0
#: The part of a wait for an answer that must have gone by without any.
_MOST = 0.8
#: Round trips within which an acknowledgement comes, in full queues too.
_ROUND_TRIPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What one rank sees on its channels.

    Attributes:
        stuck: channels it sends on whose bytes are not acknowledged: receiver, path, and how many packets must have
            arrived there if the way there works.
        clear: paths of channels it sends on whose bytes all are.
        got: channels it receives on: sender, path, packets that have come.
        heard: ranks whose state it has heard.
    """

    stuck: tuple[tuple[int, Path, int], ...] = ()
    clear: tuple[Path, ...] = ()
    got: tuple[tuple[int, Path, int], ...] = ()
    heard: frozenset[int] = frozenset()

    def to_record(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {"stuck": self.stuck, "clear": self.clear, "got": self.got, "heard": sorted(self.heard)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], size: int, num_vertices: int) -> Evidence:
        """Back from ``to_record``.

        Args:
            record: what somebody has said.
            size: of the group.
            num_vertices: of the fabric.

        Raises:
            ValueError: it is no evidence about such a group.
        """
        fields = Fields(record)
        return cls(
            stuck=fields.counted("stuck", size, num_vertices),
            clear=fields.paths("clear", num_vertices),
            got=fields.counted("got", size, num_vertices),
            heard=frozenset(fields.integers("heard", 0, size - 1)),
        )

    def split(self, longest: int) -> tuple[Evidence, ...]:
        """Pieces, at least one, of about ``longest`` bytes each as JSON; ``join`` makes them one again."""
        found: list[dict[str, list[Any]]] = [{}]
        left = longest
        for name, items in self.to_record().items():
            for item in items:
                needed = len(json.dumps(item, separators=(",", ":"))) + 1
                if needed > left:
                    found.append({})
                    left = longest
                left -= needed
                found[-1].setdefault(name, []).append(item)
        return tuple(
            Evidence(
                stuck=tuple(piece.get("stuck", ())),
                clear=tuple(piece.get("clear", ())),
                got=tuple(piece.get("got", ())),
                heard=frozenset(piece.get("heard", ())),
            )
            for piece in found
        )

    @classmethod
    def join(cls, pieces: Sequence[Evidence]) -> Evidence:
        """One of several, in their order."""
        return cls(
            stuck=tuple(item for piece in pieces for item in piece.stuck),
            clear=tuple(item for piece in pieces for item in piece.clear),
            got=tuple(item for piece in pieces for item in piece.got),
            heard=frozenset(rank for piece in pieces for rank in piece.heard),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """The kernel's word on a connection.

    Attributes:
        is_pending: bytes are not acknowledged, or not even sent.
        tries: how often in a row the kernel has tried again in vain, or could not so much as try, since the interface
            takes nothing. 0 where the receiver has no room: it says so, and the way works.
        unanswered_s: seconds since something was acknowledged, while something ought to be; else 0.
        least: packets of data that must have arrived at the other end if the way there works: those that were sent,
            less those that were lost before. What is lost is sent again, so these are as many as were sent again
            before the tries of now; half of these may be lost yet, for they may be on their way.
        received: packets of data that have come.
    """

    is_pending: bool
    tries: int
    unanswered_s: float
    least: int
    received: int


def _facts(descriptor: int) -> _Facts | None:
    """The kernel's word on a connection; ``None`` where it is no TCP, or is closed."""
    raw = raw_tcp_info(descriptor, _LENGTH)
    if raw is None:
        return None
    unacked, unsent, window = (_U32.unpack_from(raw, at)[0] for at in (_UNACKED, _UNSENT, _WINDOW))
    again, received, sent = (_U32.unpack_from(raw, at)[0] for at in (_TOTAL_RETRANS, _DATA_SEGS_IN, _DATA_SEGS_OUT))
    tries = raw[_RETRANSMITS] if unacked else raw[_PROBES] if unsent and window else 0
    last_ack_s, round_trip_s = (
        _U32.unpack_from(raw, _LAST_ACK_MS)[0] / 1e3,
        _U32.unpack_from(raw, _ROUND_TRIP_US)[0] / 1e6,
    )
    return _Facts(
        is_pending=bool(unacked or unsent),
        tries=tries,
        unanswered_s=last_ack_s if (unacked or tries) and last_ack_s > _ROUND_TRIPS * round_trip_s else 0.0,
        least=sent - again + (tries + 1) // 2,
        received=received,
    )


def probe(channels: Mapping[Channel, int], rank: int) -> None:
    """Send a byte out of band on every channel this rank sends on."""
    for channel, descriptor in channels.items():
        if channel.src == rank and _facts(descriptor) is not None:
            # A full buffer or a closed connection refuses; there is evidence enough then.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as sock:
                sock.send(b"\0", socket.MSG_OOB | socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def has_stalled(channels: Mapping[Channel, int], rank: int) -> bool:
    """Whether the kernel has long been sending again on a channel of this rank, and nothing is acknowledged."""
    for channel, descriptor in channels.items():
        facts = _facts(descriptor) if channel.src == rank else None
        if facts and facts.tries >= _MANY_TRIES and facts.unanswered_s >= _LONG_S:
            return True
    return False


def collect(
    channels: Mapping[Channel, int],
    rank: int,
    heard: frozenset[int],
    waited_s: float,
    unanswered: Channel | None = None,
    *,
    is_probed: bool = True,
) -> Evidence:
    """This rank's evidence, a little while after ``probe``.

    Args:
        channels: open channels with their descriptors.
        rank: whose they are.
        heard: ranks whose state has been heard.
        waited_s: since the probe; tenths of a second.
        unanswered: a channel that could not even be opened, for want of an answer.
        is_probed: whether there was a probe; else a channel on which nothing waits says nothing about its path.
    """
    stuck: list[tuple[int, Path, int]] = []
    if unanswered is not None:
        stuck.append((unanswered.dst, unanswered.path, 1))
    clear: list[Path] = []
    got: list[tuple[int, Path, int]] = []
    for channel, descriptor in channels.items():
        facts = _facts(descriptor)
        if facts is None:
            continue
        if channel.src != rank:
            got.append((channel.src, channel.path, facts.received))
        elif not facts.is_pending:
            clear += [channel.path] if is_probed else []
        elif facts.unanswered_s >= _MOST * waited_s:
            stuck.append((channel.dst, channel.path, facts.least))
    return Evidence(stuck=tuple(stuck), clear=tuple(clear), got=tuple(got), heard=heard)


def failed_links(evidence: Mapping[int, Evidence]) -> tuple[tuple[Hop, ...], ...]:
    """The fewest links that explain all channels on which nothing arrives.

    Args:
        evidence: of each rank that has any.

    Returns:
        For each failure the links that may be it, as ``(src, dst)`` vertices: one, or several where exactly the same
        channels use them.
    """
    dead, alive = _sort_channels(evidence)
    users: dict[Hop, set[int]] = {}
    for number, path in enumerate(dead):
        hops = [hop for hop in pairwise(path) if hop not in alive]
        for hop in hops or pairwise(path):
            users.setdefault(hop, set()).add(number)
    found = []
    left = set(range(len(dead)))
    while left:
        best = max(sorted(users), key=lambda hop: len(users[hop] & left))
        found.append(tuple(hop for hop in sorted(users) if users[hop] & left == users[best] & left))
        left -= users[best]
    return tuple(sorted(found))


def _sort_channels(evidence: Mapping[int, Evidence]) -> tuple[list[Path], set[Hop]]:
    """Paths on which nothing arrives, and links over which something does."""
    got = {(src, rank, path): n for rank, one in evidence.items() for src, path, n in one.got}
    dead: list[Path] = []
    alive: set[Hop] = set()
    for rank, one in sorted(evidence.items()):
        for path in one.clear:
            alive |= set(pairwise(path))
        for dst, path, least in one.stuck:
            if got.get((rank, dst, path), -1) >= least:
                alive |= set(pairwise(path))
            else:
                dead.append(path)
    return dead, alive


def link_names(topology: Topology, failures: tuple[tuple[Hop, ...], ...], evidence: Mapping[int, Evidence]) -> str:
    """Failed links in words: ``link a -> b`` where bytes get through the other way, ``link a - b`` else."""
    _, alive = _sort_channels(evidence)
    names: list[str] = []
    for group in failures:
        words = []
        for src, dst in group:
            if (dst, src) in alive:
                words.append(f"link {topology.label(src)} -> {topology.label(dst)}")
            else:
                low, high = min(src, dst), max(src, dst)
                words.append(f"link {topology.label(low)} - {topology.label(high)}")
        text = " or ".join(dict.fromkeys(words))
        if text not in names:
            names.append(text)
    return ", ".join(names)
