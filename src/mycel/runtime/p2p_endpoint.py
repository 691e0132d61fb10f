"""A rank's end of all messages of its group: who moves their bytes, and when they fail.

**Who waits moves the bytes**, for all transfers of the group: no other thread has to wake up for a message that is
waited for. For transfers that nobody waits for, a thread of its own takes over within some milliseconds.

State is changed under one lock, which is never held while waiting. Callers are told after it has been let go.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from mycel.errors import CommunicationError, PeerLostError
from mycel.runtime import p2p_stream
from mycel.runtime.ending import at_work
from mycel.runtime.forks import let_go_in_children
from mycel.runtime.p2p_connection import Connection
from mycel.runtime.p2p_detours import Detours
from mycel.runtime.p2p_exchange import Exchange, Outlet, early_bytes_for
from mycel.runtime.p2p_frames import Frame, Kind
from mycel.runtime.p2p_lines import Lines
from mycel.runtime.p2p_matching import Transfer
from mycel.runtime.p2p_pool import RELAYED_BYTES
from mycel.runtime.p2p_routes import parts_of
from mycel.runtime.p2p_stream import READABLE, WRITABLE
from mycel.runtime.p2p_waiting import Waiting
from mycel.runtime.p2p_wires import Wire, accept_wire, offer_wire

__all__ = ["Endpoint"]

#: Between looks at deadlines and at what the other ranks say.
_LOOK_S = 0.1
#: After which transfers that nobody waits for are taken care of; while somebody waits for others, longer.
_TICK_S, _LONG_TICK_S = 0.001, 0.005
#: Within which somebody who has waited most often waits for the next one.
_PAUSE_S = 0.0002
#: Ticks without anything to do after which the thread sleeps until it is called.
_IDLE_TICKS = 50
#: For what the other side has accepted to get through when the group is left.
_LINGER_S = 5.0
#: For a rank to be reached, whatever the time-out: it has been reached before, when the group was made.
_LONGEST_DIAL_S = 300.0
#: After which nothing comes any more from a rank whose process has ended, whoever holds its connections.
_SILENCE_S = 1.0
_INHERITED = "a process that was forked cannot use its parent's process group; make a group of its own"


class Endpoint:
    """Sends and receives of one rank of a group.

    Args:
        lines: this rank's ways to the others.
        relays: whether its long messages may go through other ranks, too.
    """

    def __init__(self, lines: Lines, *, relays: bool = True) -> None:
        self.rank, self.size = lines.rank, lines.size
        self._lines = lines
        self._exchange = Exchange(lines.rank, self._write)
        self._lock = threading.Lock()
        self._holder = 0  # the thread that holds the lock
        self._moving = threading.RLock()  # held by who waits for the kernel, on behalf of all
        self._dialing = threading.Lock()
        if lines.ring_bytes:
            p2p_stream.load()
        self._waiting = Waiting(lines.listening, yields=lines.is_crowded)
        self._detours = Detours(
            lines, inside=lambda: _Inside(self), adopt=self._adopt, write=self._write, is_wanted=relays
        )
        #: Who has called and not said yet what is to carry its bytes: rank, number of its path, socket.
        self._callers: list[tuple[int, int, socket.socket]] = []
        #: Ranks of which a connection has ended.
        self._ended: set[int] = set()
        #: Ranks that have gone, and since when this is known here.
        self._missed: dict[int, float] = {}
        self._failed: BaseException | None = None
        self._next_look = 0.0
        self._is_closed = self._is_inherited = False
        self._wanted, self._handover = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._attendant = 0  # the thread's identity
        self._is_attended = False  # whether it is that which moves
        self._waiters: list[int] = []  # threads that wait
        let_go_in_children(self)

    # -- what callers ask for -----------------------------------------------------------------------------

    def send(self, transfer: Transfer) -> None:
        """Begin to send; it proceeds by itself.

        Raises:
            CommunicationError: the group has failed before, or the rank cannot be reached.
        """
        self._check()
        if transfer.peer is None:
            raise CommunicationError("a message is sent to one rank")
        outlet = self._reach(transfer.peer, len(transfer.view), transfer.deadline)
        with _Inside(self):
            self._exchange.send(transfer, outlet)
        self._tell()

    def receive(self, transfer: Transfer) -> None:
        """Begin to receive; it proceeds by itself.

        Raises:
            CommunicationError: the group has failed before.
        """
        self._check()
        with _Inside(self):
            self._exchange.receive(transfer)
        self._tell()

    def wait(self, transfer: Transfer, limit_s: float | None = None) -> bool:
        """Wait for a transfer; ``False``: it is still under way after ``limit_s``.

        Raises:
            CommunicationError: it failed.
        """
        if not transfer.is_done:
            doze = lambda patience: self._doze(transfer, patience)  # noqa: E731
            if not self._wait(lambda: transfer.is_done, limit_s, doze):
                return False
        if transfer.error is not None:
            raise transfer.error
        return True

    def glance(self) -> None:
        """Take in what has come, without waiting for any."""
        if self._moving.acquire(blocking=False):
            try:
                self._move(0.0)
            finally:
                self._moving.release()

    def when_done(self, transfer: Transfer, callback: Callable[[], None]) -> bool:
        """Have ``callback`` called before the transfer is seen as over; ``False``: it is over already."""
        with _Inside(self):
            if transfer in self._exchange.open:
                transfer.callbacks.append(callback)
                return True
        while not transfer.is_done:  # another thread is about to tell of it
            time.sleep(0)
        return False

    def note(self, peer: int, content: dict[str, Any], limit_s: float) -> None:
        """Tell another rank something, apart from all messages.

        Raises:
            CommunicationError: the group has failed before, or the rank cannot be reached.
        """
        self._check()
        payload = json.dumps(content).encode()
        line = self._exchange.inlets.get(peer)
        if line is None or line.is_broken:
            line = self._reach(peer, 0, time.monotonic() + limit_s).connections[0]
        with _Inside(self):
            line.post(Frame(Kind.NOTE, length=len(payload)), memoryview(payload))
            self._write(line)
        self._tell()

    def notes_from(self, peer: int) -> list[dict[str, Any]]:
        """Take what a rank has told this one since."""
        with _Inside(self):
            return list(self._exchange.notes.pop(peer, ()))

    def wait_until(self, is_there: Callable[[], bool], limit_s: float) -> bool:
        """Wait for something that notes tell of; ``False``: it has not come in time.

        Raises:
            CommunicationError: the group has failed.
        """
        came = self._wait(lambda: is_there() or self._failed is not None, limit_s, lambda _: time.sleep(_TICK_S))
        if self._failed is not None:
            raise self._failed
        return came

    def is_lost(self, peer: int) -> bool:
        """Whether a rank has left or died, as far as this one has seen."""
        return peer in self._lines.gone

    def _check(self) -> None:
        if self._is_inherited:
            raise CommunicationError(_INHERITED)
        if self._is_closed:
            raise CommunicationError("the process group has been destroyed")
        if (cause := self._failed or self._lines.failure) is not None:
            raise type(cause)(f"the process group failed earlier: {cause}")

    # -- waiting and moving -------------------------------------------------------------------------------

    def _wait(self, is_there: Callable[[], bool], limit_s: float | None, doze: Callable[[float], None]) -> bool:
        until = None if limit_s is None else time.monotonic() + limit_s
        patience = _LOOK_S
        self._waiters.append(threading.get_ident())
        try:
            while not is_there():
                if until is not None and (patience := min(_LOOK_S, until - time.monotonic())) <= 0:
                    return False
                if self._moving.acquire(blocking=False) or self._relieve(patience):
                    try:
                        if not is_there():
                            self._move(patience)
                    finally:
                        self._moving.release()
                else:
                    doze(patience)
        finally:
            self._waiters.pop()
            self._hand_over()
        return True

    def _relieve(self, patience: float) -> bool:
        """Move instead of the thread: whoever waits need not be woken. ``False``: it is not the thread that moves."""
        if not self._is_attended:
            return False
        self._waiting.interrupt()
        return self._moving.acquire(timeout=patience)

    def _hand_over(self) -> None:
        """Have the thread take care soon of what nobody may be waiting for now."""
        if self._exchange.open and not self._handover.is_set() and not self._waiters:
            self._handover.set()

    @staticmethod
    def _doze(transfer: Transfer, patience: float) -> None:
        """Wait while somebody else moves the bytes."""
        event = transfer.event
        if event is None:
            event = transfer.event = threading.Event()
        if not transfer.is_done:
            event.wait(patience)

    def _move(self, patience: float) -> None:
        """Wait until something can move, and move it; the caller holds ``_moving``."""
        if self._failed is not None:
            time.sleep(min(patience, _TICK_S))
            return
        asks = threading.get_ident() != self._attendant
        ready = self._waiting.ready(patience, asks=asks)
        with _Inside(self):
            for connection, what in ready:
                if connection is None:
                    self._next_look = 0.0
                    continue
                if what & WRITABLE:
                    self._write(connection)
                if what & READABLE:
                    self._read(connection)
        if time.monotonic() >= self._next_look:
            self._look()
        self._tell()

    def _read(self, connection: Connection) -> None:
        try:
            connection.read()
        except CommunicationError as error:
            what = f"from rank {connection.peer} to rank {self.rank}: {error}"
            self._exchange.disagreement = self._exchange.disagreement or what
        self._watch(connection)

    def _write(self, connection: Connection) -> None:
        if not connection.is_broken:
            connection.write()
        self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """Have what the connection waits for be noticed."""
        if not connection.is_broken:
            self._waiting.update(connection)
        elif self._waiting.remove(connection):
            if connection.is_relayed or connection.flight is not None:  # its bytes come another way
                self._exchange.lose_relay(connection)
                return
            self._ended.add(connection.peer)
            self._next_look = 0.0

    def _tell(self) -> None:
        """Tell who waits for transfers that are over; the lock is not held."""
        exchange = self._exchange
        if exchange.disagreement and self._failed is None:
            self._fail(self._lines.fail("mismatch", exchange.disagreement))
        while exchange.over:
            try:
                transfer = exchange.over.popleft()
            except IndexError:  # another thread tells of the last one
                break
            _tell_of(transfer)
        if exchange.open and not self._wanted.is_set():
            self._call_thread()

    # -- connections --------------------------------------------------------------------------------------

    def _reach(self, peer: int, num_bytes: int, deadline: float) -> Outlet:
        """The outlet to a rank, with a connection for each path that a message of this length takes."""
        outlet = self._exchange.outlets.get(peer)
        if outlet is not None and outlet.suffices(num_bytes):
            return outlet
        with self._dialing:
            outlet = self._exchange.outlets.get(peer)
            if outlet is None:
                first = self._dial(peer, 0, deadline)
                outlet = Outlet(self._lines.routes(peer), first, early_bytes_for(self.size))
                self._exchange.outlets[peer] = outlet
            parts = parts_of(num_bytes, outlet.routes)
            while any(begin < end for begin, end in parts[len(outlet.connections) :]):
                outlet.connections.append(self._dial(peer, len(outlet.connections), deadline))
                self._detours.share(outlet.connections[-1], outlet)
            if num_bytes >= RELAYED_BYTES and not outlet.has_asked:
                self._detours.ask(peer, outlet)
        return outlet

    def _dial(self, peer: int, number: int, deadline: float) -> Connection:
        lines = self._lines
        try:
            sock = lines.dial(peer, number, min(deadline, time.monotonic() + _LONGEST_DIAL_S))
            wire = offer_wire(sock, self._waiting.bell, ring_bytes=lines.ring_bytes, yields=self._waiting.yields)
        except CommunicationError:
            cause = lines.lost(peer, f"the first message to rank {peer}")
            if lines.failure is not None:
                self._fail(cause)
            raise cause from None
        with _Inside(self):
            return self._adopt(wire, peer)

    def _adopt(self, wire: Wire, peer: int) -> Connection:
        connection = Connection(wire, peer, self._exchange)
        self._waiting.add(connection)
        return connection

    def _let_in(self) -> None:
        """Let in who calls, as soon as it has said what is to carry its bytes."""
        self._detours.let_in()
        for caller in self._lines.accept():
            self._callers.append(caller)
            self._waiting.listen(caller[2].fileno())
        for caller in tuple(self._callers):
            peer, number, sock = caller
            try:
                wire = accept_wire(sock, yields=self._waiting.yields)
                if wire is None:
                    continue
            except CommunicationError as error:
                wire = None
                if not isinstance(error, PeerLostError):
                    self._exchange.disagreement = f"from rank {peer} to rank {self.rank}: {error}"
                self._ended.add(peer)
            self._callers.remove(caller)
            self._waiting.ignore(sock.fileno())
            if wire is None:
                sock.close()
                continue
            with _Inside(self):
                connection = self._adopt(wire, peer)
                if number == 0:
                    self._exchange.inlets[peer] = connection
                self._read(connection)

    # -- what goes wrong ----------------------------------------------------------------------------------

    def _look(self) -> None:
        """Let in who calls; see to deadlines, and to what has happened to other ranks."""
        self._next_look = time.monotonic() + _LOOK_S
        self._let_in()
        if self._failed is not None:
            return
        if (cause := self._lines.failure) is not None:
            self._fail(cause)
            return
        for peer in self._ended | self._lines.gone:
            self._miss(peer)
        with _Inside(self):
            now = time.monotonic()
            for connection in self._exchange.stalled():
                connection.is_broken = True
                self._watch(connection)
            late = [transfer for transfer in self._exchange.open if transfer.deadline <= now]
        if late:
            first = min(late, key=lambda transfer: transfer.deadline)
            self._fail(self._lines.fail("timeout", _describe_late(first)))

    def _miss(self, peer: int) -> None:
        """A rank's connections have ended, or some: what waits for them fails."""
        with _Inside(self):
            waiting = [transfer for transfer in self._exchange.open if self._is_stranded(transfer, peer)]
        if not waiting:
            return
        error = self._lines.lost(peer, waiting[0].what)
        if self._lines.failure is not None:
            self._fail(error)
            return
        with _Inside(self):
            for transfer in waiting:
                self._exchange.drop(transfer, error)

    def _is_stranded(self, transfer: Transfer, peer: int) -> bool:
        """Whether a transfer needs a rank that takes or brings nothing any more."""
        is_gone = peer in self._lines.gone
        if transfer.verb == "send":
            outlet = self._exchange.outlets.get(peer)
            if transfer.peer != peer or outlet is None:
                return transfer.peer == peer and is_gone
            first = outlet.connections[0]  # brings word of what the other side has taken, before its end
            if first.is_broken:
                return True
            if is_gone:
                return self._is_silent(first, peer)
            return any(connection.is_broken for connection in outlet.connections)
        inlet = self._exchange.inlets.get(peer)
        if not (is_gone if inlet is None else inlet.is_broken or self._is_silent(inlet, peer)):
            return False  # what it has sent before its end is still to be read
        if transfer.begun:
            return transfer.source == peer
        if transfer.peer is None:  # it fails when there is nobody left
            return set(range(self.size)) - {self.rank, peer} <= self._lines.gone | self._ended
        return transfer.peer == peer

    def _is_silent(self, inlet: Connection, peer: int) -> bool:
        """Whether a rank has gone and its connection brings nothing, though somebody else holds it open."""
        now = time.monotonic()
        if peer not in self._lines.gone:
            return False
        return now - max(inlet.heard_s, self._missed.setdefault(peer, now)) > _SILENCE_S

    def _fail(self, error: BaseException) -> None:
        """Nothing goes on after this."""
        self._detours.close()
        with _Inside(self):
            self._failed = self._failed or error
            for transfer in tuple(self._exchange.open):
                self._exchange.drop(transfer, error)
            for connection in tuple(self._waiting.connections.values()):
                connection.is_broken = True
                self._watch(connection)
        self._tell()

    # -- the thread, and the end --------------------------------------------------------------------------

    def _call_thread(self) -> None:
        self._wanted.set()
        with _Inside(self):
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._attend, name="mycel-messages", daemon=True)
                self._thread.start()

    def _attend(self) -> None:
        """Body of the thread: takes care of what nobody waits for."""
        idle, tick = 0, _TICK_S
        self._attendant = threading.get_ident()
        while not self._is_closed:
            if self._handover.wait(tick):
                self._handover.clear()
                time.sleep(_PAUSE_S)
            tick = _TICK_S
            if not self._exchange.open:
                idle += 1
                if idle >= _IDLE_TICKS:
                    idle = 0
                    self._wanted.clear()
                    if not self._exchange.open and not self._is_closed:
                        self._wanted.wait()
                continue
            idle = 0
            with at_work:
                if self._waiters or not self._moving.acquire(blocking=False):
                    tick = _LONG_TICK_S
                    continue
                try:
                    self._is_attended = True
                    while self._exchange.open and not (self._waiters or self._is_closed or at_work.is_over):
                        self._move(_LOOK_S)
                except Exception as error:  # whoever waits must hear of it
                    self._fail(self._lines.fail("failed", f"rank {self.rank}: {type(error).__name__}: {error}"))
                finally:
                    self._is_attended = False
                    self._moving.release()

    def abort(self) -> None:
        """Fail all that is under way here; the group has failed."""
        self._fail(self._lines.failure or CommunicationError("aborted by the user"))

    def close(self) -> None:
        """Leave: what the other side has accepted gets through, in bounded time; the rest fails. Idempotent."""
        if self._is_closed:
            return
        until = time.monotonic() + _LINGER_S
        error = CommunicationError("the process group has been destroyed")
        with _Inside(self):
            for transfer in [t for t in self._exchange.open if t.verb == "recv" or not t.begun]:
                self._exchange.drop(transfer, error)
        self._tell()
        over = lambda: self._failed is not None or not (self._exchange.open or self._is_sending())  # noqa: E731
        self._wait(over, until - time.monotonic(), lambda _: time.sleep(_TICK_S))
        self._is_closed = True
        self._wanted.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        for connection in tuple(self._waiting.connections.values()):
            self._lines.finish(connection.wire.sock, until)
        self._fail(error)
        self._detours.join(1.0)
        if self._moving.acquire(timeout=1.0):
            for _, _, sock in self._callers:
                sock.close()
            self._waiting.close()
            self._moving.release()

    def _is_sending(self) -> bool:
        return any(connection.has_more for connection in self._waiting.connections.values())

    def after_fork_in_child(self) -> None:
        """Close the copies of the descriptors, while which are open the parent's end is not seen; say nothing."""
        self._lock, self._moving, self._holder = threading.Lock(), threading.RLock(), 0
        self._is_closed = self._is_inherited = True
        self._is_attended = False
        self._detours.after_fork_in_child()
        self._failed = error = CommunicationError(_INHERITED)
        for transfer in tuple(self._exchange.open):
            transfer.error, transfer.is_done = error, True
        self._exchange.open.clear()
        for connection in self._waiting.connections.values():
            connection.close()
        for _, _, sock in self._callers:
            sock.close()
        self._waiting.connections.clear()
        self._waiting.close()


