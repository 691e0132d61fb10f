"""Control connections between ranks of one process: what peers may send, and what the watching thread makes of it."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from mycel.errors import CommunicationError, PeerLostError
from mycel.runtime.control import Control
from mycel.runtime.hearing import Hearing
from mycel.runtime.messages import Abort, Bye, Heard, Identity, Position
from mycel.runtime.verdict import State
from mycel.runtime.watch import Watched, check_members, watch

#: For a thread to have noticed; nothing is measured.
LONG_S = 20.0


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < deadline, "it never happened"
        threading.Event().wait(0.01)


def pair() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    return ends


@contextmanager
def two_ranks() -> Iterator[tuple[Hearing, Hearing]]:
    a, b = pair()
    controls = [Control({1 - rank: sock}, rank=rank, size=2, num_vertices=4) for rank, sock in enumerate((a, b))]
    made = [Hearing(rank, 2, control) for rank, control in enumerate(controls)]
    try:
        yield made[0], made[1]
    finally:
        for control in controls:
            control.close()


def watched(hearing: Hearing, members: tuple[int, ...] = (10, 11), machines: tuple[str, ...] = ("a", "a")) -> Watched:
    made = Watched(hearing, members, machines, [("127.0.0.1", 1)] * len(members))
    watch(made)
    return made


@pytest.mark.parametrize(
    "payload",
    [
        b'{"type":"news"}',
        b'{"mycel":2,"type":"bye"}',
        b'{"mycel":1,"type":"news"}',
        b'{"mycel":1,"type":["bye"]}',
        b'{"mycel":1,"type":"abort","by":0,"kind":"lost"}',
        b"[]",
        b"[" * 60_000,
        b'{"mycel":1,"type":"state","by":1e400}',
        b"\xff\xfe",
        b"",
    ],
    ids=range(10),
)
def test_what_is_not_understood_is_ignored_with_one_warning(payload: bytes, caplog: pytest.LogCaptureFixture) -> None:
    a, b = pair()
    with a, closing(Control({3: b}, rank=0, size=4, num_vertices=4)) as control, caplog.at_level(logging.WARNING):
        for data in (payload, payload, b'{"mycel":1,"type":"bye"}'):
            a.sendall(struct.pack("<I", len(data)) + data)
        assert [event.message for event in control.take()] == [Bye()]
        assert control.left == {3} and not control.gone
        (record,) = caplog.records
        assert "control connection of rank 3" in record.message and "ignored" in record.message


def test_an_absurd_length_closes_that_connection_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    a, b = pair()
    c, d = pair()
    with a, c, closing(Control({1: b, 2: d}, rank=0, size=4, num_vertices=4)) as control:
        a.sendall(struct.pack("<I", (1 << 32) - 1))
        with caplog.at_level(logging.WARNING):
            assert [(event.peer, event.message) for event in control.take()] == [(1, None)]
        assert "rank 1, a record of 4294967295 bytes" in caplog.text
        assert control.cut == {1} and not control.dead
        with pytest.raises(OSError):
            a.sendall(b"x" * 100)
        control.tell_all(Bye())
        assert c.recv(1000)


def test_an_alert_is_seen_by_whoever_waits_until_it_is_ended() -> None:
    a, b = pair()
    with a, closing(Control({1: b}, rank=0, size=2, num_vertices=4)) as control:
        poller = select.poll()
        for descriptor in control.descriptors.tolist():
            poller.register(descriptor, select.POLLIN)
        assert not poller.poll(0)
        control.alert()
        assert poller.poll(0) and poller.poll(0)
        control.calm()
        control.calm()
        assert not poller.poll(0)


def test_two_descriptors_are_watched_however_many_ranks_there_are() -> None:
    pairs = {peer: pair() for peer in range(1, 40)}
    sockets = {peer: own for peer, (own, _) in pairs.items()}
    with closing(Control(sockets, rank=0, size=40, num_vertices=4)) as control:
        assert len(control.descriptors) == 2 and len(control.watched()) == 1
        for peer in (3, 17, 39):
            Control({0: pairs[peer][1]}, rank=peer, size=40, num_vertices=4).close()
        control.wait(LONG_S)
        events = control.take()
        assert {event.peer for event in events} == control.left == control.gone == {3, 17, 39}
        assert control.take() == []
        assert not select.select(control.descriptors.tolist(), [], [], 0)[0], "those that have left are let go of"
    for peer, (_, other) in pairs.items():
        if peer not in (3, 17, 39):
            other.close()


def test_a_connection_that_is_dropped_wakes_nobody_though_a_copy_of_it_stays_open() -> None:
    a, b = pair()
    with a, b.dup(), closing(Control({1: b}, rank=0, size=2, num_vertices=4)) as control:  # as in a child on its way
        a.sendall(struct.pack("<I", (1 << 32) - 1))  # no record is as long
        assert [event.message for event in control.take()] == [None]
        a.sendall(b"more")  # the copy takes it
        assert not select.select(control.descriptors.tolist(), [], [], 0)[0]


def test_kernels_are_asked_and_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        a = socket.create_connection(listener.getsockname())
        b, _ = listener.accept()
    with a:
        b.setblocking(False)
        with closing(Control({1: b}, rank=0, size=2, num_vertices=4)) as control:
            silence = control.silence_s(1)
            assert silence is not None and 0 <= silence < LONG_S
            assert b.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert b.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 3
        assert control.silence_s(1) is None


def test_a_forked_child_closes_its_copies() -> None:
    a, b = pair()
    control = Control({1: b}, rank=0, size=2, num_vertices=4)
    with a:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)  # lives on until this end is closed
            os._exit(0)
        os.close(reader)
        control.after_fork_in_child()  # closes without a goodbye, as the kernel does for who is killed
        until(lambda: bool(select.select([a], [], [], 0)[0]))
        assert a.recv(100) == b"", "the child holds the connection"
        os.close(writer)
        os.waitpid(child, 0)
    control.close()


def test_what_is_said_between_calls_is_heard_and_goes_on_to_whoever_waits() -> None:
    with two_ranks() as (mine, other):
        group = watched(mine)
        other.poison("lost", "rank 7 was lost", ranks=(1,))
        until(lambda: mine.cause is not None)
        assert isinstance(mine.cause, PeerLostError) and str(mine.cause) == "rank 7 was lost"
        assert mine.lost == {1}
        poller = select.poll()
        poller.register(int(mine.control.descriptors[-1]), select.POLLIN)
        assert poller.poll(0), "a call under way must look up"
        with pytest.raises(PeerLostError, match="new group of rank 11, rank 5 cannot be made, for rank 11 was lost"):
            check_members((11, 5))
        check_members((10, 5))
        group.close()
        check_members((11, 5))
    until(lambda: "mycel-watch" not in [thread.name for thread in threading.enumerate()])


def test_a_connection_that_ends_without_goodbye_is_no_failure_but_no_new_group_waits_for_it() -> None:
    with two_ranks() as (mine, other):
        group = watched(mine)
        other.control.after_fork_in_child()  # closes without a goodbye, as the kernel does for who is killed
        until(lambda: mine.control.gone == {1})
        assert mine.cause is None
        with pytest.raises(PeerLostError, match="for rank 11 was lost: its process ended"):
            check_members((10, 11))
        group.close()


def test_a_process_that_has_ended_is_noticed_though_its_connections_are_open() -> None:
    code = "from mycel.runtime.processes import own_identity as o; i = o(); print(i.pid, i.started, i.boot,"
    code += " i.namespace, flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    pid, started, boot, namespace = child.stdout.readline().split()
    with child, two_ranks() as (mine, other):
        group = watched(mine)
        identity = Identity(pid=int(pid), started=int(started), boot=boot, namespace=int(namespace))
        other.control.tell_all(identity)
        until(lambda: mine.identities.get(1) == identity)
        assert not mine.control.ended
        child.send_signal(signal.SIGKILL)
        until(lambda: mine.control.ended == {1})
        assert mine.cause is None, "what it has sent may be on its way yet"
        with two_ranks() as (later, its_peer):
            second = watched(later)
            until(lambda: 1 in later.identities)
            assert not later.control.ended
            its_peer.control.tell_all(identity)
            until(lambda: later.control.ended == {1})  # known from the first group
            second.close()
        group.close()


def test_what_a_peer_does_not_take_is_kept_for_it_and_given_up_with_it() -> None:
    (a, b), (c, d) = pair(), pair()
    b.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    with c, closing(Control({1: b, 2: d}, rank=0, size=3, num_vertices=4)) as control:
        said = Abort(by=0, kind="failed", cause="x" * 3000, ranks=())
        for _ in range(50):
            control.tell((1,), said)
        control.tell((2,), said)
        assert not control.flush()
        assert (b.fileno(), select.POLLOUT) in control.watched()
        a.close()
        assert control.flush(), "who is gone is not waited for"
        assert len(c.recv(1 << 20)) > 1000


def test_a_question_is_answered_by_who_hears_and_an_answer_is_passed_to_the_thread() -> None:
    with two_ranks() as (mine, other):
        group = watched(mine)
        other.ask_for("a")  # the machine this process is on
        other.ask_for("b")  # one that nobody hears

        heard: list[object] = []

        def ask() -> bool:
            heard.extend(event.message for event in other.control.take())
            return any(isinstance(message, Heard) for message in heard)

        until(ask)
        assert [message.machine for message in heard if isinstance(message, Heard)] == ["a"]
        group.close()


def test_what_goes_wrong_in_the_thread_is_the_error_of_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with two_ranks() as (mine, other):
        monkeypatch.setattr(mine, "observe", lambda: 1 // 0)
        group = watched(mine)
        other.control.tell_all(Bye())
        until(lambda: mine.cause is not None)
        assert isinstance(mine.cause, CommunicationError) and "ZeroDivisionError" in str(mine.cause)
        group.close()


def test_a_state_makes_the_call_under_way_look_up_even_if_another_thread_has_read_it() -> None:
    with two_ranks() as (mine, other):
        state = State(what="barrier #1", waits_for=(0,), header=(1, 5, 4), limit_s=5.0)
        other.control.tell_all(Position(by=1, inquiry=(0, 0), state=state))
        mine.observe()
        poller = select.poll()
        poller.register(int(mine.control.descriptors[-1]), select.POLLIN)
        assert poller.poll(0)


def test_questions_come_once_by_however_many_ways() -> None:
    """Three ranks in a row of sockets: what one asks reaches the third through the second, and stops."""
    a, b = pair()
    c, d = pair()
    with a, d:
        control = Control({0: b, 2: c}, rank=1, size=3, num_vertices=4)
        hearing = Hearing(1, 3, control)
        group = watched(hearing, members=(0, 1, 2), machines=("a", "b", "c"))
        d.recv(1 << 16)  # who that rank is
        question = json.dumps({"mycel": 1, "type": "question", "by": 0, "number": 1, "machine": "z"}).encode()
        for _ in range(3):
            a.sendall(struct.pack("<I", len(question)) + question)
        until(lambda: bool(select.select([d], [], [], 0)[0]))
        hearing.poison("failed", "the end")
        until(lambda: b"the end" in d.recv(1 << 16, socket.MSG_PEEK))
        data = d.recv(1 << 16)
        assert data.count(b'"question"') == 1
        group.close()
        control.close()


def test_the_words_of_an_abort_are_those_of_the_first() -> None:
    with two_ranks() as (mine, other):
        first = mine.poison("failed", "x" * 100_000)
        assert mine.poison("lost", "another") is first
        (said,) = [event.message for event in other.control.take() if isinstance(event.message, Abort)]
        assert said.cause == str(first) and len(said.cause) < 10_000
