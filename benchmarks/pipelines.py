"""Pipelines of torch over Gloo and over mycel, step by step in turns: losses, and seconds of a step.

    python benchmarks/pipelines.py                                  # two ranks of this machine, then four
    python benchmarks/pipelines.py --ranks 2 --activations 4MB --schedules 1f1b
    mycel emulate examples/clusters/torus_2x4.yaml -- python benchmarks/pipelines.py

Each rank has one stage (two, one behind the other in a loop or back in a V, in the schedules that are so), a layer
and its nonlinearity; an activation is what goes from stage to stage for a micro-batch. Losses must be the same bits
over every variant. A figure is the median over steps that take turns between the variants, from when all ranks begin
to when all are through. With ``--output FILE`` every row is appended as a line of JSON.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from loopback import group_of, processor_seconds
from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.topology import load_topology
from mycel.units import format_seconds, format_size, parse_size
from ranks import are_launched, be_rank, run_here
from record import append, stamp

WIDTH = 256
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv")
TIMEOUT = timedelta(seconds=300)


class Pipeline:
    """A model in stages over the ranks of a group, and its training.

    Args:
        schedule: one of ``SCHEDULES``.
        num_bytes: of an activation.
        num_microbatches: of a step.
        group: whose ranks have the stages.
    """

    def __init__(self, schedule: str, num_bytes: int, num_microbatches: int, group: dist.ProcessGroup) -> None:
        from torch.distributed import pipelining

        rank, size = dist.get_rank(), dist.get_world_size()
        own = {
            "interleaved": [rank, size + rank],
            "zbv": [rank, 2 * size - 1 - rank],
        }.get(schedule, [rank])
        num_stages = size * len(own)
        self._is_first, self._is_last = 0 in own, num_stages - 1 in own
        torch.manual_seed(0)
        layers = [
            torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.Tanh()) for _ in range(num_stages)
        ]
        mine = [layers[number] for number in own]
        self._optimizer = torch.optim.SGD([each[0].weight for each in mine], lr=0.1)
        rows = num_microbatches * max(1, num_bytes // WIDTH // 4)
        self._inputs, self._targets = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
        device = torch.device("cpu")
        stages = [
            pipelining.PipelineStage(layer, number, num_stages, device, group=group)
            for layer, number in zip(mine, own, strict=True)
        ]
        kinds: dict[str, Any] = {
            "gpipe": pipelining.ScheduleGPipe,
            "1f1b": pipelining.Schedule1F1B,
            "interleaved": pipelining.ScheduleInterleaved1F1B,
            "zbv": pipelining.ScheduleZBVZeroBubble,
        }
        self._schedule = kinds[schedule](
            stages if len(own) > 1 else stages[0], num_microbatches, loss_fn=torch.nn.functional.mse_loss
        )

    def step(self) -> list[float]:
        """One step of training; the losses of its micro-batches, on the rank that has the last stage."""
        losses: list[torch.Tensor] = []
        given = (self._inputs,) if self._is_first else ()
        more = {"target": self._targets, "losses": losses} if self._is_last else {}
        self._optimizer.zero_grad()
        self._schedule.step(*given, **more)
        self._optimizer.step()
        return [loss.item() for loss in losses]


def measure(options: argparse.Namespace) -> None:
    """All schedules and sizes over all variants, in an initialised job."""
    groups = {variant: group_of(variant, TIMEOUT) for variant in options.variants}
    control = dist.new_group(backend="gloo", timeout=TIMEOUT)
    for schedule in options.schedules:
        for size in options.activations:
            pipelines = {v: Pipeline(schedule, size, options.microbatches, g) for v, g in groups.items()}
            losses: dict[str, list[float]] = {variant: [] for variant in groups}
            figures: dict[str, list[tuple[float, float]]] = {variant: [] for variant in groups}
            for number in range(options.repeats + 1):  # the first is for warming up
                for variant, pipeline in pipelines.items():
                    dist.barrier(group=control)
                    used, begin = processor_seconds(), time.perf_counter()
                    losses[variant] += pipeline.step()
                    used = processor_seconds() - used
                    dist.barrier(group=control)
                    if number:
                        figures[variant].append((time.perf_counter() - begin, used))
            first = losses[options.variants[0]]
            if any(each != first for each in losses.values()):
                raise RuntimeError(f"{schedule}, {format_size(size)}: losses differ: {losses}")
            if dist.get_rank() == 0:
                show(schedule, size, options.microbatches, figures, options.output)
    dist.barrier(group=control)


def show(
    schedule: str, size: int, microbatches: int, figures: dict[str, list[tuple[float, float]]], output: Path | None
) -> None:
    """Print a cell, and append its rows to a file."""
    medians = {variant: float(np.median([s for s, _ in values])) for variant, values in figures.items()}
    base = next(iter(medians.values()))
    used = {variant: float(np.median([u for _, u in values])) for variant, values in figures.items()}
    cells = [f"{v} {format_seconds(s)} ({base / s:.2f}; CPU {format_seconds(used[v])})" for v, s in medians.items()]
    print(f"{schedule}, {dist.get_world_size()} ranks, {format_size(size)}: " + "; ".join(cells), flush=True)
    if output is None:
        return
    described = os.environ.get("MYCEL_TOPOLOGY")
    rows = []
    for variant, values in figures.items():
        seconds = [s for s, _ in values]
        p10, median, p90 = (float(np.quantile(seconds, q)) for q in (0.1, 0.5, 0.9))
        rows.append(
            {
                "benchmark": "pipelines",
                "schedule": schedule,
                "bytes": size,
                "microbatches": microbatches,
                "world_size": dist.get_world_size(),
                "variant": variant,
                "topology": load_topology(described).name if described else "loopback",
                "median_s": median,
                "p10_s": p10,
                "p90_s": p90,
                "processor_s": float(np.median([used for _, used in values])),
                "repeats": len(values),
                "hardware": describe_hardware(),
                "versions": dict(describe_versions()),
                **stamp(),
            }
        )
    append(output, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [1 << 20, 4 << 20, 16 << 20]
    parser.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=[2, 4])
    parser.add_argument("--schedules", type=lambda text: text.split(","), default=list(SCHEDULES))
    parser.add_argument("--activations", type=lambda t: [parse_size(part) for part in t.split(",")], default=sizes)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--variants", type=lambda text: text.split(","), default=["gloo", "memory"])
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each variant")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if are_launched():
        be_rank(measure, options, TIMEOUT)
        return 0
    return max(run_here(size, measure, options, TIMEOUT) for size in options.ranks)


if __name__ == "__main__":
    raise SystemExit(main())
