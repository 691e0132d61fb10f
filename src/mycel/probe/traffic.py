"""Flows as fast as the network takes them, for a moment; each receiver counts what comes when."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Incoming", "carry"]

#: Seconds between two entries of a receiver's count.
_SAMPLE_S = 0.008
#: A count that took longer to get is of an unknown moment.
_PROMPT_S = 0.001
#: Bytes handed to the kernel at once.
_SEND_BYTES = 1 << 18
#: Bytes thrown away at once. The kernel drops them without a copy, so no buffer of that size is touched.
_DROP_BYTES = 1 << 22
#: ``tcp_info.tcpi_bytes_received`` of Linux 4.1 and later: what the kernel has taken, however late we read it.
_RECEIVED_AT, _RECEIVED_END = 128, 136
_RESET = struct.pack("ii", 1, 0)


@dataclass(slots=True)
class Incoming:
    """One flow that arrives here.

    Attributes:
        sock: connected.
        samples: seconds since the start and bytes until then.
        segment: payload bytes of a full packet.
    """

    sock: socket.socket
    samples: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])
    segment: int = 1448
    _dropped: int = 0

    def drop(self, buffer: bytearray) -> bool:
        """Read and forget what has come; whether more may come."""
        try:
            count = self.sock.recv_into(buffer, len(buffer), socket.MSG_TRUNC)
        except BlockingIOError:
            return True
        except OSError:  # reset: the sender has stopped
            return False
        self._dropped += count
        return count > 0

    def sample(self, start: float) -> None:
        """Note the count, unless the processor was taken from us while we asked: then nobody knows when it was so."""
        before = time.monotonic()
        try:
            info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_END)
        except OSError:
            return
        now = time.monotonic()
        if now - before > _PROMPT_S:
            return
        received = self._dropped
        if len(info) == _RECEIVED_END:
            received = int.from_bytes(info[_RECEIVED_AT:_RECEIVED_END], "little")
        self.samples.append((now - start, max(received, self.samples[-1][1])))


def carry(
    outgoing: Sequence[socket.socket],
    incoming: Mapping[int, Incoming],
    *,
    seconds: float,
    cap_bytes: int,
    drain_s: float,
) -> bool:
    """Send over all outgoing connections for so long, read all incoming ones to their end; closes all of them.

    Senders end by reset, so that what still waits in their buffers is not sent: the links are free again at once.

    Args:
        outgoing: connected sockets.
        incoming: by sender.
        seconds: how long to send.
        cap_bytes: at most so much over each connection.
        drain_s: how long after that an incoming flow may still go on.

    Returns:
        Whether every incoming flow came to its end.
    """
    payload = memoryview(bytes(_SEND_BYTES))
    buffer = bytearray(_DROP_BYTES)
    left = {sock.fileno(): cap_bytes for sock in outgoing}
    senders = {sock.fileno(): sock for sock in outgoing}
    readers = {flow.sock.fileno(): flow for flow in incoming.values()}
    with select.epoll() as poller:
        for number, sock in senders.items():
            sock.setblocking(False)
            poller.register(number, select.EPOLLOUT)
        for number, flow in readers.items():
            flow.sock.setblocking(False)
            flow.segment = flow.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
            poller.register(number, select.EPOLLIN)
        start = sampled = time.monotonic()
        while senders or readers:
            events = poller.poll(_SAMPLE_S)
            now = time.monotonic()
            if now - sampled >= _SAMPLE_S:
                for flow in readers.values():
                    flow.sample(start)
                sampled = now
            for number, _ in events:
                if number in readers:
                    if not readers[number].drop(buffer):
                        poller.unregister(number)
                        readers.pop(number).sock.close()
                elif number in senders:
                    left[number] -= _send(senders[number], payload[: left[number]])
            over = now - start >= seconds
            for number in [n for n in senders if over or left[n] <= 0]:
                poller.unregister(number)
                _end(senders.pop(number), at_once=over)
            if now - start >= seconds + drain_s:
                break
        for flow in readers.values():
            flow.sock.close()
        return not readers


def _send(sock: socket.socket, payload: memoryview) -> int:
    """Bytes that the kernel took; all of them where the receiver is gone, as nothing more is to be sent."""
    try:
        return sock.send(payload)
    except BlockingIOError:
        return 0
    except OSError:
        return len(payload)


def _end(sock: socket.socket, *, at_once: bool) -> None:
    if at_once:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()
