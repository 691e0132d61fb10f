"""The listener behind a handle: where the members of a group that is being formed meet, and their key-value store.

The first member of a group serves it; who that is follows from the handles, so nobody needs a store that outlives
ranks. One thread serves all connections and never waits for one of them. A connection is nobody's until it has shown
the handle's key within ``_GREETING_S``, and at most ``_STRANGERS`` such are kept.

Records, all JSON (``mycel.records``): ``challenge`` (from here, first), ``join``, then ``assemble``, ``gone``,
``set``, ``get``, ``add``, ``check``, ``compare_set``, ``delete`` and ``count``, each answered by one ``answer`` or
``failed``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mycel.records import RecordSocket
from mycel.runtime.elastic.proofs import new_nonce, proof, proves
from mycel.runtime.forks import let_go_in_children
from mycel.runtime.transport.listening import listen_on

__all__ = ["LONGEST", "MemberServer"]

_log = logging.getLogger(__name__)

#: Bytes of the longest record.
LONGEST = 1 << 16
_GREETING_S = 5.0
_STRANGERS = 256
#: How long an answer may take to leave; it fits into a socket's buffer, so nobody who reads is late.
_ANSWER_S = 1.0
#: Ids of groups that are remembered, so that none is used twice.
_REMEMBERED = 4096


@dataclass(eq=False, slots=True, kw_only=True)
class _Guest:
    """One connection.

    Attributes:
        fd: its descriptor.
        line: its records.
        nonce: what it was challenged with.
        until: when it must have greeted.
        session: the group it is a member of, once it has.
        rank: in that group.
        waits: gives the answer that it waits for, once there is one.
        late: gives what it is told where there is none in time.
        waits_until: when that is.
    """

    fd: int
    line: RecordSocket
    nonce: str
    until: float
    session: _Session | None = None
    rank: int = -1
    waits: Callable[[], dict[str, Any] | None] | None = None
    late: Callable[[], dict[str, Any]] | None = None
    waits_until: float = 0.0


@dataclass(eq=False, slots=True, kw_only=True)
class _Session:
    """One group: who is there, and what they have written.

    Attributes:
        uuid, size: of the group.
        members: digest of its handles.
        present: its members' connections.
        assembled: all have been there at once.
        left: members that were there and are not any more.
        missed: members that had not come when the first to wait gave up: what the others are told, too.
        values: the store.
    """

    uuid: str
    size: int
    members: str
    present: dict[int, _Guest] = field(default_factory=dict)
    assembled: bool = False
    left: set[int] = field(default_factory=set)
    missed: list[int] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)


class MemberServer:
    """Listens at one address until it is closed.

    Args:
        ip: the address; nothing else is listened on.
        key: what members show.

    Raises:
        UsageError: this machine has no such address.
        CommunicationError: it cannot listen there.
    """

    def __init__(self, ip: str, key: bytes) -> None:
        (self._listener,) = listen_on((ip,))
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._key = key
        self._sessions: dict[str, _Session] = {}
        self._used: deque[str] = deque(maxlen=_REMEMBERED)
        self._guests: dict[int, _Guest] = {}
        self._wake_out, self._wake_in = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._closing = False
        self._owner = os.getpid()
        self._thread = threading.Thread(target=self._serve, name="mycel-members", daemon=True)
        self._thread.start()
        let_go_in_children(self)

    def after_fork_in_child(self) -> None:
        """Close the child's copies: others notice when this process ends, and nobody takes the child for it."""
        self._closing = True
        for guest in self._guests.values():
            guest.line.sock.close()
        self._listener.close()
        self._selector.close()
        os.close(self._wake_in)
        os.close(self._wake_out)

    def close(self) -> None:
        """Stop listening and end all connections. Idempotent; nothing in a forked child."""
        if self._closing or os.getpid() != self._owner:
            return
        self._closing = True
        os.write(self._wake_in, b"x")
        self._thread.join(5.0)

    # -- the thread ---------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select(self._patience_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif (guest := self._guests.get(key.fd)) is not None:
                        self._hear(guest)
                self._look_at_clock()
        except Exception:  # members see their connections end, and say so
            _log.exception("the server of a group's members has failed")
        finally:
            self._closing = True
            for guest in list(self._guests.values()):
                guest.line.sock.close()
            self._selector.close()
            self._listener.close()
            os.close(self._wake_in)
            os.close(self._wake_out)

    def _patience_s(self) -> float | None:
        now = time.monotonic()
        times = [guest.until for guest in self._guests.values() if guest.session is None]
        times += [guest.waits_until for guest in self._guests.values() if guest.waits is not None]
        return max(0.0, min(times) - now) if times else None

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            strangers = [guest for guest in self._guests.values() if guest.session is None]
            if len(strangers) >= _STRANGERS:
                self._drop(strangers[0])
            guest = _Guest(
                fd=sock.fileno(),
                line=RecordSocket(sock, longest=LONGEST),
                nonce=new_nonce(),
                until=time.monotonic() + _GREETING_S,
            )
            self._guests[guest.fd] = guest
            self._selector.register(sock, selectors.EVENT_READ)
            self._tell(guest, {"type": "challenge", "nonce": guest.nonce})

    def _hear(self, guest: _Guest) -> None:
        try:
            with contextlib.suppress(BlockingIOError):
                guest.line.read()
            while guest.fd in self._guests and (record := guest.line.take()) is not None:
                if guest.session is None:
                    self._greet(guest, record)
                else:
                    self._obey(guest, guest.session, record)
        except (EOFError, OSError, KeyError, TypeError, ValueError):  # gone, or none of ours
            self._drop(guest)

    def _tell(self, guest: _Guest, record: dict[str, Any]) -> None:
        try:
            guest.line.send(record, _ANSWER_S)
            guest.line.sock.setblocking(False)
        except OSError:
            self._drop(guest)

    def _drop(self, guest: _Guest) -> None:
        if self._guests.pop(guest.fd, None) is None:
            return
        self._selector.unregister(guest.line.sock)
        guest.line.sock.close()
        session = guest.session
        if session is not None and session.present.get(guest.rank) is guest:
            del session.present[guest.rank]
            session.left.add(guest.rank)
            if not session.present:
                self._sessions.pop(session.uuid, None)
            else:
                self._look_again(session)

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        for guest in list(self._guests.values()):
            if guest.session is None and now >= guest.until:
                self._drop(guest)
            elif guest.waits is not None and guest.late is not None and now >= guest.waits_until:
                late = guest.late
                guest.waits = guest.late = None
                self._tell(guest, late())

    # -- what members say ---------------------------------------------------------------------------------

    def _greet(self, guest: _Guest, record: dict[str, Any]) -> None:
        if record["type"] != "join":
            raise ValueError
        uuid, rank, size, members = str(record["uuid"]), int(record["rank"]), int(record["size"]), record["members"]
        said = (guest.nonce, record["nonce"], uuid, rank, size, members)
        if not proves(record["proof"], self._key, "member", *said):
            self._tell(
                guest, {"type": "failed", "why": "the key is not that of the handle (or the job's secret differs)"}
            )
            self._drop(guest)
            return
        session = self._sessions.get(uuid)
        if session is None and uuid not in self._used:
            session = self._sessions[uuid] = _Session(uuid=uuid, size=size, members=members)
        refusal = _refusal(session, rank, size, members)
        if session is None or refusal:
            self._tell(guest, {"type": "failed", "why": refusal})
            self._drop(guest)
            return
        guest.session, guest.rank = session, rank
        session.present[rank] = guest
        session.left.discard(rank)
        self._tell(guest, {"type": "welcome", "proof": proof(self._key, "server", *said)})
        self._look_again(session)

    def _obey(self, guest: _Guest, session: _Session, record: dict[str, Any]) -> None:
        what = record["type"]
        if what == "assemble":
            final = bool(record["final"])
            guest.late = lambda: self._missing(session, final=final)
            self._let_wait(guest, lambda: self._assembled(session), float(record["within_s"]))
        elif what == "get":
            keys = [str(key) for key in record["keys"]]
            guest.late = lambda: {"type": "failed", "why": f"no {keys[0]!r} in time", "left": sorted(session.left)}
            self._let_wait(guest, lambda: _values(session, keys), float(record["within_s"]))
        else:
            if what == "gone":  # says the first member, who has tried to reach them
                session.left.update(int(rank) for rank in record["ranks"] if int(rank) not in session.present)
            self._tell(guest, _answer(session, what, record))
            self._look_again(session)

    def _assembled(self, session: _Session) -> dict[str, Any] | None:
        if session.missed:
            return {"type": "failed", "missing": session.missed}
        if session.left and not session.assembled:
            return {"type": "failed", "missing": sorted(session.left), "left": sorted(session.left)}
        if len(session.present) == session.size and not session.assembled:
            session.assembled = True
            self._used.append(session.uuid)
        return {"type": "answer", "value": True} if session.assembled else None

    def _missing(self, session: _Session, *, final: bool) -> dict[str, Any]:
        """Who has not come. Who waits no longer would itself be missed by those who wait a moment more."""
        missing = [rank for rank in range(session.size) if rank not in session.present]
        if final:
            session.missed = missing
            self._look_again(session)
        return {"type": "failed", "missing": missing}

    def _let_wait(self, guest: _Guest, there: Callable[[], dict[str, Any] | None], within_s: float) -> None:
        if (answer := there()) is not None:
            guest.late = None
            self._tell(guest, answer)
            return
        guest.waits, guest.waits_until = there, time.monotonic() + min(within_s, 1e8)

    def _look_again(self, session: _Session) -> None:
        """Answer those who waited for what has just changed."""
        for guest in list(session.present.values()):
            if guest.waits is not None and (answer := guest.waits()) is not None:
                guest.waits = guest.late = None
                self._tell(guest, answer)


