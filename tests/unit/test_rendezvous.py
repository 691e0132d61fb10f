"""How ranks find each other: over unix sockets or TCP, at which addresses, and who is turned away."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from mycel.collectives.program import Channel
from mycel.errors import CollectiveTimeoutError, CommunicationError, PeerLostError, UsageError
from mycel.runtime.transport import listening, reception
from mycel.runtime.transport import rendezvous as module
from mycel.runtime.transport.hello import HELLO_BYTES, Challenge, Hello, Purpose, path_digest
from mycel.runtime.transport.listening import LocalFailure, listen_on, out_of_descriptors
from mycel.runtime.transport.parting import StoreServer
from mycel.runtime.transport.reception import Reception
from mycel.runtime.transport.rendezvous import Address, Rendezvous
from mycel.runtime.transport.secret import PROOF_BYTES, Secret
from mycel.settings import read_settings

LONG_S = 30.0
CHANNELS = (Channel(src=0, dst=1, path=(0, 2, 1)), Channel(src=1, dst=0, path=(1, 2, 0)))
SECRET = Secret(b"a secret of sixteen bytes and more")


class Dictionary:
    """A store for threads."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self.values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def delete_key(self, key: str) -> bool:
        with self._changed:
            return self.values.pop(key, None) is not None

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """What they give, or raise, run side by side."""
    results: list[Any] = [None] * len(functions)

    def run(number: int) -> None:
        try:
            results[number] = functions[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def join(store: Dictionary, rank: int, **given: Any) -> Rendezvous:
    own = Address(
        host=given.pop("host", "a"), ip=given.pop("ip", "127.0.0.1"), port=0, pid=rank, user=given.pop("user", "")
    )
    return Rendezvous(rank=rank, size=2, store=store, own=own, **{"timeout_s": LONG_S} | given)


@contextmanager
def pair(store: Dictionary | None = None, **given: Any) -> Iterator[list[Rendezvous]]:
    """Two ranks; of what is given as a tuple, each has its own."""
    store = store or Dictionary()

    def one(rank: int) -> Rendezvous:
        own = {key: value[rank] if isinstance(value, tuple) else value for key, value in given.items()}
        return join(store, rank, **own)

    ranks = in_threads(lambda: one(0), lambda: one(1))
    for rank in ranks:
        if isinstance(rank, Exception):
            raise rank
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def connect(
    ranks: list[Rendezvous], *, address: str = "127.0.0.1", pace: int | None = None
) -> list[list[socket.socket]]:
    made = in_threads(*(lambda r=r: r.connect(CHANNELS, lambda _: address, lambda _: pace, LONG_S) for r in ranks))
    for each in made:
        if isinstance(each, Exception):
            raise each
    return made


def carry(sockets: list[list[socket.socket]]) -> None:
    """What goes in at one end of a channel comes out at the other; closes them."""
    for number in range(2):
        source, sink = sockets[CHANNELS[number].src][number], sockets[CHANNELS[number].dst][number]
        source.sendall(b"%d" % number)
        sink.settimeout(LONG_S)
        assert sink.recv(1) == b"%d" % number
    for each in sockets:
        for sock in each:
            sock.close()


def token_of(rank: Rendezvous) -> bytes:
    return bytes.fromhex(rank._board.token)


@pytest.mark.parametrize(
    ("given", "family"),
    [
        ({}, socket.AF_UNIX),
        ({"unix": (False, True)}, socket.AF_INET),
        ({"unix": (True, False)}, socket.AF_INET),
        ({"user": ("a", "b")}, socket.AF_INET),
        ({"secret": SECRET}, socket.AF_UNIX),
    ],
)
def test_channels_of_one_host_are_unix_sockets(given: dict[str, Any], family: int) -> None:
    with pair(**given) as ranks:
        sockets = connect(ranks)
        assert {sock.family for each in sockets for sock in each} == {family}
        assert {rank.is_one_host for rank in ranks} == {family == socket.AF_UNIX}
        carry(sockets)


@pytest.mark.parametrize("given", [{"pace": 1_000_000}, {"address": "127.0.0.2"}])
@pytest.mark.parametrize("secret", [None, SECRET])
def test_paced_and_wired_channels_are_tcp(given: dict[str, Any], secret: Secret | None) -> None:
    """A unix socket has no rate to hold back, and takes no path that a wiring file pins."""
    with pair(also=(["127.0.0.2"], ["127.0.0.2"]), secret=secret) as ranks:
        sockets = connect(ranks, **given)
        assert {sock.family for each in sockets for sock in each} == {socket.AF_INET}
        carry(sockets)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_control_connections_and_messages(secret: Secret | None) -> None:
    with pair(secret=secret) as ranks:
        lines = in_threads(*(lambda r=r: r.connect_control(LONG_S) for r in ranks))
        lines[0][1].sendall(b"news")
        lines[1][0].settimeout(LONG_S)
        assert lines[1][0].recv(4) == b"news"
        sock = ranks[0].call(1, 7, "127.0.0.1", None, time.monotonic() + LONG_S)
        found: list[tuple[int, int, socket.socket]] = []
        until = time.monotonic() + LONG_S
        while not found and time.monotonic() < until:
            found = ranks[1].calls()
        (peer, number, other), *_ = found
        assert (peer, number) == (0, 7)
        for each in (sock, other, lines[0][1], lines[1][0]):
            each.close()


# -- where ranks listen -----------------------------------------------------------------------------------------


def test_nobody_listens_anywhere_else() -> None:
    with pair(also=(["127.0.0.3"], [])) as ranks:
        for ip, rank, expected in [
            ("127.0.0.1", 0, 0),
            ("127.0.0.3", 0, 0),
            ("127.0.0.3", 1, 1),
            ("127.0.0.2", 0, 1),
        ]:
            with socket.socket() as sock:
                sock.settimeout(LONG_S)
                refused = sock.connect_ex((ip, ranks[0].addresses[rank].port))
                assert bool(refused) == bool(expected), (ip, rank)


def test_a_port_that_is_taken_on_one_of_several_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = iter([False, True, False, False])
    bound = listening._bound

    def sometimes(ip: str, port: int) -> socket.socket:
        if next(refused):
            raise OSError(errno.EADDRINUSE, "in use")
        return bound(ip, port)

    monkeypatch.setattr(listening, "_bound", sometimes)
    made = listen_on(("127.0.0.1", "127.0.0.2"))
    assert len({sock.getsockname()[1] for sock in made}) == 1
    for sock in made:
        sock.close()


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1, which is not an address of its own"):
        listen_on(("192.0.2.1",))


def test_ipv6() -> None:
    try:
        listen_on(("::1",))[0].close()
    except (UsageError, LocalFailure) as error:
        pytest.skip(str(error))
    with pair(ip="::1", unix=False, secret=SECRET) as ranks:
        sockets = connect(ranks, address="::1")
        assert {sock.family for each in sockets for sock in each} == {socket.AF_INET6}
        carry(sockets)


def test_a_loopback_address_among_several_machines_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's own name maps to 127.0.1.1, as Debian has it; rank 1 knows better."""
    asked: list[Any] = []

    def towards(others: Any) -> str:
        asked.append(list(others))
        return "127.0.0.4"

    monkeypatch.setattr(module, "is_loopback", lambda ip: ip == "127.0.0.1")
    monkeypatch.setattr(module, "address_towards", towards)
    with pair(host=("a", "b"), ip=("127.0.0.1", "127.0.0.2")) as ranks:
        assert [[address.ip for address in rank.addresses] for rank in ranks] == [["127.0.0.4", "127.0.0.2"]] * 2
        assert asked == [[("127.0.0.2",)]]
        made = in_threads(
            *(lambda r=r: r.connect(CHANNELS, lambda c: r.addresses[c.dst].ip, lambda _: None, LONG_S) for r in ranks)
        )
        carry(made)


def test_no_address_among_several_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "address_towards", lambda others: None)
    store = Dictionary()
    errors = in_threads(
        lambda: join(store, 0, host="a", ip="127.0.0.1"), lambda: join(store, 1, host="b", ip="127.0.0.2")
    )
    assert any(
        isinstance(error, LocalFailure) and "set MYCEL_ADDRESS, MYCEL_INTERFACE" in str(error) for error in errors
    )
    assert all(isinstance(error, CommunicationError) for error in errors)


