"""Control connections: one between every two ranks of a group, silent until something goes wrong.

They carry five short records: ``abort`` (the group has failed, and why), ``state`` (where I
stand and for whom I wait), ``evidence`` (on which channels nothing arrives), ``handle`` (where I can be found by a
group that is formed of the survivors) and ``bye`` (I leave on purpose). They go
over the links, not the store: the store dies with rank 0.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mycel.records import RecordSocket

__all__ = ["Control", "Event"]

_LONGEST = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something a peer said, or that it is gone.

    Attributes:
        peer: who.
        record: what it said; ``None``: its connection ended.
    """

    peer: int
    record: dict[str, Any] | None


class Control:
    """The control connections of one rank.

    Args:
        sockets: non-blocking, by peer.
    """

    def __init__(self, sockets: dict[int, socket.socket]) -> None:
        self._lines = {peer: RecordSocket(sock, longest=_LONGEST) for peer, sock in sockets.items()}
        self._slot = {peer: slot for slot, peer in enumerate(sorted(sockets))}
        #: Descriptors for the engine to watch, -1 where the peer has left; shared memory, changed in place.
        self.descriptors: npt.NDArray[np.int64] = np.full(max(1, len(sockets)), -1, dtype=np.int64)
        for peer, sock in sockets.items():
            self.descriptors[self._slot[peer]] = sock.fileno()
        #: Ranks that said goodbye before their connection ended.
        self.left: set[int] = set()
        #: Ranks whose connection ended.
        self.gone: set[int] = set()
        #: What survivors of a failure say of where they listen; see ``mycel.runtime.elastic.control_handles``.
        self.handles: dict[int, str] = {}

    def tell(self, peers: Iterable[int], record: dict[str, Any], *, patience_s: float = 0.5) -> None:
        """Send a record to the peers that are still connected; one that takes nothing is passed over."""
        for peer in peers:
            if peer not in self._lines:
                continue
            line = self._lines[peer]
            try:
                line.send(record, patience_s)
                line.sock.setblocking(False)
            except OSError:
                continue  # it is gone or stuck; reading from it will say so

    def tell_all(self, record: dict[str, Any]) -> None:
        """Send a record to every rank that is still connected."""
        self.tell(tuple(self._lines), record)

    def listen(self, patience_s: float) -> list[Event]:
        """What peers have said; waits at most ``patience_s`` for the first word."""
        lines = {line.sock.fileno(): peer for peer, line in self._lines.items()}
        if not lines:
            time.sleep(min(patience_s, 0.05))
            return []
        poller = select.poll()
        for descriptor in lines:
            poller.register(descriptor, select.POLLIN)
        events: list[Event] = []
        for descriptor, _ in poller.poll(max(0.0, patience_s) * 1000):
            events += self._read(lines[descriptor])
        return events

    def _read(self, peer: int) -> list[Event]:
        line, events, ended = self._lines[peer], list[Event](), False
        try:
            while True:
                line.read()
        except BlockingIOError:
            pass
        except (EOFError, OSError):
            ended = True
        try:
            while (record := line.take()) is not None:
                if record["type"] == "handle":
                    self.handles[peer] = str(record["text"])
                    continue
                if record["type"] == "bye":
                    self.left.add(peer)
                events.append(Event(peer=peer, record=record))
        except EOFError:
            ended = True
        if ended:
            self._drop(peer)
            events.append(Event(peer=peer, record=None))
        return events

    def _drop(self, peer: int) -> None:
        self.gone.add(peer)
        self.descriptors[self._slot[peer]] = -1
        self._lines.pop(peer).sock.close()

    def close(self) -> None:
        """Say goodbye and close."""
        self.tell_all({"type": "bye"})
        for peer in list(self._lines):
            self._drop(peer)
