"""How the ranks of a group find each other: addresses through the store, then sockets.

Every rank listens on one port and publishes where. A rank opens a connection for each channel it sends on, and
greets; the listener files what arrives by (sender, path). Connecting needs no help from the peer's Python, since the
kernel accepts on its behalf, so ranks may get here in any order.

Ranks of one host also listen on a unix socket each, and their channels go over those: no packets, no
acknowledgements (docs/decisions/0021-speed-at-every-size.md). Its name is random and in the abstract namespace: no
file to leave behind, but no file's permissions either, so both ends check that the other one runs as the same user.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from mycel.collectives.program import Channel
from mycel.errors import CollectiveTimeoutError, CommunicationError, PeerLostError
from mycel.runtime.pacing import SO_MAX_PACING_RATE
from mycel.runtime.transport.hello import (
    HELLO_BYTES,
    MOST_LINES,
    TOKEN_BYTES,
    Hello,
    message_digest,
    path_digest,
)

__all__ = ["Address", "Rendezvous", "Store"]

_BACKLOG = 1024
#: How often a wait for a connection is interrupted to observe what other ranks say.
_HEED_S = 0.1
#: A connection is answered sooner than this: by the kernel, whatever the program at the other end does.
_ANSWER_S = 1.5
#: Bytes a unix socket may hold on their way. The kernel's default, 208 KB, makes large messages wait for the reader.
_UNIX_BUFFER = 1 << 20
#: Of connections for messages, by what their hello says in a path's place.
_LINES = {message_digest(number): number for number in range(MOST_LINES)}
#: Longest wait for the hello of a connection that has been accepted while messages are under way.
_HELLO_S = 1.0


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used here."""

    def set(self, key: str, value: str) -> None:
        """Write a key."""

    def get(self, key: str) -> bytes:
        """Read a key that exists."""

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until keys exist; raise where they do not in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a rank listens.

    Attributes:
        host: name of its machine, to tell which ranks share one.
        ip: address that ordinary routing leads to.
        port: TCP port, the same on every address of the rank.
        pid: its process, for messages.
        local: name of its unix socket for ranks of the same host; empty where it has none.
    """

    host: str
    ip: str
    port: int
    pid: int
    local: str = ""


class Rendezvous:
    """This rank's listener and connections.

    Args:
        rank, size: in the group.
        store: the group's key-value store.
        own: the address to publish, with port 0; the port is chosen here.
        bind: local address to listen on.
        timeout_s: how long to wait for a rank that has not come yet.
        unix: whether channels between ranks of one host may go over unix sockets.

    Raises:
        CollectiveTimeoutError: a rank did not publish its address in time; the message names it.
    """

    def __init__(
        self, *, rank: int, size: int, store: Store, own: Address, bind: str, timeout_s: float, unix: bool = True
    ) -> None:
        self.rank, self.size = rank, size
        self._prefix = "mycel/"
        self._store = store
        self._filed: dict[tuple[int, bytes, bool], socket.socket] = {}
        #: The peer whose connection is, or was, being waited for.
        self.awaited = rank
        self._dialing: tuple[Channel, float] | None = None
        self._listeners = [socket.create_server((bind, 0), backlog=_BACKLOG)]
        port = self._listeners[0].getsockname()[1]
        published = {"host": own.host, "ip": own.ip, "port": port, "pid": own.pid}
        if unix and hasattr(socket, "SO_PEERCRED"):
            published["local"] = f"mycel-{secrets.token_hex(TOKEN_BYTES)}"
            self._listeners.append(_listen_locally(published["local"]))
        for listener in self._listeners:
            listener.setblocking(False)
        if rank == 0:
            store.set(f"{self._prefix}token", secrets.token_hex(TOKEN_BYTES))
        store.set(f"{self._prefix}rank{rank}", json.dumps(published))
        deadline = time.monotonic() + timeout_s
        self.addresses: tuple[Address, ...] = tuple(
            Address(**json.loads(self._fetch(f"rank{peer}", peer, deadline))) for peer in range(size)
        )
        self._token = bytes.fromhex(self._fetch("token", 0, deadline).decode())

    def _fetch(self, key: str, owner: int, deadline: float) -> bytes:
        left = max(0.001, deadline - time.monotonic())
        try:
            self._store.wait([self._prefix + key], timedelta(seconds=left))
            return self._store.get(self._prefix + key)
        except RuntimeError as error:
            raise CollectiveTimeoutError(
                f"rank {owner} has not joined the group of {self.size} ranks (rank {self.rank} waited for its "
                f"address in the store: {str(error).splitlines()[0]})"
            ) from None

    def agree(self, key: str, make: Callable[[], str], timeout_s: float) -> str:
        """A text that rank 0 makes, on every rank.

        Args:
            key: to find it by in the store.
            make: makes it; called on rank 0 only.
            timeout_s: how long the others wait for it.
        """
        if self.rank == 0:
            self._store.set(self._prefix + key, make())
        return self._fetch(key, 0, time.monotonic() + timeout_s).decode()

    # -- connections --------------------------------------------------------------------------------------

    def connect_control(self, timeout_s: float) -> dict[int, socket.socket]:
        """One control connection to every other rank, by rank."""
        deadline = time.monotonic() + timeout_s
        out: dict[int, socket.socket] = {}
        for peer in range(self.rank):
            hello = Hello(token=self._token, src=self.rank, control=True)
            out[peer] = self._open(peer, self.addresses[peer].ip, hello, deadline)
        for peer in range(self.rank + 1, self.size):
            out[peer] = self._await((peer, bytes(16), True), deadline, "its control connection")
        for sock in out.values():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setblocking(False)
        return out

    def connect(
        self,
        channels: Sequence[Channel],
        address_of: Callable[[Channel], str],
        pace_of: Callable[[Channel], int | None],
        timeout_s: float,
        *,
        deadline: float | None = None,
        observe: Callable[[], None] | None = None,
        epoch: int = 0,
    ) -> list[socket.socket]:
        """Sockets of this rank's channels, in their order: outgoing ones opened, incoming ones awaited.

        Args:
            channels: all with this rank as source or destination.
            address_of: at which address the channel's destination is reached over the channel's path.
            pace_of: bytes a second beyond which an outgoing channel holds back; ``None`` for no limit.
            timeout_s: how long unacknowledged bytes may stay so, and how long to wait for the peers' sides.
            deadline: until when to wait instead (``time.monotonic``).
            observe: called several times a second while waiting; what it raises ends the wait.
            epoch: how often the group has got new channels. Later ones go back the way they came, if there is an
                address that says so, since ordinary routing may lead over a link that has failed.

        Raises:
            PeerLostError: a peer, ``awaited``, refuses the connection.
            CollectiveTimeoutError: a peer, ``awaited``, has not opened its side in time.
        """
        deadline = time.monotonic() + timeout_s if deadline is None else deadline
        out: dict[int, socket.socket] = {}
        for number, channel in enumerate(channels):
            if channel.src == self.rank:
                digest = path_digest(channel.path, epoch)
                hello = Hello(token=self._token, src=self.rank, control=False, path=digest)
                ip, pace = address_of(channel), pace_of(channel)
                if self._is_local(channel.dst, ip, pace):
                    out[number] = self._open_locally(channel.dst, hello, deadline)
                    continue
                back = Channel(src=channel.dst, dst=channel.src, path=channel.path[::-1])
                source = address_of(back) if epoch else None
                self._dialing = (channel, time.monotonic())
                out[number] = self._open(channel.dst, ip, hello, deadline, observe, source)
                self._dialing = None
                if pace is not None:
                    out[number].setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, pace)
        for number, channel in enumerate(channels):
            if channel.dst == self.rank:
                key = (channel.src, path_digest(channel.path, epoch), False)
                out[number] = self._await(key, deadline, f"its channel over {channel.path}", observe)
        for sock in out.values():
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, int(timeout_s * 1000)))
        return [out[number] for number in range(len(channels))]

    # -- connections for messages between two ranks -------------------------------------------------------

    @property
    def listening(self) -> tuple[int, ...]:
        """Descriptors that become readable when a rank calls."""
        return tuple(listener.fileno() for listener in self._listeners)

    def call(self, peer: int, number: int, ip: str, pace: int | None, deadline: float) -> socket.socket:
        """A connection for messages to a rank.

        Args:
            peer: which.
            number: of the connection, among those to this rank.
            ip: address at which the rank is reached over the path of the connection.
            pace: bytes a second beyond which it holds back; ``None`` for no limit.
            deadline: until when to try (``time.monotonic``).

        Raises:
            CommunicationError: the rank cannot be reached.
        """
        hello = Hello(token=self._token, src=self.rank, control=False, path=message_digest(number))
        if self._is_local(peer, ip, pace):
            sock = self._open_locally(peer, hello, deadline)
        else:
            sock = self._open(peer, ip, hello, deadline)
            if pace is not None:
                sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, pace)
        sock.setblocking(False)
        return sock

    def calls(self) -> list[tuple[int, int, socket.socket]]:
        """Connections for messages that ranks have opened since: rank, number, socket. Waits for nobody to call."""
        for listener in self._listeners:
            with contextlib.suppress(OSError):  # nobody, or all are gone again
                while True:
                    sock, _ = listener.accept()
                    self._file(sock, time.monotonic() + _HELLO_S)
        found = [key for key in tuple(self._filed) if key[1] in _LINES and not key[2]]
        came = [(key[0], _LINES[key[1]], self._filed.pop(key)) for key in found]
        for _, _, sock in came:
            sock.setblocking(False)
        return came

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks are on one host and take unix sockets; the same on every rank."""
        return len({address.host for address in self.addresses}) == 1 and all(a.local for a in self.addresses)

    @property
    def unanswered(self) -> Channel | None:
        """The channel whose opening has found no answer for so long that none is to be expected."""
        dialing, self._dialing = self._dialing, None
        return dialing[0] if dialing is not None and time.monotonic() - dialing[1] > _ANSWER_S else None

    def _is_local(self, peer: int, ip: str, pace: int | None) -> bool:
        """Whether a channel goes over a unix socket: same host, no wired path of its own, nothing to be paced."""
        self.awaited = peer
        own, other = self.addresses[self.rank], self.addresses[peer]
        return bool(own.local and other.local) and own.host == other.host and ip == other.ip and pace is None

    def _open_locally(self, peer: int, hello: Hello, deadline: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.01, deadline - time.monotonic()))
            sock.connect("\0" + self.addresses[peer].local)
            if not _same_user(sock):
                raise PeerLostError(
                    f"rank {peer} cannot be reached from rank {self.rank}: another user listens there"
                )
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)
            sock.sendall(hello.pack())
        except OSError as error:
            sock.close()
            raise PeerLostError(
                f"rank {peer} cannot be reached on this host from rank {self.rank}: {error.strerror or error}"
            ) from None
        except PeerLostError:
            sock.close()
            raise
        return sock

    def _open(
        self,
        peer: int,
        ip: str,
        hello: Hello,
        deadline: float,
        observe: Callable[[], None] | None = None,
        source: str | None = None,
    ) -> socket.socket:
        port = self.addresses[peer].port
        self.awaited = peer
        try:
            sock = _dial(ip, port, deadline, observe, source)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(hello.pack())
        except TimeoutError:
            raise CollectiveTimeoutError(
                f"rank {peer} cannot be reached at {ip}:{port} from rank {self.rank}: no answer in time "
                "(a firewall, a link that is down, or a wrong wiring?)"
            ) from None
        except OSError as error:
            raise PeerLostError(
                f"rank {peer} cannot be reached at {ip}:{port} from rank {self.rank}: {error.strerror or error}"
            ) from None
        return sock

    def _await(
        self, key: tuple[int, bytes, bool], deadline: float, what: str, observe: Callable[[], None] | None = None
    ) -> socket.socket:
        self.awaited = key[0]
        poller = select.poll()
        for listener in self._listeners:
            poller.register(listener, select.POLLIN)
        while key not in self._filed:
            patience = max(0.01, deadline - time.monotonic())
            if observe is not None:
                observe()
                patience = min(patience, _HEED_S)
            ready = {descriptor for descriptor, _ in poller.poll(patience * 1000)}
            if not ready and time.monotonic() < deadline:
                continue
            if not ready:
                raise CollectiveTimeoutError(
                    f"rank {key[0]} has not opened {what} to rank {self.rank} in time: it is stopped, late, or calls "
                    "another collective"
                )
            for listener in (each for each in self._listeners if each.fileno() in ready):
                with contextlib.suppress(BlockingIOError):  # whoever called has gone again
                    sock, _ = listener.accept()
                    self._file(sock, deadline)
        return self._filed.pop(key)

    def _file(self, sock: socket.socket, deadline: float) -> None:
        sock.settimeout(max(0.01, min(10.0, deadline - time.monotonic())))
        try:
            data = b""
            while len(data) < HELLO_BYTES:
                more = sock.recv(HELLO_BYTES - len(data))
                if not more:
                    raise CommunicationError("a connection ended before its greeting")
                data += more
            hello = Hello.unpack(data)
        except (OSError, CommunicationError):
            sock.close()
            return
        known = hello.token == self._token and 0 <= hello.src < self.size
        if not known or (sock.family == socket.AF_UNIX and not _same_user(sock)):
            sock.close()
            return
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._filed[hello.src, hello.path, hello.control] = sock

    def close(self) -> None:
        """Stop listening and drop connections that nobody took."""
        for listener in self._listeners:
            listener.close()
        for sock in self._filed.values():
            sock.close()
        self._filed.clear()


def _dial(
    ip: str, port: int, deadline: float, observe: Callable[[], None] | None, source: str | None
) -> socket.socket:
    """Connect, looking up now and then.

    Raises:
        OSError: no answer in time (``TimeoutError``), or a refusal.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if source is not None:
            sock.bind((source, 0))
        sock.setblocking(False)
        begun = sock.connect_ex((ip, port))
        poller = select.poll()
        poller.register(sock, select.POLLOUT)
        while begun == errno.EINPROGRESS and not poller.poll(_HEED_S * 1000):
            if observe is not None:
                observe()
            if time.monotonic() >= deadline:
                raise TimeoutError
        refused = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or (begun != errno.EINPROGRESS and begun)
        if refused:
            raise OSError(refused, os.strerror(refused))
        sock.settimeout(max(0.01, deadline - time.monotonic()))
    except BaseException:
        sock.close()
        raise
    return sock


def _listen_locally(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + name)
    listener.listen(_BACKLOG)
    return listener


def _same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end of a unix socket runs as this one's user; the kernel vouches for it."""
    credentials = struct.Struct("3i")  # struct ucred: pid, uid, gid
    _, uid, _ = credentials.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return bool(uid == os.geteuid())