def test_a_machine_copied_while_it_ran_says_it_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies have one boot id; the unix socket is not there, and TCP is taken."""
    with pair() as ranks:
        for rank in ranks:
            elsewhere = tuple(
                Address(host=a.host, ip=a.ip, port=a.port, pid=a.pid, local=f"{a.local}-elsewhere")
                for a in rank.addresses
            )
            rank._caller._addresses = elsewhere
        sockets = connect(ranks)
        assert {sock.family for each in sockets for sock in each} == {socket.AF_INET}
        carry(sockets)


# -- strangers --------------------------------------------------------------------------------------------------


@contextmanager
def strangers(rank: Rendezvous, count: int, says: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections to both listeners of a rank, which say little or nothing."""
    own = rank.addresses[rank.rank]
    with ExitStack() as stack:
        made = []
        for number in range(count):
            family = (socket.AF_UNIX, socket.AF_INET)[number % 2]
            sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sock.connect("\0" + own.local if family == socket.AF_UNIX else (own.ip, own.port))
            sock.sendall(says)
            made.append(sock)
        yield made


@pytest.mark.parametrize("says", [b"", b"m", b"GET / HTTP/1.1\r\n" * 10])
@pytest.mark.parametrize("secret", [None, SECRET])
def test_many_strangers_keep_nobody_out(says: bytes, secret: Secret | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "_MOST_WAITING", 10)
    with pair(secret=secret) as ranks, strangers(ranks[0], 30, says), strangers(ranks[1], 30, says):
        carry(connect(ranks))
        assert len(ranks[0]._reception._callers) <= 10 + len(ranks)