class _Inside:
    """Holds an endpoint's lock. A signal handler that came here while its thread is inside would wait for ever."""

    __slots__ = ("_endpoint",)

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def __enter__(self) -> None:
        endpoint, me = self._endpoint, threading.get_ident()
        if endpoint._holder == me:
            raise CommunicationError("a signal handler cannot send or receive here: it has interrupted another one")
        endpoint._lock.acquire()
        endpoint._holder = me

    def __exit__(self, *_: object) -> None:
        self._endpoint._holder = 0
        self._endpoint._lock.release()


def _tell_of(transfer: Transfer) -> None:
    """Put a transfer's result where it belongs, and let everybody see that it is over."""
    if transfer.error is None and transfer.settle is not None:
        try:
            transfer.settle()
        except Exception as error:  # whoever waits must hear of it
            transfer.error = error
    transfer.keep = transfer.settle = None
    for callback in transfer.callbacks:
        callback()
    transfer.is_done = True
    if transfer.event is not None:
        transfer.event.set()


def _describe_late(transfer: Transfer) -> str:
    peer = transfer.peer if transfer.source < 0 else transfer.source
    other = "any other rank" if peer is None else f"rank {peer}"
    total = len(transfer.view)
    if transfer.begun:
        state = f"{total - transfer.left} of {total} bytes have got through ({other} or the way to it is slow)"
    elif transfer.verb == "send":
        state = f"{other} has not received it (stopped, late, or never called recv)"
    else:
        state = f"nothing with this tag has come from {other} (stopped, late, or never sent)"
    return f"{transfer.what} reached its timeout of {transfer.timeout_s:g} s: {state}"
