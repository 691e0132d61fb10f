"""Sockets to listen on: on the addresses a rank publishes and no others, and what can go wrong there."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import struct

from mycel.errors import CommunicationError, UsageError
from mycel.topology.addresses import family_of

__all__ = ["LocalFailure", "listen_locally", "listen_on", "out_of_descriptors", "same_user"]

_BACKLOG = 1024
#: Ports that are tried where a rank listens on several addresses, and one is taken.
_PORTS_TRIED = 20
#: No descriptors are left: in this process, on this machine.
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class LocalFailure(CommunicationError):  # noqa: N818 (says whose fault it is)
    """Something failed on this rank, not on a peer."""


def out_of_descriptors(error: OSError) -> LocalFailure | None:
    """What to raise where descriptors have run out; ``None`` where something else is the matter."""
    if error.errno not in _NO_DESCRIPTORS:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return LocalFailure(
        f"no file descriptors are left for connections: the limit is {limit} for this process; raise it (ulimit -n)"
    )


def same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end of a unix socket runs as this one's user; the kernel vouches for it."""
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(uid == os.geteuid())


def listen_locally(name: str) -> socket.socket:
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + name)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise out_of_descriptors(error) or error from None
    return listener


def listen_on(addresses: tuple[str, ...]) -> list[socket.socket]:
    """One listener an address, all on a port that the kernel chose for the first."""
    for _ in range(_PORTS_TRIED):
        made: list[socket.socket] = []
        with contextlib.ExitStack() as opened:
            try:
                for ip in addresses:
                    port = made[0].getsockname()[1] if made else 0
                    made.append(_bound(ip, port))
                    opened.callback(made[-1].close)
            except OSError as error:
                if made and error.errno == errno.EADDRINUSE:
                    continue
                raise _cannot_listen(addresses[len(made)], error) from None
            opened.pop_all()
        return made
    raise LocalFailure(f"no port is free on all of {', '.join(addresses)}")


def _bound(ip: str, port: int) -> socket.socket:
    listener = socket.socket(family_of(ip), socket.SOCK_STREAM)
    try:
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((ip, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _cannot_listen(ip: str, error: OSError) -> Exception:
    failure = out_of_descriptors(error)
    if failure is not None:
        return failure
    if error.errno == errno.EADDRNOTAVAIL:
        return UsageError(
            f"this machine cannot listen on {ip}, which is not an address of its own (MYCEL_ADDRESS, MYCEL_WIRING); "
            "ranks listen on the address that they publish and nowhere else"
        )
    return LocalFailure(f"this rank cannot listen on {ip}: {error.strerror or error}")