def test_a_full_queue_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose queue strangers have filled serves them while it dials, and lets the ranks in."""
    monkeypatch.setattr(listening, "_BACKLOG", 1)
    with pair() as ranks, ExitStack() as stack:
        for rank in ranks:
            filled = False
            while not filled:
                sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                sock.setblocking(False)
                filled = sock.connect_ex("\0" + rank.addresses[rank.rank].local) == errno.EAGAIN
        carry(connect(ranks))


def test_who_takes_too_long_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "_HANDSHAKE_S", 0.01)
    monkeypatch.setattr(reception, "_HANDSHAKE_OF_A_RANK_S", 0.0)
    with pair() as ranks, strangers(ranks[0], 2, b"m") as made:
        assert ranks[0]._reception.take((1, Purpose.CONTROL, bytes(16)), time.monotonic() + 0.2) is None
        for sock in made:
            sock.settimeout(LONG_S)
            assert sock.recv(1) == b""


@pytest.mark.parametrize("wrong", ["token", "user", "rank", "self", "beyond"])
def test_strangers_are_turned_away(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who found the socket's name but has another group's token, or is another user, is not let in."""
    with pair() as ranks:
        if wrong == "user":
            monkeypatch.setattr(reception, "same_user", lambda sock: False)
        hello = Hello(
            token=bytes(16) if wrong == "token" else token_of(ranks[1]),
            src={"self": 1, "beyond": 2}.get(wrong, 0),
            dst=0 if wrong == "rank" else 1,
            purpose=Purpose.CHANNEL,
            path=path_digest(CHANNELS[0].path),
        )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect("\0" + ranks[1].addresses[1].local)
            stranger.sendall(hello.pack())
            with pytest.raises(CollectiveTimeoutError, match="rank 0 has not opened its channel"):
                ranks[1].connect(CHANNELS[:1], lambda _: "127.0.0.1", lambda _: None, 0.2)
            stranger.settimeout(LONG_S)
            with pytest.raises(ConnectionResetError) if wrong == "user" else ExitStack():
                assert stranger.recv(1) == b""


