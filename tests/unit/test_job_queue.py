"""The queue of a group, and waits in it, without ranks: order, errors, what interrupts what."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mycel.errors import CommunicationError
from mycel.runtime.calls import Latch, Ticket
from mycel.runtime.faults import Attempt
from mycel.runtime.job_queue import JobQueue
from mycel.runtime.turns import Errand


def queue() -> JobQueue:
    return JobQueue(lambda status, ticket: None, lambda error, where: CommunicationError(f"{where}: {error}"))


def ticket(what: str, settle: Any = None) -> Ticket:
    attempt = Attempt(what=what, timeout_s=5.0, deadline=0.0, header=(0, 0, 0))
    return Ticket(job=None, attempt=attempt, settle=settle)


@contextmanager
def raising_soon(error: BaseException, after_s: float = 0.05) -> Iterator[None]:
    """A signal whose handler raises, while the main thread is in the block."""

    def handle(*_: Any) -> None:
        raise error

    before = signal.signal(signal.SIGUSR1, handle)
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def test_tickets_are_settled_and_told_in_their_order() -> None:
    line, seen = queue(), list[str]()
    tickets = [ticket(name, lambda name=name: seen.append(f"settle {name}")) for name in "abc"]
    for one in tickets:
        line.hold(one)
        line.when_finished(one, lambda t: seen.append(f"tell {t.what}"))
    tickets[1].is_through = True
    line.take()
    assert not tickets[1].is_finished, "a is not over"
    tickets[0].is_through = True
    assert line.wait(tickets[1], 0.0)
    assert seen == ["settle a", "tell a", "settle b", "tell b"]
    assert not line.wait(tickets[2], 0.01)
    tickets[2].is_through = True
    line.close()
    assert seen[-2:] == ["settle c", "tell c"]
    line.when_finished(tickets[0], lambda t: seen.append("late"))
    assert seen[-1] == "late"


def test_what_fails_while_results_are_copied_is_the_tickets_error() -> None:
    line = queue()

    def settle() -> None:
        raise ValueError("the tensor is another one")

    first, second = ticket("a", settle), ticket("b")
    for one in (first, second):
        one.is_through = True
        line.hold(one)
    assert isinstance(first.error, ValueError)
    assert (second.is_finished, second.error) == (True, None)


def test_a_handler_that_interrupts_settling_finishes_it_once() -> None:
    """As if a signal handler took tickets off while this thread is copying one's results."""
    line, seen = queue(), list[str]()

    def settle() -> None:
        seen.append("settle a")
        if len(seen) == 1:
            line.take()

    first, second = ticket("a", settle), ticket("b", lambda: seen.append("settle b"))
    line.hold(first)
    line.hold(second)
    line.when_finished(first, lambda t: seen.append("tell a"))
    first.is_through = second.is_through = True
    line.take()
    assert seen == ["settle a", "settle a", "tell a", "settle b"]
    assert not line.tickets


def test_what_a_handler_raises_waits_for_the_ticket() -> None:
    line, one = queue(), ticket("a")
    line.hold(one)

    def finish() -> None:
        time.sleep(0.2)
        one.is_through = True
        line.take()

    thread = threading.Thread(target=finish)
    with raising_soon(LookupError("a handler's")):
        thread.start()
        with pytest.raises(LookupError, match="a handler's"):
            line.wait(one, 10.0)
    thread.join()
    assert one.is_finished


def test_an_errand_is_done_whatever_handlers_raise() -> None:
    done = threading.Event()

    def work() -> None:
        time.sleep(0.2)
        done.set()

    with raising_soon(LookupError("a handler's")), pytest.raises(LookupError, match="a handler's"):
        Errand(work).wait()
    assert done.is_set()

    def fail() -> None:
        raise OSError("no way")

    with pytest.raises(OSError, match="no way"):
        Errand(fail).wait()


def test_a_latch_lets_all_go_on() -> None:
    latch = Latch()
    assert not latch.wait(0.0)
    heard: list[bool] = []
    threads = [threading.Thread(target=lambda: heard.append(latch.wait(30.0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    latch.open()
    latch.open()
    for thread in threads:
        thread.join(30.0)
    assert heard == [True] * 4
    assert latch.wait(-1.0)


def test_a_child_is_told_that_what_is_under_way_is_not_its_own() -> None:
    line, one = queue(), ticket("a", lambda: pytest.fail("results are the parent's"))
    line.hold(one)
    line.give_up(CommunicationError("forked"))
    assert line.wait(one, 0.0)
    assert str(one.error) == "forked"
    assert not line.tickets
