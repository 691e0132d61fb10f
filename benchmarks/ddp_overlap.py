"""How much of its communication DDP hides behind the backward pass: Gloo and mycel, step by step in turns.

    mycel emulate benchmarks/two_nodes.yaml -- python benchmarks/ddp_overlap.py

A transformer of 5.5 million parameters (22 MB) in buckets of 4 MB. In each turn a step without communication, then
for each variant the sums of its buckets alone, and a step with DDP. *Exposed* is what a step takes longer than the
one without communication; figures are medians of rank 0, from a barrier to the end of the step. With
``--output FILE`` every row is appended as a line of JSON.
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
from torch.nn.parallel import DistributedDataParallel

from loopback import group_of, processor_seconds
from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.topology import load_topology
from mycel.units import format_seconds
from ranks import are_launched, be_rank
from record import append, stamp

TIMEOUT = timedelta(seconds=300)
BUCKET_MB = 4
WIDTH, LAYERS, LENGTH = 256, 7, 64


def model() -> torch.nn.Module:
    """The same on every rank and for every variant."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


def train(trained: torch.nn.Module, inputs: torch.Tensor) -> None:
    """Forward and backward."""
    trained.zero_grad()
    trained(inputs).square().mean().backward()


def timed(call: Callable[[], object], control: dist.ProcessGroup) -> tuple[float, float]:
    """Seconds and processor seconds of a call that all ranks begin together."""
    dist.barrier(group=control)
    used, begin = processor_seconds(), time.perf_counter()
    call()
    return time.perf_counter() - begin, processor_seconds() - used


def measure(options: argparse.Namespace) -> None:
    """All turns, in an initialised job."""
    control = dist.new_group(backend="gloo", timeout=TIMEOUT)
    groups = {variant: group_of(variant, TIMEOUT) for variant in options.variants}
    alone = model()
    inputs = torch.randn(options.batch, LENGTH, WIDTH)
    ddp = {
        variant: DistributedDataParallel(model(), process_group=group, bucket_cap_mb=BUCKET_MB)
        for variant, group in groups.items()
    }
    total = sum(parameter.numel() for parameter in alone.parameters())
    buckets = torch.zeros(total).split(BUCKET_MB * (1 << 20) // 4)

    def sum_up(group: dist.ProcessGroup) -> None:
        works = [dist.all_reduce(bucket, group=group, async_op=True) for bucket in buckets]
        for work in works:
            work.wait()

    figures: dict[str, list[tuple[float, float]]] = {}
    for number in range(options.repeats + 2):  # DDP makes its buckets anew after the first step
        taken = {"alone": timed(lambda: train(alone, inputs), control)}
        for variant, group in groups.items():
            taken[f"{variant} sums"] = timed(lambda group=group: sum_up(group), control)
            taken[f"{variant} step"] = timed(lambda own=ddp[variant]: train(own, inputs), control)
        if number >= 2:
            for name, figure in taken.items():
                figures.setdefault(name, []).append(figure)
    gradients = [[p.grad for p in each.parameters()] for each in ddp.values()]
    for others in gradients[1:]:
        torch.testing.assert_close(others, gradients[0])
    if dist.get_rank() == 0:
        show(figures, options)
    dist.barrier(group=control)


def show(figures: dict[str, list[tuple[float, float]]], options: argparse.Namespace) -> None:
    """Print what each variant exposes, and append the rows to a file."""
    seconds = {name: np.array([s for s, _ in values]) for name, values in figures.items()}
    used = {name: float(np.median([u for _, u in values])) for name, values in figures.items()}
    print(f"without communication: {format_seconds(float(np.median(seconds['alone'])))}")
    rows = []
    described = os.environ.get("MYCEL_TOPOLOGY")
    for variant in options.variants:
        step, sums = seconds[f"{variant} step"], seconds[f"{variant} sums"]
        exposed = step - seconds["alone"]
        p10, median, p90 = (float(np.quantile(exposed, q)) for q in (0.1, 0.5, 0.9))
        alone_s = float(np.median(sums))
        print(
            f"{variant}: sums alone {format_seconds(alone_s)}; step {format_seconds(float(np.median(step)))}, "
            f"exposed {format_seconds(median)} (p10 {format_seconds(p10)}, p90 {format_seconds(p90)}), "
            f"hidden {1 - median / alone_s:.0%}; CPU of a step {format_seconds(used[f'{variant} step'])}, "
            f"without communication {format_seconds(used['alone'])}",
            flush=True,
        )
        rows.append(
            {
                "benchmark": "ddp_overlap",
                "variant": variant,
                "world_size": dist.get_world_size(),
                "topology": load_topology(described).name if described else "loopback",
                "alone_s": float(np.median(seconds["alone"])),
                "sums_s": alone_s,
                "step_s": float(np.median(step)),
                "exposed_median_s": median,
                "exposed_p10_s": p10,
                "exposed_p90_s": p90,
                "processor_s": used[f"{variant} step"],
                "repeats": len(step),
                "hardware": describe_hardware(),
                "versions": dict(describe_versions()),
                **stamp(),
            }
        )
    if options.output is not None:
        append(options.output, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", type=lambda text: text.split(","), default=["gloo", "memory"])
    parser.add_argument("--repeats", type=int, default=30, help="timed turns")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a rank and step")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if not are_launched():
        parser.error("ranks are started by mycel emulate, or torchrun")
    be_rank(measure, options, TIMEOUT)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
