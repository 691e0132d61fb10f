"""Messages between two ranks without a process group: paths, matching, connections, and an endpoint's promises."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mycel.collectives.program import Channel
from mycel.errors import CollectiveTimeoutError, CommunicationError, MismatchError, PeerLostError
from mycel.runtime import p2p_lines, p2p_stream
from mycel.runtime.monitored import pass_barrier
from mycel.runtime.p2p_connection import Connection
from mycel.runtime.p2p_endpoint import Endpoint
from mycel.runtime.p2p_exchange import EAGER_BYTES, WINDOW_BYTES, early_bytes_for
from mycel.runtime.p2p_frames import FRAME_BYTES, LONGEST_NOTE, Frame, Kind, pack_frame, unpack_frame
from mycel.runtime.p2p_matching import Arrival, Matching, Transfer
from mycel.runtime.p2p_passage import Passage
from mycel.runtime.p2p_routes import Relay, Route, find_routes, parts_of
from mycel.runtime.p2p_wires import MemoryWire, SocketWire, Wire, accept_wire, offer_wire
from mycel.topology.builders import loopback, ring, star, torus, two_boxes
from mycel.topology.model import Topology

LONG_S = 20.0
RING_BYTES = 1 << 17


# -- paths ------------------------------------------------------------------------------------------------------


def by_path(channel: Channel) -> str:
    """A wiring that has an address for every path."""
    return ">".join(map(str, channel.path))


@pytest.mark.parametrize(
    ("topology", "pair", "shares"),
    [
        (loopback(num_ranks=3), (0, 2), [1]),
        (star(num_ranks=4, bandwidth="100 Mbit/s"), (1, 3), [1]),
        (two_boxes(num_ranks=4, inside="400 Mbit/s", between="100 Mbit/s"), (0, 1), [4, 1]),
        (two_boxes(num_ranks=4, inside="400 Mbit/s", between="100 Mbit/s"), (0, 2), [1]),
        (ring(num_ranks=4), (0, 1), [1]),
        (ring(num_ranks=4), (0, 2), [1]),
        (torus(dims=(2, 4)), (0, 1), [1]),
    ],
)
def test_paths_carry_what_the_flow_carries(topology: Topology, pair: tuple[int, int], shares: list[int]) -> None:
    routes = find_routes(topology, *pair, by_path)
    least = min(route.share for route in routes)
    assert sorted((route.share // least for route in routes), reverse=True) == sorted(shares, reverse=True)
    used = [hop for route in routes for hop in pairwise(route.channel.path)]
    assert len(used) == len(set(used)), "two paths share a link"
    for route in routes:
        assert (route.channel.path[0], route.channel.path[-1]) == tuple(topology.ranks[rank] for rank in pair)
        assert set(pairwise(route.channel.path)) <= set(topology.capacity)


def test_paths_that_packets_cannot_tell_apart_count_once() -> None:
    topology = two_boxes(num_ranks=4, inside="400 Mbit/s", between="100 Mbit/s")
    assert len(find_routes(topology, 0, 1, lambda channel: "10.0.0.2")) == 1


@given(st.integers(0, 1 << 24), st.lists(st.integers(1, 1000), min_size=1, max_size=8))
def test_parts_cover_a_message_once(num_bytes: int, shares: list[int]) -> None:
    routes = tuple(Route(channel=Channel(src=0, dst=1, path=(0, n, 1)), share=s) for n, s in enumerate(shares))
    parts = parts_of(num_bytes, routes)
    assert parts[0][0] == 0 and parts[-1][1] == num_bytes
    assert all(before[1] == after[0] for before, after in pairwise(parts))
    if num_bytes:
        assert parts[0][1] > 0, "the first is always used"


# -- frames and matching ----------------------------------------------------------------------------------------


def test_what_is_no_frame_is_refused() -> None:
    good = pack_frame(Frame(Kind.NOTE, length=LONGEST_NOTE))
    assert unpack_frame(good).length == LONGEST_NOTE
    too_long = pack_frame(Frame(Kind.NOTE, length=LONGEST_NOTE + 1))
    for bad in (b"GET " + good[4:], good[:4] + b"\x77" + good[5:], too_long):
        with pytest.raises(CommunicationError, match="no message"):
            unpack_frame(bad)


def transfer(verb: str, peer: int | None, tag: int = 0, data: bytes | bytearray = b"", **more: object) -> Transfer:
    made: dict[str, object] = {"timeout_s": LONG_S, "dtype": b"uint8", **more}
    return Transfer(verb=verb, peer=peer, tag=tag, view=memoryview(data), **made)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 1), st.booleans()), max_size=60))
def test_messages_and_receives_meet_in_order(events: list[tuple[bool, int, int, bool]]) -> None:
    """Against a list that is searched from the front each time."""
    matching = Matching()
    receives: list[Transfer] = []
    arrivals: list[Arrival] = []
    for number, (is_receive, src, tag, any_source) in enumerate(events):
        if is_receive:
            asked = transfer("recv", None if any_source else src, tag)
            right = next((a for a in arrivals if a.tag == tag and asked.peer in (None, a.src)), None)
            assert matching.receive(asked) is right
            if right is None:
                receives.append(asked)
            else:
                arrivals.remove(right)
        else:
            taker = next((t for t in receives if t.tag == tag and t.peer in (None, src)), None)
            assert matching.arrive(src, tag) is taker
            if taker is None:
                arrivals.append(Arrival(src=src, tag=tag, number=number, dtype=b"", num_bytes=0))
                matching.hold(arrivals[-1])
            else:
                receives.remove(taker)


def test_a_receive_that_is_withdrawn_gets_nothing() -> None:
    matching = Matching()
    first, second = transfer("recv", 0), transfer("recv", 0)
    assert matching.receive(first) is None and matching.receive(second) is None
    matching.withdraw(first)
    matching.withdraw(transfer("recv", 5))
    assert matching.arrive(0, 0) is second
    assert matching.arrive(0, 0) is None


class Log:
    """A reader that keeps all that comes."""

    def __init__(self) -> None:
        self.frames: list[tuple[Frame, bytes]] = []
        self.place = bytearray()
        self.num_sent = 0

    def begin(self, connection: Connection, frame: Frame) -> memoryview | None:
        self.place = bytearray(frame.length)
        return memoryview(self.place) if frame.length else None

    def end(self, connection: Connection, frame: Frame) -> None:
        self.frames.append((frame, bytes(self.place)))

    def sent(self, transfer: Transfer, num_bytes: int) -> None:
        self.num_sent += num_bytes


@pytest.fixture(params=[False, True], ids=["sockets", "memory"])
def in_memory(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def wires(in_memory: bool) -> Iterator[tuple[Wire, Wire]]:
    """Both ends of a connection; what is sent by the first has room, what is answered has less."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    called = offer_wire(ours, bell, ring_bytes=RING_BYTES * in_memory, yields=True)
    accepted = accept_wire(theirs, yields=True)
    assert accepted is not None
    assert type(called) is type(accepted) is (MemoryWire if in_memory else SocketWire)
    yield called, accepted
    for wire in (called, accepted):
        wire.close()
    os.close(bell)


