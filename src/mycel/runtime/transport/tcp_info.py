"""What the kernel counts on a TCP connection: bytes, and for how long it was busy sending them.

The counters cost nothing while a collective runs. ``busy_s`` grows only while there is something to send or to be
acknowledged, so bytes over busy time is what the path carried when it was asked to. Time in which the receiver's
buffer was full (``receiver_full_s``) is part of it and says something about the receiving rank, not about the path.

References:
    ``struct tcp_info`` of Linux (include/uapi/linux/tcp.h), whose fields are only ever added at the end.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

__all__ = ["TcpInfo", "raw_tcp_info", "silence_s", "tcp_info"]

_U32, _U64 = struct.Struct("=I"), struct.Struct("=Q")
_LAST_DATA_RECV_MS, _LAST_ACK_RECV_MS = 52, 56
_TOTAL_RETRANS, _BYTES_ACKED, _MIN_RTT, _BUSY, _RWND_LIMITED = 100, 120, 148, 168, 176
_LENGTH = 184


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpInfo:
    """Counters of one connection since it was opened.

    Attributes:
        sent_bytes: acknowledged by the receiver's kernel.
        busy_s: seconds in which something was waiting to be sent or acknowledged.
        receiver_full_s: the part of them in which the receiver had no room.
        retransmitted: packets sent again.
        round_trip_s: the shortest that was seen.
    """

    sent_bytes: int
    busy_s: float
    receiver_full_s: float
    retransmitted: int
    round_trip_s: float


def raw_tcp_info(descriptor: int, length: int) -> bytes | None:
    """The kernel's ``struct tcp_info``, at least ``length`` bytes of it; ``None`` where there is none."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return None
    return raw if len(raw) >= length else None


def tcp_info(descriptor: int) -> TcpInfo | None:
    """Counters of the connection behind a descriptor; ``None`` where it is no TCP or the kernel does not say."""
    raw = raw_tcp_info(descriptor, _LENGTH)
    if raw is None:
        return None
    return TcpInfo(
        sent_bytes=_U64.unpack_from(raw, _BYTES_ACKED)[0],
        busy_s=_U64.unpack_from(raw, _BUSY)[0] / 1e6,
        receiver_full_s=_U64.unpack_from(raw, _RWND_LIMITED)[0] / 1e6,
        retransmitted=_U32.unpack_from(raw, _TOTAL_RETRANS)[0],
        round_trip_s=_U32.unpack_from(raw, _MIN_RTT)[0] / 1e6,
    )


def silence_s(sock: socket.socket) -> float | None:
    """Seconds since anything came from the kernel at the other end, an answer to a keepalive included.

    ``None`` where the socket is no connected TCP.
    """
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK_RECV_MS + 4)
    except OSError:
        return None
    if len(raw) < _LAST_ACK_RECV_MS + 4:
        return None
    data_ms, ack_ms = (_U32.unpack_from(raw, at)[0] for at in (_LAST_DATA_RECV_MS, _LAST_ACK_RECV_MS))
    return float(min(data_ms, ack_ms)) / 1e3
