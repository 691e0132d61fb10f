"""Rings between two processes: how they are handed over, and what is refused."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mycel.errors import CollectiveTimeoutError, CommunicationError, PeerLostError
from mycel.runtime import ring as r
from mycel.runtime.ring_memory import Ring

CAPACITY = 1 << 12


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


@pytest.fixture
def bell() -> Iterator[int]:
    made = os.eventfd(0, os.EFD_NONBLOCK)
    yield made
    os.close(made)


def soon() -> float:
    return time.monotonic() + 5.0


def nothing() -> None:
    pass


def test_both_ends_see_the_same_bytes(pair: tuple[socket.socket, socket.socket], bell: int) -> None:
    """Messages of every length go round the ring many times and come out as they went in."""
    given = Ring.offer(pair[0], CAPACITY, bell)
    taken = Ring.accept(pair[1], soon(), nothing)
    assert given is not None and taken is not None
    random = np.random.default_rng(3)
    for length in (1, 63, 64, 65, CAPACITY, CAPACITY + 1, 3 * CAPACITY + 7, *random.integers(1, 9000, 30)):
        sent = random.integers(0, 256, length).astype(np.uint8)
        came, done, left = np.zeros(length, dtype=np.uint8), 0, int(length)
        while done < length:
            n = r.put(given.address, CAPACITY, sent.ctypes.data + length - left, left) if left else 0
            left -= n
            while (n := r.at_hand(taken.address, CAPACITY, length - done)) > 0:
                where = r.place(taken.address, CAPACITY) - taken.address
                came[done : done + n] = taken._memory[where : where + n]
                done += n
                r.take(taken.address, n, int(done == length))
        assert (came == sent).all()
        assert r.come(taken.address) == 0
    assert not any(map(os.get_inheritable, (given.bell, taken.bell, taken.own_bell)))
    os.eventfd_write(given.bell, 1)
    assert os.eventfd_read(taken.own_bell) == 1
    os.eventfd_write(taken.bell, 1)
    assert os.eventfd_read(bell) == 1
    given.close()
    taken.close()


def test_a_channel_may_be_no_ring(pair: tuple[socket.socket, socket.socket], bell: int) -> None:
    assert Ring.offer(pair[0], 0, bell) is None
    assert Ring.accept(pair[1], soon(), nothing) is None


def test_without_memory_the_socket_does(
    pair: tuple[socket.socket, socket.socket], bell: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert Ring.offer(pair[0], CAPACITY, bell) is None
    assert Ring.accept(pair[1], soon(), nothing) is None


@pytest.mark.parametrize("num_bytes", [0, 100, r.DATA + 5000])
def test_memory_that_is_no_ring_is_refused(
    pair: tuple[socket.socket, socket.socket], bell: int, num_bytes: int
) -> None:
    descriptor = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    socket.send_fds(pair[0], [b"M"], [descriptor, bell, bell])
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(CommunicationError, match="its length may change"):
        Ring.accept(pair[1], soon(), nothing)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    os.close(descriptor)


def test_a_peer_that_goes_or_keeps_silent_is_noticed(pair: tuple[socket.socket, socket.socket], bell: int) -> None:
    looks: list[int] = []
    with pytest.raises(CollectiveTimeoutError):
        Ring.accept(pair[1], time.monotonic() + 0.15, lambda: looks.append(1))
    assert looks
    pair[0].close()
    with pytest.raises(PeerLostError):
        Ring.accept(pair[1], soon(), nothing)
    with pytest.raises(PeerLostError):
        Ring.offer(pair[1], CAPACITY, bell)
