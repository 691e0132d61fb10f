"""One rank of the fault matrix: imports torch once, then forks a child for every cell, which reports and is gone.

Usage: rank.py DIRECTORY. Cells come as lines of JSON through the named pipe ``DIRECTORY/cellsR``; reports go to
standard output as lines of JSON.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mycel.runtime

# The collector of doctests imports this file as well, outside any job.
RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
#: Elements of float32 a rank gives or gets; where nobody says, some tens of milliseconds at 400 Mbit/s.
COUNT = int(os.environ.get("FAULTS_ELEMENTS", str(1 << 18)))
#: Calls that go well before the fault, and seconds within which it must show.
GOOD_CALLS = 2
LIMIT_S = 30.0
#: The rank that all others exchange messages with: the victim, so that everybody needs it.
HUB = 2
#: Part of the time-out by which a slow rank is late: no reason for an error.
SLOWNESS = 0.5
#: Seconds by which a rank is late where the others are to be in a call meanwhile.
LATE_S = 1.0

Run = Callable[..., None]


def given(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((count,), rank + 1, dtype=dtype)


def check(got: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(got, expected):
        raise AssertionError(f"wrong result: {got[:8]} instead of {expected[:8]}")


def all_reduce(*, count: int = COUNT, dtype: torch.dtype = torch.float32, op: str = "SUM", root: int = 0) -> None:
    data = given(RANK, count, dtype)
    dist.all_reduce(data, getattr(dist.ReduceOp, op))
    check(data, torch.full((count,), SIZE * (SIZE + 1) // 2 if op == "SUM" else SIZE, dtype=dtype))


def all_gather(*, count: int = COUNT, dtype: torch.dtype = torch.float32, op: str = "SUM", root: int = 0) -> None:
    out = torch.empty(count * SIZE, dtype=dtype)
    dist.all_gather_into_tensor(out, given(RANK, count, dtype))
    check(out, torch.cat([given(rank, count, dtype) for rank in range(SIZE)]))


def reduce_scatter(*, count: int = COUNT, dtype: torch.dtype = torch.float32, op: str = "SUM", root: int = 0) -> None:
    out = torch.empty(count, dtype=dtype)
    dist.reduce_scatter_tensor(out, given(RANK, count * SIZE, dtype), getattr(dist.ReduceOp, op))
    check(out, torch.full((count,), SIZE * (SIZE + 1) // 2 if op == "SUM" else SIZE, dtype=dtype))


def broadcast(*, count: int = COUNT, dtype: torch.dtype = torch.float32, op: str = "SUM", root: int = 0) -> None:
    data = given(RANK, count, dtype)
    dist.broadcast(data, root)
    check(data, given(root, count, dtype))


def reduce(*, count: int = COUNT, dtype: torch.dtype = torch.float32, op: str = "SUM", root: int = 0) -> None:
    data = given(RANK, count, dtype)
    dist.reduce(data, root, getattr(dist.ReduceOp, op))
    if root == RANK:
        check(data, torch.full((count,), SIZE * (SIZE + 1) // 2 if op == "SUM" else SIZE, dtype=dtype))


def all_to_all(*, count: int = COUNT, dtype: torch.dtype = torch.float32, op: str = "SUM", root: int = 0) -> None:
    out = torch.empty(count // SIZE * SIZE, dtype=dtype)
    dist.all_to_all_single(out, given(RANK, count // SIZE * SIZE, dtype))
    check(out, torch.cat([given(rank, count // SIZE, dtype) for rank in range(SIZE)]))


def all_to_all_split(
    *, count: int = COUNT, dtype: torch.dtype = torch.float32, op: str = "SUM", root: int = 0
) -> None:
    """Every rank gives rank r a part of r + 1 units."""
    unit = count // (SIZE * (SIZE + 1) // 2)
    gives = [unit * (rank + 1) for rank in range(SIZE)]
    gets = [unit * (RANK + 1)] * SIZE
    out = torch.empty(sum(gets), dtype=dtype)
    dist.all_to_all_single(out, given(RANK, sum(gives), dtype), gets, gives)
    check(out, torch.cat([given(rank, gets[rank], dtype) for rank in range(SIZE)]))


def gather(*, count: int = COUNT, dtype: torch.dtype = torch.float32, op: str = "SUM", root: int = 0) -> None:
    outs = [torch.empty(count, dtype=dtype) for _ in range(SIZE)] if root == RANK else None
    dist.gather(given(RANK, count, dtype), outs, root)
    for rank, out in enumerate(outs or []):
        check(out, given(rank, count, dtype))


def scatter(*, count: int = COUNT, dtype: torch.dtype = torch.float32, op: str = "SUM", root: int = 0) -> None:
    out = torch.empty(count, dtype=dtype)
    dist.scatter(out, [given(rank, count, dtype) for rank in range(SIZE)] if root == RANK else None, root)
    check(out, given(RANK, count, dtype))


def barrier(*, count: int = COUNT, dtype: torch.dtype = torch.float32, op: str = "SUM", root: int = 0) -> None:
    dist.barrier()


def send_recv(
    *, count: int = COUNT, dtype: torch.dtype = torch.float32, op: str = "SUM", root: int = 0, swapped: bool = False
) -> None:
    """Every rank exchanges two messages of one tag with rank ``HUB``; the second is half as long."""
    lengths = (count, count // 2)
    peers = [rank for rank in range(SIZE) if rank != HUB] if RANK == HUB else [HUB]
    outs = [(peer, torch.empty(length, dtype=dtype)) for peer in peers for length in lengths]
    works = [dist.irecv(out, peer) for peer, out in outs]
    order = lengths[::-1] if swapped else lengths
    works += [dist.isend(given(RANK, length, dtype), peer) for peer in peers for length in order]
    for work in works:
        if work is not None:
            work.wait()
    for peer, out in outs:
        check(out, given(peer, out.numel(), dtype))


COLLECTIVES: dict[str, Run] = {
    run.__name__: run
    for run in (
        all_reduce,
        all_gather,
        reduce_scatter,
        broadcast,
        reduce,
        all_to_all,
        all_to_all_split,
        gather,
        scatter,
        barrier,
        send_recv,
    )
}


def other_call(cell: dict[str, Any], run: Run) -> None:
    """What the victim calls where ranks are not to agree."""
    variant = cell["variant"]
    if variant == "collective":
        COLLECTIVES["all_gather" if cell["collective"] == "all_reduce" else "all_reduce"]()
    elif variant == "size":
        run(count=COUNT * 2)
    elif variant == "type":
        run(dtype=torch.int32)
    elif variant == "operation":
        run(op="MAX")
    elif variant in ("root", "late root"):
        run(root=1)
    elif cell["collective"] == "send_recv":
        run(swapped=True)
    else:
        COLLECTIVES["reduce_scatter" if cell["collective"] == "barrier" else "barrier"]()


def say(cell: dict[str, Any], **what: Any) -> None:
    print(json.dumps({"cell": cell["number"], "rank": RANK, **what}), flush=True)


def stay_behind(fork: Callable[[], int]) -> None:
    """Fork a process that lives on, for longer than anybody waits here, and holds whatever it has inherited."""
    if fork() == 0:
        signal.alarm(int(2 * LIMIT_S))
        while True:
            signal.pause()


def loop(cell: dict[str, Any], store: dist.Store) -> None:
    """Call the collective until it fails; the fault comes from outside, or is this rank's other call."""
    run = COLLECTIVES[cell["collective"]]
    is_victim = cell["victim"] == RANK
    if is_victim and cell["fault"] == "children":
        stay_behind(os.fork)
    if is_victim and cell["fault"] == "orphan":
        stay_behind(ctypes.PyDLL(None).fork)  # what Python does in children is not done
    for _ in range(GOOD_CALLS):
        run()
    store.set(f"good{RANK}", "")
    store.wait([f"good{rank}" for rank in range(SIZE)])
    say(cell, running=True)
    attempt = run
    if "new_group" in (cell["fault"], cell["variant"]):
        attempt = functools.partial(dist.new_group, list(range(SIZE)))
        if is_victim:
            time.sleep(LIMIT_S)
    if cell["variant"] == "late root" and is_victim:
        time.sleep(LATE_S)  # the others go on meanwhile, for as long as there is room for what they send
    if cell["variant"] == "between":
        time.sleep(LIMIT_S / 2)
    began = time.monotonic()
    while time.monotonic() < began + LIMIT_S:
        began_call = time.monotonic()
        try:
            if cell["fault"] == "mismatch" and is_victim:
                other_call(cell, run)
            attempt()
        except RuntimeError as error:
            first = (type(error).__name__, str(error), time.monotonic() - began_call)
            break
    else:
        first = ("none", "no error", LIMIT_S)
    began_call = time.monotonic()
    try:
        run()
        second = ("none", "no error", 0.0)
    except RuntimeError as error:
        second = (type(error).__name__, str(error), time.monotonic() - began_call)
    say(cell, first=first, second=second)