@pytest.fixture
def wires_in_memory() -> Iterator[tuple[MemoryWire, MemoryWire, int]]:
    """Both ends, and the bell of the one that has called."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    bell = os.eventfd(0, os.EFD_NONBLOCK)
    called = offer_wire(ours, bell, ring_bytes=RING_BYTES, yields=False)
    accepted = accept_wire(theirs, yields=False)
    assert isinstance(called, MemoryWire) and isinstance(accepted, MemoryWire)
    yield called, accepted, bell
    called.close()
    accepted.close()
    os.close(bell)


@pytest.mark.parametrize("is_answer", [False, True])
def test_frames_come_as_they_went_whatever_is_taken_at_once(wires: tuple[Wire, Wire], is_answer: bool) -> None:
    log = Log()
    ends = wires[::-1] if is_answer else wires
    writer, reader = Connection(ends[0], 1, log), Connection(ends[1], 0, log)
    generator = random.Random(3)
    sizes = [0, 1, FRAME_BYTES, 5000, 1 << 16, 200_000, *(generator.randrange(3000) for _ in range(200))]
    payloads = [generator.randbytes(size) for size in sizes]
    for number, payload in enumerate(payloads):
        sent = transfer("send", 1, data=payload)
        writer.post(Frame(Kind.EAGER, 7, number, len(payload)), sent.view, sent)
    while writer.has_more:
        writer.write()
        reader.read()
    reader.read()
    assert [payload for _, payload in log.frames] == payloads
    assert [frame.number for frame, _ in log.frames] == list(range(len(payloads)))
    assert log.num_sent == sum(sizes)
    writer.post(Frame(Kind.NOTE))
    writer.write()
    writer.close()
    if reader.memory is not None:
        reader.memory.hear()
    while not reader.is_broken:
        reader.read()
    assert log.frames[-1][0].kind is Kind.NOTE, "what was sent before the end comes"
    assert len(log.frames) == len(sizes) + 1


def test_a_short_message_does_not_wait_for_a_long_one(wires: tuple[Wire, Wire]) -> None:
    log = Log()
    writer, reader = Connection(wires[0], 1, log), Connection(wires[1], 0, log)
    piece_bytes = wires[0].piece_bytes
    long = [transfer("send", 1, data=bytes(4 * piece_bytes)) for _ in range(2)]
    for each in long:
        writer.post_part(each, 0, len(each.view))
    writer.write()
    writer.post(Frame(Kind.NOTE))
    while writer.has_more:
        writer.write()
        reader.read()
    kinds = [frame.kind for frame, _ in log.frames]
    assert kinds.index(Kind.NOTE) <= 1 and kinds.count(Kind.PIECE) == 8
    assert log.num_sent == 8 * piece_bytes


def test_who_sleeps_is_rung_for_and_nobody_else(wires_in_memory: tuple[MemoryWire, MemoryWire, int]) -> None:
    called, accepted, bell = wires_in_memory

    def sleep(wire: MemoryWire) -> int:
        lines = array("q", [wire.line])
        return p2p_stream.attend(lines.buffer_info()[0], 1, p2p_stream.SLEEP, 3, 0)

    place = bytearray(64)
    for _ in range(2):
        assert sleep(accepted) == 0
        called.send([memoryview(b"x")])
        assert os.eventfd_read(accepted.bell) == 1
        called.send([memoryview(b"y")])
        with pytest.raises(BlockingIOError):
            os.eventfd_read(accepted.bell)
        assert sleep(accepted) == 1 and accepted.ready == p2p_stream.READABLE, "it does not sleep on what has come"
        called.send([memoryview(b"z")])
        with pytest.raises(BlockingIOError):
            os.eventfd_read(accepted.bell)
        assert accepted.receive(memoryview(place), accepted.address_of(memoryview(place)), is_middle=False) == 3
        assert place[:3] == b"xyz"
    with pytest.raises(BlockingIOError):
        while True:
            called.send([memoryview(bytes(30_000))])
    called.wait(for_room=True)
    assert sleep(called) == 0
    accepted.receive(memoryview(place), accepted.address_of(memoryview(place)), is_middle=False)
    assert os.eventfd_read(bell) == 1
    assert sleep(called) == 1 and called.ready == p2p_stream.WRITABLE


def test_what_is_no_wire_is_refused(in_memory: bool) -> None:
    """Bytes of somebody else, memory of a length that is none of ours, a caller that says nothing, or has gone."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        assert accept_wire(theirs, yields=False) is None
        before = len(list(Path("/proc/self/fd").iterdir()))
        ours.sendall(b"G")
        with pytest.raises(CommunicationError, match="no message came"):
            accept_wire(theirs, yields=False)
        descriptor = os.memfd_create("other", os.MFD_ALLOW_SEALING)
        socket.send_fds(ours, [b"M"], [descriptor] * 4)
        os.close(descriptor)
        with pytest.raises(CommunicationError, match="its length may change"):
            accept_wire(theirs, yields=False)
        assert len(list(Path("/proc/self/fd").iterdir())) <= before  # less: what tests before left
        ours.close()
        with pytest.raises(PeerLostError):
            accept_wire(theirs, yields=False)
        with pytest.raises(PeerLostError):
            offer_wire(theirs, theirs.fileno(), ring_bytes=RING_BYTES * in_memory, yields=False)


