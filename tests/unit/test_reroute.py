"""Running calls again: what is put back, from where a group goes on, and that nothing is run twice without reason."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from mycel.errors import CollectiveTimeoutError, CommunicationError
from mycel.runtime.calls import Call, Ticket
from mycel.runtime.faults import Attempt, LinksFailed
from mycel.runtime.job_queue import JobQueue
from mycel.runtime.reroute import Rerouter, keep_input


class Script:
    """Stands for a communicator: adds one to the buffer of a call, and fails where it is told to."""

    def __init__(self, *failures: tuple[int, bool, int]) -> None:
        self.failures = list(failures)  # (sequence, in the commit, where to resume)
        self.runs: list[tuple[int, bool]] = []
        self.queue = JobQueue(
            lambda status, ticket: None, lambda error, where: CommunicationError(f"{where}: {error}")
        )
        self.rerouter = Rerouter(0, self.run_once, lambda failed: None, self.queue.take, self.queue._internal)

    def run_once(self, call: Call, ticket: Ticket, sequence: int, is_committing: bool) -> None:
        self.runs.append((sequence, is_committing))
        if not is_committing:
            (buffer,) = call.keep
            assert isinstance(buffer, np.ndarray)
            buffer += 1
        if self.failures and self.failures[0][:2] == (sequence, is_committing):
            raise LinksFailed(frozenset({(0, 1)}), "link 0 - 1", self.failures.pop(0)[2])

    def call(self, sequence: int, buffer: np.ndarray, name: str = "all_reduce") -> Ticket:  # type: ignore[type-arg]
        made = Call(
            name=name,  # type: ignore[arg-type]
            num_elements=len(buffer),
            item_bytes=4,
            output_address=buffer.ctypes.data,
            root=1,
            keep=(buffer,),
        )
        attempt = Attempt(what=name, timeout_s=1.0, deadline=0.0, header=(sequence, 0, 0))
        ticket = Ticket(job=None, attempt=attempt)
        self.rerouter.submit(made, ticket)
        self.queue.hold(ticket)
        return ticket


@pytest.mark.parametrize(
    ("failures", "runs"),
    [
        ((), [(1, False), (1, True)]),
        (((1, False, 1),), [(1, False), (1, False), (1, True)]),
        (((1, True, 1),), [(1, False), (1, True), (1, False), (1, True)]),
        (((1, True, 2),), [(1, False), (1, True)]),
        (((1, False, 1), (1, True, 1)), [(1, False), (1, False), (1, True), (1, False), (1, True)]),
    ],
    ids=["no failure", "during", "after", "all came through", "twice"],
)
def test_what_is_run_again_begins_from_the_same_input(
    failures: tuple[tuple[int, bool, int], ...], runs: list[tuple[int, bool]]
) -> None:
    script, buffer = Script(*failures), np.arange(5, dtype=np.float32)
    ticket = script.call(1, buffer)
    assert script.queue.wait(ticket, 10)
    assert ticket.error is None
    assert ticket.what == "all_reduce #1"
    assert script.runs == runs
    assert buffer.tolist() == [1, 2, 3, 4, 5]
    script.rerouter.close()


def test_an_error_that_nobody_has_thought_of_reaches_who_waits() -> None:
    script, buffer = Script(), np.zeros(3, dtype=np.float32)
    script.rerouter._run_once = lambda *_: {}["missing"]  # type: ignore[misc,index]
    ticket = script.call(1, buffer)
    assert script.queue.wait(ticket, 10)
    assert isinstance(ticket.error, CommunicationError)
    assert "all_reduce #1: 'missing'" in str(ticket.error)
    script.rerouter.close()


def test_calls_keep_their_order_and_errors_go_to_their_own() -> None:
    script, first, second = Script((2, False, 2)), np.zeros(3, dtype=np.float32), np.zeros(3, dtype=np.float32)

    def refuse(failed: LinksFailed) -> None:
        raise CollectiveTimeoutError("no fabric is left")

    script.rerouter._go_on = refuse
    tickets = [script.call(1, first), script.call(2, second)]
    heard = threading.Event()
    script.queue.when_finished(tickets[1], lambda _: heard.set())
    assert all(script.queue.wait(ticket, 10) for ticket in tickets)
    assert heard.wait(10)
    assert tickets[0].error is None
    assert isinstance(tickets[1].error, CollectiveTimeoutError)
    assert [sequence for sequence, _ in script.runs] == [1, 1, 2]
    script.rerouter.close()


@pytest.mark.parametrize(("name", "kept"), [("all_reduce", True), ("broadcast", True), ("all_gather", False)])
def test_only_what_is_overwritten_is_copied(name: str, kept: bool) -> None:
    buffer = np.arange(4, dtype=np.float32)
    call = Call(name=name, num_elements=4, item_bytes=4, output_address=buffer.ctypes.data, root=1)  # type: ignore[arg-type]
    put_back = keep_input(call, 1)
    buffer[:] = -1
    put_back()
    assert buffer.tolist() == ([0, 1, 2, 3] if kept else [-1] * 4)
    put_back = keep_input(call, 0)
    buffer[:] = -2
    put_back()
    assert (buffer[0] == -2) == (name != "all_reduce")


def test_a_result_inside_the_input_is_no_loss() -> None:
    whole = np.arange(8, dtype=np.float32)
    call = Call(
        name="reduce_scatter",
        num_elements=8,
        item_bytes=4,
        input_address=whole.ctypes.data,
        output_address=whole[4:].ctypes.data,
    )
    put_back = keep_input(call, 1)
    whole[4:] = -1
    put_back()
    assert whole.tolist() == list(range(8))
