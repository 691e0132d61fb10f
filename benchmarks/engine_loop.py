"""Which loop should carry bytes: plain Python, compiled code without the interpreter lock, or Gloo?

Two ranks on this machine's loopback all-reduce the same array. The plain-Python and the compiled engine execute the
same prepared program over the same TCP connections; Gloo does it its own way. Each is measured with the main thread
idle (waiting for the result) and with the main thread busy in Python, as in a training step.

``python benchmarks/engine_loop.py --size 64MB --repeats 7`` prints a table and, with ``--output FILE``, appends one
line of JSON a row.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.collectives.cost import choose
from mycel.collectives.lower import RankTemplate
from mycel.collectives.spec import Collective
from mycel.collectives.synth import SYNTHESIZERS, synthesize
from mycel.collectives.verify import verify_schedule
from mycel.runtime import engine as e
from mycel.runtime.forms import Form
from mycel.runtime.prepared import Job, Prepared
from mycel.runtime.reduce_kernels import DType, ReduceOp
from mycel.runtime.warm import warm
from mycel.topology.builders import loopback
from mycel.units import format_seconds, format_size, parse_size
from record import append, commit
from reference_engine import execute_in_python

RANKS = 2
LOOPS = ("python", "compiled", "gloo")
LONG_NS = 120 * 10**9


def prepared_program(rank: int, num_bytes: int, store: dist.Store) -> tuple[Prepared, list[socket.socket]]:
    """The program that the cost model chooses, on fresh TCP connections."""
    collective = Collective(name="all_reduce", num_ranks=RANKS)
    made = {m: synthesize(loopback(num_ranks=RANKS), collective, method=m) for m in SYNTHESIZERS}
    for schedule in made.values():
        verify_schedule(schedule)
    choice = choose(made, num_bytes)
    plan = RankTemplate(made[choice.method], rank)
    listener = socket.create_server(("127.0.0.1", 0))
    store.set(f"port{rank}", str(listener.getsockname()[1]))
    sockets: dict[int, socket.socket] = {}
    for number, channel in enumerate(plan.channels):
        if channel.src == rank:
            sockets[number] = socket.create_connection(("127.0.0.1", int(store.get(f"port{channel.dst}"))))
    for number, channel in enumerate(plan.channels):
        if channel.dst == rank:
            sockets[number] = listener.accept()[0]
    listener.close()
    for sock in sockets.values():
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
    ordered = [sockets[number] for number in range(len(plan.channels))]
    form = Form(plan, [s.fileno() for s in ordered], np.array([-1]))
    return form.prepare(num_bytes // 4, choice.piece_bytes // 4, 4), ordered


def spin(done: Callable[[], bool]) -> None:
    """Python code that never waits."""
    total = 0
    while not done():
        for i in range(200):
            total += i * i


def run_engine(loop: str, prepared: Prepared, array: torch.Tensor, number: int, *, busy: bool) -> float:
    """Seconds of one all-reduce by one of the engines, in a thread."""
    job = Job(
        prepared,
        bases=(0, array.data_ptr()),
        dtype=int(DType.FLOAT32),
        reduce_op=int(ReduceOp.SUM),
        divisor=0,
        header=(number, 0),
        limit_ns=LONG_NS,
        keep=(array,),
    )
    execute = (lambda: e.execute(job.address)) if loop == "compiled" else (lambda: execute_in_python(job))
    start = time.perf_counter()
    thread = threading.Thread(target=execute)
    thread.start()
    if busy:
        spin(lambda: job.done)
    else:
        thread.join()
    seconds = time.perf_counter() - start
    thread.join()
    if not job.done:
        raise RuntimeError(f"{loop}: the run ended before its time")
    return seconds


def run_gloo(array: torch.Tensor, *, busy: bool) -> float:
    """Seconds of one all-reduce by Gloo, whose threads are its own."""
    start = time.perf_counter()
    work = dist.all_reduce(array, async_op=True)
    if busy:
        spin(work.is_completed)
    work.wait()
    return time.perf_counter() - start


def be_rank(rank: int, num_bytes: int, repeats: int, store_file: str, results: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(store_file, RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    warm()
    prepared, sockets = prepared_program(rank, num_bytes, store)
    array = torch.empty(num_bytes // 4)
    seconds: dict[tuple[str, bool], list[float]] = {(loop, busy): [] for loop in LOOPS for busy in (False, True)}
    number = 0
    for repeat in range(repeats + 1):  # the first is for warming up
        for (loop, busy), times in seconds.items():
            number += 1
            array.fill_(rank + 1)
            dist.barrier()
            if loop == "gloo":
                took = run_gloo(array, busy=busy)
            else:
                took = run_engine(loop, prepared, array, number, busy=busy)
            if not (array == 3).all():
                raise RuntimeError(f"{loop}: wrong result")
            slowest = torch.tensor([took], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if repeat:
                times.append(slowest.item())
    if rank == 0:
        results.put(seconds)
    dist.destroy_process_group()
    for sock in sockets:
        sock.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=parse_size("64MB"), help="of the array")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help="file to append lines of JSON to")
    options = parser.parse_args()
    warm()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        arguments = (options.size, options.repeats, f"{directory}/store", results)
        ranks = [context.Process(target=be_rank, args=(rank, *arguments)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        seconds = results.get(timeout=600)
        for process in ranks:
            process.join()
    print(
        f"all_reduce of {format_size(options.size)}, {RANKS} ranks, loopback; median (p10 - p90) of {options.repeats}"
    )
    print(f"{'loop':10} {'main thread':12} {'median':>10} {'p10':>10} {'p90':>10} {'GB/s':>7}")
    for (loop, busy), times in seconds.items():
        median, p10, p90 = (float(np.quantile(times, q)) for q in (0.5, 0.1, 0.9))
        state = "busy" if busy else "idle"
        shown = " ".join(f"{format_seconds(value):>10}" for value in (median, p10, p90))
        print(f"{loop:10} {state:12} {shown} {options.size / median / 1e9:7.2f}")
        if options.output is not None:
            row = {
                "benchmark": "engine_loop",
                "collective": "all_reduce",
                "bytes": options.size,
                "world_size": RANKS,
                "loop": loop,
                "main_thread": state,
                "median_s": median,
                "p10_s": p10,
                "p90_s": p90,
                "algbw_gbps": options.size / median / 1e9,
                "repeats": options.repeats,
                "topology": loopback(num_ranks=RANKS).fingerprint,
                "commit": commit(),
                "hardware": describe_hardware(),
                "versions": dict(describe_versions()),
            }
            append(options.output, [row])


if __name__ == "__main__":
    main()
