"""What a call promises, on every rank, for ``test_semantics.py``: when results are there, whatever comes between."""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mycel.errors import CommunicationError, MismatchError
from mycel.runtime import job_fields as j
from mycel.runtime import tensor_group

Started = tuple[dist.Work, Tensor, float]


# -- completion ---------------------------------------------------------------------------------------------------


def _forms(rank: int, size: int) -> Iterator[tuple[str, Callable[[], Started]]]:
    """Collectives whose results are copied to the caller's tensors: work, one of these, what it is to hold."""
    mine = torch.full((3,), 1.0 + rank)
    total = float(sum(range(1, size + 1)))

    def tensors() -> list[Tensor]:
        return [torch.zeros(3) for _ in range(size)]

    def turned() -> Started:
        whole = torch.full((5, 3), 1.0 + rank).t()
        return dist.all_reduce(whole, async_op=True), whole, total

    def all_gather() -> Started:
        out = tensors()
        return dist.all_gather(out, mine, async_op=True), out[-1], float(size)

    def all_to_all() -> Started:
        out = tensors()
        return dist.all_to_all(out, [mine.clone() for _ in range(size)], async_op=True), out[-1], float(size)

    def gather() -> Started:
        out = tensors() if rank == 0 else None
        work = dist.gather(mine, out, dst=0, async_op=True)
        return work, torch.full((3,), float(size)) if out is None else out[-1], float(size)

    def scatter() -> Started:
        out = torch.zeros(3, 2).t()
        given = [torch.full((2, 3), float(r)) for r in range(size)] if rank == 0 else None
        return dist.scatter(out, given, src=0, async_op=True), out, float(rank)

    def reduce_scatter() -> Started:
        out = torch.zeros(3, 2).t()
        return dist.reduce_scatter(out, [torch.full((2, 3), 1.0 + rank)] * size, async_op=True), out, total

    for form in (turned, all_gather, all_to_all, gather, scatter, reduce_scatter):
        yield form.__name__, form


def results_are_there(rank: int, size: int) -> None:
    """Once a work says that it is over; and, of works that nobody keeps, once a later collective is over."""
    for name, make in _forms(rank, size):
        work, out, right = make()
        _poll(work)
        assert (out == right).all(), (name, out)
        work, out, right = make()
        del work
        gc.collect()
        dist.barrier()
        assert (out == right).all(), ("dropped", name, out)
        _, out, right = make()
        later = dist.all_reduce(torch.ones(1), async_op=True)
        _poll(later)
        assert (out == right).all(), ("before a later one", name, out)
    empty = dist.all_reduce(torch.zeros(0), async_op=True)
    _poll(empty)


def _poll(work: dist.Work) -> None:
    until = time.monotonic() + 30
    while not work.is_completed():
        assert time.monotonic() < until
        time.sleep(0.0002)
    assert work.is_success()


def futures_are_done(rank: int, size: int) -> None:
    """Futures of works that are over are done, and callbacks that are added then run at once, in the caller."""
    for number in range(40):
        tensor = torch.ones(8 if number % 2 else 1 << 17)
        work = dist.all_reduce(tensor, async_op=True)
        early = work.get_future() if number % 4 < 2 else None
        if number % 5 == 0:
            dist.barrier()
        elif number % 5 == 1:
            dist.all_reduce(torch.ones(3), async_op=True).wait()
        elif number % 5 == 2:
            _poll(work)
        else:
            work.wait()
        future = early or work.get_future()
        assert future.done(), number
        heard: list[threading.Thread] = []
        future.then(lambda _, heard=heard: heard.append(threading.current_thread()))  # type: ignore[misc]
        assert heard == [threading.current_thread()]
        assert future.value()[0] is tensor
        assert (tensor == size).all()


def callbacks_keep_their_order(rank: int, size: int) -> None:
    """Callbacks start collectives of their own and wait for them: in the order of the works."""
    seen: list[int] = []
    sums = []

    def again(number: int, future: Any) -> Tensor:
        seen.append(number)
        tensor = future.value()[0] + number
        chained = dist.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
        return chained.wait()

    works = [dist.all_reduce(torch.full((4,), float(n)), async_op=True) for n in range(20)]
    for number, work in enumerate(works):
        sums.append(work.get_future().then(functools.partial(again, number)))
    for work in works[::-1]:
        work.wait()
    for number, future in enumerate(sums):
        assert (future.wait() == 2 * size * (size * number + number)).all()
    assert seen == list(range(20))


