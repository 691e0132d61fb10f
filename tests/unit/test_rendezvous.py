"""How ranks of one host find each other: over unix sockets or TCP, and who is turned away."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta

import pytest

from mycel.collectives.program import Channel
from mycel.errors import CollectiveTimeoutError, UsageError
from mycel.runtime.transport import rendezvous as module
from mycel.runtime.transport.hello import Hello, path_digest
from mycel.runtime.transport.rendezvous import Address, Rendezvous
from mycel.settings import read_settings

LONG_S = 30.0
CHANNELS = (Channel(src=0, dst=1, path=(0, 2, 1)), Channel(src=1, dst=0, path=(1, 2, 0)))


class Dictionary:
    """A store for threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: all(k in self._values for k in keys), timeout.total_seconds()):
                raise RuntimeError(f"no {keys}")


def in_threads(*functions: Callable[[], object]) -> list[object]:
    """What they give, run side by side."""
    results: list[object] = [None] * len(functions)

    def run(number: int) -> None:
        results[number] = functions[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def pair(store: Dictionary, hosts: tuple[str, str] = ("a", "a"), unix: tuple[bool, bool] = (True, True)):  # type: ignore[no-untyped-def]
    def join(rank: int) -> Rendezvous:
        own = Address(host=hosts[rank], ip="127.0.0.1", port=0, pid=rank)
        return Rendezvous(
            rank=rank, size=2, store=store, own=own, bind="127.0.0.1", timeout_s=LONG_S, unix=unix[rank]
        )

    return in_threads(lambda: join(0), lambda: join(1))


def connect(ranks, *, address: str = "127.0.0.1", pace: int | None = None) -> list[list[socket.socket]]:  # type: ignore[no-untyped-def]
    return in_threads(*(lambda r=r: r.connect(CHANNELS, lambda _: address, lambda _: pace, LONG_S) for r in ranks))  # type: ignore[misc,return-value]


@pytest.mark.parametrize(
    ("given", "family"),
    [
        ({}, socket.AF_UNIX),
        ({"unix": (False, True)}, socket.AF_INET),
        ({"unix": (True, False)}, socket.AF_INET),
        ({"hosts": ("a", "b")}, socket.AF_INET),
    ],
)
def test_channels_of_one_host_are_unix_sockets(given: dict[str, tuple[str, str]], family: int) -> None:
    ranks = pair(Dictionary(), **given)  # type: ignore[arg-type]
    try:
        sockets = connect(ranks)
        assert {sock.family for each in sockets for sock in each} == {family}
        assert {rank.is_one_host for rank in ranks} == {family == socket.AF_UNIX}  # type: ignore[attr-defined]
        for number in range(2):  # what goes in at one end of a channel comes out at the other
            source, sink = sockets[CHANNELS[number].src][number], sockets[CHANNELS[number].dst][number]
            source.sendall(b"%d" % number)
            sink.settimeout(LONG_S)
            assert sink.recv(1) == b"%d" % number
        for each in sockets:
            for sock in each:
                sock.close()
    finally:
        for rank in ranks:
            rank.close()


@pytest.mark.parametrize("given", [{"pace": 1_000_000}, {"address": "127.0.0.2"}])
def test_paced_and_wired_channels_are_tcp(given: dict[str, object]) -> None:
    """A unix socket has no rate to hold back, and takes no path that a wiring file pins."""
    store = Dictionary()
    ranks = in_threads(
        *(
            lambda r=r: Rendezvous(
                rank=r,
                size=2,
                store=store,
                own=Address(host="a", ip="127.0.0.1", port=0, pid=r),
                bind="0.0.0.0",
                timeout_s=LONG_S,
            )
            for r in range(2)
        )
    )
    with ExitStack() as stack:
        for rank in ranks:
            stack.callback(rank.close)  # type: ignore[attr-defined]
        for each in connect(ranks, **given):  # type: ignore[arg-type]
            for sock in each:
                assert sock.family == socket.AF_INET
                sock.close()


@pytest.mark.parametrize("wrong", ["token", "user"])
def test_strangers_are_turned_away(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who found the socket's name but has another group's token, or is another user, is not let in."""
    ranks = pair(Dictionary())
    with ExitStack() as stack:
        for rank in ranks:
            stack.callback(rank.close)
        token = ranks[1]._token if wrong == "user" else bytes(16)
        if wrong == "user":
            monkeypatch.setattr(module, "_same_user", lambda sock: False)
        stranger = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        stranger.connect("\0" + ranks[1].addresses[1].local)
        stranger.sendall(Hello(token=token, src=0, control=False, path=path_digest(CHANNELS[0].path)).pack())
        with pytest.raises(CollectiveTimeoutError, match="rank 0 has not opened its channel"):
            ranks[1].connect(CHANNELS[:1], lambda _: "127.0.0.1", lambda _: None, 0.2)
        stranger.settimeout(LONG_S)
        assert stranger.recv(1) == b""


def test_the_kind_of_socket_is_a_setting() -> None:
    assert read_settings({}).local is None
    assert read_settings({"MYCEL_LOCAL": "tcp"}).local == "tcp"
    with pytest.raises(UsageError, match="MYCEL_LOCAL='udp' is not one of: unix, tcp"):
        read_settings({"MYCEL_LOCAL": "udp"})
