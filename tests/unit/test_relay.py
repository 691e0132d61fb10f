"""Control over a graph: whoever is lost, every word reaches every rank once, and who is gone is named, no other."""

from __future__ import annotations

import json
import logging
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.effort import examples
from tests.unit.test_board import SECRET, Extended, meet
from tests.unit.test_rendezvous import in_threads

from mycel.errors import CollectiveTimeoutError, CommunicationError, PeerLostError
from mycel.runtime.control import Control
from mycel.runtime.control_graph import Graph, control_graph, distances, spanning_tree
from mycel.runtime.evidence import Evidence
from mycel.runtime.hearing import Hearing
from mycel.runtime.messages import (
    LONGEST,
    Abort,
    Bye,
    Calling,
    Finding,
    Gone,
    Message,
    Position,
    Relayed,
    Whereabouts,
    record_of,
)
from mycel.runtime.relay import Relay
from mycel.runtime.transport.gathering import gather
from mycel.runtime.transport.secret import Secret
from mycel.runtime.verdict import State

LONG_S = 20.0
HOSTS = [f"node{rank // 3}" for rank in range(21)]
STATE = State(what="all_reduce #3", waits_for=(1,), header=(3, 7, 64), limit_s=5.0)
#: Machines by their number of ranks.
LAYOUTS = st.lists(st.integers(1, 12), min_size=1, max_size=14).filter(lambda sizes: sum(sizes) >= 3)


def hosts_of(sizes: Sequence[int]) -> list[str]:
    return [f"node{number}" for number, size in enumerate(sizes) for _ in range(size)]


def without(graph: Graph, lost: set[int]) -> list[list[int]]:
    return [
        [each for each in near if each not in lost] if rank not in lost else [] for rank, near in enumerate(graph)
    ]


