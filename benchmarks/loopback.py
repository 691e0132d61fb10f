"""Ranks of one machine: Gloo against mycel, over sockets and in memory that they share, calls alternating.

    python benchmarks/loopback.py                                        # 2 and 4 ranks, all_reduce, 1 KB to 64 MB
    python benchmarks/loopback.py --ranks 4 --sizes 1KB --modes waiting  # asynchronous calls, waited for at once
    python benchmarks/loopback.py --variants gloo,tcp,unix,memory/65536  # with a piece size of its own
    python benchmarks/loopback.py --variants memory:tree,memory:ring     # with schedules by these methods

Every variant has a process group of its own in the same processes; rounds alternate between them. A figure is the
median over rounds of a call's seconds on the slowest rank, and of all ranks' processor seconds over the bytes of the
array. With ``--output FILE`` every row is appended as a line of JSON.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mycel.bench import Case
from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.bench.worker import prepare
from mycel.units import format_seconds, format_size, parse_size
from record import append, stamp

#: Calls of a round are as many as move about this much, and at most ``MOST_CALLS``.
ROUND_BYTES = 4 << 20
MOST_CALLS = 50
SIZES = [1 << power for power in (10, 14, 16, 18, 20, 22, 24, 26)]


def group_of(variant: str, timeout: timedelta) -> dist.ProcessGroup:
    """The process group of a variant: ``gloo``, or ``LOCAL[:METHODS][/PIECE]``, methods joined by ``+``."""
    if variant == "gloo":
        return dist.new_group(backend="gloo", timeout=timeout)
    rest, _, piece = variant.partition("/")
    local, _, methods = rest.partition(":")
    chosen = {"MYCEL_LOCAL": local, "MYCEL_PIECE_BYTES": piece, "MYCEL_METHODS": methods.replace("+", ",")}
    os.environ.update(chosen)
    try:
        return dist.new_group(backend="mycel", timeout=timeout)
    finally:
        for name in chosen:
            del os.environ[name]


def processor_seconds() -> float:
    """Of this process, in user and kernel mode."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def one_round(call: Callable[[], Any], calls: int, mode: str, control: dist.ProcessGroup) -> tuple[float, float]:
    """Seconds and processor seconds of a call on this rank."""
    dist.barrier(group=control)
    used, begin = processor_seconds(), time.perf_counter()
    for _ in range(calls):
        work = call()
        if mode == "waiting":
            work.wait()
    return (time.perf_counter() - begin) / calls, (processor_seconds() - used) / calls


def be_rank(rank: int, ranks: int, options: argparse.Namespace, store_file: str, results: Any) -> None:
    import mycel.runtime  # registers the backend

    mycel.runtime.warm()
    torch.set_num_threads(1)
    timeout = timedelta(seconds=120)
    store = dist.FileStore(store_file, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    groups = {variant: group_of(variant, timeout) for variant in options.variants}
    control = dist.new_group(backend="gloo", timeout=timeout)
    for collective in options.collectives:
        for size in options.sizes:
            for mode in options.modes:
                case = Case(collective=collective, num_bytes=size, mode=mode)
                operands = prepare(case, rank, ranks)
                calls = max(1, min(MOST_CALLS, ROUND_BYTES // size))
                figures: dict[str, list[list[float]]] = {variant: [] for variant in groups}
                for number in range(options.repeats + 1):  # the first is for warming up
                    for variant, group in groups.items():
                        operands.reset()
                        operands_call = lambda group=group: operands.call(group, mode == "blocking")  # noqa: B023, E731
                        if number == 0:
                            work = operands_call()
                            if work is not None:
                                work.wait()
                            if operands.num_wrong():
                                raise RuntimeError(f"{variant}: {collective} of {size} bytes is wrong")
                        took, used = one_round(operands_call, calls, mode, control)
                        slowest, total = torch.tensor([took]).double(), torch.tensor([used]).double()
                        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=control)
                        dist.all_reduce(total, group=control)
                        if number:
                            figures[variant].append([slowest.item(), total.item()])
                if rank == 0:
                    results.put((ranks, collective, size, mode, figures))
    dist.barrier(group=control)
    dist.destroy_process_group()


def next_of(results: Any, processes: Sequence[Any]) -> Any:
    """The next result; ends the run where a rank has failed."""
    while True:
        try:
            return results.get(timeout=1)
        except queue.Empty:
            if any(process.exitcode for process in processes):
                for process in processes:
                    process.terminate()
                raise SystemExit("a rank failed") from None


def show(found: tuple[int, str, int, str, dict[str, list[list[float]]]], output: Path | None) -> None:
    """Print a case, and append its rows to a file."""
    ranks, collective, size, mode, figures = found
    medians = {variant: np.median(values, axis=0) for variant, values in figures.items()}
    cells = [
        f"{variant} {format_seconds(float(seconds))} ({float(used) / size * 1e9:.2f})"
        for variant, (seconds, used) in medians.items()
    ]
    print(f"{ranks} ranks {collective} {format_size(size)} {mode}: " + "; ".join(cells), flush=True)
    if output is not None:
        rows = []
        for variant, values in figures.items():
            p10, median, p90 = (float(np.quantile([v[0] for v in values], q)) for q in (0.1, 0.5, 0.9))
            rows.append(
                {
                    "benchmark": "loopback",
                    "collective": collective,
                    "bytes": size,
                    "world_size": ranks,
                    "variant": variant,
                    "mode": mode,
                    "median_s": median,
                    "p10_s": p10,
                    "p90_s": p90,
                    "cpu_s_per_gb": float(medians[variant][1]) / size * 1e9,
                    "repeats": len(values),
                    "hardware": describe_hardware(),
                    "versions": dict(describe_versions()),
                    **stamp(),
                }
            )
        append(output, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def several(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
        return lambda text: [kind(part) for part in text.split(",")]

    parser.add_argument("--ranks", type=several(int), default=[2, 4])
    parser.add_argument("--collectives", type=several(str), default=["all_reduce"])
    parser.add_argument("--sizes", type=several(parse_size), default=SIZES)
    parser.add_argument("--modes", type=several(str), default=["blocking"])
    parser.add_argument("--variants", type=several(str), default=["gloo", "unix", "memory"])
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds of each variant")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    print("median time of a call on the slowest rank (processor seconds of all ranks per GB of the array)")
    context = multiprocessing.get_context("spawn")
    for ranks in options.ranks:
        results = context.Queue()
        with tempfile.TemporaryDirectory() as folder:
            given = (ranks, options, f"{folder}/store", results)
            processes = [context.Process(target=be_rank, args=(rank, *given)) for rank in range(ranks)]
            for process in processes:
                process.start()
            expected = len(options.collectives) * len(options.sizes) * len(options.modes)
            for _ in range(expected):
                show(next_of(results, processes), options.output)
            for process in processes:
                process.join()


if __name__ == "__main__":
    main()
