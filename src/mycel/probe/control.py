"""Commands and answers between rank 0 and all ranks: one connection each, a deadline on every wait."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from mycel.errors import CollectiveTimeoutError, CommunicationError, PeerLostError
from mycel.records import MalformedRecord, RecordSocket

__all__ = ["Hub", "Member", "join"]

#: Says of a connection that it is one of ours, and of which version.
_GREETING = "mycel {} 1"
#: Seconds between attempts to reach rank 0 before it listens.
_RETRY_S = 0.05
#: Longest record in bytes: an answer of one rank about hundreds of flows.
_LONGEST = 1 << 26


def _records(sock: socket.socket) -> RecordSocket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return RecordSocket(sock, longest=_LONGEST)


def _until(deadline: float) -> float:
    return max(0.01, deadline - time.monotonic())


class Member:
    """The end of the connection that a rank has.

    Args:
        sock: connected to rank 0.
        rank: whose end this is.
        name: of what is done, for messages.
    """

    def __init__(self, sock: socket.socket, rank: int, name: str = "probe") -> None:
        self._records, self._rank, self._name = _records(sock), rank, name

    def next(self, deadline: float) -> dict[str, Any]:
        """The next command.

        Raises:
            PeerLostError: rank 0 is gone.
            CollectiveTimeoutError: rank 0 said nothing in time.
        """
        try:
            return self._records.receive(deadline)
        except TimeoutError:
            raise CollectiveTimeoutError(
                f"{self._name}: rank {self._rank} heard nothing from rank 0 in time"
            ) from None
        except (EOFError, OSError):
            raise self._lost() from None

    def answer(self, message: Mapping[str, Any], deadline: float) -> None:
        """Answer the last command.

        Raises:
            PeerLostError: rank 0 is gone.
        """
        try:
            self._records.send(message, _until(deadline))
        except OSError:
            raise self._lost() from None

    def _lost(self) -> PeerLostError:
        return PeerLostError(f"{self._name}: rank 0, which leads it, has gone (seen by rank {self._rank})")

    def close(self) -> None:
        """Close the connection."""
        self._records.sock.close()


def join(address: tuple[str, int], rank: int, size: int, deadline: float, *, name: str = "probe") -> Member:
    """Connect to rank 0, which may not listen yet.

    Args:
        address: where it listens.
        rank: who we are.
        size: world size.
        deadline: by when it must be reached, of ``time.monotonic``.
        name: of what is done; rank 0 takes nobody who is there for something else.

    Raises:
        CollectiveTimeoutError: rank 0 cannot be reached in time.
    """
    reason = ""
    while time.monotonic() < deadline:
        try:
            sock = socket.create_connection(address, timeout=_until(deadline))
        except OSError as error:
            reason = str(error.strerror or error)
            time.sleep(min(_RETRY_S, max(0.0, deadline - time.monotonic())))
            continue
        member = Member(sock, rank, name)
        member.answer({"greeting": _GREETING.format(name), "rank": rank, "size": size}, deadline)
        return member
    raise CollectiveTimeoutError(
        f"{name}: rank {rank} cannot reach rank 0 at {address[0]}:{address[1]} ({reason or 'no time left'}); "
        "was it started, and does MASTER_ADDR name its machine?"
    )


class Hub:
    """Rank 0's side: the connections of all ranks.

    Args:
        listener: where they come in; closed when all are there.
        size: world size.
        deadline: by when all must have come.
        name: of what is done, for messages and greetings.

    Raises:
        CollectiveTimeoutError: some have not; the message names them.
        CommunicationError: a rank has another idea of the world size, or two have the same number.
    """

    def __init__(self, listener: socket.socket, size: int, deadline: float, *, name: str = "probe") -> None:
        self._size, self._name = size, name
        self._members: dict[int, RecordSocket] = {}
        try:
            while len(self._members) < size:
                self._admit(listener, deadline)
        except BaseException as error:
            self.dismiss(str(error))
            raise
        finally:
            listener.close()

    def _admit(self, listener: socket.socket, deadline: float) -> None:
        listener.settimeout(_until(deadline))
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            missing = [rank for rank in range(self._size) if rank not in self._members]
            raise CollectiveTimeoutError(
                f"{self._name}: {_ranks(missing)} of {self._size} did not come in time; were they all started?"
            ) from None
        member = _records(sock)
        try:
            hello = member.receive(min(deadline, time.monotonic() + 10.0))
            greeting, rank, size = hello["greeting"], int(hello["rank"]), int(hello["size"])
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            sock.close()  # not one of ours
            return
        ours, again = _GREETING.format(self._name), rank in self._members
        if greeting != ours or size != self._size or not 0 <= rank < size or again:
            sock.close()
            raise CommunicationError(
                f"{self._name}: a process came as rank {rank} of {size} ({greeting}), but this is one of "
                f"{self._size} ranks ({ours}){', and that rank is here already' if again else ''}"
            )
        self._members[rank] = member

    def ask(
        self, commands: Mapping[int, Mapping[str, Any]], timeout_s: float, what: str
    ) -> dict[int, dict[str, Any]]:
        """Give ranks a command each and return their answers.

        Args:
            commands: by rank.
            timeout_s: by when all must have answered.
            what: for messages, as in "during ...".

        Raises:
            PeerLostError: a rank has gone.
            CollectiveTimeoutError: a rank did not answer.
            CommunicationError: a rank reports a failure.
        """
        deadline = time.monotonic() + timeout_s
        for rank, command in commands.items():
            try:
                self._members[rank].send(command, _until(deadline))
            except OSError:
                raise self._lost([rank], what) from None
        return self.collect(commands, deadline, what)

    def collect(self, ranks: Collection[int], deadline: float, what: str) -> dict[int, dict[str, Any]]:
        """One answer of each of the ranks; raises as ``ask`` does."""
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                self._members[rank].sock.setblocking(False)
                selector.register(self._members[rank].sock, selectors.EVENT_READ, rank)
            while len(answers) < len(ranks):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    silent = [rank for rank in ranks if rank not in answers]
                    raise CollectiveTimeoutError(
                        f"{self._name}: {_ranks(silent)} did not answer in time during {what}"
                    )
                for key, _ in ready:
                    rank = key.data
                    try:
                        self._members[rank].read()
                        answer = self._members[rank].take()
                    except (EOFError, MalformedRecord):
                        raise self._lost([rank], what) from None
                    if answer is not None:
                        if "error" in answer:
                            raise CommunicationError(
                                f"{self._name}: rank {rank} failed during {what}: {answer['error']}"
                            )
                        answers[rank] = answer
                        selector.unregister(self._members[rank].sock)
        return answers

    def dismiss(self, error: str = "") -> None:
        """Tell all ranks that it is over, and why if that was a failure; close."""
        for member in self._members.values():
            with suppress(OSError):  # whoever has gone: the others still have to hear
                member.send({"do": "end", "error": error}, 2.0)
            member.sock.close()
        self._members.clear()

    def _lost(self, ranks: list[int], what: str) -> PeerLostError:
        return PeerLostError(f"{self._name}: {_ranks(ranks)} has gone during {what}")


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