def test_who_comes_twice_is_turned_away(caplog: pytest.LogCaptureFixture) -> None:
    with pair() as ranks:
        hello = Hello(token=token_of(ranks[1]), src=0, dst=1, purpose=Purpose.CONTROL)
        with ExitStack() as stack:
            first, second = (stack.enter_context(socket.create_connection(_place(ranks[1]))) for _ in range(2))
            first.sendall(hello.pack())
            taken = ranks[1]._reception
            until = time.monotonic() + LONG_S
            while not taken._filed and time.monotonic() < until:
                taken.attend(0.01)
            second.sendall(hello.pack())
            taken.attend(0.5)
            second.settimeout(LONG_S)
            assert second.recv(1) == b""
            kept = taken.take(hello.key, time.monotonic())
            assert kept is not None
            assert kept.getpeername() == first.getsockname()
            kept.close()
    assert "refused another connection that says it is rank 0" in caplog.text


def _place(rank: Rendezvous) -> tuple[str, int]:
    own = rank.addresses[rank.rank]
    return own.ip, own.port


def test_no_descriptors_are_left() -> None:
    failure = out_of_descriptors(OSError(errno.EMFILE, "Too many open files"))
    assert failure is not None
    assert "raise it (ulimit -n)" in str(failure)
    assert out_of_descriptors(OSError(errno.ECONNREFUSED, "")) is None
    with pair() as ranks:

        class Full:
            def accept(self) -> None:
                raise OSError(errno.EMFILE, "Too many open files")

        with pytest.raises(LocalFailure, match="no file descriptors are left"):
            ranks[0]._reception._accept(Full())  # type: ignore[arg-type]


def test_a_failure_at_start_is_told_to_the_others() -> None:
    with pair() as ranks:

        def fails() -> None:
            with ranks[0].failing_together():
                raise OSError(errno.EMFILE, "Too many open files")

        errors = in_threads(fails, lambda: ranks[1].connect_control(LONG_S))
        assert isinstance(errors[0], LocalFailure)
        # Rank 1 reads what rank 0 said, or finds that it listens no more, or was there before and hears it now.
        if isinstance(errors[1], dict):
            for channel in errors[1].values():
                channel.close()
            with pytest.raises(CommunicationError):
                ranks[1].connect_control(LONG_S)
        else:
            assert isinstance(errors[1], CommunicationError)
    store = Dictionary()
    with pair(store) as ranks:
        ranks[1]._board.fail(LocalFailure("no file descriptors are left"))
        with pytest.raises(CommunicationError, match="cannot start: rank 1: no file descriptors are left"):
            ranks[0].connect_control(LONG_S)


# -- the job's secret -------------------------------------------------------------------------------------------


def greet(sock: socket.socket, rank: Rendezvous, secret: Secret) -> tuple[Hello, Challenge]:
    """A greeting, and the listener's answer."""
    hello = Hello(token=token_of(rank), src=0, dst=1, purpose=Purpose.CONTROL, nonce=Secret.nonce())
    sock.sendall(hello.pack())
    sock.settimeout(LONG_S)
    challenge = Challenge.unpack(sock.recv(48, socket.MSG_WAITALL))
    assert challenge.is_right(hello, SECRET)
    assert not challenge.is_right(hello, Secret(b"another"))
    return hello, challenge


@pytest.mark.parametrize("how", ["wrong secret", "old proof", "own proof", "none"])
def test_a_peer_without_the_secret_is_refused_by_name(how: str, caplog: pytest.LogCaptureFixture) -> None:
    with pair(secret=SECRET) as ranks:
        with ExitStack() as stack:
            sock = stack.enter_context(socket.create_connection(_place(ranks[1])))
            if how == "none":
                sock.sendall(Hello(token=token_of(ranks[1]), src=0, dst=1, purpose=Purpose.CONTROL).pack())
                sock.settimeout(LONG_S)
            else:
                hello, challenge = greet(sock, ranks[1], SECRET)
                if how == "wrong secret":
                    sock.sendall(challenge.reply(hello, Secret(b"wrong")))
                elif how == "old proof":
                    other = stack.enter_context(socket.create_connection(_place(ranks[1])))
                    sock.sendall(Challenge.unpack(greet(other, ranks[1], SECRET)[1].pack()).reply(hello, SECRET))
                else:
                    sock.sendall(challenge.proof)
            assert sock.recv(1) == b""
        carry(connect(ranks))  # the job goes on
    assert "rank 1 refused a connection that says it is rank 0: it does not know the job's secret" in caplog.text


