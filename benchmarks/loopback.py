"""Ranks of one machine: Gloo against mycel, over sockets and in memory that they share, calls alternating.

    python benchmarks/loopback.py                                        # 2 and 4 ranks, all_reduce, 1 KB to 64 MB
    python benchmarks/loopback.py --ranks 4 --sizes 1KB --modes waiting  # asynchronous calls, waited for at once
    python benchmarks/loopback.py --variants gloo,tcp,unix,memory/65536  # with a piece size of its own
    python benchmarks/loopback.py --variants memory:tree,memory:ring     # with schedules by these methods
    python benchmarks/loopback.py --mpi ENV/bin/python --collectives all_reduce,broadcast  # beside an MPI, or several

``shared`` is ``memory`` with arrays that ``mycel.empty`` has placed in memory that the ranks share.

Every variant has a process group of its own in the same processes; rounds alternate between them. A round is a call
that is not timed, a barrier of the same group, and the timed calls, one after the other. ``empty`` is a
backend that does nothing: what torch itself takes for a call. An MPI (``--mpi``, as often as there are some: a Python
with mpi4py) has processes of its own, which have their turn in each round as the others have, the untimed call and
the barrier included, and wait without spinning between their turns; its calls are blocking ones.

A figure is the median over rounds of a call's seconds on the slowest rank, with tenth percentile and minimum, and the
median of all ranks' processor seconds over the bytes of the array. ``best`` is the ratio of the first variant of
mycel to the best of the others, by medians and by minima. With ``--output FILE`` every row is appended as a line of
JSON.
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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from empty import empty_group
from mpi import Mpi, named
from mycel.bench import Case
from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.bench.operands import prepare
from mycel.units import format_seconds, format_size, parse_size
from record import append, stamp

#: Calls of a round are as many as move about this much, and at most ``MOST_CALLS``.
ROUND_BYTES = 4 << 20
MOST_CALLS = 50
OURS = ("memory", "shared", "unix", "tcp")
Figures = dict[str, list[tuple[float, float]]]  # of each variant's rounds: seconds, processor seconds
SIZES = [1 << power for power in (10, 14, 16, 18, 20, 22, 24, 26)]


def group_of(variant: str, timeout: timedelta) -> dist.ProcessGroup:
    """The process group of a variant: ``gloo``, or ``LOCAL[:METHODS][/PIECE]``, methods joined by ``+``.

    ``straight`` is ``memory`` where no rank passes on messages of others.
    """
    if variant == "gloo":
        return dist.new_group(backend="gloo", timeout=timeout)
    if variant == "empty":
        return empty_group(timeout)
    rest, _, piece = variant.partition("/")
    local, _, methods = rest.partition(":")
    local = "memory" if local == "shared" else local
    relays, local = ("0", "memory") if local == "straight" else ("1", local)
    chosen = {
        "MYCEL_RELAYS": relays,
        "MYCEL_LOCAL": local,
        "MYCEL_PIECE_BYTES": piece,
        "MYCEL_METHODS": methods.replace("+", ","),
    }
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


def one_round(
    call: Callable[[], Any], calls: int, mode: str, reset: Callable[[], None], group: dist.ProcessGroup
) -> tuple[float, float]:
    """Seconds and processor seconds of a call on this rank, after one that is not timed and a barrier."""
    work = call()
    if mode == "waiting":
        work.wait()
    reset()
    dist.barrier(group=group)
    used, begin = processor_seconds(), time.perf_counter()
    for _ in range(calls):
        work = call()
        if mode == "waiting":
            work.wait()
    return (time.perf_counter() - begin) / calls, (processor_seconds() - used) / calls


def be_rank(rank: int, ranks: int, options: argparse.Namespace, folder: str, results: Any) -> None:
    import mycel.runtime  # registers the backend

    mycel.runtime.warm()
    torch.set_num_threads(1)
    timeout = timedelta(seconds=240)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    groups = {variant: group_of(variant, timeout) for variant in options.variants}
    control = dist.new_group(backend="gloo", timeout=timeout)
    # Rank 0 has the turns of the others' processes taken; the other ranks wait for it in ``control``.
    others = {"-".join(named(python)): Mpi(python, ranks, folder) for python in options.mpi} if rank == 0 else {}
    for collective in options.collectives:
        for size in options.sizes:
            for mode in options.modes:
                case = Case(collective=collective, num_bytes=size, mode=mode)
                operands = {is_shared: prepare(case, rank, ranks) for is_shared in {v == "shared" for v in groups}}
                for tensor in operands[True].tensors if True in operands else ():
                    tensor.data = mycel.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
                calls = max(1, min(MOST_CALLS, ROUND_BYTES // size))
                figures: Figures = {variant: [] for variant in (*groups, *others)}
                for number in range(options.repeats + 1):  # the first is for warming up
                    for variant, group in groups.items():
                        given = operands[variant == "shared"]
                        given.reset()
                        operands_call = partial(given.call, group, mode == "blocking")
                        if number == 0:
                            work = operands_call()
                            if work is not None:
                                work.wait()
                            if variant != "empty" and given.num_wrong():
                                raise RuntimeError(f"{variant}: {collective} of {size} bytes is wrong")
                        # As an MPI does: a call first that wakes everything up, and the library's own barrier.
                        aligned = control if variant == "empty" else group
                        took, used = one_round(operands_call, calls, mode, given.reset, aligned)
                        slowest, total = torch.tensor([took]).double(), torch.tensor([used]).double()
                        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=control)
                        dist.all_reduce(total, group=control)
                        if number:
                            figures[variant].append((slowest.item(), total.item()))
                    for variant, job in others.items():
                        took, used = job.round(collective, size, calls)
                        if number:
                            figures[variant].append((took, used))
                if rank == 0:
                    results.put((ranks, collective, size, mode, figures))
    dist.barrier(group=control)
    for job in others.values():
        job.close()
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


def quantiles(values: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Of a call's seconds: minimum, tenth percentile, median, ninetieth."""
    seconds = [took for took, _ in values]
    names = {"min_s": 0.0, "p10_s": 0.1, "median_s": 0.5, "p90_s": 0.9}
    return {name: float(np.quantile(seconds, q)) for name, q in names.items()}