def test_without_memory_the_socket_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refuse)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert isinstance(offer_wire(ours, 0, ring_bytes=RING_BYTES, yields=False), SocketWire)
        assert isinstance(accept_wire(theirs, yields=False), SocketWire)


# -- endpoints --------------------------------------------------------------------------------------------------


class World:
    """Ranks in one process: what a group's connections are, and what is known of its ranks."""

    def __init__(self, size: int, num_paths: int = 1, *, in_memory: bool) -> None:
        self.size, self.in_memory = size, in_memory
        self.failure: CommunicationError | None = None
        self.gone: set[int] = set()
        self.left: set[int] = set()
        self.calls: list[deque[tuple[int, int, socket.socket]]] = [deque() for _ in range(size)]
        self.passages: list[deque[tuple[Passage, socket.socket]]] = [deque() for _ in range(size)]
        self.relays: list[tuple[Relay, float]] = []
        self.bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(size)]
        shares = range(num_paths, 0, -1)
        self.paths = [Route(channel=Channel(src=0, dst=1, path=(0, n, 1)), share=n) for n in shares]
        self.ends = [Endpoint(Fake(self, rank)) for rank in range(size)]  # type: ignore[arg-type]

    def close(self) -> None:
        for end in self.ends:
            end.close()
        for _, _, sock in (call for queue in self.calls for call in queue):
            sock.close()
        for _, sock in (call for queue in self.passages for call in queue):
            sock.close()
        for bell in self.bells:
            os.close(bell)


