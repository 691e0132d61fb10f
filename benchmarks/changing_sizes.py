"""Calls whose size was never seen before: what they cost more than calls of one size, and beside Gloo, in turns.

    python benchmarks/changing_sizes.py                       # two ranks of this machine
    python benchmarks/changing_sizes.py --ranks 4 --calls all_reduce,all_to_all
    python benchmarks/changing_sizes.py --many 100000         # and memory after so many sizes

Each round makes the same number of blocking calls of one size with mycel, of ever new sizes with mycel, and of the
same new sizes with Gloo. Figures are medians over rounds, of the slowest rank: time of a call, and processor time of
a call, which other work changes less. With ``--output FILE`` every row is appended as a line of JSON.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.units import format_seconds, format_size, parse_size
from ranks import run_here
from record import append, stamp

TIMEOUT = timedelta(seconds=120)
SIZES = [1 << 10, 1 << 16, 1 << 20]
#: Variants: backend, and whether sizes change.
VARIANTS = (("mycel", False), ("mycel", True), ("gloo", True))
#: One call over a group, given and taken memory, with elements of each rank, and by how many the sizes differ.
Run = Callable[[dist.ProcessGroup, torch.Tensor, torch.Tensor, int, int], None]


def all_reduce(group: dist.ProcessGroup, given: torch.Tensor, taken: torch.Tensor, base: int, more: int) -> None:
    dist.all_reduce(given[: base + more], group=group)


def all_gather(group: dist.ProcessGroup, given: torch.Tensor, taken: torch.Tensor, base: int, more: int) -> None:
    n = dist.get_world_size()
    count = base // n + more
    dist.all_gather_into_tensor(taken[: count * n], given[:count], group=group)


def reduce_scatter(group: dist.ProcessGroup, given: torch.Tensor, taken: torch.Tensor, base: int, more: int) -> None:
    n = dist.get_world_size()
    count = base // n + more
    dist.reduce_scatter_tensor(taken[:count], given[: count * n], group=group)


def all_to_all(group: dist.ProcessGroup, given: torch.Tensor, taken: torch.Tensor, base: int, more: int) -> None:
    """Splits that differ from pair to pair, as tokens to experts do."""
    n, rank = dist.get_world_size(), dist.get_rank()
    count = base // n + more
    gives = [count + (rank + 2 * peer) % n for peer in range(n)]
    gets = [count + (peer + 2 * rank) % n for peer in range(n)]
    dist.all_to_all_single(taken[: sum(gets)], given[: sum(gives)], gets, gives, group=group)


CALLS: dict[str, Run] = {f.__name__: f for f in (all_reduce, all_gather, reduce_scatter, all_to_all)}


def one_round(
    run: Run, sizes: Sequence[int], base: int, group: dist.ProcessGroup, memory: torch.Tensor
) -> list[float]:
    """Seconds and processor seconds of a call of this rank."""
    taken = torch.empty_like(memory)
    begin, used = time.perf_counter(), time.process_time()
    for more in sizes:
        run(group, memory, taken, base, more)
    return [(time.perf_counter() - begin) / len(sizes), (time.process_time() - used) / len(sizes)]


def measure(options: argparse.Namespace) -> None:
    """All calls over all variants, in an initialised job."""
    groups = {name: dist.new_group(backend=name, timeout=TIMEOUT) for name in ("mycel", "gloo")}
    n, control = dist.get_world_size(), dist.new_group(backend="gloo", timeout=TIMEOUT)
    for name in options.calls:
        for size in options.sizes:
            base, seen = size // 4, 0
            memory = torch.zeros(base + n * (options.repeats + 2) * options.rounds_of + 2 * n * n)
            figures: dict[tuple[str, bool], list[list[float]]] = {variant: [] for variant in VARIANTS}
            for number in range(options.repeats + 1):  # the first is for warming up
                fresh = range(seen + 1, seen + 1 + options.rounds_of)
                seen += options.rounds_of
                for variant in VARIANTS:
                    dist.barrier(group=control)
                    sizes = fresh if variant[1] else [0] * len(fresh)
                    took = one_round(CALLS[name], sizes, base, groups[variant[0]], memory)
                    slowest = torch.tensor(took, dtype=torch.float64)
                    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=control)
                    if number:
                        figures[variant].append(slowest.tolist())
            if dist.get_rank() == 0:
                show(name, size, figures, options.output)
    if options.many:
        meet_many(groups["mycel"], options.many)


def meet_many(group: dist.ProcessGroup, many: int) -> None:
    """Memory of a rank while it meets ever new sizes."""
    memory = torch.zeros(many + 1)
    for count in range(1, many + 1):
        dist.all_reduce(memory[:count], group=group)
        if dist.get_rank() == 0 and (count in (many // 100, many // 10, many // 2, many)):
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            resident = pages * os.sysconf("SC_PAGE_SIZE")
            print(f"after {count} sizes: {format_size(resident)} resident", flush=True)


def show(name: str, size: int, figures: dict[tuple[str, bool], list[list[float]]], output: Path | None) -> None:
    """Print a call, and append its rows to a file."""
    medians = {variant: np.median(np.array(rounds), axis=0) for variant, rounds in figures.items()}
    known, fresh, gloo = (medians[variant] for variant in VARIANTS)
    cells = [
        f"{words} {format_seconds(wall)} ({cpu * 1e6:.0f} us of processor)"
        for words, (wall, cpu) in (("one size", known), ("new sizes", fresh), ("Gloo, new sizes", gloo))
    ]
    more = (fresh[1] - known[1]) * 1e6
    print(f"{name} {format_size(size)}: {'; '.join(cells)}; a new size costs {more:.0f} us more", flush=True)
    if output is None:
        return
    append(
        output,
        [
            {
                "benchmark": "changing_sizes",
                "collective": name,
                "bytes": size,
                "world_size": dist.get_world_size(),
                "variant": backend,
                "sizes": "new" if changes else "one",
                "median_s": float(medians[backend, changes][0]),
                "median_processor_s": float(medians[backend, changes][1]),
                "p10_s": float(np.quantile([wall for wall, _ in rounds], 0.1)),
                "p90_s": float(np.quantile([wall for wall, _ in rounds], 0.9)),
                "repeats": len(rounds),
                "hardware": describe_hardware(),
                "versions": dict(describe_versions()),
                **stamp(),
            }
            for (backend, changes), rounds in figures.items()
        ],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=lambda text: [parse_size(part) for part in text.split(",")], default=SIZES)
    parser.add_argument("--calls", type=lambda text: text.split(","), default=list(CALLS))
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds of each variant")
    parser.add_argument("--rounds-of", type=int, default=40, help="calls of a round")
    parser.add_argument("--many", type=int, default=0, help="all_reduces of ever new sizes at the end")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    return run_here(options.ranks, measure, options, TIMEOUT)


if __name__ == "__main__":
    raise SystemExit(main())
