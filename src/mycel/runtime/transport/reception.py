"""Where a rank is reached: its listeners, and the handshakes of all who come, served side by side.

Whoever connects may be a rank, or anybody: a scanner, a health check, somebody who says nothing, or a byte now and
then. So nobody is waited for. Each connection has a deadline of its own; those that have not said who they are are
few, and make room for others, the oldest first. A rank's greeting is there as soon as its connection is, or one round
trip later, so that a rank is not the oldest for long.

Without a secret, whoever waits for a connection serves the others meanwhile, and no thread is needed. With one, ranks
are answered by a thread, since whoever dials waits for the answer: ranks that dial each other while neither expects
it would wait for each other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from mycel.errors import CommunicationError
from mycel.runtime.transport.hello import HELLO_BYTES, Challenge, Hello, Purpose
from mycel.runtime.transport.listening import LocalFailure, listen_locally, listen_on, out_of_descriptors, same_user
from mycel.runtime.transport.secret import PROOF_BYTES, Secret

__all__ = ["HEED_S", "Reception"]

_log = logging.getLogger(__name__)

#: How often a wait is interrupted to observe what other ranks say.
HEED_S = 0.1
#: How long a handshake may take, and so much more for each rank of the group: who calls dials all ranks and then
#: greets one after the other, and ranks that share a processor wait for it meanwhile. A connection that is dropped
#: here looks to its rank as if this one had died.
_HANDSHAKE_S, _HANDSHAKE_OF_A_RANK_S = 10.0, 0.25
#: Handshakes under way at once, beside one of each rank.
_MOST_WAITING = 256
#: Connections that are kept until somebody asks for them, of each rank.
_MOST_FILED = 4096

Key = tuple[int, Purpose, bytes]


@dataclass(slots=True, kw_only=True)
class _Caller:
    """A connection whose handshake is under way."""

    sock: socket.socket
    deadline: float
    data: bytearray = field(default_factory=bytearray)
    hello: Hello | None = None
    challenge: Challenge | None = None


class Reception:
    """A rank's listeners, and the connections of the peers that have come.

    Args:
        rank, size: in the group.
        local: name of a unix socket to listen on; empty for none.
        secret: the job's, if it has one.
    """

    def __init__(self, rank: int, size: int, *, local: str = "", secret: Secret | None = None) -> None:
        self._rank, self._size, self._secret = rank, size, secret
        self._handshake_s = _HANDSHAKE_S + _HANDSHAKE_OF_A_RANK_S * size
        self._most_waiting = _MOST_WAITING + size
        self._token = b""
        self._listeners: dict[int, socket.socket] = {}
        self._callers: dict[int, _Caller] = {}
        self._filed: dict[Key, socket.socket] = {}
        self._refused: set[str] = set()
        self._changed = threading.Condition()
        self._serving = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake = self._news = -1
        self._epoll = select.epoll()
        self._failure: CommunicationError | None = None
        self._closed = False
        if local:
            self._add(listen_locally(local))

    def listen(self, addresses: Iterable[str]) -> int:
        """Listen on these addresses and no others, instead of those before; the port, which is the same on all.

        Raises:
            UsageError: an address is not this machine's.
            LocalFailure: no descriptors are left.
        """
        for listener in [each for each in self._listeners.values() if each.family != socket.AF_UNIX]:
            self._epoll.unregister(listener)
            del self._listeners[listener.fileno()]
            listener.close()
        made = listen_on(tuple(dict.fromkeys(addresses)))
        for listener in made:
            self._add(listener)
        return int(made[0].getsockname()[1])

    def open(self, token: bytes) -> None:
        """Let in who knows the group's token, from now on."""
        self._token = token
        if self._secret is not None and self._thread is None:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._epoll.register(self._wake, select.EPOLLIN)
            self._thread = threading.Thread(target=self._answer, name="mycel-reception", daemon=True)
            self._thread.start()

    def take(self, key: Key, deadline: float, observe: Callable[[], None] | None = None) -> socket.socket | None:
        """The connection of a peer, once it is there; ``None`` if it has not come in time.

        Args:
            key: ``Hello.key`` of the connection.
            deadline: until when to wait (``time.monotonic``).
            observe: called several times a second while waiting; what it raises ends the wait.
        """
        self._require()
        self._wait(0.0, lambda: key in self._filed)  # a peer that has gone by now may have called before
        while True:
            with self._changed:
                if key in self._filed:
                    return self._filed.pop(key)
                if self._failure is not None:
                    raise self._failure
            if observe is not None:
                observe()
            self._require()
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._wait(min(left, HEED_S), lambda: key in self._filed)

    def take_all(self, purpose: Purpose) -> list[tuple[int, bytes, socket.socket]]:
        """Connections for a purpose that are there: whose, what for more closely, and the socket. Does not wait.

        ``descriptor`` becomes readable when there may be more.
        """
        self._require()
        if self._thread is None and self._serving.acquire(blocking=False):
            try:
                self._serve(0.0)
            finally:
                self._serving.release()
        elif self._news >= 0:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._news)
        with self._changed:
            if self._failure is not None:
                raise self._failure
            keys = [key for key in self._filed if key[1] is purpose]
            return [(key[0], key[2], self._filed.pop(key)) for key in keys]

    @property
    def descriptor(self) -> int:
        """Becomes readable when somebody has called."""
        return self._news if self._thread is not None else self._epoll.fileno()

    def wait_for(self, sock: socket.socket, event: int, patience_s: float) -> bool:
        """Whether a socket is ready (``select.POLLIN``, ``select.POLLOUT``) in so many seconds.

        Those who call meanwhile are served: two ranks that dial each other must not both wait with full queues.
        """
        self._require()
        if self._thread is None and self._serving.acquire(blocking=False):
            try:
                return self._serve(patience_s, (sock.fileno(), event))
            finally:
                self._serving.release()
        poller = select.poll()
        poller.register(sock, event)
        return bool(poller.poll(patience_s * 1000))

    def attend(self, patience_s: float) -> None:
        """Serve those who call, for at most so long."""
        self._require()
        self._wait(patience_s, lambda: False)

    def _require(self) -> None:
        if self._closed:
            raise CommunicationError("the process group has been destroyed")

    def _wait(self, patience_s: float, is_over: Callable[[], bool]) -> None:
        if self._thread is None and self._serving.acquire(blocking=False):
            try:
                self._serve(patience_s)
            finally:
                self._serving.release()
            return
        with self._changed:
            self._changed.wait_for(is_over, patience_s)

    def close(self) -> None:
        """Hang up on everybody whom nobody has asked for, and stop answering; ``leave`` stops listening."""
        self._closed = True
        if self._thread is not None:
            thread, self._thread = self._thread, None
            os.eventfd_write(self._wake, 1)
            thread.join(5.0)
            self._epoll.unregister(self._wake)
            os.close(self._wake)
            os.close(self._news)
        with self._changed:
            for sock in (*self._filed.values(), *(caller.sock for caller in self._callers.values())):
                sock.close()
            self._filed.clear()
            self._callers.clear()

    def leave(self) -> None:
        """Stop listening."""
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()
        self._epoll.close()

    def after_fork_in_child(self) -> None:
        """Let go of what a forked child has inherited; says nothing to anybody."""
        self._closed = True
        self._thread, self._failure = None, LocalFailure("this process was forked from one that is in the group")
        self._changed, self._serving = threading.Condition(), threading.Lock()
        for sock in (*self._filed.values(), *(caller.sock for caller in self._callers.values())):
            sock.close()
        for listener in self._listeners.values():
            listener.close()
        for descriptor in (self._wake, self._news):
            if descriptor >= 0:
                os.close(descriptor)
        self._epoll.close()
        self._filed.clear()
        self._callers.clear()
        self._listeners.clear()

    # -- those who call -----------------------------------------------------------------------------------

    def _answer(self) -> None:
        """Body of the thread that answers where the job has a secret."""
        me = threading.current_thread()
        try:
            while self._thread is me:
                self._serve(_HANDSHAKE_S)
        except Exception as error:  # whoever waits must hear of it
            with self._changed:
                if not isinstance(error, CommunicationError):
                    error = LocalFailure(f"answering peers failed: {error!r}")
                self._failure = error
                self._changed.notify_all()

    def _serve(self, patience_s: float, other: tuple[int, int] | None = None) -> bool:
        """Serve whoever calls, for a while; whether another descriptor has become ready."""
        first = min((caller.deadline for caller in self._callers.values()), default=float("inf"))
        patience_s = max(0.0, min(patience_s, first - time.monotonic()))
        is_ready = False
        if other is not None:
            poller = select.poll()
            poller.register(self._epoll, select.POLLIN)
            poller.register(*other)
            is_ready = any(descriptor == other[0] for descriptor, _ in poller.poll(patience_s * 1000))
            patience_s = 0.0
        for descriptor, _ in self._epoll.poll(patience_s):
            if descriptor in self._listeners:
                self._accept(self._listeners[descriptor])
            elif descriptor in self._callers:
                self._hear(self._callers[descriptor])
        now = time.monotonic()
        for caller in [each for each in self._callers.values() if each.deadline <= now]:
            self._drop(caller)
        return is_ready

    def _accept(self, listener: socket.socket) -> None:
        """Take in those who wait at a listener, though not for ever."""
        for _ in range(self._most_waiting):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                failure = out_of_descriptors(error)
                if failure is None:
                    continue  # whoever called has gone again
                if not self._callers:
                    raise failure from None
                self._drop(self._least())
                continue
            if sock.family == socket.AF_UNIX and not same_user(sock):
                sock.close()
                self._refuse("a connection of another user to this rank's unix socket")
                continue
            sock.setblocking(False)
            caller = _Caller(sock=sock, deadline=time.monotonic() + self._handshake_s)
            self._callers[sock.fileno()] = caller
            self._epoll.register(sock, select.EPOLLIN)
            self._hear(caller)
            if len(self._callers) > self._most_waiting:
                self._drop(self._least())

    def _least(self) -> _Caller:
        """The oldest of those who have not said who they are, or else of all."""
        callers = self._callers.values()
        return next((each for each in callers if each.hello is None), next(iter(callers)))

    def _hear(self, caller: _Caller) -> None:
        """Read what has come, and go on with the handshake."""
        try:
            while True:
                wanted = HELLO_BYTES if caller.hello is None else PROOF_BYTES
                more = caller.sock.recv(wanted - len(caller.data))
                if not more:
                    self._drop(caller)
                    return
                caller.data += more
                if len(caller.data) < wanted:
                    continue
                data, caller.data = bytes(caller.data), bytearray()
                if self._is_over(caller, data):
                    return
        except BlockingIOError:
            return
        except (OSError, CommunicationError):
            self._drop(caller)

    def _is_over(self, caller: _Caller, data: bytes) -> bool:
        """Take a step of the handshake; whether it was the last."""
        if caller.hello is not None and caller.challenge is not None and self._secret is not None:
            if caller.challenge.is_answered(data, caller.hello, self._secret):
                self._file(caller, caller.hello)
            else:
                self._drop(caller)
                self._refuse(
                    f"a connection that says it is rank {caller.hello.src}: it does not know the job's secret"
                )
            return True
        hello = Hello.unpack(data)
        is_ours = hello.token == self._token and hello.dst == self._rank
        if not is_ours or hello.src == self._rank or not hello.src < self._size:
            self._drop(caller)
            return True
        if self._secret is None or not hello.has_secret:
            if hello.has_secret is (self._secret is not None):
                self._file(caller, hello)
            else:
                self._drop(caller)
                who = f"a connection that says it is rank {hello.src}"
                lacks = "it does not" if self._secret is not None else "this rank does not"
                has = "know" if self._secret is not None else "have"
                self._refuse(f"{who}: {lacks} {has} the job's secret (MYCEL_SECRET_FILE, MYCEL_SECRET)")
            return True
        caller.hello, caller.challenge = hello, Challenge.answer(hello, self._secret)
        caller.sock.send(caller.challenge.pack())
        return False

    def _file(self, caller: _Caller, hello: Hello) -> None:
        sock = caller.sock
        self._epoll.unregister(sock)
        del self._callers[sock.fileno()]
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._changed:
            many = sum(key[0] == hello.src for key in self._filed) >= _MOST_FILED
            if many or hello.key in self._filed:  # the first is kept: a rank dials once
                sock.close()
                self._refuse(f"another connection that says it is rank {hello.src}, for what it has one already")
                return
            self._filed[hello.key] = sock
            self._changed.notify_all()
        if self._news >= 0:
            os.eventfd_write(self._news, 1)

    def _drop(self, caller: _Caller) -> None:
        self._epoll.unregister(caller.sock)
        del self._callers[caller.sock.fileno()]
        caller.sock.close()

    def _refuse(self, what: str) -> None:
        """Say whom this rank refused, once."""
        if what not in self._refused:
            self._refused.add(what)
            _log.warning("rank %d refused %s", self._rank, what)

    def _add(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listeners[listener.fileno()] = listener
        self._epoll.register(listener, select.EPOLLIN)
