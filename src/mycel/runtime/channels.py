"""The connections that schedules use: opened at first need, shut down when the group fails, closed at the end.

A call that needs channels which are not open opens them when its turn has come, and not when it is made: whoever
starts a call and goes on must not wait for ranks that are not there yet. Its time-out counts from then.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence

from mycel.collectives.program import Channel
from mycel.errors import CommunicationError, PeerLostError
from mycel.runtime.faults import Alarm, Attempt, Faults
from mycel.runtime.transport.rendezvous import LocalFailure, Rendezvous
from mycel.runtime.turns import Errand

__all__ = ["Channels"]

_log = logging.getLogger(__name__)


class Channels:
    """One rank's channels to and from the others of its group.

    Args:
        rank: in the group.
        rendezvous: opens them.
        address_of: at which address a channel's destination is reached over its path.
        pace_of: bytes a second that a channel sends at most; ``None``: it is not paced.
        faults: what is the matter where one cannot be opened.
        abort: fails the group, where the user interrupts.

    Attributes:
        descriptors: of the sockets that are open, by channel.
    """

    def __init__(
        self,
        rank: int,
        rendezvous: Rendezvous,
        address_of: Callable[[Channel], str],
        pace_of: Callable[[Channel], int | None],
        faults: Faults,
        abort: Callable[[str], None],
    ) -> None:
        self.descriptors: dict[Channel, int] = {}
        self._rank = rank
        self._rendezvous = rendezvous
        self._address_of, self._pace_of = address_of, pace_of
        self._faults = faults
        self._abort = abort
        self._open: list[socket.socket] = []
        self._opening: Errand | None = None

    def open(self, channels: Sequence[Channel], attempt: Attempt) -> None:
        """Open those that are not open yet. Every rank at their other ends must come here to get on.

        Raises:
            CommunicationError: a peer does not come, or cannot be reached.
            LinksFailed: likewise, and the group may go on without the links.
        """
        missing = [channel for channel in channels if channel not in self.descriptors]
        for channel, sock in zip(missing, self._connect(missing, attempt) if missing else (), strict=True):
            self._open.append(sock)
            self.descriptors[channel] = sock.fileno()

    def sockets(self, channels: Sequence[Channel]) -> list[int]:
        """Descriptors of channels; -1 where they are not open."""
        return [self.descriptors.get(channel, -1) for channel in channels]

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
        rendezvous, faults = self._rendezvous, self._faults
        try:
            return rendezvous.connect(
                channels,
                self._address_of,
                self._pace_of,
                attempt.timeout_s,
                deadline=attempt.deadline,
                observe=lambda: faults.observe_connecting(attempt, rendezvous),
                epoch=faults.epoch,
            )
        except (Alarm, CommunicationError) as error:
            if faults.cause is not None:
                raise faults.cause from None
            if isinstance(error, LocalFailure):
                raise faults.poison("failed", f"rank {self._rank}: {error}") from None
            _log.debug("rank %d: %s: %s", self._rank, attempt.what, error)
            lost = isinstance(error, PeerLostError)
            raise faults.not_connected(attempt, rendezvous.awaited, rendezvous.unanswered, lost=lost) from None

    def shut_down(self) -> None:
        """Have peers wait for this rank no longer.

        They are closed later: the engine's thread may still look at their descriptors.
        """
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all; those that are needed again are opened anew."""
        self.descriptors.clear()
        for sock in self._open:
            sock.close()
        self._open.clear()
