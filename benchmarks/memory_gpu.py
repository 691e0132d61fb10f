"""One GPU: links to pinned memory, plans of activations, and a model of four times the budget, timed.

    python benchmarks/memory_gpu.py                # on a GPU
    python benchmarks/memory_gpu.py --rehearse     # on any machine: a small model behind an emulated link

*link*: GB/s of ``CudaLink`` out, in, and of both directions at a time. *activations*: an iteration of feed-forward
blocks with all kept, all computed again, all moved, and by the plan, within a part of what they save; gradients are
compared first. *parameters*: a step of a model whose parameters, gradients and optimizer state take four times the
budget, beside the same with everything near; a GPU's AdamW and a processor's differ in the last bits, so how far
losses are apart is said. Rounds go over the ways in turn; figures are medians with the 10th and 90th percentile,
between synchronisations. *At most* is what torch's allocator gave; *asked* is how often an iteration has the
processor wait for the device, by torch's own count.

No GPU has run this yet: no figure in the documents comes from it. Without one, it says so and ends with 2; what a
rehearsal prints says that the script runs, and nothing about a GPU.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from memory_prediction import Networks
from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.memory import CudaLink, EmulatedLink, FarMemory, Link, attach, fit, in_host, measure, pinned
from mycel.memory.needs import counted_peak, needs_of
from mycel.planning.residency import MemoryPlan, known_plans, plan_memory
from record import append, stamp

WARM_UP = 3
#: Part of what blocks save, that is near, and the number of times that states are larger than the budget.
NEAR, TIMES = 0.4, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where, and how large.

    Attributes:
        device: that computes.
        link: to far memory.
        width, layers, rows: of the model, and of what it computes on.
        transfer_bytes: of a transfer whose rate is measured.
        rounds: that are timed.
    """

    device: torch.device
    link: Link
    width: int
    layers: int
    rows: int
    transfer_bytes: int
    rounds: int

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Until the device has nothing to do."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def model(self) -> tuple[nn.Module, Tensor]:
        """One of blocks of one size, and its batch."""
        torch.manual_seed(0)
        model = Networks(width=self.width, layers=self.layers).to(self.device)
        return model, torch.randn(self.rows, self.width, device=self.device)

    def most(self, step: Callable[[], object]) -> int:
        """Bytes that the allocator gave at most, beyond what was there."""
        if not self.is_gpu:
            return counted_peak(step)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        step()
        return torch.cuda.max_memory_allocated(self.device) - before

    def asked(self, step: Callable[[], object]) -> int:
        """How often a step has the processor wait for the device."""
        if not self.is_gpu:
            step()
            return 0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchron" in str(each.message) for each in caught)

    def timed(self, ways: Mapping[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
        """Seconds of each way, in turns."""
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(self.rounds + WARM_UP):
            for name, step in ways.items():
                self.wait()
                begin = time.perf_counter()
                step()
                self.wait()
                if turn >= WARM_UP:
                    taken[name].append(time.perf_counter() - begin)
        found = {}
        for name, values in taken.items():
            low, middle, high = (float(each) for each in np.percentile(values, [10, 50, 90]))
            found[name] = {"p10_s": low, "median_s": middle, "p90_s": high}
        return found


def link_rows(setting: Setting) -> list[dict[str, Any]]:
    """A line a direction, and one for both at a time."""
    size, link = setting.transfer_bytes, setting.link
    make = pinned if setting.is_gpu else in_host
    far = [make(size) for _ in range(2)]
    near = [torch.zeros(size, dtype=torch.uint8, device=setting.device) for _ in range(2)]

    def out() -> None:
        link.store([(far[0], near[0])]).wait()

    def back() -> None:
        link.fetch([(far[1], near[1])]).wait()

    def both() -> None:
        going = link.store([(far[0], near[0])])
        link.fetch([(far[1], near[1])]).wait()
        going.wait()

    ways: dict[str, Callable[[], object]] = {"out": out, "in": back, "both at a time": both}
    timed = setting.timed(ways)
    moved = {"out": size, "in": size, "both at a time": 2 * size}
    return [
        {"part": "link", "way": name, **figures, "gbps": moved[name] / figures["median_s"] / 1e9}
        for name, figures in timed.items()
    ]


def activation_rows(setting: Setting) -> list[dict[str, Any]]:
    """A line a plan of activations."""
    model, x = setting.model()
    blocks = [f"layers.{place}" for place in range(setting.layers)]
    found = measure(model, blocks, lambda: model(x), link=setting.link, budget=1 << 50)
    largest = max(block.saved for block in found.blocks)
    whole = sum(block.saved for block in found.blocks)
    instance = replace(found, capacity=max(largest, int(NEAR * whole)))
    plans: dict[str, MemoryPlan | None] = {"keep all, no budget": None}
    known = known_plans(instance)
    plans |= {name: known[name] for name in ("recompute all", "swap all") if name in known}
    plans["plan"] = plan_memory(instance, limit_s=10.0)

    def step_of(own: nn.Module) -> Callable[[], list[Tensor]]:
        def step() -> list[Tensor]:
            own.zero_grad()
            own(x).backward()
            return [p.grad for p in own.parameters() if p.grad is not None]

        return step

    rows: dict[str, dict[str, Any]] = {}
    ways: dict[str, Callable[[], object]] = {}
    wanted: list[Tensor] = []
    with ExitStack() as stack:
        for name, plan in plans.items():
            own = copy.deepcopy(model)
            held = None
            if plan is not None:
                held = stack.enter_context(attach(own, blocks, instance, plan, link=setting.link))
            step = step_of(own)
            got = step()
            wanted = wanted or [grad.clone() for grad in got]
            if not all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)):
                raise SystemExit(f"{name}: other gradients")
            del got
            row: dict[str, Any] = {"part": "activations", "way": name, "most_bytes": setting.most(step)}
            row["asked"] = setting.asked(step)
            if plan is not None and held is not None:
                row |= {"planned_s": plan.iteration_us / 1e6, "bound_s": plan.lower_bound_us / 1e6}
                row |= {"budget": instance.capacity, "near": held.near.peak, "policies": plan.counts}
            rows[name], ways[name] = row, step
        for name, figures in setting.timed(ways).items():
            rows[name] |= figures
    return list(rows.values())


