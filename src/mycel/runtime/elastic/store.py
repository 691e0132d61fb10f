"""A member's end of its group's key-value store: a ``torch.distributed.Store`` that the first member serves."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from mycel.errors import CollectiveTimeoutError, CommunicationError, PeerLostError
from mycel.records import RecordSocket
from mycel.runtime.elastic.handle import Handle
from mycel.runtime.elastic.proofs import new_nonce, proof, proves
from mycel.runtime.elastic.server import LONGEST
from mycel.runtime.forks import let_go_in_children

__all__ = ["MemberStore"]

#: How much later than asked an answer may come: the server may be busy in Python.
_LATE_S = 5.0
#: How long one try to connect may take, before another one.
_DIAL_S = 3.0
#: How often the first member looks after those that have not come.
_LOOK_S = 0.5
#: Time-out of operations that are given none.
_DEFAULT_S = 300.0
#: All stores of this process: torch's C++ side holds on to the object, but not to its Python half.
_made: list[Store] = []


class MemberStore(Store):
    """Connects to the first member of a group and waits there until all members have come.

    Keys that a member waits for, and that are not there, end the wait at once when a member has left.

    Args:
        uuid: of the group.
        members: by rank.
        rank: this process's.
        key: what members show to the first one; see ``MemberServer``.
        timeout_s: for all of it.

    Raises:
        CollectiveTimeoutError: members did not come; the message names them.
        PeerLostError: the first member is gone, or refuses.
    """

    def __init__(self, *, uuid: str, members: Sequence[Handle], rank: int, key: bytes, timeout_s: float) -> None:
        super().__init__()
        self._uuid, self._members, self._rank = uuid, tuple(members), rank
        self._timeout_s = _DEFAULT_S
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._line: RecordSocket | None = None
        deadline = time.monotonic() + timeout_s
        line = RecordSocket(self._dial(deadline, timeout_s), longest=LONGEST)
        try:
            self._greet(line, key, deadline, timeout_s)
            self._assemble(line, deadline, timeout_s)
        except BaseException:
            line.sock.close()
            raise
        self._line = line
        _made.append(self)
        let_go_in_children(self)

    def after_fork_in_child(self) -> None:
        """Close the child's copy: it is no member."""
        self._lock = threading.Lock()
        if self._line is not None:
            self._line.sock.close()
            self._line = None

    # -- joining ------------------------------------------------------------------------------------------

    def _dial(self, deadline: float, timeout_s: float) -> socket.socket:
        first, why = self._members[0], "no answer"
        while (left := deadline - time.monotonic()) > 0:
            try:
                sock = socket.create_connection((first.ip, first.port), timeout=min(left, _DIAL_S))
            except TimeoutError:
                continue
            except OSError as error:
                why = error.strerror or str(error)
                break
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        raise PeerLostError(
            f"{self._title}: rank 0 ({first.described}) cannot be reached from rank {self._rank}: {why} "
            f"(of {timeout_s:g} s)"
        )

    def _greet(self, line: RecordSocket, key: bytes, deadline: float, timeout_s: float) -> None:
        own = new_nonce()
        digest = hashlib.sha256("\n".join(m.to_text() for m in self._members).encode()).hexdigest()
        size = len(self._members)
        try:
            challenge = line.receive(deadline)
            said = (challenge["nonce"], own, self._uuid, self._rank, size, digest)
            join = {"type": "join", "uuid": self._uuid, "rank": self._rank, "size": size, "members": digest}
            line.send({**join, "nonce": own, "proof": proof(key, "member", *said)}, _DIAL_S)
            answer = line.receive(deadline)
        except TimeoutError:
            raise CollectiveTimeoutError(
                f"{self._title}: rank 0 ({self._members[0].described}) does not answer within {timeout_s:g} s: "
                "stopped, or busy?"
            ) from None
        except (OSError, EOFError, KeyError):
            raise PeerLostError(
                f"{self._title}: rank 0 ({self._members[0].described}) hung up on rank {self._rank}: it has left, or "
                "something else listens there"
            ) from None
        if answer.get("type") != "welcome":
            raise CommunicationError(f"{self._title}: rank 0 refuses rank {self._rank}: {answer.get('why', answer)}")
        if not proves(answer.get("proof"), key, "server", *said):
            raise CommunicationError(f"{self._title}: what listens at rank 0's address has not its key")

    def _assemble(self, line: RecordSocket, deadline: float, timeout_s: float) -> None:
        """Wait for all members. The first one looks now and then whether those that are missing still listen."""
        try:
            while True:
                left = max(0.01, deadline - time.monotonic())
                within = min(left, _LOOK_S) if self._rank == 0 else left
                line.send({"type": "assemble", "within_s": within, "final": within == left}, _DIAL_S)
                answer = line.receive(deadline + _LATE_S)
                if answer["type"] == "answer":
                    return
                missing = [int(rank) for rank in answer["missing"]]
                if self._rank != 0 or answer.get("left") or time.monotonic() >= deadline:
                    break
                if gone := [rank for rank in missing if rank and _is_gone(self._members[rank])]:
                    line.send({"type": "gone", "ranks": gone}, _DIAL_S)
                    line.receive(deadline + _LATE_S)
                    missing, answer = gone, {"left": gone}
                    break
        except (OSError, EOFError):
            raise PeerLostError(
                f"{self._title}: rank 0 ({self._members[0].described}) was lost while members were awaited"
            ) from None
        names = ", ".join(f"rank {rank} ({self._members[rank].described})" for rank in missing)
        if answer.get("left"):
            raise PeerLostError(f"{self._title}: {names} is gone (killed, or gave up?)")
        raise CollectiveTimeoutError(
            f"{self._title}: {names} did not come within {timeout_s:g} s; "
            f"{len(self._members) - len(missing)} of {len(self._members)} members did"
        )

    @property
    def _title(self) -> str:
        return f"forming the group {self._uuid} of {len(self._members)} members"

    # -- what torch asks of a store -------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Write a key."""
        self._ask({"type": "set", "key": key, "value": _text(value)})

    def get(self, key: str) -> bytes:
        """The value of a key; waits for it."""
        return self._values([key], self._timeout_s)[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys; waits for all of them."""
        return self._values(keys, self._timeout_s)

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        """Write several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Whether there are ``multi_get`` and ``multi_set``."""
        return True

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until keys are there."""
        self._values(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def add(self, key: str, amount: int) -> int:
        """Add to a key that holds a number, and give the sum."""
        return int(self._ask({"type": "add", "key": key, "amount": amount}))

    def check(self, keys: list[str]) -> bool:
        """Whether keys are there."""
        return bool(self._ask({"type": "check", "keys": keys}))

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Write a key if it holds what is expected, and give what it holds then."""
        record = {"type": "compare_set", "key": key, "expected": _text(expected), "value": _text(value)}
        return str(self._ask(record)).encode("latin-1")

    def delete_key(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        return bool(self._ask({"type": "delete", "key": key}))

    def num_keys(self) -> int:
        """How many keys there are."""
        return int(self._ask({"type": "count"}))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of later operations."""
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """Time-out of operations that are given none."""
        return timedelta(seconds=self._timeout_s)

    def clone(self) -> MemberStore:
        """This store: one connection serves all threads of a process, one operation at a time."""
        return self

    # Names by which torch's C++ side asks for the same.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815
    setTimeout = set_timeout  # noqa: N815

    def close(self) -> None:
        """Leave the group: others that wait for something of this member are told. Idempotent."""
        with self._lock:
            line, self._line = self._line, None
        if line is not None and os.getpid() == self._owner:
            line.sock.close()

    # -- asking -------------------------------------------------------------------------------------------

    def _values(self, keys: list[str], timeout_s: float) -> list[bytes]:
        found = self._ask({"type": "get", "keys": list(keys), "within_s": timeout_s}, timeout_s)
        return [str(value).encode("latin-1") for value in found]

    def _ask(self, record: dict[str, Any], within_s: float = 0.0) -> Any:
        with self._lock:
            line = self._line
            if line is None or os.getpid() != self._owner:
                raise CommunicationError(f"the store of the group {self._uuid} is closed: the group was left")
            try:
                line.send(record, _DIAL_S)
                answer = line.receive(time.monotonic() + within_s + _LATE_S)
            except (OSError, EOFError):
                self._line = None
                line.sock.close()
                raise PeerLostError(
                    f"rank 0 ({self._members[0].described}), which has the store of the group {self._uuid}, is lost"
                ) from None
        if answer["type"] == "answer":
            return answer.get("value")
        gone = ", ".join(f"rank {rank} ({self._members[rank].described})" for rank in answer.get("left", ()))
        if gone:
            raise PeerLostError(f"the group {self._uuid} is no longer whole: {gone} has left; form a new one")
        raise CollectiveTimeoutError(f"the store of the group {self._uuid}: {answer['why']} ({within_s:g} s)")


def _text(value: str | bytes) -> str:
    """Bytes as text, one character each; a store's values are bytes, records are JSON."""
    return value.encode().decode("latin-1") if isinstance(value, str) else bytes(value).decode("latin-1")


def _is_gone(member: Handle) -> bool:
    """Whether nobody listens any more where a member did: its machine says so, silence does not count."""
    try:
        socket.create_connection((member.ip, member.port), timeout=_DIAL_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False
