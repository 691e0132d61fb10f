"""Messages between two ranks: Gloo against mycel over sockets and through memory, back and forth, in turns.

    python benchmarks/point_to_point.py                               # two ranks of this machine, 1 KB to 64 MB
    python benchmarks/point_to_point.py --sizes 1KB --repeats 21
    mycel emulate examples/clusters/two_boxes.yaml -- python benchmarks/point_to_point.py --variants gloo,tcp

Ranks 0 and 1 send a tensor to each other, one after the other; a figure is half of a round trip, the median over
rounds that take turns between the variants. Under ``mycel emulate`` the other ranks look on. With ``--output FILE``
every row is appended as a line of JSON.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from loopback import group_of
from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.topology import load_topology
from mycel.units import format_seconds, format_size, parse_size
from ranks import are_launched, be_rank, run_here
from record import append, stamp

#: Round trips of a round are as many as move about this much, and at most ``MOST_CALLS``.
ROUND_BYTES = 16 << 20
MOST_CALLS = 200
SIZES = [1 << power for power in (10, 16, 18, 20, 22, 26)]
TIMEOUT = timedelta(seconds=120)


def one_round(tensor: torch.Tensor, calls: int, group: dist.ProcessGroup, control: dist.ProcessGroup) -> float:
    """Seconds of a message on its way, as one of the two ranks sees it."""
    rank = dist.get_rank()
    dist.barrier(group=control)
    begin = time.perf_counter()
    for _ in range(calls if rank < 2 else 0):
        if rank == 0:
            dist.send(tensor, 1, group)
            dist.recv(tensor, 1, group)
        else:
            dist.recv(tensor, 0, group)
            dist.send(tensor, 0, group)
    return (time.perf_counter() - begin) / calls / 2


def measure(options: argparse.Namespace) -> None:
    """All sizes over all variants, in an initialised job."""
    groups = {variant: group_of(variant, TIMEOUT) for variant in options.variants}
    control = dist.new_group(backend="gloo", timeout=TIMEOUT)
    for size in options.sizes:
        calls = max(1, min(MOST_CALLS, ROUND_BYTES // size))
        figures: dict[str, list[float]] = {variant: [] for variant in groups}
        for number in range(options.repeats + 1):  # the first is for warming up
            for variant, group in groups.items():
                tensor = torch.full((size,), 7 if dist.get_rank() == 0 else 0, dtype=torch.uint8)
                took = one_round(tensor, calls, group, control)
                if dist.get_rank() < 2 and not bool((tensor == 7).all()):
                    raise RuntimeError(f"{variant}: a message of {size} bytes is wrong")
                if number:
                    figures[variant].append(took)
        if dist.get_rank() == 0:
            show(size, figures, options.output)
    dist.barrier(group=control)


def show(size: int, figures: dict[str, list[float]], output: Path | None) -> None:
    """Print a size, and append its rows to a file."""
    medians = {variant: float(np.median(values)) for variant, values in figures.items()}
    cells = [f"{v} {format_seconds(s)} ({size / s / 1e9:.2f} GB/s)" for v, s in medians.items()]
    print(f"{format_size(size)}: " + "; ".join(cells), flush=True)
    if output is None:
        return
    rows = []
    described = os.environ.get("MYCEL_TOPOLOGY")
    fabric = load_topology(described).name if described else "loopback"
    for variant, values in figures.items():
        p10, median, p90 = (float(np.quantile(values, q)) for q in (0.1, 0.5, 0.9))
        rows.append(
            {
                "benchmark": "point_to_point",
                "bytes": size,
                "world_size": dist.get_world_size(),
                "variant": variant,
                "topology": fabric,
                "median_s": median,
                "p10_s": p10,
                "p90_s": p90,
                "repeats": len(values),
                "hardware": describe_hardware(),
                "versions": dict(describe_versions()),
                **stamp(),
            }
        )
    append(output, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: [parse_size(part) for part in text.split(",")], default=SIZES)
    parser.add_argument("--variants", type=lambda text: text.split(","), default=["gloo", "unix", "memory"])
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds of each variant")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if are_launched():
        be_rank(measure, options, TIMEOUT)
        return 0
    return run_here(2, measure, options, TIMEOUT)


if __name__ == "__main__":
    raise SystemExit(main())
