"""What an endpoint waits for: sockets, bells, and the memory that it shares with ranks of its node."""

from __future__ import annotations

import os
import select
import threading
import time
from array import array
from collections.abc import Iterable, Sequence

from mycel.runtime import p2p_stream as s
from mycel.runtime.p2p_connection import Connection

__all__ = ["Waiting"]

#: While there is memory to see to, the kernel is asked about the rest each so many times.
_TURNS_PER_POLL = 8
#: Looks at memory before sleeping, some 100 us at most: what an answer takes that Python gives at the other end.
_LEAST_ROUNDS, _MOST_ROUNDS = 16, 1024
#: A sleep that was shorter would have been spared by asking for longer.
_SHORT_S = 300e-6


class _Lines:
    """Connections over memory, as compiled code finds them; replaced, never changed: it may be at them."""

    def __init__(self, connections: Iterable[Connection]) -> None:
        self.wires = [(each, each.memory) for each in connections if each.memory is not None]
        self._table = array("q", [wire.line for _, wire in self.wires])
        self.address = self._table.buffer_info()[0]

    def attend(self, what: int, rounds: int, *, yields: bool) -> int:
        """How many of them can go on, see ``p2p_stream.attend``."""
        return s.attend(self.address, len(self.wires), what, rounds, yields) if self.wires else 0

    def ready(self) -> list[tuple[Connection | None, int]]:
        """Those that can, and with what."""
        return [(connection, what) for connection, wire in self.wires if (what := wire.ready)]


class Waiting:
    """The connections of an endpoint, and which of them can go on.

    One thread at a time waits; others may add and remove connections, and say what these wait for, meanwhile.

    Args:
        listening: descriptors that become readable when somebody calls.
        yields: whether other ranks of the node need the processor while this one asks.

    Attributes:
        yields: as given.
        bell: descriptor by which the other ends of connections over memory wake this one.
        connections: by the descriptor of their sockets.
    """

    def __init__(self, listening: Sequence[int], *, yields: bool) -> None:
        self.yields = yields
        self._epoll = select.epoll()
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.connections: dict[int, Connection] = {}
        self._bells = {self.bell}
        self._lines = _Lines(())
        self._waiter = 0
        self._rounds = _MOST_ROUNDS
        self._num_turns = 0
        # Edges of bells: whoever is woken looks at all memory, and need not take the ringing back.
        self._epoll.register(self.bell, select.EPOLLIN | select.EPOLLET)
        for descriptor in listening:
            self.listen(descriptor)

    def listen(self, descriptor: int) -> None:
        """Have it be noticed, as somebody's call, when a descriptor becomes readable."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def add(self, connection: Connection) -> None:
        """Wait for what a connection brings, too."""
        self.connections[connection.descriptor] = connection
        connection.watched = select.EPOLLIN
        self._epoll.register(connection.descriptor, connection.watched)
        if connection.memory is not None:
            if connection.memory.bell >= 0:
                self._bells.add(connection.memory.bell)
                self._epoll.register(connection.memory.bell, select.EPOLLIN | select.EPOLLET)
            self._lines = _Lines(self.connections.values())
            self.interrupt()

    def ignore(self, descriptor: int) -> None:
        """Take ``listen`` back."""
        self._epoll.unregister(descriptor)

    def remove(self, connection: Connection) -> bool:
        """Wait for it no longer, and close it; ``False``: it has been removed before."""
        if self.connections.pop(connection.descriptor, None) is None:
            return False
        self._epoll.unregister(connection.descriptor)
        if connection.memory is not None:
            if connection.memory.bell >= 0:
                self._bells.discard(connection.memory.bell)
                self._epoll.unregister(connection.memory.bell)
            self._lines = _Lines(self.connections.values())
        connection.close()
        return True

    def update(self, connection: Connection) -> None:
        """Note whether a connection waits for room."""
        if connection.memory is not None:
            connection.memory.wait(for_room=connection.is_waiting)
            if connection.is_waiting:
                self.interrupt()
            return
        events = select.EPOLLIN | (select.EPOLLOUT if connection.is_waiting else 0)
        if connection.watched != events:
            self._epoll.modify(connection.descriptor, events)
            connection.watched = events

    def interrupt(self) -> None:
        """Have whoever waits in another thread see what has changed; the kernel tells of sockets by itself."""
        if self._waiter not in (0, threading.get_ident()):
            os.eventfd_write(self.bell, 1)

    def ready(self, patience: float, *, asks: bool) -> list[tuple[Connection | None, int]]:
        """Wait until something can go on.

        Args:
            patience: seconds, at most; 0: do not wait.
            asks: whether to ask memory for a while before sleeping.

        Returns:
            Connections, and what each can go on with: ``READABLE``, ``WRITABLE``; none: somebody may have called.
        """
        self._waiter = threading.get_ident()
        lines = self._lines  # holds the memory that compiled code is at
        what = s.SLEEP if patience > 0 else s.LOOK
        found = lines.attend(what, self._rounds if asks else 0, yields=self.yields)
        if found >= s.PAID:
            self._rounds = min(_MOST_ROUNDS, 2 * self._rounds)
        self._num_turns += 1
        ready: list[tuple[Connection | None, int]] = []
        if not found or self._num_turns % _TURNS_PER_POLL == 0:
            begin = time.perf_counter()
            events = self._epoll.poll(0 if found else patience)
            if events and not found:
                found = lines.attend(s.LOOK, 0, yields=False)
                if asks:
                    self._learn(time.perf_counter() - begin)
            ready = [each for descriptor, event in events if (each := self._meant(descriptor, event))]
        self._waiter = 0
        return ready + lines.ready() if found else ready

    def _learn(self, slept_s: float) -> None:
        """Ask for longer where that would have spared a sleep, and less long where it would not."""
        if slept_s < _SHORT_S:
            self._rounds = min(_MOST_ROUNDS, 2 * self._rounds)
        else:
            self._rounds = max(_LEAST_ROUNDS, self._rounds // 2)

    def _meant(self, descriptor: int, event: int) -> tuple[Connection | None, int] | None:
        if descriptor in self._bells:
            return None
        connection = self.connections.get(descriptor)
        if connection is None:  # somebody calls, or a connection has gone meanwhile
            return None, 0
        if connection.memory is not None:
            connection.memory.hear()
        can_read, can_write = event & ~select.EPOLLOUT, event & select.EPOLLOUT
        return connection, (s.READABLE if can_read else 0) | (s.WRITABLE if can_write else 0)

    def close(self) -> None:
        """Let go of the kernel's descriptors, nobody waiting any more. Idempotent."""
        if not self._epoll.closed:
            self._epoll.close()
            os.close(self.bell)
