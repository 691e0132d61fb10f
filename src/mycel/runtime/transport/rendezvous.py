"""How the ranks of a group find each other: addresses through the store, then sockets.

Every rank listens on the address that it publishes, and nowhere else. A rank opens a connection for each channel it
sends on, and greets; the listener files what arrives by sender, purpose and path. Connecting needs no help from the
peer's Python, since the kernel accepts on its behalf, so ranks may get here in any order. Where the job has a secret,
a thread of the peer's answers.

Ranks of one host also listen on a unix socket each, and their channels go over those: no packets, no
acknowledgements (docs/decisions/0021-speed-at-every-size.md). Its name is random and in the abstract namespace: no
file to leave behind, but no file's permissions either, so both ends check that the other one runs as the same user.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mycel.collectives.program import Channel
from mycel.errors import CollectiveTimeoutError
from mycel.runtime.control_graph import Graph
from mycel.runtime.forks import let_go_in_children
from mycel.runtime.pacing import SO_MAX_PACING_RATE
from mycel.runtime.transport.address import Address
from mycel.runtime.transport.board import Board, Store
from mycel.runtime.transport.calling import Caller
from mycel.runtime.transport.gathering import gather
from mycel.runtime.transport.hello import TOKEN_BYTES, Hello, Purpose, path_digest
from mycel.runtime.transport.listening import LocalFailure, out_of_descriptors
from mycel.runtime.transport.parting import LONGEST_S, StoreServer, wait_for_end
from mycel.runtime.transport.reception import Reception
from mycel.runtime.transport.secret import Secret
from mycel.settings import MESH_RANKS
from mycel.topology.addresses import address_towards, family_of, is_loopback

__all__ = ["Address", "LocalFailure", "Rendezvous", "Store"]

_log = logging.getLogger(__name__)

#: A connection is answered sooner than this: by the kernel, whatever the program at the other end does.
_ANSWER_S = 1.5
#: How often ranks that wait for control connections look whether another one has failed.
_LOOK_S = 1.0

_said_that_the_network_is_trusted = False


class Rendezvous:
    """This rank's listener and connections.

    Args:
        rank, size: in the group.
        store: the group's key-value store.
        own: the address to publish, with port 0; the port is chosen here.
        also: other addresses to listen on, those of paths that a wiring pins.
        timeout_s: how long to wait for a rank that has not come yet.
        unix: whether channels between ranks of one host may go over unix sockets.
        secret: the job's; ``None``: whoever can read the store may join.
        store_server: the job's store, if it lives in this process and ends when this group is destroyed.
        observe: called about once a second while waiting for the store; what it raises ends the wait.
        notice: what rank 0 has all ranks know; ``None``: it makes it when all have come.
        make_notice: makes it then.
        mesh_ranks: ranks of a group up to which each is to have a control connection to every other one.

    Raises:
        CollectiveTimeoutError: a rank did not publish its address in time; the message names it.
        CommunicationError: another rank has failed, or this machine's address cannot be found or listened on.

    Attributes:
        addresses: of all ranks.
        notice: what rank 0 has all ranks know.
        awaited: the peer whose connection is, or was, being waited for.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        store: Store,
        own: Address,
        timeout_s: float,
        also: Sequence[str] = (),
        unix: bool = True,
        secret: Secret | None = None,
        store_server: StoreServer | None = None,
        observe: Callable[[], None] | None = None,
        notice: str | None = None,
        make_notice: Callable[[], str] = str,
        mesh_ranks: int = MESH_RANKS,
    ) -> None:
        self.rank, self.size = rank, size
        self.mesh_ranks = mesh_ranks
        self.awaited = rank
        self.notice = notice or ""
        self._timeout_s = timeout_s
        self._secret = secret
        self._store_server = store_server
        self._dialing: tuple[Channel, float] | None = None
        deadline = time.monotonic() + timeout_s
        self._board = Board(store, rank=rank, size=size, secret=secret, observe=observe)
        local = f"mycel-{secrets.token_hex(TOKEN_BYTES)}" if unix and hasattr(socket, "SO_PEERCRED") else ""
        self.addresses: tuple[Address, ...] = ()
        self._closed = False
        self._reception = Reception(rank, size, local=local, secret=secret)
        let_go_in_children(self)
        with self.failing_together():
            port = self._reception.listen([own.ip, *also])
            own = replace(own, port=port, local=local, serves_store=store_server is not None)
            known = {} if rank != 0 or notice is None else {"notice": notice}
            self._board.join({f"rank{rank}": own.to_text(), **known}, deadline)
            self.addresses = self._meet(own, also, deadline)
            if rank == 0 and notice is None:
                self.notice = make_notice()
                self._board.put("notice", self.notice)
            self._caller = Caller(rank, self.addresses, self._reception, secret)
            self._reception.open(bytes.fromhex(self._board.token))

    def _meet(self, own: Address, also: Sequence[str], deadline: float) -> tuple[Address, ...]:
        """Everybody's address; of ranks that had none for other machines, the one that they find now."""
        owners = {f"rank{rank}": rank for rank in range(self.size)}
        if self.rank != 0:
            owners["notice"] = 0
        texts = self._board.get_all(owners, deadline)
        self.notice = texts.pop("notice", self.notice)
        met = [Address.from_text(text) for text in texts.values()]
        if len({address.host for address in met}) == 1:
            return tuple(met)
        unfound = [rank for rank, address in enumerate(met) if is_loopback(address.ip)]
        if self.rank in unfound:
            elsewhere = [a.networks or (a.ip,) for a in met if a.host != own.host]
            ip = address_towards(elsewhere)
            if ip is None:
                raise LocalFailure(
                    f"rank {self.rank} on {own.name} knows no address at which ranks on other machines reach it; set "
                    "MYCEL_ADDRESS, MYCEL_INTERFACE, or a MASTER_ADDR that is not a loopback address there"
                )
            again = replace(own, ip=ip, port=self._reception.listen([ip, *also]))
            self._board.put(f"again{self.rank}", again.to_text())
        for rank in unfound:
            met[rank] = Address.from_text(self._board.get(f"again{rank}", rank, deadline))
        return tuple(met)

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Tell the other ranks, who wait for this one to start, of what goes wrong in the block, and close."""
        try:
            yield
        except Exception as error:
            failure = out_of_descriptors(error) if isinstance(error, OSError) else None
            self._board.fail(failure or error)
            self.close(waits=False)
            if failure is not None:
                raise failure from None
            raise

    def say_what_is_trusted(self) -> None:
        """Say once a job, on rank 0, that a job without a secret trusts its network."""
        global _said_that_the_network_is_trusted
        if self.rank == 0 and self._secret is None and not _said_that_the_network_is_trusted:
            _said_that_the_network_is_trusted = True
            _log.warning(
                "this job trusts its network, as with Gloo and NCCL: whoever reaches its store and its ports can "
                "take part; a secret (MYCEL_SECRET_FILE) keeps others out"
            )

    # -- connections --------------------------------------------------------------------------------------

    def connect_control(self, timeout_s: float, graph: Graph | None = None) -> dict[int, socket.socket]:
        """Control connections to other ranks, by rank, when all ranks have theirs.

        Args:
            timeout_s: how long to wait for the others.
            graph: to which ranks each has one; ``None``: to every other one.

        Raises:
            CommunicationError: a rank does not come, cannot be reached, or has failed.
        """
        peers = [peer for peer in range(self.size) if peer != self.rank] if graph is None else graph[self.rank]
        out: dict[int, socket.socket] = {}
        try:
            with self.failing_together():
                self._connect_control(out, peers, graph, time.monotonic() + timeout_s)
        except BaseException:  # the reason stands in the store by now, before others see connections end
            for sock in out.values():
                sock.close()
            raise
        for sock in out.values():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setblocking(False)
        return out

    def _connect_control(
        self, out: dict[int, socket.socket], peers: Sequence[int], graph: Graph | None, deadline: float
    ) -> None:
        looking = self._looking()
        hellos = {peer: self._hello(peer, Purpose.CONTROL) for peer in peers if peer < self.rank}
        for peer, hello in hellos.items():
            self.awaited = peer
            out[peer] = self._caller.dial(self.addresses[peer].ip, hello)
        for peer, hello in hellos.items():
            self.awaited = peer
            self._caller.greet(out[peer], self.addresses[peer].ip, hello, deadline, looking)
        for peer, hello in hellos.items():
            self.awaited = peer
            self._caller.prove(out[peer], hello, deadline, looking)
        for peer in peers:
            if peer > self.rank:
                key = (peer, Purpose.CONTROL, bytes(16))
                out[peer] = self._await(key, deadline, "its control connection", looking)
        if graph is not None:
            gather(self.rank, out, graph, self._reception.wait_for, looking, self._board.look, deadline)

    def _looking(self) -> Callable[[], None]:
        """Looks now and then whether another rank has failed."""
        next_look = time.monotonic() + _LOOK_S

        def look() -> None:
            nonlocal next_look
            if time.monotonic() >= next_look:
                self._board.look()
                next_look = time.monotonic() + _LOOK_S

        return look

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
            PeerLostError: a peer, ``awaited``, refuses the connection, or does not know the job's secret.
            CollectiveTimeoutError: a peer, ``awaited``, has not opened its side in time.
            LocalFailure: something is the matter with this rank.
        """
        self._dialing = None
        deadline = time.monotonic() + timeout_s if deadline is None else deadline
        out: dict[int, socket.socket] = {}
        hellos: dict[int, Hello] = {}
        dialed: dict[int, tuple[str, float]] = {}
        try:
            for number, channel in enumerate(channels):
                if channel.src != self.rank:
                    continue
                hellos[number] = self._hello(channel.dst, Purpose.CHANNEL, path_digest(channel.path, epoch))
                ip, pace = address_of(channel), pace_of(channel)
                self.awaited = channel.dst
                if self._caller.reaches_locally(channel.dst, ip, pace):
                    local = self._caller.call_locally(hellos[number], deadline, observe)
                    if local is not None:
                        out[number] = local
                        continue
                back = Channel(src=channel.dst, dst=channel.src, path=channel.path[::-1])
                source = address_of(back) if epoch else None
                dialed[number] = (ip, time.monotonic())
                out[number] = self._caller.dial(ip, hellos[number], source)
                if pace is not None:
                    out[number].setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, pace)
            for number, (ip, since) in dialed.items():  # all at once: kernels answer while this waits for the first
                self.awaited = channels[number].dst
                self._dialing = (channels[number], since)
                self._caller.greet(out[number], ip, hellos[number], deadline, observe)
                self._dialing = None
            for number, hello in hellos.items():
                self.awaited = hello.dst
                self._caller.prove(out[number], hello, deadline, observe)
            for number, channel in enumerate(channels):
                if channel.dst == self.rank:
                    key = (channel.src, Purpose.CHANNEL, path_digest(channel.path, epoch))
                    out[number] = self._await(key, deadline, f"its channel over {channel.path}", observe)
        except BaseException:
            for sock in out.values():
                sock.close()
            raise
        for sock in out.values():
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, int(timeout_s * 1000)))
        return [out[number] for number in range(len(channels))]

    @property
    def life(self) -> str:
        """What tells this life of the group from others over the same store; for keys of one's own there."""
        return self._board.token

    @property
    def listening(self) -> tuple[int, ...]:
        """Descriptors that become readable when another rank may have called."""
        return (self._reception.descriptor,)

    def call(
        self, peer: int, number: int, ip: str, pace: int | None, deadline: float, purpose: Purpose = Purpose.MESSAGES
    ) -> socket.socket:
        """A connection to a rank for messages; the rank finds it among its ``calls``.

        Args:
            peer: the rank.
            number: tells several connections of the two apart, in sixteen bytes.
            ip: at which address to reach it.
            pace: bytes a second beyond which the connection holds back; ``None`` for no limit.
            deadline: until when to wait (``time.monotonic``).
            purpose: ``MESSAGES``, or ``PASSAGE``.

        Raises:
            CommunicationError: it cannot be reached.
        """
        hello = self._hello(peer, purpose, number.to_bytes(16, "little"))
        is_local = self._caller.reaches_locally(peer, ip, pace)
        sock = self._caller.call_locally(hello, deadline) if is_local else None
        sock = sock or self._caller.call(ip, hello, deadline)
        if pace is not None:
            sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, pace)
        self._caller.prove(sock, hello, deadline)
        sock.setblocking(False)
        return sock

    def calls(self, purpose: Purpose = Purpose.MESSAGES) -> list[tuple[int, int, socket.socket]]:
        """Connections for messages that others have opened since: rank, number, socket. Does not wait."""
        found = self._reception.take_all(purpose)
        for _, _, sock in found:
            sock.setblocking(False)
        return [(peer, int.from_bytes(path, "little"), sock) for peer, path, sock in found]

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks are on one host and take unix sockets; the same on every rank."""
        return len({(a.host, a.user) for a in self.addresses}) == 1 and all(a.local for a in self.addresses)

    @property
    def unanswered(self) -> Channel | None:
        """The channel whose opening has found no answer for so long that none is to be expected."""
        dialing = self._dialing
        return dialing[0] if dialing is not None and time.monotonic() - dialing[1] > _ANSWER_S else None

    def _hello(self, peer: int, purpose: Purpose, path: bytes = bytes(16)) -> Hello:
        token = bytes.fromhex(self._board.token)
        hello = Hello(token=token, src=self.rank, dst=peer, purpose=purpose, path=path)
        return hello if self._secret is None else replace(hello, nonce=Secret.nonce())

    def _await(
        self,
        key: tuple[int, Purpose, bytes],
        deadline: float,
        what: str,
        observe: Callable[[], None] | None = None,
    ) -> socket.socket:
        self.awaited = key[0]
        sock = self._reception.take(key, deadline, observe)
        if sock is None:
            raise CollectiveTimeoutError(
                f"rank {key[0]} has not opened {what} to rank {self.rank} in time: it is stopped, late, or calls "
                "another collective"
            )
        return sock

    # -- the end ------------------------------------------------------------------------------------------

    def close(self, *, waits: bool = True) -> None:
        """Let go of the store, stop listening and drop connections that nobody took. Idempotent.

        Where the job's store ends with rank 0's group, other ranks wait here, for a bounded time, until it has: they
        may be about to make a new group at the same address.

        Args:
            waits: whether to wait for that.
        """
        if self._closed:
            return
        self._closed = True
        self._board.leave()
        self._reception.close()
        if self._store_server is not None and waits:
            self._store_server.when_closed(self._reception.leave)
            return
        self._reception.leave()
        if waits and self.rank != 0 and self.addresses and self.addresses[0].serves_store:
            wait_for_end(self._call_rank_0, min(self._timeout_s, LONGEST_S))

    def after_fork_in_child(self) -> None:
        """Let go of what a forked child has inherited; says nothing to anybody."""
        self._closed = True  # the store stays held: to destroy it, in a child, would wait for its threads
        self._reception.after_fork_in_child()

    def _call_rank_0(self, timeout_s: float) -> socket.socket:
        """A connection to rank 0's listener, only to see it end."""
        first = self.addresses[0]
        is_local = self._caller.reaches_locally(0, first.ip, None)
        family = socket.AF_UNIX if is_local else family_of(first.ip)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect("\0" + first.local if is_local else (first.ip, first.port))
        except BaseException:
            sock.close()
            raise
        return sock