def in_a_handler(run: Run, *, is_late: bool) -> None:
    """All ranks meet in a signal handler, as before a preemption, in the middle of a call that waits for a late rank.

    The late one meets them right behind its call.
    """
    met: list[int] = []

    def meet(number: int, frame: object) -> None:
        dist.barrier()
        met.append(number)

    before = signal.signal(signal.SIGUSR1, meet)
    calls = mycel.runtime.tensor_group()
    number = calls.number

    def strike() -> None:
        until = time.monotonic() + LIMIT_S
        while calls.number == number and time.monotonic() < until:  # on a busy machine, the call may be yet to begin
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    caller = threading.Timer(LATE_S / 2, strike)
    if is_late:
        time.sleep(LATE_S)
        run()
        caller.start()
    else:
        caller.start()
        run()
    caller.join()
    signal.signal(signal.SIGUSR1, before)
    if met != [signal.SIGUSR1]:
        raise AssertionError("the handler has not run")


def swapped() -> None:
    """The owner of a tensor gives it another storage while a collective is under way: the result goes to the old."""
    data = given(RANK, COUNT, torch.float32)
    memory = data.detach()
    work = dist.all_reduce(data, async_op=True)
    data.data = torch.zeros(1)
    junk = [torch.full((COUNT,), 7.0) for _ in range(4)]
    work.wait()
    check(memory, torch.full((COUNT,), SIZE * (SIZE + 1) / 2))
    del junk