def test_a_proof_belongs_to_one_connection() -> None:
    hello = Hello(token=bytes(16), src=0, dst=1, purpose=Purpose.CONTROL, nonce=Secret.nonce())
    challenge = Challenge.answer(hello, SECRET)
    proof = challenge.reply(hello, SECRET)
    assert len(proof) == PROOF_BYTES
    assert challenge.is_answered(proof, hello, SECRET)
    others: list[dict[str, Any]] = [
        {"src": 2},
        {"dst": 2},
        {"token": bytes([1] * 16)},
        {"purpose": Purpose.CHANNEL},
        {"path": bytes([1] * 16)},
        {"nonce": Secret.nonce()},
    ]
    for other in others:
        fields = {"token": bytes(16), "src": 0, "dst": 1, "purpose": Purpose.CONTROL, "nonce": hello.nonce} | other
        assert not challenge.is_answered(proof, Hello(**fields), SECRET), other
    assert not Challenge.answer(hello, SECRET).is_answered(proof, hello, SECRET)


def test_who_answers_must_know_the_secret() -> None:
    """Somebody who listens where a rank did is found out before anything is sent there."""
    with pair(secret=SECRET) as ranks, socket.create_server(("127.0.0.1", 0)) as impostor:

        def answer() -> bytes:
            sock, _ = impostor.accept()
            with sock:
                sock.recv(HELLO_BYTES, socket.MSG_WAITALL)
                sock.sendall(bytes(48))
                sock.settimeout(LONG_S)
                return sock.recv(1)

        hello = ranks[0]._hello(1, Purpose.CONTROL)
        caller = ranks[0]._caller
        changed = Address(host="b", ip="127.0.0.1", port=impostor.getsockname()[1], pid=1)
        caller._addresses = (ranks[0].addresses[0], changed)

        def dial() -> None:
            sock = caller.call("127.0.0.1", hello, time.monotonic() + LONG_S)
            caller.prove(sock, hello, time.monotonic() + LONG_S)

        said, error = in_threads(answer, dial)
        assert said == b""
        assert isinstance(error, PeerLostError)
        assert "refused who answers at the address of rank 1" in str(error)


def test_ranks_that_dial_each_other_need_not_wait_for_each_other() -> None:
    """Each opens a channel that the other has not come to yet; with a secret, too, both get on."""
    with pair(secret=SECRET) as ranks:
        made = [
            ranks[0].connect(CHANNELS[:1], lambda _: "127.0.0.1", lambda _: None, LONG_S),
            ranks[1].connect(CHANNELS[1:], lambda _: "127.0.0.1", lambda _: None, LONG_S),
        ]
        for each in made:
            each[0].close()


def test_a_rank_with_another_secret_is_refused_until_the_right_one_comes(caplog: pytest.LogCaptureFixture) -> None:
    store = Dictionary()
    results: list[Any] = [None]

    def right_one() -> Rendezvous:
        until = time.monotonic() + LONG_S
        while "rank 0 refused" not in caplog.text and time.monotonic() < until:  # the wrong one may refuse first
            time.sleep(0.01)
        return join(store, 1, secret=SECRET)

    def wrong_one() -> Any:
        with pytest.raises(CollectiveTimeoutError, match="was not made with this job's secret"):
            join(store, 1, secret=Secret(b"wrong"), timeout_s=0.5)

    results = in_threads(lambda: join(store, 0, secret=SECRET), right_one, wrong_one)
    assert results[2] is None
    carry(connect(results[:2]))
    for rank in results[:2]:
        rank.close()
    assert "rank 0 refused what stands in the store for rank 1: it was not made with this job's secret" in caplog.text


def test_a_secret_on_some_ranks_only() -> None:
    store = Dictionary()
    results = in_threads(lambda: join(store, 0, secret=SECRET, timeout_s=1.0), lambda: join(store, 1, timeout_s=1.0))
    assert isinstance(results[1], UsageError)
    assert "rank 0 has a secret and rank 1 has none" in str(results[1])
    assert isinstance(results[0], CommunicationError)


