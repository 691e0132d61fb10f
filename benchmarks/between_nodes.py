"""all_reduce between two nodes over a fast network: what a group that was told nothing loses against one that was.

    mycel emulate "star:ranks=2,bandwidth=25 Gbit/s" -- python benchmarks/between_nodes.py --label "25 Gbit/s"

Variants: ``told`` has the topology file of the launcher, ``default`` has none, ``unpaced`` has it and sends as fast
as the kernel takes it; and Gloo. Each has its turn in each round, over ``mycel emulate`` or real machines. "s/GB" are
processor seconds of all ranks for 10^9 bytes of the array. With ``--output FILE`` rows are appended as lines of JSON.
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

from loopback import group_of, processor_seconds
from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.units import format_seconds, format_size, parse_size
from ranks import are_launched, be_rank
from record import append, stamp

TIMEOUT = timedelta(seconds=120)
#: What the environment says while a variant's group is made; ``None``: nothing.
SAID: dict[str, dict[str, str | None]] = {
    "told": {},
    "default": {"MYCEL_TOPOLOGY": None},
    "unpaced": {"MYCEL_PACE": "0"},
}


def group_as(variant: str) -> dist.ProcessGroup:
    """The process group of a variant."""
    if variant == "gloo":
        return group_of("gloo", TIMEOUT)
    said = SAID[variant]
    before = {name: os.environ.get(name) for name in said}
    try:
        _say(said)
        return dist.new_group(backend="mycel", timeout=TIMEOUT)
    finally:
        _say(before)


def _say(said: dict[str, str | None]) -> None:
    for name, value in said.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def measure(options: argparse.Namespace) -> None:
    """All sizes over all variants, in an initialised job."""
    groups = {variant: group_as(variant) for variant in options.variants}
    control = dist.new_group(backend="gloo", timeout=TIMEOUT)
    expected = dist.get_world_size() * (dist.get_world_size() + 1) // 2
    for size in options.sizes:
        figures: dict[str, list[tuple[float, float]]] = {variant: [] for variant in groups}
        for number in range(options.repeats + 2):  # the first two are for warming up
            for variant, group in groups.items():
                array = torch.full((size // 4,), float(dist.get_rank() + 1))
                dist.barrier(group=control)
                used, begin = processor_seconds(), time.perf_counter()
                dist.all_reduce(array, group=group)
                took = torch.tensor([time.perf_counter() - begin, processor_seconds() - used])
                if not bool((array == expected).all()):
                    raise RuntimeError(f"{variant}: a sum of {size} bytes is wrong")
                all_took = [torch.zeros(2) for _ in range(dist.get_world_size())]
                dist.all_gather(all_took, took, group=control)
                slowest, together = max(float(t[0]) for t in all_took), sum(float(t[1]) for t in all_took)
                if number >= 2:
                    figures[variant].append((slowest, together / size * 1e9))
        if dist.get_rank() == 0:
            show(size, figures, options)
    dist.barrier(group=control)


def show(size: int, figures: dict[str, list[tuple[float, float]]], options: argparse.Namespace) -> None:
    """Print a size, and append its rows to a file."""
    rows = []
    for variant, values in figures.items():
        seconds, used = np.array(values).T
        p10, median, p90 = (float(np.quantile(seconds, q)) for q in (0.1, 0.5, 0.9))
        s_per_gb = float(np.median(used))
        print(
            f"{options.label}, {format_size(size)}, {variant}: {format_seconds(median)} (p10 {format_seconds(p10)}, "
            f"min {format_seconds(float(seconds.min()))}), {8 * size / median / 1e9:.1f} Gbit/s, {s_per_gb:.2f} s/GB",
            flush=True,
        )
        rows.append(
            {
                "benchmark": "between_nodes",
                "network": options.label,
                "bytes": size,
                "world_size": dist.get_world_size(),
                "variant": variant,
                "median_s": median,
                "p10_s": p10,
                "p90_s": p90,
                "min_s": float(seconds.min()),
                "processor_s_per_gb": s_per_gb,
                "repeats": len(values),
                "hardware": describe_hardware(),
                "versions": dict(describe_versions()),
                **stamp(),
            }
        )
    if options.output is not None:
        append(options.output, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [16 << 20, 64 << 20]
    parser.add_argument("--label", default="this network", help="what the rows call the network")
    parser.add_argument("--sizes", type=lambda text: [parse_size(part) for part in text.split(",")], default=sizes)
    parser.add_argument("--variants", type=lambda t: t.split(","), default=["gloo", "told", "default", "unpaced"])
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if not are_launched():
        parser.error("ranks are started by mycel emulate, or torchrun")
    be_rank(measure, options, TIMEOUT)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