# -- signal handlers ----------------------------------------------------------------------------------------------


@contextmanager
def _handler(handle: Callable[[], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: handle())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _in_the_middle(num_calls: int, then: Callable[[], object] = lambda: None) -> threading.Thread:
    """Sends this process a signal when so many more calls have been made; the last one may still be under way.

    ``then`` is called after the signal was sent.
    """
    communicator: Any = tensor_group().communicator
    last = communicator.number + num_calls

    def watch() -> None:
        while communicator.number < last and (num_calls > 1 or not _is_running(communicator)):
            time.sleep(0.0005)
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGUSR1)
        then()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def _is_running(communicator: Any) -> bool:
    """Whether the compiled engine is at a call that this process waits for."""
    ticket = getattr(communicator._turns._turn, "ticket", None)
    job = None if ticket is None else ticket.job
    return job is not None and bool(job.fields[j.J_STATUS] != j.UNUSED and job.fields[j.J_REMAINING] >= 0)


def handlers_come_after(rank: int, size: int) -> None:
    """A handler that meets the others runs in the middle of a call: blocking, waited for, first of its kind."""
    met: list[float] = []

    def meet() -> None:
        tensor = torch.full((1000,), 1.0 + rank)
        dist.all_reduce(tensor)
        dist.barrier()
        others = [torch.zeros(2) for _ in range(size)]
        dist.all_gather(others, torch.full((2,), float(rank)), async_op=True).wait()
        met.append(tensor[0].item() + others[-1][0].item())

    def reduce(tensor: Tensor) -> None:
        dist.all_reduce(tensor)

    def reduce_and_wait(tensor: Tensor) -> None:
        works = [dist.all_reduce(tensor, async_op=True), dist.all_reduce(torch.ones(5), async_op=True)]
        works[1].wait()
        works[0].wait()

    def reduce_behind_another(tensor: Tensor) -> None:
        work = dist.all_reduce(torch.ones(1 << 18), async_op=True)
        dist.all_reduce(tensor)
        work.wait()

    def gather_for_the_first_time(tensor: Tensor) -> None:
        out = [torch.zeros_like(tensor) for _ in range(size)] if rank == 1 else None
        dist.gather(tensor, out, dst=1)  # its channels are opened now
        tensor.mul_(size)

    right = size * (size + 1) / 2 + size - 1
    with _handler(meet):
        for case, call in enumerate((reduce, reduce_and_wait, reduce_behind_another, gather_for_the_first_time)):
            dist.barrier()
            if rank:  # the others are in the call, and get their signal, before this rank comes
                time.sleep(0.25)
            tensor = torch.ones(1 << 20)
            caller = _in_the_middle(2 if call in (reduce_and_wait, reduce_behind_another) else 1)
            call(tensor)
            caller.join()
            while len(met) <= case:
                time.sleep(0.001)
            assert (tensor == size).all(), call.__name__
            assert met[-1] == right, call.__name__
    after = torch.ones(3)
    dist.all_reduce(after)
    assert (after == size).all()


def handlers_may_raise(rank: int, size: int) -> None:
    """What a handler raises comes when the call is over, and the group lives."""

    def refuse() -> None:
        raise LookupError("from a handler")

    store = dist.distributed_c10d._get_default_store()
    for blocking in (True, False):
        dist.barrier()
        tensor = torch.full((1000,), 1.0)
        key, waits = f"signalled {blocking}", threading.Event()

        def when_it_waits(key: str = key, waits: threading.Event = waits) -> None:
            waits.wait()
            os.kill(os.getpid(), signal.SIGUSR1)
            store.set(key, "yes")

        if rank:
            store.wait([key])  # no call is over before the signal
            dist.all_reduce(tensor)
        elif blocking:
            with _handler(refuse):
                caller = _in_the_middle(1, lambda key=key: store.set(key, "yes"))  # type: ignore[misc]
                with pytest.raises(LookupError, match="from a handler"):
                    dist.all_reduce(tensor)
                caller.join()
        else:
            work = dist.all_reduce(tensor, async_op=True)
            with _handler(refuse):
                caller = threading.Thread(target=when_it_waits)
                caller.start()
                with pytest.raises(LookupError, match="from a handler"):
                    waits.set()
                    work.wait()
                caller.join()
            work.wait()  # the signal may have come before the other wait
        assert (tensor == size).all()
    dist.all_reduce(tensor)
    assert (tensor == size * size).all()


