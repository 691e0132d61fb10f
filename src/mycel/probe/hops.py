"""Which routers and ranks forward packets to the other ranks, without privileges; and how long a packet takes.

A packet whose time to live is used up is reported to its sender by whoever had it then. Linux hands that report to
ordinary sockets that ask for it (``IP_RECVERR``). Routers limit how many reports they send: usually a handful at
once and then one a second to each sender, so silence is asked again with longer waits.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median

__all__ = ["Echo", "local_addresses", "ping", "trace"]

_IP_RECVERR = 11  # Linux; the socket module has no name for it
_TIME_EXCEEDED = 11
_FROM_ICMP = 2
#: destination, time to live, attempt
_PAYLOAD = struct.Struct("!4sIII")
_MAGIC = b"mycl"
_MOST_HOPS = 12
#: Seconds to wait for answers to each attempt.
_WAITS_S = (0.05, 0.1, 0.4, 1.0, 1.1)


class Echo:
    """Sends every small packet back, in a thread of its own, until closed.

    Args:
        address: to listen at; the port is chosen here.
    """

    def __init__(self, address: str) -> None:
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._sock.bind((address, 0))
        self.port: int = self._sock.getsockname()[1]
        self._thread = threading.Thread(target=self._work, name="mycel-probe-echo", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while True:
            try:
                data, sender = self._sock.recvfrom(64)
                if not data:
                    return
                if data.startswith(_MAGIC) and len(data) == _PAYLOAD.size:
                    self._sock.sendto(data, sender)
            except OSError:
                if self._sock.fileno() < 0:
                    return  # closed
                # otherwise a report about an earlier answer

    def close(self) -> None:
        """End the thread."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"", self._sock.getsockname())
        self._thread.join(2.0)
        self._sock.close()


def local_addresses() -> list[str]:
    """IPv4 addresses of this machine (of this network namespace), without those of the loopback network."""
    try:
        lines = Path("/proc/net/fib_trie").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    found: dict[str, None] = {}
    for before, line in pairwise(lines):
        if "/32 host LOCAL" in line and "|-- " in before:
            found[before.split("|-- ")[1].strip()] = None
    return [address for address in found if not address.startswith("127.")]


def trace(targets: Mapping[int, tuple[str, int]], deadline: float) -> dict[int, list[str | None]]:
    """Addresses that answered on the way to each target, nearest first, ``None`` for a silent one.

    Args:
        targets: echo address and port, by rank.
        deadline: of ``time.monotonic``.

    Returns:
        Ways to the targets that sent an echo; the others are missing.
    """
    found: dict[int, dict[int, str]] = {rank: {} for rank in targets}
    reached: dict[int, int] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
        sock.setblocking(False)
        for hop in range(1, _MOST_HOPS + 1):
            asked = {rank for rank in targets if rank not in reached}
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, hop)
            for attempt, wait_s in enumerate(_WAITS_S):
                silent = [rank for rank in asked if rank not in reached and hop not in found[rank]]
                if not silent or time.monotonic() >= deadline:
                    break
                for rank in silent:
                    _send(sock, _PAYLOAD.pack(_MAGIC, rank, hop, attempt), targets[rank])
                _listen(sock, min(deadline, time.monotonic() + wait_s), set(silent), hop, found, reached)
            if len(reached) == len(targets) or time.monotonic() >= deadline:
                break
    return {rank: [found[rank].get(hop) for hop in range(1, last)] for rank, last in reached.items()}


def _send(sock: socket.socket, payload: bytes, target: tuple[str, int]) -> None:
    with suppress(OSError):  # a report about an earlier packet that came in between; the next attempt sends again
        sock.sendto(payload, target)


def _listen(
    sock: socket.socket,
    until: float,
    silent: set[int],
    hop: int,
    found: dict[int, dict[int, str]],
    reached: dict[int, int],
) -> None:
    """Take echoes and reports until nobody is silent about this hop, or the time is over."""
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    while silent and (left := until - time.monotonic()) > 0:
        poller.poll(max(1, int(left * 1000)))
        try:
            while True:
                data, ancillary, _, _ = sock.recvmsg(512, 512, socket.MSG_ERRQUEUE)
                router = _router(ancillary)
                parts = _parse(data)
                if parts is not None and router is not None:
                    found.get(parts[0], {}).setdefault(parts[1], router)
                    if parts[1] == hop:
                        silent.discard(parts[0])
        except OSError:
            pass  # the queue of reports is empty
        try:
            while True:
                parts = _parse(sock.recv(512))
                if parts is not None:
                    reached[parts[0]] = min(parts[1], reached.get(parts[0], parts[1]))
                    silent.discard(parts[0])
        except OSError:
            pass  # no more echoes


def _parse(data: bytes) -> tuple[int, int] | None:
    if len(data) != _PAYLOAD.size or not data.startswith(_MAGIC):
        return None
    _, rank, hop, _ = _PAYLOAD.unpack(data)
    return rank, hop


def _router(ancillary: Collection[tuple[int, int, bytes]]) -> str | None:
    """Who reported that a packet's time to live was over."""
    for level, kind, data in ancillary:
        if level == socket.IPPROTO_IP and kind == _IP_RECVERR and len(data) >= 24:
            _, origin, icmp_type, _, _ = struct.unpack("=IBBBB", data[:8])
            if origin == _FROM_ICMP and icmp_type == _TIME_EXCEEDED:
                return socket.inet_ntoa(data[20:24])
    return None


def ping(targets: Mapping[int, tuple[str, int]], *, count: int, timeout_s: float) -> dict[int, float]:
    """Half the median time to a target and back, in seconds; targets that answered.

    Args:
        targets: echo address and port, by rank.
        count: packets to each.
        timeout_s: for each packet.
    """
    out: dict[int, float] = {}
    for rank, target in targets.items():
        times: list[float] = []
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(timeout_s)
            for attempt in range(count + 1):
                payload = _PAYLOAD.pack(_MAGIC, rank, 0, attempt)
                before = time.perf_counter()
                try:
                    sock.sendto(payload, target)
                    while sock.recv(64) != payload:
                        pass  # an answer that came after its time
                except OSError:
                    if attempt >= 2 and not times:
                        break  # it does not answer
                    continue
                if attempt:  # the first one wakes everybody up
                    times.append(time.perf_counter() - before)
        if times:
            out[rank] = median(times) / 2
    return out