def is_ours(variant: str) -> bool:
    """Whether a variant is mycel's."""
    return variant.partition("/")[0].partition(":")[0] in OURS


def ratio_to_best(of: dict[str, dict[str, float]]) -> str:
    """The first variant of mycel beside the best of the others, by medians and by minima."""
    ours = next(filter(is_ours, of), None)
    rest = [name for name in of if not is_ours(name) and name != "empty"]
    if ours is None or not rest:
        return ""
    by = [of[ours][key] / min(of[name][key] for name in rest) for key in ("median_s", "min_s")]
    return f"; {ours} to the best: {by[0]:.2f} (min {by[1]:.2f})"


def show(found: tuple[int, str, int, str, Figures], output: Path | None) -> None:
    """Print a case, and append its rows to a file."""
    ranks, collective, size, mode, figures = found
    of = {variant: quantiles(values) for variant, values in figures.items()}
    used = {v: float(np.median([used for _, used in values])) / size * 1e9 for v, values in figures.items()}
    cells = [
        f"{variant} {format_seconds(q['median_s'])} (p10 {format_seconds(q['p10_s'])}, min "
        f"{format_seconds(q['min_s'])}, {used[variant]:.2f} s/GB)"
        for variant, q in of.items()
    ]
    print(
        f"{ranks} ranks {collective} {format_size(size)} {mode}: " + "; ".join(cells) + ratio_to_best(of), flush=True
    )
    if output is not None:
        rows = [
            {
                "benchmark": "loopback",
                "collective": collective,
                "bytes": size,
                "world_size": ranks,
                "variant": variant,
                "mode": mode,
                **of[variant],
                "cpu_s_per_gb": used[variant],
                "repeats": len(values),
                "hardware": describe_hardware(),
                "versions": dict(describe_versions()),
                **stamp(),
            }
            for variant, values in figures.items()
        ]
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
    parser.add_argument("--mpi", action="append", default=[], metavar="PYTHON", help="one that has mpi4py")
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds of each variant")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if options.mpi and options.modes != ["blocking"]:
        parser.error("--mpi: MPI's calls are blocking ones; leave --modes away")
    if not set(options.modes) <= {"blocking", "waiting"}:
        parser.error(
            "--modes: blocking, waiting; benchmarks/two_boxes.py --only busy measures beside a busy main thread"
        )
    if "empty" in options.variants and options.collectives != ["all_reduce"]:
        parser.error("--variants: empty is a backend of all_reduce alone")
    print("median time of a call on the slowest rank (processor seconds of all ranks per GB of the array)")
    context = multiprocessing.get_context("spawn")
    for ranks in options.ranks:
        results = context.Queue()
        with tempfile.TemporaryDirectory() as folder:
            given = (ranks, options, folder, results)
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