class Net:
    """The control connections of all ranks of a group, in one process and thread."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.graph = control_graph(hosts)
        ends: list[dict[int, socket.socket]] = [{} for _ in hosts]
        for rank, near in enumerate(self.graph):
            for peer in near:
                if rank < peer:
                    ends[rank][peer], ends[peer][rank] = socket.socketpair()
                    ends[rank][peer].setblocking(False)
                    ends[peer][rank].setblocking(False)
        self.controls = {
            rank: Control(
                ends[rank], rank=rank, size=len(hosts), num_vertices=30, relay=Relay(rank, self.graph, hosts)
            )
            for rank in range(len(hosts))
        }
        #: What each rank has heard: author and word.
        self.heard: dict[int, list[tuple[int, Message | None]]] = {rank: [] for rank in self.controls}

    def settle(self, but: Sequence[int] = ()) -> None:
        """Have ranks read until nobody has anything to read any more; those of ``but`` are stopped."""
        while True:
            events = {rank: control.take() for rank, control in self.controls.items() if rank not in but}
            for rank, found in events.items():
                self.heard[rank] += [(event.peer, event.message) for event in found]
            ready = [c for rank, c in self.controls.items() if rank not in but and not is_quiet(c)]
            if not any(events.values()) and not ready:
                return

    def kill(self, rank: int) -> None:
        self.controls.pop(rank).after_fork_in_child()  # closes without a goodbye, as the kernel does
        self.heard.pop(rank)

    def forget(self) -> None:
        for heard in self.heard.values():
            heard.clear()


def is_quiet(control: Control) -> bool:
    return not select.select([int(control.descriptors[0])], [], [], 0)[0]


@contextmanager
def net(hosts: Sequence[str] = HOSTS) -> Iterator[Net]:
    made = Net(hosts)
    try:
        yield made
    finally:
        for control in made.controls.values():
            control.after_fork_in_child()


def inject(net: Net, to: int, by_neighbour: int, data: bytes) -> None:
    """Have a neighbour write anything to a rank."""
    net.controls[by_neighbour]._lines[to].sock.sendall(data)


def wire(record: object) -> bytes:
    payload = json.dumps(record).encode()
    return struct.pack("<I", len(payload)) + payload


# -- the graph --------------------------------------------------------------------------------------------


@examples(100, 2000)
@given(LAYOUTS)
def test_no_single_loss_parts_the_graph_and_degrees_are_small(sizes: list[int]) -> None:
    hosts = hosts_of(sizes)
    graph = control_graph(hosts)
    assert all(rank in graph[peer] and rank != peer for rank, near in enumerate(graph) for peer in near)
    losses = [{rank} for rank in range(len(hosts))]
    losses += [{rank for rank, host in enumerate(hosts) if host == name} for name in set(hosts)]
    for lost in losses:
        left = [rank for rank in range(len(hosts)) if rank not in lost]
        if left:
            away = distances(without(graph, lost), left[0])
            assert all(away[rank] >= 0 for rank in left), (sizes, lost)


@pytest.mark.parametrize("per_node", [1, 2, 8, 16, 1024])
def test_a_thousand_ranks_have_few_neighbours_and_short_ways(per_node: int) -> None:
    graph = control_graph([f"node{rank // per_node}" for rank in range(1024)])
    assert max(map(len, graph)) <= 16
    assert max(distances(graph, 0)) <= 10 and max(distances(graph, 777)) <= 10


@examples(50, 500)
@given(LAYOUTS)
def test_the_tree_has_every_rank_once(sizes: list[int]) -> None:
    graph = control_graph(hosts_of(sizes))
    trees = [spanning_tree(graph, rank) for rank in range(len(graph))]
    assert [rank for rank, (parent, _) in enumerate(trees) if parent < 0] == [0]
    assert sorted(child for _, children in trees for child in children) == list(range(1, len(graph)))
    assert all(trees[child][0] == rank for rank, (_, children) in enumerate(trees) for child in children)


# -- words ------------------------------------------------------------------------------------------------


def test_every_word_comes_to_every_rank_once() -> None:
    with net() as ranks:
        said = [Abort(by=5, kind="failed", cause=f"cause {number}") for number in range(40)]
        for message in said:
            ranks.controls[5].tell_all(message)
        ranks.settle()
        for rank, heard in ranks.heard.items():
            assert heard == ([] if rank == 5 else [(5, message) for message in said])


def test_a_word_comes_to_all_who_are_left_whoever_dies_first() -> None:
    machines = {host: {rank for rank, other in enumerate(HOSTS) if other == host} for host in HOSTS}
    for lost in [{rank} for rank in range(len(HOSTS))] + list(machines.values()):
        with net() as ranks:
            for rank in lost:
                ranks.kill(rank)
            ranks.settle()
            for control in ranks.controls.values():
                assert control.gone == control.dead == lost and not control.left and not control.ended
            ranks.forget()
            author = min(ranks.controls)
            said = Position(by=author, inquiry=(0, 0), state=STATE)
            ranks.controls[author].tell_all(said)
            ranks.settle()
            assert all(heard == [(author, said)] for rank, heard in ranks.heard.items() if rank != author)


@examples(30, 300)
@given(st.integers(0, len(HOSTS) - 1), st.lists(st.integers(0, len(HOSTS) - 1), max_size=12), st.data())
def test_a_word_under_way_comes_to_all_who_are_left(author: int, order: list[int], data: st.DataObject) -> None:
    """Some ranks have read it, others have not, when one dies, its author or another, or its machine."""
    victim = data.draw(st.integers(0, len(HOSTS) - 1))
    is_machine = data.draw(st.booleans())
    lost = {rank for rank, host in enumerate(HOSTS) if host == HOSTS[victim]} if is_machine else {victim}
    with net() as ranks:
        said = Abort(by=author, kind="failed", cause="x")
        ranks.controls[author].tell_all(said)
        for rank in order:
            ranks.heard[rank] += [(event.peer, event.message) for event in ranks.controls[rank].take()]
        for rank in lost:
            ranks.kill(rank)
        ranks.settle()
        counts = {heard.count((author, said)) for rank, heard in ranks.heard.items() if rank != author}
        is_heard_of = author not in lost or any(peer not in lost for peer in ranks.graph[author])
        assert counts == {1} if is_heard_of else counts <= {0, 1}
        assert all(control.gone == lost for control in ranks.controls.values())


def test_a_rank_that_is_stopped_keeps_nobody_from_hearing() -> None:
    with net() as ranks:
        said = Abort(by=0, kind="failed", cause="x")
        ranks.controls[0].tell_all(said)
        ranks.settle(but=(1, 3, 12))
        assert all(heard == [(0, said)] for rank, heard in ranks.heard.items() if rank not in (0, 1, 3, 12))
        ranks.settle()
        assert all(heard == [(0, said)] for rank, heard in ranks.heard.items() if rank != 0)


def test_who_leaves_is_no_loss() -> None:
    with net() as ranks:
        leaving = ranks.controls.pop(4)
        closing = threading.Thread(target=leaving.close)
        closing.start()
        closing.join()
        ranks.settle()
        for control in ranks.controls.values():
            assert control.left == control.gone == {4} and not control.dead


def test_where_ranks_can_be_found_is_known_to_all() -> None:
    with net() as ranks:
        for rank, control in ranks.controls.items():
            control.tell([peer for peer in ranks.controls if peer != rank], Whereabouts(handle=f"handle {rank}"))
        ranks.settle()
        for rank, control in ranks.controls.items():
            assert control.handles == {peer: f"handle {peer}" for peer in ranks.controls if peer != rank}


def test_a_word_for_one_rank_comes_to_that_one() -> None:
    with net() as ranks:
        said = Calling(epoch=0, header=(3, 7, 64))
        for peer in range(1, len(HOSTS)):
            ranks.controls[0].tell((peer,), said)
            ranks.settle()
            assert ranks.heard.pop(peer) == [(0, said)]
            ranks.heard[peer] = []
        assert not any(ranks.heard.values())


def test_a_word_for_one_rank_that_is_said_again_goes_around_ranks_that_are_stopped() -> None:
    with net() as ranks:
        stopped = ranks.graph[0][:-1]
        to = next(rank for rank in range(len(HOSTS)) if rank not in (0, *ranks.graph[0]))
        for _ in range(200):
            ranks.controls[0].tell((to,), Calling(epoch=0, header=(3, 7, 64)))
            ranks.settle(but=stopped)
            if ranks.heard[to]:
                return
        pytest.fail("never by way of the one neighbour that runs")


def test_a_process_that_has_ended_is_missed_on_its_machine_and_gone_for_others() -> None:
    with net() as ranks:
        ranks.controls[4].note_ended(3)  # a child of its holds its connections
        ranks.settle(but=(3,))
        for rank, control in ranks.controls.items():
            assert rank == 3 or control.gone == {3}
            assert control.ended == ({3} if rank in (4, 5) else set())
        assert all(heard.count((3, None)) == 1 for rank, heard in ranks.heard.items() if rank not in (3, 4)), (
            "others who follow it say nothing that is known"
        )


def test_who_is_said_to_be_gone_and_is_not_says_so() -> None:
    with net() as ranks:
        accuser = ranks.graph[7][0]
        ranks.controls[accuser]._publish(Gone(rank=7, has_ended=False))
        ranks.settle()
        assert not any(control.gone for control in ranks.controls.values())
        ranks.kill(7)
        ranks.settle()
        assert all(control.gone == {7} for control in ranks.controls.values())


# -- what is refused --------------------------------------------------------------------------------------


def relayed(by: int, number: int, said: Message) -> dict[str, object]:
    return record_of(Relayed(by=by, number=number, said=record_of(said)))


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        (record_of(Abort(by=5, kind="failed", cause="x")), "'abort', which comes in one of type 'relayed'"),
        (record_of(Bye()), "'bye', which comes in one of type 'relayed'"),
        (relayed(5, 1, Abort(by=6, kind="failed", cause="x")), "rank 5 speaks for another one"),
        (relayed(5, 1, Calling(epoch=0, header=(1, 2, 3))), "it holds one of type 'calling'"),
        (relayed(5, 1, Relayed(by=5, number=2, said={})), "it holds one of type 'relayed'"),
        (relayed(5, 1 << 40, Bye()), "number 1099511627776 of rank 5 comes after 0"),
        (relayed(5, 1, Gone(rank=20, has_ended=False)), "rank 5 is no neighbour of rank 20"),
        (relayed(5, 1, Bye()) | {"by": 99}, "'by' is 99"),
        (relayed(5, 1, Bye()) | {"number": 0}, "'number' is 0"),
        (relayed(5, 1, Bye()) | {"said": [1]}, "'said' is [1]"),
        (relayed(5, 1, Bye()) | {"said": {"type": "bye"}}, "of version None"),
        ({"mycel": 1, "type": "routed", "by": 5, "to": 0, "hops": 1, "said": record_of(Bye())}, "one of type 'bye'"),
        ({"mycel": 1, "type": "routed", "by": 5, "to": 0, "hops": 1 << 20, "said": {}}, "'hops' is 1048576"),
    ],
    ids=range(13),
)
def test_what_is_forged_is_refused_and_passed_on_to_nobody(
    record: dict[str, object], complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with net() as ranks, caplog.at_level(logging.WARNING):
        neighbour = ranks.graph[0][0]
        inject(ranks, 0, neighbour, wire(record))
        ranks.settle()
        assert complaint in caplog.text and len(caplog.records) == 1
        assert not any(ranks.heard.values()) and not any(c.gone or c.left for c in ranks.controls.values())


def test_what_comes_again_is_dropped_however_late() -> None:
    with net(HOSTS[:6]) as ranks:
        neighbour = ranks.graph[0][0]
        first = wire(relayed(neighbour, 1, Abort(by=neighbour, kind="failed", cause="first")))
        inject(ranks, 0, neighbour, first)
        for number in range(2, 1100):
            inject(
                ranks, 0, neighbour, wire(relayed(neighbour, number, Abort(by=neighbour, kind="failed", cause="x")))
            )
            if number % 100 == 0:
                ranks.settle()
        inject(ranks, 0, neighbour, first)
        ranks.settle()
        for rank, heard in ranks.heard.items():
            if rank != neighbour:
                assert Counter(message.cause for _, message in heard if isinstance(message, Abort))["first"] == 1


def test_who_announces_too_long_a_word_is_dropped_and_heard_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    with net() as ranks, caplog.at_level(logging.WARNING):
        neighbour = ranks.graph[0][0]
        inject(ranks, 0, neighbour, struct.pack("<I", LONGEST + 1))
        ranks.settle()
        assert f"rank {neighbour}, a record of {LONGEST + 1} bytes" in caplog.text
        assert ranks.controls[0].cut == {neighbour}
        assert not any(control.gone for control in ranks.controls.values()), "one connection is not the rank"
        said = Abort(by=neighbour, kind="failed", cause="still here")
        ranks.controls[neighbour].tell_all(said)
        ranks.settle()
        assert (neighbour, said) in ranks.heard[0]


def test_words_of_a_graph_are_refused_in_a_mesh(caplog: pytest.LogCaptureFixture) -> None:
    a, b = socket.socketpair()
    b.setblocking(False)
    control = Control({1: b}, rank=0, size=3, num_vertices=4)
    with a, caplog.at_level(logging.WARNING):
        a.sendall(wire(relayed(2, 1, Bye())) + wire(record_of(Gone(rank=2, has_ended=False))))
        assert not control.take() and not control.left and not control.gone
        assert "in a group whose ranks all hear each other" in caplog.text
        control.close()


def test_the_longest_words_can_be_relayed() -> None:
    text, everybody = "\U0001f344" * 10_000, tuple(range(20_000))
    header = (-(1 << 63), -(1 << 63), -(1 << 63))
    state = State(what=text, waits_for=everybody, header=header, mismatch=text, recent=(header,) * 500)
    said: list[Message] = [Position(by=0, inquiry=(0, 0), state=state)]
    said.append(Abort(by=19_999, kind="mismatch", cause=text, ranks=everybody))
    for message in said:
        word = Relayed(by=19_999, number=(1 << 63) - 1, said=record_of(message))
        assert len(json.dumps(record_of(word), separators=(",", ":"))) <= LONGEST


# -- what ranks make of it --------------------------------------------------------------------------------


def test_all_hear_of_a_failure_and_where_everybody_stands() -> None:
    with net() as ranks:
        hearings = {rank: Hearing(rank, len(HOSTS), control) for rank, control in ranks.controls.items()}
        for rank, hearing in hearings.items():
            hearing.say(State(what=f"barrier #{rank}", waits_for=(), header=(1, 5, 4)))
        for _ in range(2 * max(distances(ranks.graph, 0))):
            for hearing in hearings.values():
                hearing.observe()
        for rank, hearing in hearings.items():
            assert sorted(hearing.said()[0]) == list(range(len(HOSTS)))
            assert set(hearing.identities) == set(ranks.graph[rank]), "nobody else is followed"
        cause = hearings[9].poison("lost", "rank 20 was lost", ranks=(20,))
        for _ in range(2 * max(distances(ranks.graph, 9))):
            for hearing in hearings.values():
                hearing.observe()
        assert {(type(h.cause), str(h.cause), h.lost) for h in hearings.values()} == {
            (PeerLostError, str(cause), frozenset({20}))
        }


def test_all_come_to_say_the_same_where_several_miss_a_rank_at_once() -> None:
    """In different calls they would say it in different words; those of the lowest rank count."""
    with net(HOSTS[:9]) as ranks:
        hearings = {rank: Hearing(rank, 9, control) for rank, control in ranks.controls.items()}
        for rank in (6, 2, 4):
            hearings[rank].poison("lost", f"rank 8 was lost during broadcast #{rank}", ranks=(8,))
        hearings[0].poison("lost", "rank 7 was lost", ranks=(7,))  # something else: whoever hears this first keeps it
        for _ in range(12):
            for hearing in hearings.values():
                hearing.observe()
        settled = {str(hearing.settled()) for rank, hearing in hearings.items() if hearing.lost == {8}}
        assert settled == {"rank 8 was lost during broadcast #2"}
        assert hearings[1].poison("lost", "late", ranks=(8,)) is hearings[1].cause


# -- forming ----------------------------------------------------------------------------------------------


def nothing() -> None:
    """No rank has failed."""


def gathered(size: int, absent: Sequence[int], patience_s: float) -> dict[int, CommunicationError | None]:
    """What ranks find that wait until all have come; those who are absent close their connections."""
    graph = control_graph(["node"] * size)
    ends: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for rank, near in enumerate(graph):
        for peer in near:
            if rank < peer:
                ends[rank][peer], ends[peer][rank] = socket.socketpair()
    found: dict[int, CommunicationError | None] = {}

    def wait_for(sock: socket.socket, event: int, seconds: float) -> bool:
        poller = select.poll()
        poller.register(sock, event)
        return bool(poller.poll(min(seconds, 0.1) * 1000))

    def be(rank: int) -> None:
        try:
            if rank not in absent:
                gather(rank, ends[rank], graph, wait_for, nothing, nothing, time.monotonic() + patience_s)
            found[rank] = None
        except CommunicationError as error:
            found[rank] = error
        if found[rank] is not None or rank in absent:
            for sock in ends[rank].values():
                sock.close()

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    for sock in [sock for mine in ends for sock in mine.values()]:
        sock.close()
    return found


@pytest.mark.parametrize("size", [3, 13])
def test_ranks_wait_until_all_have_come(size: int) -> None:
    assert gathered(size, (), LONG_S) == dict.fromkeys(range(size))


def test_where_one_does_not_come_nobody_goes_on() -> None:
    found = gathered(13, (7,), LONG_S)
    assert all(isinstance(error, PeerLostError) for rank, error in found.items() if rank != 7)
    assert any("rank 7 was lost while the group was formed" in str(error) for error in found.values())


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mycel.runtime.transport.gathering._OTHERS_S", 0.1)
    a, b = socket.socketpair()
    with a, b, pytest.raises(CollectiveTimeoutError, match="rank 0 has waited in vain for rank 1"):
        gather(0, {1: a}, ((1,), (0,)), lambda *_: False, nothing, nothing, time.monotonic())


@pytest.mark.parametrize("secret", [None, SECRET])
def test_ranks_connect_along_the_graph_and_talk_over_it(secret: Secret | None) -> None:
    size = 8
    ranks = meet(Extended(), size, notice="for all", secret=secret, mesh_ranks=4)
    controls = dict(enumerate(in_threads(*(lambda r=r: Control.open(r, LONG_S, 9) for r in ranks))))
    graph = control_graph(["a"] * size)
    assert [tuple(sorted(control.neighbours)) for control in controls.values()] == list(graph)
    said = Abort(by=3, kind="failed", cause="x")
    controls[3].tell_all(said)
    until, heard = time.monotonic() + LONG_S, {3}
    while len(heard) < size and time.monotonic() < until:
        heard |= {rank for rank, control in controls.items() if any(e.message == said for e in control.take())}
    assert len(heard) == size
    for control in controls.values():
        control.after_fork_in_child()
    in_threads(*(rank.close for rank in ranks))


def test_a_rank_that_never_connects_is_named_to_all() -> None:
    """Those that have all of their connections wait for the others, and hear who is missed by its neighbours."""
    size = 8
    ranks = meet(Extended(), size, notice="for all", mesh_ranks=4)
    errors = in_threads(*(lambda r=r: r.connect_control(1.0, control_graph(["a"] * size)) for r in ranks[:-1]))
    assert all("rank 7" in str(error) for error in errors), errors
    in_threads(*(rank.close for rank in ranks))


def test_evidence_reaches_everybody_in_its_pieces() -> None:
    with net(HOSTS[:9]) as ranks:
        evidence = Evidence(got=tuple((0, (0, 4, 1), count) for count in range(3000)))
        pieces = Finding.of(2, (0, 0), evidence)
        assert len(pieces) > 1
        for piece in pieces:
            ranks.controls[2].tell_all(piece)
        ranks.settle()
        assert all([message for _, message in heard] == list(pieces) for r, heard in ranks.heard.items() if r != 2)
