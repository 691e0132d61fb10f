"""Messages that other ranks pass on: which ways, who takes which piece, and what happens where a way goes."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.test_point_to_point import (
    LONG_S,
    Fake,
    World,
    begin_receive,
    begin_send,
    by_path,
    glances_until,
    transfer,
    until,
)

from mycel.collectives.program import Channel
from mycel.errors import CommunicationError, UsageError
from mycel.runtime import p2p_pool
from mycel.runtime.p2p_connection import Connection
from mycel.runtime.p2p_endpoint import Endpoint
from mycel.runtime.p2p_frames import AGAIN, FRAME_BYTES, Frame, Kind
from mycel.runtime.p2p_matching import Transfer
from mycel.runtime.p2p_passage import Passage, Passages
from mycel.runtime.p2p_pieces import Pieces
from mycel.runtime.p2p_pool import RELAYED_BYTES, Flight, Piece, Pool, piece_bytes_for
from mycel.runtime.p2p_routes import Relay, find_relays, find_routes
from mycel.settings import read_settings
from mycel.topology.builders import loopback, ring, star, torus, two_boxes
from mycel.topology.model import Topology

SIZE = 8 << 20

# -- ways -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "pair", "stops"),
    [
        (loopback(num_ranks=4), (0, 2), []),
        (star(num_ranks=4, bandwidth="100 Mbit/s"), (1, 3), []),
        (two_boxes(num_ranks=4, inside="400 Mbit/s", between="100 Mbit/s"), (0, 1), []),
        (ring(num_ranks=4), (0, 1), [(3, 2, 1)]),
        (ring(num_ranks=6), (0, 1), []),  # four others would have to pass it on
        (ring(num_ranks=4), (0, 2), [(3, 2)]),  # beside the one that ordinary routing takes
        (torus(dims=(2, 4)), (0, 4), [(1, 5, 4), (3, 7, 4)]),
        (torus(dims=(3, 3)), (4, 5), [(3, 5), (1, 2, 5), (7, 8, 5)]),
    ],
)
def test_ways_through_others_share_no_link(
    topology: Topology, pair: tuple[int, int], stops: list[tuple[int, ...]]
) -> None:
    routes = find_routes(topology, *pair, by_path)
    relays = find_relays(topology, routes)
    assert [relay.stops for relay in relays] == stops
    used = [hop for route in routes for hop in pairwise(route.channel.path)]
    for relay in relays:
        assert (relay.channels[0].src, relay.stops[-1]) == pair
        assert all(before.dst == after.src for before, after in pairwise(relay.channels))
        used += [hop for channel in relay.channels for hop in pairwise(channel.path)]
    assert len(used) == len(set(used)) and set(used) <= set(topology.capacity)


@given(st.integers(0, 9), st.integers(0, 1 << 15), st.lists(st.integers(0, 9), max_size=2))
def test_what_a_rank_is_told_of_a_passage(origin: int, number: int, stops: list[int]) -> None:
    passage = Passage(origin=origin, number=number, stops=tuple(stops))
    assert Passage.unpack(passage.pack(), size=10) == passage
    assert passage.pack().bit_length() <= 128
    if max(origin, *stops, 0) > 0:
        with pytest.raises(CommunicationError, match="ranks that there are not"):
            Passage.unpack(passage.pack(), size=max(origin, *stops, 0))


# -- who takes which piece --------------------------------------------------------------------------------------


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_ways_fetch_each_byte_once_and_a_lost_piece_again() -> None:
    pool, flight = Pool(25e6, lambda: 0), Flight(25e6, Clock())
    flight.is_ready = True
    messages = [transfer("send", 1, data=bytes(length)) for length in (2 << 20, 1 << 20, 70_000)]
    for message in messages:
        pool.add(message)
    taken: list[Piece] = []
    while (piece := pool.fetch(flight)) is not None:
        taken.append(piece)
    assert 1 < len(taken) <= 4, "as many as may be in flight"
    pool.tell_again(taken)
    again: list[Piece] = []
    while (piece := pool.fetch(None)) is not None:
        (again if piece.is_again else taken).append(piece)
    assert [piece[:3] for piece in again] == [piece[:3] for piece in taken[: len(again)]]
    for message in messages:
        ends = sorted((piece.begin, piece.end) for piece in taken if piece.transfer is message)
        assert ends[0][0] == 0 and ends[-1][1] == len(message.view)
        assert all(before[1] == after[0] for before, after in pairwise(ends))


def test_a_way_gets_nothing_that_the_direct_one_would_bring_sooner() -> None:
    clock = Clock()
    piece = piece_bytes_for(25e6)
    pool, flight = Pool(25e6, lambda: 0), Flight(25e6, clock)
    pool.add(transfer("send", 1, data=bytes(16 * piece)))
    assert pool.fetch(flight) is None, "its other end has not said that it is there"
    flight.is_ready = True
    first = pool.fetch(flight)
    assert first is not None
    clock.now += 4 * piece / 25e6  # a quarter of the cable
    assert flight.taken(first.transfer.number, first.begin) is first
    fetched = 0
    while pool.has_for(None):
        if pool.has_for(flight):
            fetched += 1
            through = pool.fetch(flight)
            assert through is not None
            assert pool._left + piece >= flight.takes_s(0) * 25e6
        pool.fetch(None)
    assert 0 < fetched <= 4
    with pytest.raises(CommunicationError, match="not sent"):
        flight.taken(99, 0)


def test_a_way_without_news_is_given_up_and_one_that_waits_is_not() -> None:
    clock = Clock()
    pool, flight = Pool(25e6, lambda: 0), Flight(25e6, clock)
    flight.is_ready = True
    clock.now += 1000
    assert not flight.is_stalled, "nothing is under way"
    pool.add(transfer("send", 1, data=bytes(RELAYED_BYTES)))
    piece = pool.fetch(flight)
    assert piece is not None and not flight.is_stalled
    clock.now += 1.5
    assert flight.is_stalled
    flight.taken(piece.transfer.number, piece.begin)
    assert not flight.is_stalled


def test_what_is_forgotten_is_not_fetched() -> None:
    pool = Pool(25e6, lambda: 0)
    kept, dropped = transfer("send", 1, data=bytes(RELAYED_BYTES)), transfer("send", 1, data=bytes(RELAYED_BYTES))
    for message in (dropped, kept):
        pool.add(message)
    piece = pool.fetch(None)
    assert piece is not None and piece.transfer is dropped
    pool.tell_again([piece])
    pool.forget(dropped)
    piece = pool.fetch(None)
    assert piece is not None and piece.transfer is kept and not piece.is_again


# -- pieces that come -------------------------------------------------------------------------------------------


class Wireless:
    """What ``Pieces`` needs of a connection."""

    def __init__(self, *, is_relayed: bool = False) -> None:
        self.peer, self.is_relayed, self.is_spare = 0, is_relayed, False
        self.aside: bytearray | None = None

    def divert(self) -> None:
        self.is_spare = True


@given(st.data())
def test_pieces_come_in_any_order_twice_and_before_their_message(data: st.DataObject) -> None:
    """Against the message: each byte is written once, counted once, and never after it was complete."""
    told: list[int] = []
    total = 0

    def advance(target: object, num_bytes: int) -> bool:
        nonlocal total
        total += num_bytes
        told.append(num_bytes)
        return total == len(message)

    whole: list[tuple[int, int]] = []
    pieces = Pieces(advance, lambda *key: whole.append(key))
    message = bytes(range(60))
    kept = Transfer(verb="recv", peer=0, tag=0, view=memoryview(bytearray(60)), dtype=b"uint8", timeout_s=LONG_S)
    places = range(0, 60, 20)
    sends = data.draw(st.permutations([(place, is_again) for place in places for is_again in (False, True)]))
    announced = data.draw(st.integers(0, len(sends)))
    opened: list[tuple[Any, Frame, memoryview]] = []
    for step, (place, is_again) in enumerate(sends):
        if step == announced:
            pieces.announce(0, 3)
            pieces.expect(0, 3, kept, kept.view)
        connection: Any = Wireless(is_relayed=not is_again)
        frame = Frame(Kind.PIECE, AGAIN if is_again else 0, number=3, length=20, value=place)
        opened.append((connection, frame, pieces.begin(connection, frame)))
        while opened and data.draw(st.booleans()):
            finish(pieces, message, *opened.pop(data.draw(st.integers(0, len(opened) - 1))))
    if announced == len(sends):
        pieces.announce(0, 3)
        pieces.expect(0, 3, kept, kept.view)
    for each in opened:
        finish(pieces, message, *each)
    assert bytes(kept.view) == message and sum(told) == len(message)
    assert whole == [(0, 3)], "its sender may drop what it would tell again"
    assert not pieces._coming and not pieces._aside


def finish(pieces: Pieces, message: bytes, connection: Any, frame: Frame, view: memoryview) -> None:
    """The rest of a piece comes: to its place, unless it has been diverted."""
    if not connection.is_spare:
        view[:] = message[frame.value : frame.value + frame.length]
    pieces.end(connection, frame)


def test_pieces_that_are_none_of_a_message_are_refused() -> None:
    pieces = Pieces(lambda target, num_bytes: False, lambda peer, number: None)
    kept = Transfer(verb="recv", peer=0, tag=0, view=memoryview(bytearray(60)), dtype=b"uint8", timeout_s=LONG_S)
    pieces.announce(0, 0)
    connection: Any = Wireless()
    with pytest.raises(CommunicationError, match="nobody has asked for"):
        pieces.begin(connection, Frame(Kind.PIECE, number=0, length=20))
    with pytest.raises(CommunicationError, match="nobody has asked for"):
        pieces.begin(connection, Frame(Kind.PIECE, number=1, length=1 << 40))
    early = Frame(Kind.PIECE, number=1, length=20, value=50)
    pieces.begin(connection, early)
    pieces.end(connection, early)
    pieces.announce(0, 1)
    with pytest.raises(CommunicationError, match="none of it"):
        pieces.expect(0, 1, kept, kept.view)


# -- passing on -------------------------------------------------------------------------------------------------


def test_bytes_are_passed_on_both_ways_and_a_passage_ends_with_its_ends() -> None:
    passages = Passages()
    ends = []
    for _ in range(3):
        ours, entry = socket.socketpair()
        leaving, theirs = socket.socketpair()
        passages.open(entry, lambda leaving=leaving: leaving)  # type: ignore[misc]
        ends.append((ours, theirs))
    data = random.Random(1).randbytes(3 << 20)
    came = [bytearray() for _ in range(6)]

    def read(sock: socket.socket, into: bytearray) -> None:
        while len(into) < len(data):
            into += sock.recv(1 << 16)

    ways = [(a, b) for ours, theirs in ends for a, b in ((ours, theirs), (theirs, ours))]
    threads = [threading.Thread(target=way[0].sendall, args=(data,)) for way in ways]
    threads += [threading.Thread(target=read, args=(way[1], into)) for way, into in zip(ways, came, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert all(bytes(each) == data for each in came)
    ends[1][0].close()
    assert ends[1][1].recv(1) == b"", "the others go on"
    ends[2][0].sendall(b"x")
    assert ends[2][1].recv(1) == b"x"
    passages.close()
    for ours, theirs in (ends[0], ends[2]):
        assert ours.recv(1) == theirs.recv(1) == b""
    for sock in (sock for pair in ends for sock in pair):
        sock.close()


def test_a_passage_to_nobody_ends() -> None:
    def dial() -> socket.socket:
        raise CommunicationError("nobody is there")

    passages = Passages()
    ours, entry = socket.socketpair()
    passages.open(entry, dial)
    assert ours.recv(1) == b""
    passages.close()
    other, entry = socket.socketpair()
    passages.open(entry, dial)
    assert other.recv(1) == b"", "the group is being left"
    ours.close()
    other.close()


# -- endpoints --------------------------------------------------------------------------------------------------


def way_through(*stops: int) -> Relay:
    channels = [Channel(src=src, dst=dst, path=(src, dst)) for src, dst in pairwise((0, *stops))]
    return Relay(channels=tuple(channels))


@pytest.fixture
def world() -> Iterator[World]:
    made = World(4, in_memory=False)
    yield made
    made.close()


def widen(world: World, *through: int) -> Connection:
    """Send a long message from rank 0 to rank 1, and wait until the way through others is there."""
    a, b = world.ends[:2]
    exchange(a, b, RELAYED_BYTES)
    outlet = a._exchange.outlets[1]

    def is_there() -> bool:
        for rank in (*through, 1, 0):
            world.ends[rank].glance()
        return outlet.is_widened

    until(is_there)
    return outlet.relays[0]


def exchange(a: Endpoint, b: Endpoint, size: int) -> None:
    data = random.Random(size).randbytes(size)
    receiving, sending = begin_receive(b, 0, size), begin_send(a, 1, data)
    assert b.wait(receiving, LONG_S) and a.wait(sending, LONG_S)
    assert bytes(receiving.view) == data


def test_a_long_message_goes_through_others_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[Piece] = []
    begin = Flight.begin

    def count(flight: Flight, piece: Piece) -> None:
        passed.append(piece)
        begin(flight, piece)

    monkeypatch.setattr(Flight, "begin", count)
    world.relays = [(way_through(2, 3, 1), 1e8)]
    a, b = world.ends[:2]
    widen(world, 2, 3)
    assert not passed
    for _ in range(3):
        exchange(a, b, SIZE)
    assert passed and len({piece.transfer for piece in passed}) == 3
    before = len(passed)
    exchange(a, b, RELAYED_BYTES - 1)
    assert len(passed) == before, "a short one goes straight"
    assert not world.ends[2]._exchange.open and not world.ends[2]._waiting.connections, "nothing of it is seen there"


def test_a_rank_that_leaves_or_dies_on_the_way_fails_no_message(world: World) -> None:
    world.relays = [(way_through(2, 1), 1e8), (way_through(3, 1), 1e8)]
    a, b = world.ends[:2]
    widen(world, 2, 3)
    until(lambda: len(a._exchange.outlets[1].relays) == 2)
    for rank in (2, 3, 1, 0):
        world.ends[rank].glance()
    for gone in (2, 3):
        data = random.Random(gone).randbytes(SIZE)
        receiving, sending = begin_receive(b, 0, SIZE), begin_send(a, 1, data)
        glances_until(a, lambda sending=sending: sending.begun)  # type: ignore[misc]
        world.ends[gone]._detours.close()
        world.gone.add(gone)
        assert b.wait(receiving, LONG_S) and a.wait(sending, LONG_S)
        assert bytes(receiving.view) == data
    glances_until(a, lambda: not a._exchange.outlets[1].relays)
    exchange(a, b, SIZE)
    assert world.failure is None


class ByHand:
    """A rank on the way, which passes on what it is told to."""

    def __init__(self, world: World, rank: int) -> None:
        until(lambda: bool(world.passages[rank]))
        passage, self.before = world.passages[rank].popleft()
        self.after = Fake(world, rank).dial_passage(passage, 0.0)
        self.held = bytearray()
        self.passed = 0
        self.world = world

    def answer(self) -> None:
        """Pass back what the destination says."""
        data = bytearray()
        while len(data) % FRAME_BYTES or not data:
            self.world.ends[1].glance()
            try:
                data += self.after.recv(1 << 16)
            except BlockingIOError:
                time.sleep(0.0005)
        self.before.sendall(data)

    def hold(self) -> None:
        """Take in what has come."""
        try:
            self.held += self.before.recv(1 << 20)
        except BlockingIOError:
            time.sleep(0.0005)

    def pass_on(self, num_bytes: int) -> None:
        self.after.setblocking(True)
        while num_bytes:
            sent = self.after.send(self.held[: min(num_bytes, 1 << 15)])
            del self.held[:sent]
            num_bytes -= sent
            self.passed += sent
            self.world.ends[1].glance()


@pytest.mark.parametrize("passed", [0, FRAME_BYTES - 1, FRAME_BYTES + 1000, None], ids=str)
def test_a_way_that_stalls_is_given_up_and_what_comes_late_harms_nobody(
    world: World, monkeypatch: pytest.MonkeyPatch, passed: int | None
) -> None:
    """Pieces that were told again come twice: before, in the middle of, and after the message that they belong to."""
    monkeypatch.setattr(p2p_pool, "_STALLED_S", 0.2)
    world.relays = [(way_through(2, 1), 1e8)]
    a, b = world.ends[:2]
    exchange(a, b, RELAYED_BYTES)
    relay = ByHand(world, 2)
    relay.answer()
    glances_until(a, lambda: a._exchange.outlets[1].is_widened)
    data = random.Random(7).randbytes(SIZE)
    receiving, sending = begin_receive(b, 0, SIZE), begin_send(a, 1, data)
    threads = [threading.Thread(target=end.wait, args=(each, LONG_S)) for end, each in ((a, sending), (b, receiving))]
    for thread in threads:
        thread.start()
    while len(relay.held) < FRAME_BYTES + piece_bytes_for(1e8):
        relay.hold()
    whole = FRAME_BYTES + piece_bytes_for(1e8)
    relay.pass_on(whole if passed is None else passed)
    while any(thread.is_alive() for thread in threads):
        relay.hold()
    assert bytes(receiving.view) == data
    receiving.view[:] = bytes(SIZE)
    relay.pass_on(len(relay.held))
    for _ in range(10):
        b.glance()
    assert bytes(receiving.view) == bytes(SIZE), "nobody writes to what has been handed over"
    glances_until(a, lambda: not a._exchange.outlets[1].relays)
    assert world.failure is None
    exchange(a, b, SIZE)
    relay.before.close()
    relay.after.close()


def test_a_message_that_is_there_is_over_though_nobody_says_so_on_the_way(world: World) -> None:
    """A receiver that has everything reads no more: copies of what it has would wait before it for ever."""
    world.relays = [(way_through(2, 1), 1e8)]
    a, b = world.ends[:2]
    exchange(a, b, RELAYED_BYTES)
    relay = ByHand(world, 2)
    relay.answer()
    glances_until(a, lambda: a._exchange.outlets[1].is_widened)
    data = random.Random(8).randbytes(SIZE)
    receiving, sending = begin_receive(b, 0, SIZE), begin_send(a, 1, data)
    until_s = time.monotonic() + LONG_S
    while not receiving.is_done and time.monotonic() < until_s:
        a.glance()
        b.glance()
        relay.hold()
        relay.pass_on(len(relay.held))
    assert relay.passed >= FRAME_BYTES + piece_bytes_for(1e8) and bytes(receiving.view) == data
    assert a.wait(sending, LONG_S)
    relay.before.close()
    relay.after.close()


def test_a_job_may_do_without() -> None:
    assert read_settings({}).relays and not read_settings({"MYCEL_RELAYS": "0"}).relays
    with pytest.raises(UsageError, match="MYCEL_RELAYS='no' is not one of: 0, 1"):
        read_settings({"MYCEL_RELAYS": "no"})
    world = World(3, in_memory=False)
    world.relays = [(way_through(2, 1), 1e8)]
    end = Endpoint(Fake(world, 0), relays=False)  # type: ignore[arg-type]
    begin_send(end, 1, bytes(RELAYED_BYTES))
    outlet = end._exchange.outlets[1]
    assert outlet.pool is None and not outlet.relays and not world.passages[2]
    end.close()
    world.close()


def test_messages_that_fail_leave_nothing_behind(world: World) -> None:
    world.relays = [(way_through(2, 1), 1e8)]
    a, b = world.ends[:2]
    relay = widen(world, 2)
    with b._moving:  # its thread does not read the message meanwhile
        receiving, sending = begin_receive(b, 0, SIZE), begin_send(a, 1, bytes(SIZE))
        while not sending.begun:
            b.glance()
            a.glance()
        a._fail(CommunicationError("aborted"))
    for end, each in ((a, sending), (b, receiving)):
        with pytest.raises(CommunicationError):
            end.wait(each, LONG_S)
    assert relay.pool is not None and not relay.pool.has_for(None)
    assert not a._waiting.connections