def an_interrupt_ends_it(rank: int, size: int) -> None:
    """KeyboardInterrupt in a blocking call fails the group, and says so on the other ranks."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank == 0:
        with _handler(interrupt):
            caller = _in_the_middle(1)
            with pytest.raises(KeyboardInterrupt):
                dist.all_reduce(torch.ones(3))
            caller.join()
        store.set("interrupted", "yes")
    else:
        store.wait(["interrupted"])
    with pytest.raises(CommunicationError, match="rank 0: interrupted in all_reduce #2"):
        for _ in range(2):  # what rank 0 had sent before may be enough for one
            dist.all_reduce(torch.ones(3))


def signals_at_any_time(rank: int, size: int) -> None:
    """Handlers that do nothing, a thousand of them a second, change nothing."""
    heard = [0]

    def count(*_: Any) -> None:
        heard[0] += 1

    before = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for number in range(60):
            tensor = torch.full((100 << (number % 12),), 1.0)
            works = [dist.all_reduce(tensor.clone(), async_op=True) for _ in range(number % 3)]
            dist.all_reduce(tensor)
            for work in works:
                work.wait()
            assert (tensor == size).all()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0, 0)
        signal.signal(signal.SIGALRM, before)
    assert heard[0] > 0


# -- time-outs ----------------------------------------------------------------------------------------------------


def a_queue_takes_its_time(rank: int, size: int) -> None:
    """Six calls, 0.3 s each, with a time-out of 1 s, begun at once."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    tensors = [torch.ones(10) for _ in range(6)]
    if rank == 0:
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors[:-1]]
        dist.all_reduce(tensors[-1], group=group)
        for work in works:
            work.wait()
    else:
        for tensor in tensors:
            time.sleep(0.3)
            dist.all_reduce(tensor, group=group)
    assert all((tensor == size).all() for tensor in tensors)
    dist.destroy_process_group(group)


def any_timeout_goes(rank: int, size: int) -> None:
    """A month, a century, and all that a ``timedelta`` holds, for groups and for single calls."""
    tensor = torch.ones(3)
    for timeout in (timedelta(days=30), timedelta(days=36500), timedelta.max):
        group = dist.distributed_c10d._get_default_group()
        group.set_timeout(timeout)  # type: ignore[attr-defined]
        dist.all_reduce(tensor)
        options = dist.AllreduceOptions()
        options.timeout = timedelta(days=3650)
        group.allreduce([tensor], options).wait(timedelta(days=3650))
    assert (tensor == size**6).all()


# -- forked children ----------------------------------------------------------------------------------------------