def bear(cell: dict[str, Any], store: dist.Store) -> None:
    """Call the collective a few times while something happens that is no failure."""
    run = COLLECTIVES[cell["collective"]]
    for number in range(2 * GOOD_CALLS + 1):
        if number == GOOD_CALLS:
            say(cell, running=True)
            if cell["fault"] == "slow" and cell["victim"] == RANK:
                time.sleep(SLOWNESS * cell["timeout_s"])
            if cell["fault"] == "store" and RANK == 0:
                os.kill(cell["store"], signal.SIGKILL)
            if cell["fault"] == "handler":
                in_a_handler(run, is_late=cell["victim"] == RANK)
            if cell["fault"] == "swap":
                swapped()
        run()
    say(cell, first=("none", "", 0.0), second=("none", "", 0.0))


def be(cell: dict[str, Any]) -> None:
    """The life of a child."""
    store: dist.Store
    timeout = timedelta(seconds=cell["timeout_s"])
    if cell["fault"] == "store":
        store = dist.TCPStore(os.environ["MASTER_ADDR"], cell["port"], SIZE, False, timedelta(seconds=20))
    else:
        store = dist.FileStore(cell["store_file"], SIZE)
    dist.init_process_group("mycel", store=store, rank=RANK, world_size=SIZE, timeout=timeout)
    say(cell, pid=os.getpid())
    (bear if cell["fault"] in ("slow", "store", "handler", "swap") else loop)(cell, store)


def serve_store(cell: dict[str, Any]) -> None:
    """A store in a process of its own, so that it can be killed without its rank."""
    held = dist.TCPStore("0.0.0.0", cell["port"], SIZE, True, timedelta(seconds=20), wait_for_workers=False)
    while held is not None:
        signal.pause()


def fork(work: Callable[[dict[str, Any]], None], cell: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work(cell)
        except BaseException as error:
            say(cell, first=("broken", f"{type(error).__name__}: {error}", 0.0), second=("none", "", 0.0))
        finally:
            os._exit(0)
    return pid


def main() -> None:
    torch.set_num_threads(1)
    mycel.runtime.warm()
    pipe = Path(sys.argv[1]) / f"cells{RANK}"
    print(json.dumps({"rank": RANK, "up": True}), flush=True)
    with pipe.open(encoding="utf-8") as cells:
        for line in cells:
            cell = json.loads(line)
            if cell["fault"] == "store" and RANK == 0:
                cell["store"] = fork(serve_store, cell)
            child = fork(be, cell)
            os.waitpid(child, 0)
            if "store" in cell:
                os.kill(cell["store"], signal.SIGKILL)
                os.waitpid(cell["store"], 0)
            say(cell, over=True)


if __name__ == "__main__":
    main()