def parameter_rows(setting: Setting) -> list[dict[str, Any]]:
    """A line for everything near, and one for a quarter of it."""
    rows: dict[str, dict[str, Any]] = {}
    ways: dict[str, Callable[[], object]] = {}
    losses: dict[str, list[float]] = {}
    with ExitStack() as stack:
        for name in ("all near", f"1/{TIMES} of the states"):
            model, x = setting.model()
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            row: dict[str, Any] = {"part": "parameters", "way": name}
            if name != "all near":
                needs = needs_of(model, (x,), optimizer=optimizer)
                states = needs.most("parameters") + needs.most("gradients") + needs.most("optimizer")
                far = FarMemory(pinned if setting.is_gpu else in_host)
                fitted = fit(model, optimizer, (x,), budget=states // TIMES, link=setting.link, far=far)
                stack.enter_context(fitted)
                chosen = next(each for each in fitted.choices if each.way == fitted.way)
                row |= {"budget": states // TIMES, "chosen": fitted.way, "predicted_bytes": chosen.peak}

            def step(model: nn.Module = model, optimizer: Any = optimizer, x: Tensor = x) -> Tensor:
                loss: Tensor = model(x)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            losses[name] = [step().item() for _ in range(WARM_UP)]
            row["most_bytes"] = setting.most(step)
            row["asked"] = setting.asked(step)
            rows[name], ways[name] = row, step
        for name, figures in setting.timed(ways).items():
            rows[name] |= figures
    first, *others = losses.values()
    apart = max(abs(a - b) / abs(a) for other in others for a, b in zip(first, other, strict=True))
    return [row | {"losses_apart": apart} for row in rows.values()]


def told(row: Mapping[str, Any]) -> str:
    """A row, for people."""
    low, middle, high = (1e3 * row[key] for key in ("p10_s", "median_s", "p90_s"))
    words = [f"{row['part']:12} {row['way']:22} {middle:9.3f} ({low:.3f} to {high:.3f})"]
    if "gbps" in row:
        words.append(f"{row['gbps']:.1f} GB/s")
    if "most_bytes" in row:
        words.append(f"{row['most_bytes'] / (1 << 20):.1f} MiB at most, asked {row['asked']} times")
    if "planned_s" in row:
        words.append(f"planned {1e3 * row['planned_s']:.3f}, bound {1e3 * row['bound_s']:.3f}")
        words.append(f"near {row['near']} of {row['budget']} bytes")
    if "predicted_bytes" in row:
        words.append(f"{row['chosen']}, predicted {row['predicted_bytes'] / (1 << 20):.1f} MiB of")
        words.append(f"{row['budget'] / (1 << 20):.1f}; losses {row['losses_apart']:.1e} apart")
    return "  ".join(words)


def main() -> None:
    """Time, or rehearse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="small, on the processor")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--output", type=Path, help="append every row as a line of JSON")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        print("no CUDA GPU here: nothing to time; --rehearse shows that the script runs", file=sys.stderr)
        raise SystemExit(2)
    if options.rehearse:
        torch.set_num_threads(1)
        device, link = torch.device("cpu"), EmulatedLink(bandwidth_gbps=10)
        setting = Setting(device=device, link=link, width=64, layers=4, rows=16, transfer_bytes=1 << 16, rounds=2)
        where = "a rehearsal on the processor: no figure of a GPU"
    else:
        device = torch.device("cuda")
        setting = Setting(
            device=device,
            link=CudaLink(device),
            width=options.width,
            layers=options.layers,
            rows=options.rows,
            transfer_bytes=256 << 20,
            rounds=options.rounds,
        )
        where = torch.cuda.get_device_name()
    print(f"{where}; {describe_hardware()}; ms: median (p10 to p90)")
    for part in (link_rows, activation_rows, parameter_rows):
        rows = part(setting)
        for row in rows:
            print(told(row))
        if options.output is not None:
            common = {"on": where, "versions": describe_versions(), "hardware": describe_hardware(), **stamp()}
            append(options.output, [common | row for row in rows])
    setting.link.close()


if __name__ == "__main__":
    main()