def _child(life: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(20)
            life()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def children_leave_it_alone(rank: int, size: int) -> None:
    """A child may call, wait, collect garbage and destroy; its parent's group goes on and its sums are right."""
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    store = dist.distributed_c10d._get_default_store()
    under_way = dist.all_reduce(tensor, async_op=True) if rank == 0 else None

    def calls() -> None:
        for _ in range(2):
            with pytest.raises(CommunicationError, match="was forked from rank 0"):
                dist.all_reduce(torch.full((1000,), 100.0))
        with pytest.raises(CommunicationError, match="was forked from rank 0"):
            dist.all_reduce(torch.ones(3), async_op=True)
        if under_way is not None:
            assert under_way.is_completed()
            assert not under_way.is_success()
            with pytest.raises(CommunicationError, match="was forked from rank 0"):
                under_way.wait()
        dist.distributed_c10d._get_default_group().abort()
        gc.collect()

    def destroys() -> None:
        dist.destroy_process_group()
        gc.collect()
        dist.init_process_group("mycel", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(3))
        dist.destroy_process_group()

    if rank == 0:
        assert _child(calls) == 0
        store.set("the first child has gone", b"")
        assert _child(destroys) == 0
    else:
        store.wait(["the first child has gone"])  # so long is the call of rank 0 under way, in its child too
        under_way = dist.all_reduce(tensor, async_op=True)
    assert under_way is not None
    under_way.wait()
    assert (tensor == size * size).all()
    dist.all_reduce(tensor)
    assert (tensor == size**3).all()


# -- memory and types ---------------------------------------------------------------------------------------------


def memory_is_held(rank: int, size: int) -> None:
    """A tensor may be given other memory while a call is under way: results go to the memory that it had."""
    swaps: tuple[Callable[[Tensor, Tensor], object], ...] = (
        lambda tensor, other: setattr(tensor, "data", other),
        lambda tensor, other: tensor.set_(other),  # type: ignore[call-overload]
    )
    for swap in swaps:
        for shape in ((1 << 16,), (64, 1 << 10)):
            tensor = torch.ones(shape)
            memory, other = tensor.detach(), torch.full(shape, 7.0)
            if rank == size - 1:
                time.sleep(0.05)
            work = dist.all_reduce(tensor, async_op=True)
            swap(tensor, other)
            gone = torch.ones(3, 4).t()
            kept = gone.detach()
            second = dist.all_reduce(gone, async_op=True)
            swap(gone, torch.zeros(4, 3))
            second.wait()
            work.wait()
            assert (memory == size).all()
            assert (kept == size).all()
            assert (tensor == 7).all()
            assert (gone == 0).all()


def expanded(rank: int, size: int) -> None:
    """An expanded tensor holds a result whose elements are one; others are refused, and the group lives."""
    tensor = torch.full((1, 3), 1.0 + rank).expand(4, 3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [[size * (size + 1) / 2] * 3] * 4
    sent = torch.full((1,), float(rank)).expand(4)
    dist.broadcast(sent, size - 1, async_op=True).wait()
    assert sent.tolist() == [size - 1.0] * 4
    wrong = torch.zeros(1).expand(4) if rank == 0 else torch.arange(4.0)
    if rank == 0:
        with pytest.raises(ValueError, match="expanded tensor"):
            dist.all_reduce(wrong)
    else:
        dist.all_reduce(wrong)
    dist.barrier()


def sequence_numbers(rank: int, size: int) -> list[int]:
    """How many collectives have been called, as torch asks for it."""
    group: Any = dist.distributed_c10d._get_default_group()
    seen = [group._get_sequence_number_for_group()]
    dist.all_reduce(torch.ones(3))
    dist.barrier(async_op=True).wait()
    return [*seen, group._get_sequence_number_for_group()]


def types_are_compared(rank: int, size: int, name: str, first: str, second: str) -> str:
    """A collective whose last rank has another element type of the same width: the error."""
    dtype = getattr(torch, second if rank == size - 1 else first)
    mine, whole = torch.zeros(4, dtype=dtype), torch.zeros(4 * size, dtype=dtype)
    calls: dict[str, Callable[[], object]] = {
        "broadcast": lambda: dist.broadcast(mine, 0),
        "all_gather": lambda: dist.all_gather(list(whole.split(4)), mine),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, mine),
        "all_to_all_single": lambda: dist.all_to_all_single(whole, whole.clone()),
        "gather": lambda: dist.gather(mine, list(whole.split(4)) if rank == 0 else None, dst=0),
        "scatter": lambda: dist.scatter(mine, list(whole.split(4)) if rank == 0 else None, src=0),
    }
    with pytest.raises(MismatchError) as caught:
        calls[name]()
        dist.barrier()  # a rank that only sends may be through
    return str(caught.value)


# -- threads ------------------------------------------------------------------------------------------------------


def an_engine_thread_that_fails(rank: int, size: int) -> str:
    """Whatever happens in the engine's thread is the error of those who wait."""
    communicator: Any = tensor_group().communicator
    dist.barrier()
    if rank == 0:

        def judge(*_: Any) -> None:
            raise KeyError("what no release knows")

        communicator._faults.judge = judge
        works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
        future = works[1].get_future()
        while not works[0].is_completed():  # something for the engine to look up for
            communicator._control.alert()
            time.sleep(0.01)
    else:
        works = []
        time.sleep(1.0)
    errors = []
    for work in works:
        with pytest.raises(CommunicationError) as caught:
            work.wait()
        errors.append(str(caught.value))
        assert work.is_completed()
    if rank == 0:
        assert future.done()
        with pytest.raises(RuntimeError, match="the engine's thread failed"):
            future.wait()
        assert len(set(errors)) == 1
    with pytest.raises(CommunicationError) as last:
        dist.all_reduce(torch.ones(3))
    return str(last.value)
