"""What every rank does in a probe: obey rank 0."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mycel.errors import CommunicationError
from mycel.probe.control import Member
from mycel.probe.hops import Echo, local_addresses, ping, trace
from mycel.probe.traffic import Incoming, carry

__all__ = ["Agent", "machine_of"]

#: experiment, sender
_HELLO = struct.Struct("!4sII")
_MAGIC = b"mypr"
_BACKLOG = 1024


def machine_of() -> str:
    """This machine: host name and network namespace, since ranks in different namespaces share no network."""
    namespace = Path("/proc/self/ns/net")
    return f"{socket.gethostname()}/{namespace.readlink() if namespace.exists() else ''}"


class Agent:
    """One rank's sockets.

    Args:
        rank: who we are.
        address: at which other ranks reach us.
    """

    def __init__(self, rank: int, address: str) -> None:
        self._rank = rank
        self._echo = Echo(address)
        self._listener = socket.create_server((address, 0), backlog=_BACKLOG)
        self._address = address
        self._peers: dict[int, dict[str, Any]] = {}
        self._outgoing: list[socket.socket] = []
        self._incoming: dict[int, Incoming] = {}
        self._work: dict[str, Callable[[dict[str, Any], float], dict[str, Any]]] = {
            "introduce": self._introduce,
            "peers": self._meet,
            "trace": self._trace,
            "ping": self._ping,
            "connect": self._connect,
            "send": self._send,
        }

    def serve(self, member: Member, deadline: float) -> None:
        """Obey until told that it is over.

        Raises:
            CommunicationError: rank 0 says that the probe has failed, or is gone, or says nothing until the deadline.
        """
        try:
            while True:
                command = member.next(deadline)
                if command["do"] == "end":
                    if command.get("error"):
                        raise CommunicationError(str(command["error"]))
                    return
                try:
                    answer = self._work[command["do"]](command, deadline)
                except OSError as error:
                    answer = {"error": str(error.strerror or error)}
                member.answer(answer, deadline)
        finally:
            self.close()

    def close(self) -> None:
        """Close everything."""
        self._echo.close()
        self._listener.close()
        self._drop_flows()

    def _drop_flows(self) -> None:
        for sock in [*self._outgoing, *(flow.sock for flow in self._incoming.values())]:
            sock.close()
        self._outgoing, self._incoming = [], {}

    def _introduce(self, command: dict[str, Any], deadline: float) -> dict[str, Any]:
        return {
            "machine": machine_of(),
            "name": socket.gethostname(),
            "address": self._address,
            "addresses": local_addresses(),
            "port": self._listener.getsockname()[1],
            "echo": self._echo.port,
            "cores": len(os.sched_getaffinity(0)),
        }

    def _meet(self, command: dict[str, Any], deadline: float) -> dict[str, Any]:
        self._peers = {int(rank): peer for rank, peer in command["peers"].items()}
        return {}

    def _echoes(self) -> dict[int, tuple[str, int]]:
        return {rank: (p["address"], p["echo"]) for rank, p in self._peers.items() if rank != self._rank}

    def _trace(self, command: dict[str, Any], deadline: float) -> dict[str, Any]:
        return {"ways": trace(self._echoes(), min(deadline, time.monotonic() + command["seconds"]))}

    def _ping(self, command: dict[str, Any], deadline: float) -> dict[str, Any]:
        return {"seconds": ping(self._echoes(), count=command["count"], timeout_s=command["timeout_s"])}

    def _connect(self, command: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Open and accept the connections of one experiment."""
        self._drop_flows()
        number = int(command["number"])
        until = min(deadline, time.monotonic() + command["seconds"])
        for peer in command["to"]:
            place = (self._peers[peer]["address"], self._peers[peer]["port"])
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._outgoing.append(sock)
            sock.settimeout(max(0.01, until - time.monotonic()))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                sock.connect(place)
                sock.sendall(_HELLO.pack(_MAGIC, number, self._rank))
            except OSError as error:
                reason = error.strerror or str(error) or "no answer"
                return {"error": f"rank {peer} cannot be reached at {place[0]}:{place[1]}: {reason}"}
        wanted = set(command["from"])
        while wanted - set(self._incoming):
            self._listener.settimeout(max(0.01, until - time.monotonic()))
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                return {"error": f"no connection came from rank {min(wanted - set(self._incoming))}"}
            sender = self._greet(sock, number, until)
            if sender in wanted:
                self._incoming[sender] = Incoming(sock)
            else:
                sock.close()
        return {}

    def _greet(self, sock: socket.socket, number: int, until: float) -> int:
        """Who opened a connection for this experiment; -1 for a stranger."""
        sock.settimeout(max(0.01, until - time.monotonic()))
        try:
            data = sock.recv(_HELLO.size, socket.MSG_WAITALL)
        except OSError:
            return -1
        if len(data) != _HELLO.size:
            return -1
        magic, experiment, sender = _HELLO.unpack(data)
        return int(sender) if magic == _MAGIC and experiment == number else -1

    def _send(self, command: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Carry the flows of the experiment whose connections are open."""
        complete = carry(
            self._outgoing,
            self._incoming,
            seconds=command["seconds"],
            cap_bytes=command["cap"],
            drain_s=command["drain"],
        )
        counted = {
            sender: {"segment": flow.segment, "samples": [(round(t, 5), n) for t, n in flow.samples]}
            for sender, flow in self._incoming.items()
        }
        self._outgoing, self._incoming = [], {}
        return {"flows": counted, "complete": complete}