class Fake:
    """Lines over socket pairs."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size
        self.gone, self.ring_bytes, self.is_crowded = world.gone, RING_BYTES * world.in_memory, True
        self.listening = (world.bells[rank],)
        self.finish = p2p_lines.Lines.finish

    @property
    def failure(self) -> CommunicationError | None:
        return self.world.failure

    def fail(self, kind: str, message: str) -> CommunicationError:
        kinds = {"timeout": CollectiveTimeoutError, "mismatch": MismatchError, "lost": PeerLostError}
        self.world.failure = self.world.failure or kinds.get(kind, CommunicationError)(message)
        return self.world.failure

    def lost(self, peer: int, what: str) -> CommunicationError:
        if peer in self.world.left:
            return PeerLostError(f"rank {peer} left during {what}")
        return self.fail("lost", f"rank {peer} was lost during {what}")

    def routes(self, peer: int) -> tuple[Route, ...]:
        return tuple(self.world.paths)

    def dial(self, peer: int, number: int, deadline: float) -> socket.socket:
        ours, theirs = self._pair(peer)
        self.world.calls[peer].append((self.rank, number, theirs))
        os.eventfd_write(self.world.bells[peer], 1)
        return ours

    def _pair(self, peer: int) -> tuple[socket.socket, socket.socket]:
        if peer in self.world.gone:
            raise PeerLostError("refused")
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        return ours, theirs

    def rate(self, peer: int) -> float:
        return 1e8

    def relays(self, peer: int) -> list[tuple[Relay, float]]:
        return [found for found in self.world.relays if found[0].stops[-1] == peer]

    def dial_passage(self, passage: Passage, deadline: float) -> socket.socket:
        peer, *stops = passage.stops
        ours, theirs = self._pair(peer)
        rest = Passage(origin=passage.origin, number=passage.number, stops=tuple(stops))
        self.world.passages[peer].append((rest, theirs))
        os.eventfd_write(self.world.bells[peer], 1)
        return ours

    def accept_passages(self) -> list[tuple[Passage, socket.socket]]:
        came = list(self.world.passages[self.rank])
        self.world.passages[self.rank].clear()
        return came

    def accept(self) -> list[tuple[int, int, socket.socket]]:
        try:
            os.eventfd_read(self.world.bells[self.rank])
        except BlockingIOError:
            return []
        came = list(self.world.calls[self.rank])
        self.world.calls[self.rank].clear()
        return came


@pytest.fixture
def make_world(in_memory: bool) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(size: int, num_paths: int = 1) -> World:
        made.append(World(size, num_paths, in_memory=in_memory))
        return made[-1]

    yield make
    for world in made:
        world.close()


MakeWorld = Callable[..., World]


def begin_send(end: Endpoint, peer: int, data: bytes, tag: int = 0, **more: object) -> Transfer:
    sending = transfer("send", peer, tag, data, **more)
    end.send(sending)
    return sending


def begin_receive(end: Endpoint, peer: int | None, num_bytes: int, tag: int = 0, **more: object) -> Transfer:
    receiving = transfer("recv", peer, tag, bytearray(num_bytes), **more)
    end.receive(receiving)
    return receiving


@pytest.mark.parametrize("num_paths", [1, 3])
@pytest.mark.parametrize("size", [0, 1, EAGER_BYTES, EAGER_BYTES + 1, 9 << 20])
def test_a_message_comes_whole(make_world: MakeWorld, size: int, num_paths: int) -> None:
    a, b = make_world(2, num_paths).ends
    data = random.Random(size).randbytes(size)
    for sent_first in (True, False):
        if sent_first:
            sending = begin_send(a, 1, data)
        receiving = begin_receive(b, 0, size)
        if not sent_first:
            sending = begin_send(a, 1, data)
        assert b.wait(receiving, LONG_S) and a.wait(sending, LONG_S)
        assert bytes(receiving.view) == data
        assert receiving.source == 0


def test_long_messages_take_all_paths_in_proportion(make_world: MakeWorld) -> None:
    world = make_world(2, 3)
    a, b = world.ends
    sending, receiving = begin_send(a, 1, bytes(6 << 20)), begin_receive(b, 0, 6 << 20)
    parts = parts_of(6 << 20, tuple(world.paths))
    assert [(end - begin) >> 20 for begin, end in parts] == [3, 2, 1]
    assert b.wait(receiving, LONG_S) and a.wait(sending, LONG_S)
    assert len(a._waiting.connections) == 3
    begin_send(a, 1, b"x")
    assert len(a._waiting.connections) == 3


def test_everybody_may_send_first_and_memory_stays_bounded(make_world: MakeWorld) -> None:
    """Short messages are over at once, until the window is full; the rest wait where they are."""
    a, b = make_world(2).ends
    count = 2 * WINDOW_BYTES // EAGER_BYTES
    sendings = [begin_send(a, 1, bytes([n]) * EAGER_BYTES, tag=n) for n in range(count)]
    receiving = begin_receive(b, 0, 1, tag=1000)
    last = begin_send(a, 1, b"!", tag=1000)
    assert b.wait(receiving, LONG_S), "it comes past all the others"
    assert sum(sending.is_done for sending in sendings) == WINDOW_BYTES // EAGER_BYTES
    held = sum(len(arrival.data or b"") for queue in b._exchange._matching._arrivals.values() for arrival in queue)
    assert held == WINDOW_BYTES
    for n in reversed(range(count)):
        receiving = begin_receive(b, 0, EAGER_BYTES, tag=n)
        assert b.wait(receiving, LONG_S)
        assert bytes(receiving.view) == bytes([n]) * EAGER_BYTES
    assert all(a.wait(sending, LONG_S) for sending in (*sendings, last))
    glances_until(a, lambda: a._exchange.outlets[1].credit >= 3 * WINDOW_BYTES // 4)


def test_long_messages_set_out_and_are_over_when_they_are_asked_for(make_world: MakeWorld) -> None:
    a, b = make_world(2, 2).ends
    size, kept = 1 << 20, early_bytes_for(2)
    messages = [random.Random(n).randbytes(size) for n in range(kept // size + 3)]
    sendings = [begin_send(a, 1, message, tag=n) for n, message in enumerate(messages)]

    def held() -> int:
        b.glance()
        a.glance()
        queues = b._exchange._matching._arrivals.values()
        return sum(len(each.data or b"") - each.left for queue in queues for each in queue if each.data is not None)

    until(lambda: held() == kept)
    for _ in range(10):
        assert held() == kept and not any(sending.is_done for sending in sendings)
    for n in reversed(range(len(messages))):
        receiving = begin_receive(b, 0, size, tag=n)
        assert b.wait(receiving, LONG_S) and a.wait(sendings[n], LONG_S)
        assert bytes(receiving.view) == messages[n]
    assert a._exchange.outlets[1].early_credit == kept and not b._exchange._pieces._coming


def test_a_message_that_nobody_asked_for_is_let_go_when_its_sender_leaves(make_world: MakeWorld) -> None:
    """Half of it has gone; the other half comes from a copy, for its owner may do with the memory as he likes."""
    a, b = make_world(2).ends
    data = bytearray(b"x" * (1 << 20))
    sending = begin_send(a, 1, data)  # type: ignore[arg-type]
    (connection,) = a._exchange.outlets[1].connections
    assert connection._writing is not None
    with pytest.raises(CommunicationError, match="destroyed"):
        a._exchange.drop(sending, CommunicationError("destroyed"))
        a._tell()
        a.wait(sending)
    sending.view.release()
    data.clear()  # would raise, if anybody looked at it still
    following = begin_send(a, 1, b"next", tag=1)
    receiving = begin_receive(b, 0, 4, tag=1)
    assert b.wait(receiving, LONG_S) and a.wait(following, LONG_S)


def glances_until(end: Endpoint, is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < until
        end.glance()


def test_receives_from_any_rank(make_world: MakeWorld) -> None:
    ends = make_world(3).ends
    receiving = [begin_receive(ends[0], None, 1) for _ in range(2)]
    begin_send(ends[2], 0, b"c")
    assert ends[0].wait(receiving[0], LONG_S)
    begin_send(ends[1], 0, b"b")
    assert ends[0].wait(receiving[1], LONG_S)
    assert [(r.source, bytes(r.view)) for r in receiving] == [(2, b"c"), (1, b"b")]


def test_nobody_waits_and_all_come(make_world: MakeWorld) -> None:
    """Transfers that nobody waits for go on by themselves; whoever is to be told is, before they are seen as over."""
    a, b = make_world(2).ends
    told = threading.Event()
    receiving = begin_receive(b, 0, 4 << 20)
    assert b.when_done(receiving, told.set)
    sending = begin_send(a, 1, bytes(4 << 20))
    assert told.wait(LONG_S)
    assert b.wait(receiving, LONG_S) and a.wait(sending, LONG_S)
    assert not b.when_done(receiving, told.clear)


def test_who_waits_relieves_the_thread(make_world: MakeWorld) -> None:
    a, b = make_world(2).ends
    receiving = begin_receive(b, 0, 4)
    moved_by: list[threading.Thread] = []
    b.when_done(receiving, lambda: moved_by.append(threading.current_thread()))
    until(lambda: b._is_attended)

    def send() -> None:
        until(lambda: bool(b._waiters) and not b._is_attended)
        begin_send(a, 1, b"data")

    sender = threading.Thread(target=send)
    sender.start()
    assert b.wait(receiving, LONG_S)
    sender.join()
    assert moved_by == [threading.current_thread()]


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.0005)


def test_several_threads_wait(make_world: MakeWorld) -> None:
    a, b = make_world(2).ends
    wrong: list[int] = []

    def exchange(end: Endpoint, peer: int, tag: int) -> None:
        for number in range(50):
            receiving = begin_receive(end, peer, 100, tag)
            sending = begin_send(end, peer, bytes([number]) * 100, tag)
            if not (end.wait(receiving, LONG_S) and end.wait(sending, LONG_S)):
                wrong.append(number)
            if bytes(receiving.view) != bytes([number]) * 100:
                wrong.append(number)

    threads = [
        threading.Thread(target=exchange, args=(end, peer, tag)) for end, peer in ((a, 1), (b, 0)) for tag in (1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("size", [8, 1 << 20])
@pytest.mark.parametrize("is_early", [True, False])
def test_a_disagreement_is_an_error_on_both_sides(make_world: MakeWorld, size: int, is_early: bool) -> None:
    a, b = make_world(2).ends
    if is_early:
        receiving = begin_receive(b, 0, 4)
    sending = begin_send(a, 1, bytes(size), dtype=b"float32")
    if not is_early:
        receiving = begin_receive(b, 0, 4)
    with pytest.raises(MismatchError, match=rf"rank 0 sent {size} bytes of float32 .* receives 4 bytes of uint8"):
        b.wait(receiving, LONG_S)
    with pytest.raises(MismatchError, match="ranks do not agree"):
        a.wait(sending, LONG_S)
        begin_send(a, 1, b"")


@pytest.mark.parametrize(
    ("begin", "says"),
    [
        (lambda end: begin_receive(end, 1, 8, tag=3, timeout_s=1.0), "nothing with this tag has come from rank 1"),
        (
            lambda end: begin_receive(end, None, 8, timeout_s=1.0),
            "nothing with this tag has come from any other rank",
        ),
        (lambda end: begin_send(end, 1, bytes(1 << 20), timeout_s=1.0), "rank 1 has not received it"),
    ],
)
def test_time_outs_name_the_rank(make_world: MakeWorld, begin: Callable[[Endpoint], Transfer], says: str) -> None:
    a, b = make_world(2).ends
    assert a.wait(begin_send(a, 1, b""), LONG_S), "reached before the clock runs"
    under_way = begin(a)
    with pytest.raises(CollectiveTimeoutError, match=rf"reached its timeout of 1 s: {says}"):
        a.wait(under_way)
    with pytest.raises(CollectiveTimeoutError, match="failed earlier"):
        begin_receive(b, 0, 1)


def test_a_wait_shorter_than_the_time_out_leaves_the_transfer_under_way(make_world: MakeWorld) -> None:
    a, b = make_world(2).ends
    receiving = begin_receive(a, 1, 1, timeout_s=LONG_S)
    assert not a.wait(receiving, 0.01)
    begin_send(b, 0, b"x")
    assert a.wait(receiving, LONG_S)


def test_a_rank_that_is_lost_fails_what_needs_it(make_world: MakeWorld) -> None:
    world = make_world(3)
    a, b, c = world.ends
    begin_send(b, 0, b"last words")
    receiving = begin_receive(a, 1, 5, tag=9)
    b._fail(CommunicationError("killed"))
    world.gone.add(1)
    with pytest.raises(PeerLostError, match=r"rank 1 was lost during recv from rank 1 \(tag 9"):
        a.wait(receiving, LONG_S)
    with pytest.raises(PeerLostError, match="failed earlier"):
        begin_send(c, 0, b"")


def test_what_a_rank_sent_before_it_left_is_still_received(make_world: MakeWorld) -> None:
    world = make_world(3)
    a, b, c = world.ends
    for number in range(3):
        begin_send(b, 0, bytes([number]) * 1000, tag=number)
    world.left.add(1)
    b.close()
    world.gone.add(1)
    for number in reversed(range(3)):
        receiving = begin_receive(a, 1, 1000, tag=number)
        assert a.wait(receiving, LONG_S)
        assert bytes(receiving.view) == bytes([number]) * 1000
    with pytest.raises(PeerLostError, match="rank 1 left"):
        a.wait(begin_receive(a, 1, 1), LONG_S)
    receiving = begin_receive(a, None, 1)
    begin_send(c, 0, b"c")
    assert a.wait(receiving, LONG_S), "the others go on"


def test_a_rank_whose_connections_a_child_holds_is_missed(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mycel.runtime.p2p_endpoint._SILENCE_S", 0.2)
    world = make_world(2)
    a, b = world.ends
    begin_send(b, 0, b"last words")
    glances_until(a, lambda: 1 in a._exchange.inlets)
    world.gone.add(1)
    receiving = begin_receive(a, 1, 10)
    assert a.wait(receiving, LONG_S) and bytes(receiving.view) == b"last words"
    with pytest.raises(PeerLostError, match="rank 1 was lost"):
        a.wait(begin_receive(a, 1, 10), LONG_S)


def test_closing_lets_through_what_was_accepted_and_fails_the_rest(make_world: MakeWorld) -> None:
    a, b = make_world(2).ends
    data = random.Random(5).randbytes(8 << 20)
    receiving, accepted = begin_receive(b, 0, len(data)), begin_send(a, 1, data)
    never, awaited = begin_send(a, 1, bytes(1 << 20), tag=5), begin_receive(a, 1, 1)
    glances_until(a, lambda: accepted.begun)
    a.close()
    assert b.wait(receiving, LONG_S) and bytes(receiving.view) == data
    assert a.wait(accepted)
    for failed in (never, awaited):
        with pytest.raises(CommunicationError, match="destroyed"):
            a.wait(failed)
    with pytest.raises(CommunicationError, match="destroyed"):
        begin_receive(a, 1, 1)


def test_bytes_that_are_no_message_fail_the_group(make_world: MakeWorld) -> None:
    world = make_world(2)
    receiving = begin_receive(world.ends[1], 0, 5)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    world.calls[1].append((0, 0, theirs))
    os.eventfd_write(world.bells[1], 1)
    ours.sendall(b"GET / HTTP/1.1\r\n" * 10)
    with pytest.raises(MismatchError, match="no message came"):
        world.ends[1].wait(receiving, LONG_S)
    ours.close()


def test_a_callback_may_send_and_receive(make_world: MakeWorld) -> None:
    a, b = make_world(2).ends
    answers: list[bytes] = []

    def answer() -> None:
        begin_send(b, 0, b"pong")
        following = begin_receive(b, 0, 4, tag=1)
        b.wait(following, LONG_S)
        answers.append(bytes(following.view))

    receiving = begin_receive(b, 0, 4)
    b.when_done(receiving, answer)
    begin_send(a, 1, b"ping")
    begin_send(a, 1, b"more", tag=1)
    assert b.wait(receiving, LONG_S)
    assert answers == [b"more"]
    pong = begin_receive(a, 1, 4)
    assert a.wait(pong, LONG_S) and bytes(pong.view) == b"pong"


# -- monitored barrier ------------------------------------------------------------------------------------------


def side_by_side(*calls: Callable[[], object]) -> list[BaseException | None]:
    """What each raises."""
    raised: list[BaseException | None] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            calls[number]()
        except BaseException as error:
            raised[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_a_monitored_barrier_names_who_is_missing_and_the_next_one_passes(make_world: MakeWorld) -> None:
    ends = make_world(4).ends
    everybody = [lambda end=end: pass_barrier(end, LONG_S, wait_all_ranks=False) for end in ends]
    assert side_by_side(*everybody) == [None] * 4
    for wait_all, says in ((False, "Rank 1 failed to pass"), (True, "Ranks 1, 3 failed to pass")):
        some = [lambda end=end, w=wait_all: pass_barrier(end, 0.3, wait_all_ranks=w) for end in (ends[0], ends[2])]
        errors = side_by_side(*some)
        assert says in str(errors[0]) and isinstance(errors[0], CollectiveTimeoutError)
        assert "Rank 2 successfully reached monitoredBarrier" in str(errors[1]) and says in str(errors[1])
    assert side_by_side(*everybody) == [None] * 4


def test_a_rank_that_gave_up_does_not_count(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mycel.runtime.monitored._ANSWER_S", 0.0)
    ends = make_world(2).ends
    with pytest.raises(CollectiveTimeoutError, match="rank 0 has not answered"):
        pass_barrier(ends[1], 0.1, wait_all_ranks=False)
    with pytest.raises(CollectiveTimeoutError, match="Rank 1 failed to pass monitoredBarrier"):
        pass_barrier(ends[0], 0.2, wait_all_ranks=False)
