"""Connections that a rank opens: the call, the greeting, and the caller's side of the proof."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable, Sequence

from mycel.errors import CollectiveTimeoutError, CommunicationError, PeerLostError
from mycel.runtime.transport.address import Address
from mycel.runtime.transport.hello import CHALLENGE_BYTES, Challenge, Hello
from mycel.runtime.transport.listening import out_of_descriptors, same_user
from mycel.runtime.transport.reception import HEED_S, Reception
from mycel.runtime.transport.secret import Secret
from mycel.topology.addresses import family_of

__all__ = ["Caller"]

Observe = Callable[[], None] | None
#: Between attempts at a unix socket whose queue is full.
_QUEUE_S = 0.01
#: Bytes a unix socket may hold on their way. The kernel's default, 208 KB, makes large messages wait for the reader.
_UNIX_BUFFER = 1 << 20


class Caller:
    """Opens connections to the other ranks of a group, and serves those who call meanwhile.

    Args:
        rank: of this process.
        addresses: of all ranks.
        reception: this rank's.
        secret: the job's, if it has one.
    """

    def __init__(self, rank: int, addresses: Sequence[Address], reception: Reception, secret: Secret | None) -> None:
        self._rank, self._addresses = rank, addresses
        self._reception, self._secret = reception, secret

    def reaches_locally(self, peer: int, ip: str, pace: int | None) -> bool:
        """Whether a channel goes over a unix socket: same host, no wired path of its own, nothing to be paced."""
        own, other = self._addresses[self._rank], self._addresses[peer]
        same = (own.host, own.user) == (other.host, other.user)
        return bool(own.local and other.local) and same and ip == other.ip and pace is None

    def call_locally(self, hello: Hello, deadline: float, observe: Observe = None) -> socket.socket | None:
        """A connection to a peer's unix socket; ``None`` where there is no such socket here.

        So it is between copies of one virtual machine, which say they are one host: TCP is tried then.

        Raises:
            CommunicationError: the peer cannot be reached.
        """
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise self._unreachable(hello.dst, "", error) from None
        try:
            sock.setblocking(False)
            while (refused := sock.connect_ex("\0" + self._addresses[hello.dst].local)) == errno.EAGAIN:
                # Its queue is full. Whoever waits there, the peer serves them, as this rank does meanwhile.
                if time.monotonic() >= deadline:
                    raise CollectiveTimeoutError(f"rank {hello.dst} lets nobody in on this host: its queue is full")
                self._reception.attend(_QUEUE_S)
                if observe is not None:
                    observe()
            if refused == errno.ECONNREFUSED:
                sock.close()
                return None
            if refused:
                raise OSError(refused, os.strerror(refused))
            if not same_user(sock):
                raise PeerLostError(
                    f"rank {hello.dst} cannot be reached from rank {self._rank}: another user listens there"
                )
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER)
            sock.sendall(hello.pack())
        except OSError as error:
            sock.close()
            raise self._unreachable(hello.dst, "on this host ", error) from None
        except BaseException:
            sock.close()
            raise
        return sock

    def call(self, ip: str, hello: Hello, deadline: float, observe: Observe = None) -> socket.socket:
        """A connection to a peer over TCP; arguments and errors as for ``dial`` and ``greet``."""
        sock = self.dial(ip, hello)
        self.greet(sock, ip, hello, deadline, observe)
        return sock

    def dial(self, ip: str, hello: Hello, source: str | None = None) -> socket.socket:
        """Begin to connect to a peer over TCP; ``greet`` comes to the end of it. Several may be under way.

        Args:
            ip: at which of its addresses.
            hello: what it will be greeted with.
            source: address to call from, if it matters.

        Raises:
            CommunicationError: the peer cannot be reached.
        """
        try:
            sock = socket.socket(family_of(ip), socket.SOCK_STREAM)
        except OSError as error:
            raise self._unreachable(hello.dst, f"at {self._at(ip, hello)} ", error) from None
        try:
            if source is not None:
                sock.bind((source, 0))
            sock.setblocking(False)
            begun = sock.connect_ex((ip, self._addresses[hello.dst].port))
            if begun not in (0, errno.EINPROGRESS):
                raise OSError(begun, os.strerror(begun))
        except OSError as error:
            sock.close()
            raise self._unreachable(hello.dst, f"at {self._at(ip, hello)} ", error) from None
        return sock

    def greet(self, sock: socket.socket, ip: str, hello: Hello, deadline: float, observe: Observe = None) -> None:
        """Wait until a connection that was begun is there, and greet the peer; closes the socket where that fails.

        Args:
            sock: as ``dial`` gave it.
            ip, hello: as it was given.
            deadline: until when to wait (``time.monotonic``).
            observe: called several times a second meanwhile; what it raises ends the wait.

        Raises:
            CommunicationError: the peer cannot be reached.
        """
        at = self._at(ip, hello)
        try:
            if not self._ready(sock, select.POLLOUT, deadline, observe):
                raise CollectiveTimeoutError(
                    f"rank {hello.dst} cannot be reached at {at} from rank {self._rank}: no answer in time "
                    "(a firewall, a link that is down, or a wrong wiring?)"
                )
            refused = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if refused:
                raise OSError(refused, os.strerror(refused))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(hello.pack())
        except OSError as error:
            sock.close()
            raise self._unreachable(hello.dst, f"at {at} ", error) from None
        except BaseException:
            sock.close()
            raise

    def _at(self, ip: str, hello: Hello) -> str:
        port = self._addresses[hello.dst].port
        return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"

    def prove(self, sock: socket.socket, hello: Hello, deadline: float, observe: Observe = None) -> None:
        """Have the peer prove that it knows the job's secret, and prove it too; nothing where there is none.

        Closes the socket where that fails.

        Raises:
            PeerLostError: who answers does not know it.
            CollectiveTimeoutError: nobody answers.
        """
        if self._secret is None:
            return
        try:
            self._prove(sock, hello, self._secret, deadline, observe)
        except OSError as error:
            sock.close()
            raise self._unreachable(hello.dst, "", error) from None
        except BaseException:
            sock.close()
            raise

    def _prove(self, sock: socket.socket, hello: Hello, secret: Secret, deadline: float, observe: Observe) -> None:
        data = b""
        while len(data) < CHALLENGE_BYTES:
            if not self._ready(sock, select.POLLIN, deadline, observe):
                raise CollectiveTimeoutError(
                    f"rank {hello.dst} has not proved to rank {self._rank} in time that it knows the job's secret"
                )
            more = sock.recv(CHALLENGE_BYTES - len(data))
            if not more:
                raise PeerLostError(
                    f"rank {hello.dst} ended the connection to rank {self._rank} before it had proved that it knows "
                    "the job's secret"
                )
            data += more
        challenge = Challenge.unpack(data)
        if not challenge.is_right(hello, secret):
            raise PeerLostError(
                f"rank {self._rank} refused who answers at the address of rank {hello.dst}: it does not know the "
                "job's secret"
            )
        sock.sendall(challenge.reply(hello, secret))

    def _ready(self, sock: socket.socket, event: int, deadline: float, observe: Observe) -> bool:
        """Wait until a socket is ready, looking up now and then; ``False``: not in time."""
        while (left := deadline - time.monotonic()) > 0:
            if self._reception.wait_for(sock, event, min(left, HEED_S)):
                return True
            if observe is not None:
                observe()
        return False

    def _unreachable(self, peer: int, where: str, error: OSError) -> CommunicationError:
        return out_of_descriptors(error) or PeerLostError(
            f"rank {peer} cannot be reached {where}from rank {self._rank}: {error.strerror or error}"
        )
