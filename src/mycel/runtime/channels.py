"""The connections that schedules use: opened at first need, shut down when the group fails, closed at the end.

A call that needs channels which are not open opens them when its turn has come, and not when it is made: whoever
starts a call and goes on must not wait for ranks that are not there yet. Its time-out counts from then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

from mycel.collectives.program import Channel
from mycel.errors import CommunicationError, PeerLostError
from mycel.runtime.arena import arena
from mycel.runtime.faults import Alarm, Attempt, Faults
from mycel.runtime.prepared import Line
from mycel.runtime.ring_memory import Ring
from mycel.runtime.transport.rendezvous import LocalFailure, Rendezvous
from mycel.runtime.turns import Errand

__all__ = ["Channels"]

_log = logging.getLogger(__name__)

#: Bytes that a ring holds, at least, and all of a rank's, about.
_LEAST_RING, _ALL_RINGS = 1 << 16, 1 << 21
#: Rings of groups that were closed while their engine was still at them: to take the memory away would be worse.
_abandoned: list[Ring] = []


class Channels:
    """One rank's channels to and from the others of its group.

    Args:
        rank: in the group.
        rendezvous: opens them.
        address_of: at which address a channel's destination is reached over its path.
        pace_of: bytes a second that a channel sends at most; ``None``: it is not paced.
        faults: what is the matter where one cannot be opened.
        abort: fails the group, where the user interrupts.
        in_memory: whether channels to ranks of this node are memory that both share, where the kernel has that.

    Attributes:
        in_memory: as given.
        descriptors: of the sockets that are open, by channel.
        rings: of those channels that are memory which both ranks share.
    """

    def __init__(
        self,
        rank: int,
        rendezvous: Rendezvous,
        address_of: Callable[[Channel], str],
        pace_of: Callable[[Channel], int | None],
        faults: Faults,
        abort: Callable[[str], None],
        *,
        in_memory: bool = True,
    ) -> None:
        self.in_memory = in_memory
        hosts = [address.host for address in rendezvous.addresses]
        neighbours = max(1, hosts.count(hosts[rank]) - 1)
        self._ring_bytes = max(_LEAST_RING, _ALL_RINGS >> (neighbours.bit_length() - 1))
        self.rings: dict[Channel, Ring] = {}
        #: Rung by ranks of this node when they have made room.
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.descriptors: dict[Channel, int] = {}
        self._rank = rank
        self._rendezvous = rendezvous
        self._address_of, self._pace_of = address_of, pace_of
        self._faults = faults
        self._abort = abort
        self._open: list[socket.socket] = []
        self._opening: Errand | None = None

    @property
    def arena(self) -> tuple[int, int]:
        """Address and bytes of what this process shares with the other ranks of its node; zeros: nothing."""
        own = arena() if self.in_memory else None
        return (0, 0) if own is None else (own.address, own.num_bytes)

    def open(self, channels: Sequence[Channel], attempt: Attempt) -> None:
        """Open those that are not open yet. Every rank at their other ends must come here to get on.

        Raises:
            CommunicationError: a peer does not come, or cannot be reached.
            LinksFailed: likewise, and the group may go on without the links.
        """
        missing = [channel for channel in channels if channel not in self.descriptors]
        if not missing:
            return
        made = self._connect(missing, attempt)
        self._open += made
        self.rings |= self._share(missing, made, attempt)
        self.descriptors |= {channel: sock.fileno() for channel, sock in zip(missing, made, strict=True)}

    def _share(
        self, channels: Sequence[Channel], made: Sequence[socket.socket], attempt: Attempt
    ) -> dict[Channel, Ring]:
        """Rings of those channels that stay on this node, each made by the rank that sends, or not."""
        local = [(c, sock) for c, sock in zip(channels, made, strict=True) if sock.family == socket.AF_UNIX]
        capacity = self._ring_bytes if self.in_memory else 0
        own = arena() if self.in_memory else None
        shared = -1 if own is None else own.descriptor
        observe = self._observing(attempt)
        rings: dict[Channel, Ring | None] = {}
        try:
            for channel, sock in local:
                if channel.src == self._rank:
                    self._rendezvous.awaited = channel.dst
                    rings[channel] = Ring.offer(sock, capacity, self.bell, shared)
            for channel, sock in local:
                if channel.dst == self._rank:
                    self._rendezvous.awaited = channel.src
                    rings[channel] = Ring.accept(sock, attempt.deadline, observe)
        except (Alarm, CommunicationError) as error:
            self._blame(error, attempt)
        return {channel: ring for channel, ring in rings.items() if ring is not None}

    def lines(self, channels: Sequence[Channel]) -> list[Line]:
        """What the engine needs of channels; of those that are not open, a descriptor of -1."""
        return [self._line(channel) for channel in channels]

    def _line(self, channel: Channel) -> Line:
        descriptor, ring = self.descriptors.get(channel, -1), self.rings.get(channel)
        if ring is None:
            return Line(descriptor)
        return Line(descriptor, ring.address, ring.capacity, ring.bell, ring.own_bell, *ring.arena)

    def require(self, channels: Sequence[Channel], attempt: Attempt) -> None:
        """Open those that are not open yet, as ``open`` does, while signal handlers may call collectives themselves.

        Raises:
            CommunicationError, LinksFailed: as ``open``.
        """
        if not all(channel in self.descriptors for channel in channels):
            is_main = threading.current_thread() is threading.main_thread()
            (self._open_apart if is_main else self.open)(channels, attempt)

    def _open_apart(self, channels: Sequence[Channel], attempt: Attempt) -> None:
        try:
            if self._opening is not None:  # this is a signal handler
                self._opening.wait()
            self._opening = Errand(lambda: self.open(channels, attempt))
            self._opening.wait()
        except KeyboardInterrupt:
            self._abort(f"interrupted in {attempt.what}")
            raise
        finally:
            self._opening = None

    def _connect(self, channels: list[Channel], attempt: Attempt) -> list[socket.socket]:
        try:
            return self._rendezvous.connect(
                channels,
                self._address_of,
                self._pace_of,
                attempt.timeout_s,
                deadline=attempt.deadline,
                observe=self._observing(attempt),
                epoch=self._faults.epoch,
            )
        except (Alarm, CommunicationError) as error:
            self._blame(error, attempt)

    def _observing(self, attempt: Attempt) -> Callable[[], None]:
        """What whoever waits for a peer calls now and then."""
        return partial(self._faults.observe_connecting, attempt, self._rendezvous)

    def _blame(self, error: Exception, attempt: Attempt) -> NoReturn:
        """Find out who is to blame where a channel could not be opened, and raise it."""
        faults = self._faults
        if faults.cause is not None:
            raise faults.cause from None
        if isinstance(error, LocalFailure):
            raise faults.poison("failed", f"rank {self._rank}: {error}") from None
        _log.debug("rank %d: %s: %s", self._rank, attempt.what, error)
        lost = isinstance(error, PeerLostError)
        rendezvous = self._rendezvous
        raise faults.not_connected(attempt, rendezvous.awaited, rendezvous.unanswered, lost=lost) from None

    def shut_down(self) -> None:
        """Have peers wait for this rank no longer, and use nothing that they are still to read in its memory.

        They are closed later: the engine's thread may still look at their descriptors.
        """
        for channel, ring in tuple(self.rings.items()):
            if channel.src == self._rank:
                ring.revoke()
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all; those that are needed again are opened anew. The engine must not be at any of them."""
        self.descriptors.clear()
        for ring in self.rings.values():
            ring.close()
        self.rings.clear()
        for sock in self._open:
            sock.close()
        self._open.clear()

    def end(self, *, is_idle: bool = True) -> None:
        """Close all for good.

        Args:
            is_idle: whether the engine is at none of them.
        """
        if not is_idle:
            _abandoned.extend(self.rings.values())
        self.close()
        if self.bell >= 0:
            os.close(self.bell)
            self.bell = -1