def _refusal(session: _Session | None, rank: int, size: int, members: str) -> str:
    """Why a member cannot be taken into a group; empty where it can."""
    if session is None:
        return "this id was already used for another group; choose a new one each time"
    if (session.size, session.members) != (size, members):
        return "the members have not all been given the same handles in the same order for this id"
    if session.assembled:
        return "a group of this id has been formed already"
    if not 0 <= rank < size or rank in session.present:
        return f"there is a rank {rank} already"
    return ""


def _values(session: _Session, keys: list[str]) -> dict[str, Any] | None:
    if all(key in session.values for key in keys):
        return {"type": "answer", "value": [session.values[key] for key in keys]}
    if session.left:  # who has left will not write it, and the group is not whole without it
        return {"type": "failed", "why": "a member has left", "left": sorted(session.left)}
    return None


def _answer(session: _Session, what: str, record: dict[str, Any]) -> dict[str, Any]:
    """Do what does not wait. Values are text in which bytes are written as Latin-1 characters."""
    values = session.values
    value: bool | int | str | None = None
    if what == "check":
        value = all(str(key) in values for key in record["keys"])
    elif what == "set":
        values[str(record["key"])] = str(record["value"])
    elif what == "add":
        value = int(values.get(str(record["key"]), "0")) + int(record["amount"])
        values[str(record["key"])] = str(value)
    elif what == "compare_set":
        key, expected = str(record["key"]), str(record["expected"])
        if values.get(key, "") == expected:
            values[key] = str(record["value"])
        value = values.get(key, expected)
    elif what == "delete":
        value = values.pop(str(record["key"]), None) is not None
    elif what == "count":
        value = len(values)
    elif what != "gone":
        raise ValueError
    return {"type": "answer", "value": value}
