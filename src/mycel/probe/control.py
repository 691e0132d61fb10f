"""Commands and answers between rank 0 and all ranks: one connection each, JSON lines, a deadline on every wait."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from mycel.errors import CollectiveTimeoutError, CommunicationError, PeerLostError

__all__ = ["Hub", "Member", "join"]

#: Says of a connection that it is one of ours, and of which version.
_GREETING = "mycel probe 1"
#: Seconds between attempts to reach rank 0 before it listens.
_RETRY_S = 0.05
#: Longest line that is read: an answer of one rank about hundreds of flows.
_LONGEST_LINE = 1 << 26


class _Lines:
    """A socket that carries one JSON object a line."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Mapping[str, Any], deadline: float) -> None:
        """Raises ``OSError`` if the other end is gone or takes nothing."""
        self.sock.settimeout(max(0.01, deadline - time.monotonic()))
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, deadline: float) -> dict[str, Any]:
        """Raises ``TimeoutError``, or ``EOFError`` if the other end has closed."""
        while (line := self.take()) is None:
            self.sock.settimeout(max(0.01, deadline - time.monotonic()))
            self.read()
        return line

    def read(self) -> None:
        """Take in what has come."""
        try:
            data = self.sock.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data or len(self._buffer) > _LONGEST_LINE:
            raise EOFError
        self._buffer += data

    def take(self) -> dict[str, Any] | None:
        """The next message if it is complete."""
        end = self._buffer.find(b"\n")
        if end < 0:
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        message = json.loads(line)
        if not isinstance(message, dict):
            raise EOFError
        return message


class Member:
    """The end of the connection that a rank has.

    Args:
        sock: connected to rank 0.
        rank: whose end this is.
    """

    def __init__(self, sock: socket.socket, rank: int) -> None:
        self._lines, self._rank = _Lines(sock), rank

    def next(self, deadline: float) -> dict[str, Any]:
        """The next command.

        Raises:
            PeerLostError: rank 0 is gone.
            CollectiveTimeoutError: rank 0 said nothing in time.
        """
        try:
            return self._lines.receive(deadline)
        except TimeoutError:
            raise CollectiveTimeoutError(f"probe: rank {self._rank} heard nothing from rank 0 in time") from None
        except (EOFError, OSError, ValueError):
            raise PeerLostError(
                f"probe: rank 0, which leads the probe, has gone (seen by rank {self._rank})"
            ) from None

    def answer(self, message: Mapping[str, Any], deadline: float) -> None:
        """Answer the last command.

        Raises:
            PeerLostError: rank 0 is gone.
        """
        try:
            self._lines.send(message, deadline)
        except OSError:
            raise PeerLostError(
                f"probe: rank 0, which leads the probe, has gone (seen by rank {self._rank})"
            ) from None

    def close(self) -> None:
        """Close the connection."""
        self._lines.sock.close()


def join(address: tuple[str, int], rank: int, size: int, deadline: float) -> Member:
    """Connect to rank 0, which may not listen yet.

    Raises:
        CollectiveTimeoutError: rank 0 cannot be reached in time.
    """
    reason = ""
    while time.monotonic() < deadline:
        try:
            sock = socket.create_connection(address, timeout=max(0.01, deadline - time.monotonic()))
        except OSError as error:
            reason = str(error.strerror or error)
            time.sleep(min(_RETRY_S, max(0.0, deadline - time.monotonic())))
            continue
        member = Member(sock, rank)
        member.answer({"greeting": _GREETING, "rank": rank, "size": size}, deadline)
        return member
    raise CollectiveTimeoutError(
        f"probe: rank {rank} cannot reach rank 0 at {address[0]}:{address[1]} ({reason or 'no time left'}); "
        "was it started, and does MASTER_ADDR name its machine?"
    )


class Hub:
    """Rank 0's side: the connections of all ranks.

    Args:
        listener: where they come in; closed when all are there.
        size: world size.
        deadline: by when all must have come.

    Raises:
        CollectiveTimeoutError: some have not; the message names them.
        CommunicationError: a rank has another idea of the world size, or two have the same number.
    """

    def __init__(self, listener: socket.socket, size: int, deadline: float) -> None:
        self._size = size
        self._lines: dict[int, _Lines] = {}
        try:
            while len(self._lines) < size:
                self._admit(listener, deadline)
        except BaseException as error:
            self.dismiss(str(error))
            raise
        finally:
            listener.close()

    def _admit(self, listener: socket.socket, deadline: float) -> None:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            missing = [rank for rank in range(self._size) if rank not in self._lines]
            raise CollectiveTimeoutError(
                f"probe: {_ranks(missing)} of {self._size} did not come in time; were they all started?"
            ) from None
        lines = _Lines(sock)
        try:
            hello = lines.receive(min(deadline, time.monotonic() + 10.0))
            greeting, rank, size = hello["greeting"], int(hello["rank"]), int(hello["size"])
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            sock.close()  # not one of ours
            return
        if greeting != _GREETING or size != self._size or not 0 <= rank < size or rank in self._lines:
            sock.close()
            raise CommunicationError(
                f"probe: a process came as rank {rank} of {size} ({greeting}), but this is a probe of {self._size} "
                f"ranks ({_GREETING}){', and that rank is here already' if rank in self._lines else ''}"
            )
        self._lines[rank] = lines

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
                self._lines[rank].send(command, deadline)
            except OSError:
                raise self._lost([rank], what) from None
        return self.collect(commands, deadline, what)

    def collect(self, ranks: Collection[int], deadline: float, what: str) -> dict[int, dict[str, Any]]:
        """One answer of each of the ranks; raises as ``ask`` does."""
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                self._lines[rank].sock.setblocking(False)
                selector.register(self._lines[rank].sock, selectors.EVENT_READ, rank)
            while len(answers) < len(ranks):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    silent = [rank for rank in ranks if rank not in answers]
                    raise CollectiveTimeoutError(f"probe: {_ranks(silent)} did not answer in time during {what}")
                for key, _ in ready:
                    rank = key.data
                    try:
                        self._lines[rank].read()
                        answer = self._lines[rank].take()
                    except (EOFError, ValueError):
                        raise self._lost([rank], what) from None
                    if answer is not None:
                        if "error" in answer:
                            raise CommunicationError(f"probe: rank {rank} failed during {what}: {answer['error']}")
                        answers[rank] = answer
                        selector.unregister(self._lines[rank].sock)
        return answers

    def dismiss(self, error: str = "") -> None:
        """Tell all ranks that it is over, and why if that was a failure; close."""
        for lines in self._lines.values():
            with suppress(OSError):  # whoever has gone: the others still have to hear
                lines.send({"do": "end", "error": error}, time.monotonic() + 2.0)
            lines.sock.close()
        self._lines.clear()

    def _lost(self, ranks: list[int], what: str) -> PeerLostError:
        return PeerLostError(f"probe: {_ranks(ranks)} has gone during {what}")


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