def test_without_a_secret_it_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_said_that_the_network_is_trusted", False)
    with pair() as ranks, caplog.at_level(logging.WARNING):
        for rank in (*ranks, *ranks):
            rank.say_what_is_trusted()
    assert caplog.text.count("this job trusts its network") == 1


# -- lives ------------------------------------------------------------------------------------------------------


def test_a_store_that_outlives_a_group_serves_the_next() -> None:
    """The second life's rank 1 comes first and reads nothing of the first life's."""
    store = Dictionary()
    with pair(store) as ranks:
        first = token_of(ranks[0])
    # Rank 0 of the first life has been slow to take it away.
    store.set("mycel/life", '{"by": 0, "text": "' + first.hex() + '", "proof": ""}')
    late = threading.Event()

    def zero() -> Rendezvous:
        late.wait(LONG_S)
        return join(store, 0)

    def one() -> Rendezvous:
        threading.Timer(0.05, late.set).start()
        return join(store, 1)

    ranks = in_threads(zero, one)
    assert token_of(ranks[0]) == token_of(ranks[1]) != first
    carry(connect(ranks))
    for rank in ranks:
        rank.close()


def test_rank_0_is_missed_by_name() -> None:
    with pytest.raises(CollectiveTimeoutError, match="rank 0 has not joined the group of 2 ranks"):
        join(Dictionary(), 1, timeout_s=0.05)
    with pytest.raises(CollectiveTimeoutError, match="rank 1 has not joined the group of 2 ranks"):
        join(Dictionary(), 0, timeout_s=0.05)


def test_what_an_observer_raises_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mycel.runtime.transport.board._LOOK_S", 0.01)

    def gone() -> None:
        raise PeerLostError("rank 1 was lost")

    with pytest.raises(PeerLostError, match="rank 1 was lost"):
        join(Dictionary(), 0, observe=gone)


class Held:
    """Stands for what torch lets go of; knows the store's port."""

    def __init__(self, port: int) -> None:
        self.port = port


def test_the_others_wait_until_the_store_has_ended() -> None:
    """The job's store lives in rank 0's process and ends a little after rank 0's group."""
    with socket.create_server(("127.0.0.1", 0)) as stores_server:
        held = Held(stores_server.getsockname()[1])
        server = StoreServer.of(held)
        assert server is not None
        with pair(store_server=(server, None)) as ranks:
            ended: list[str] = []

            def ends() -> None:
                ranks[0].close()
                ended.append("group")
                time.sleep(0.05)
                ended.append("store")
                stores_server.close()

            def other() -> None:
                ranks[1].close()
                ended.append("other")

            in_threads(ends, other)
            assert ended == ["group", "store", "other"]


def test_a_store_that_is_kept_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stores_server:
        held = Held(stores_server.getsockname()[1])
        server = StoreServer.of(held)
        with pair(store_server=(server, None)) as ranks:
            del held
            for error in in_threads(*(rank.close for rank in ranks)):
                assert error is None
            assert server is not None and server.is_open


def test_a_store_elsewhere_has_no_server_here() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    assert StoreServer.of(Held(port)) is None
    assert StoreServer.of(object()) is None


def test_a_forked_child_lets_go() -> None:
    with pair() as ranks:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                assert ranks[0]._closed
                assert not ranks[0]._reception._listeners
                ranks[0].close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        carry(connect(ranks))


def test_the_kind_of_socket_is_a_setting() -> None:
    assert read_settings({}).local is None
    assert read_settings({"MYCEL_LOCAL": "tcp"}).local == "tcp"
    with pytest.raises(UsageError, match="MYCEL_LOCAL='udp' is not one of: memory, unix, tcp"):
        read_settings({"MYCEL_LOCAL": "udp"})


def test_a_closed_reception() -> None:
    closed = Reception(0, 2)
    closed.close()
    closed.leave()
    with pytest.raises(CommunicationError, match="has been destroyed"):
        closed.attend(0.0)
