"""Plans of memory carried out: mixtures beside each policy alone and torchtune's design, by link speed.

    python benchmarks/memory_swap.py            # prints; some minutes
    python benchmarks/memory_swap.py --write    # replaces its lines and the table in docs/concepts/swapping.md
    python benchmarks/memory_swap.py --quick    # two link speeds, two iterations
    python benchmarks/memory_swap.py --speeds 0.5 0.75 --write    # replaces the lines of these

Blocks are real, with real tensors and gradients; each forward and backward is stretched to a fixed time, so that two
cores measure what a device with that speed would see, and the link is emulated (``EmulatedLink``: a thread a
direction copies and takes as long as the link would). All ways take turns in one run, and each turn gives a ratio:
its median, least and greatest are in the table. ``planned`` is computed, all other times are measured. *Link* is the
rate over the one that would move a block's activations out in its forward.

``torchtune's design`` is ``OffloadActivations`` of torchtune rebuilt on the same link: each saved tensor by itself
out when it is saved, in when it is asked for; its memory is not limited here. ``keep all`` has no budget either.
``swap all`` moves everything out and back, ahead of need, as out-of-core designs do and as its plan says; ``swap all,
near stays`` is how ``Swapping`` carries the same plan out: what is asked for before it has left does not leave, which
is a mixture with blocks that are kept. No plan is below ``bound``, which is proved, of the blocks' measured times.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mycel.bench.measurement import describe_hardware
from mycel.memory import EmulatedLink, FarMemory, Swapping, attach, measure
from mycel.memory.swap.mover import Mover
from mycel.memory.swap.saved import Record
from mycel.memory.tiers.near import flat
from mycel.planning.residency import MemoryInstance, MemoryPlan, Policy, known_plans, listed_plan, plan_memory
from record import RECORDED, ROOT, append, markdown, read, stamp, write_section

OUTPUT = RECORDED / "memory_swap.jsonl"
PAGE = ROOT / "docs" / "concepts" / "swapping.md"
BLOCKS, WIDTH, TOKENS = 8, 64, 2048
#: Seconds of a block's forward and backward; part of all activations that fits near.
FORWARD_S, BACKWARD_S, NEAR = 0.03, 0.06, 0.4
SPEEDS = (0.2, 0.33, 0.5, 0.75, 1.0, 2.0)
STAYS = "swap all, near stays"


class Pace:
    """When something began, and until when it has to last."""

    def __init__(self) -> None:
        self.begin_s = 0.0

    def last(self, seconds: float) -> None:
        time.sleep(max(0.0, self.begin_s + seconds - time.perf_counter()))


class _Begins(torch.autograd.Function):
    """A block's backward begins when what it saved is there, computed again if it has to be.

    It asks for something that the block has saved anyway, and not for its output: a residual sum saves none, and the
    next block, whose input that is, would have it twice.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, pace: Pace) -> Tensor:
        ctx.pace = pace
        ctx.save_for_backward(h)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _ = ctx.saved_tensors
        ctx.pace.begin_s = time.perf_counter()
        return grads[0], None, None


class _Ends(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pace: Pace) -> Tensor:
        ctx.pace = pace
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.pace.last(BACKWARD_S)
        return grads[0], None


class PacedBlock(nn.Module):
    """A residual MLP whose forward and backward take fixed times."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        forward, backward = Pace(), Pace()
        forward.begin_s = time.perf_counter()
        x = _Ends.apply(x, backward)
        h = torch.nn.functional.gelu(self.up(self.norm(x)))
        forward.last(FORWARD_S)  # before the last thing that is saved, where a recomputation ends
        y: Tensor = _Begins.apply(x + self.down(h), h, backward)
        return y


class TorchtuneDesign(saved_tensors_hooks):
    """Every saved tensor goes out by itself when it is saved, and comes when it is asked for."""

    def __init__(self, link: EmulatedLink, parameters: Iterable[Tensor]) -> None:
        far = FarMemory()
        own = {p.untyped_storage()._cdata for p in parameters}

        def pack(x: Tensor) -> Any:
            if x.untyped_storage()._cdata in own or not x.numel() or x.grad_fn is None:
                return x.detach()
            there = far.take(x.untyped_storage().nbytes())
            return there, link.store([(there, flat(x))]), x.dtype, x.size(), x.stride(), x.storage_offset()

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            there, going, dtype, size, stride, offset = packed
            going.wait()
            near = torch.empty(there.numel(), dtype=torch.uint8)
            link.fetch([(there, near)]).wait()
            far.give(there)
            return torch.empty(0, dtype=dtype).set_(near.untyped_storage(), offset, size, stride)

        super().__init__(pack, unpack)


class MovesAll(Mover):
    """What goes out is let go before it comes back, also where it is asked for while it is still near."""

    def fetch(self, records: Iterable[Record], *, must: bool, **others: Any) -> bool:
        """As ``Mover``'s, once all of them are out."""
        records = list(records)
        until_s = time.perf_counter() + self.deadline_s
        with self.near.changed:
            while any(record.going for record in records):
                if not must:
                    return False
                if not self.near.changed.wait(max(0.0, until_s - time.perf_counter())):
                    raise SystemExit(f"swap all: what went out did not get there in {self.deadline_s:g} s")
        return super().fetch(records, must=must, **others)


def make() -> tuple[nn.Sequential, Tensor]:
    """A model and what it computes on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(PacedBlock() for _ in range(BLOCKS)))
    return model, torch.randn(TOKENS, WIDTH)


def iterate(model: nn.Module, x: Tensor) -> tuple[float, list[Tensor]]:
    """Seconds of a forward and backward, and gradients."""
    model.zero_grad()
    begin = time.perf_counter()
    model(x).square().mean().backward()
    spent = time.perf_counter() - begin
    return spent, [p.grad for p in model.parameters() if p.grad is not None]


def lines(speeds: Sequence[float], *, iterations: int, limit_s: float) -> list[dict[str, Any]]:
    """A line a link speed: what was planned, and what each way took."""
    model, x = make()
    blocks = list(model)[1:]
    probe = EmulatedLink(bandwidth_gbps=10)
    found = measure(model, blocks, lambda: model(x).square().mean(), link=probe, budget=1 << 40)
    probe.close()
    largest = max(block.saved for block in found.blocks)
    capacity = max(largest, int(NEAR * sum(block.saved for block in found.blocks)))
    made = []
    for speed in speeds:
        rate = speed * largest / FORWARD_S / 1e6  # bytes a microsecond
        instance = replace(found, capacity=capacity, out_bytes_per_us=rate, in_bytes_per_us=rate, latency_us=0)
        link = EmulatedLink(bandwidth_gbps=rate / 1e3)
        known = known_plans(instance)
        ways: dict[str, MemoryPlan] = {"mixed": plan_memory(instance, limit_s=limit_s)}
        ways |= three_policies(instance)
        ways |= {name: known[name] for name in ("recompute all", "swap all") if name in known}
        if "swap all" in ways:
            ways[STAYS] = ways["swap all"]
        line = {"link": speed, "blocks": BLOCKS, "near": NEAR, "ideal_us": instance.ideal_us}
        line |= run(model, x, instance, ways, link, iterations=iterations)
        line["policies"] = ways["mixed"].counts
        line["bound_us"] = ways["mixed"].lower_bound_us
        made.append(line)
        link.close()
        print(table(made[-1:]), flush=True)
    return made


def three_policies(instance: MemoryInstance) -> dict[str, MemoryPlan]:
    """The best list schedule of keep, swap and recompute alone, as KARMA has them: all patterns of a few blocks."""
    policies: tuple[Policy, ...] = ("keep", "swap", "recompute")
    found = (listed_plan(instance, each) for each in itertools.product(policies, repeat=len(instance.blocks)))
    best = min((plan for plan in found if plan is not None), key=lambda plan: plan.iteration_us, default=None)
    return {} if best is None else {"three policies": best}


def run(
    model: nn.Sequential,
    x: Tensor,
    instance: MemoryInstance,
    ways: Mapping[str, MemoryPlan],
    link: EmulatedLink,
    *,
    iterations: int,
) -> dict[str, Any]:
    """All ways in turns; the first iteration of each does not count, gradients have to be those of keeping all."""
    spent: dict[str, list[float]] = {}
    _, wanted = iterate(model, x)
    tuned = TorchtuneDesign(link, model.parameters())
    turns: dict[str, tuple[nn.Module, AbstractContextManager[Any]]] = {
        "keep all": (model, nullcontext()),
        "torchtune": (model, tuned),
    }
    swapped: dict[str, Swapping] = {}
    for name, plan in ways.items():  # a model each, so that each has its far memory from one iteration to the next
        own = copy.deepcopy(model)
        swapped[name] = one = attach(own, list(own)[1:], instance, plan, link=link)
        if name == "swap all":
            one.mover = MovesAll(one.near, one.far, link, one.mover.deadline_s)
        turns[name] = own, nullcontext()
    for number in range(iterations + 1):
        for name, (own, way) in turns.items():
            with way:
                seconds, grads = iterate(own, x)
            if not all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True)):
                raise SystemExit(f"{name}: other gradients")
            if number:
                spent.setdefault(name, []).append(seconds)
    peaks = {name: one.near.peak for name, one in swapped.items()}
    for one in swapped.values():
        one.close()
    if any(peak > instance.capacity for peak in peaks.values()):
        raise SystemExit(f"above the budget of {instance.capacity}: {peaks}")
    return {
        "planned_us": {name: plan.iteration_us for name, plan in ways.items()},
        "measured_us": {name: round(statistics.median(each) * 1e6) for name, each in spent.items()},
        "over_mixed": {
            name: sorted(a / b for a, b in zip(each, spent["mixed"], strict=True))
            for name, each in spent.items()
            if name != "mixed"
        },
        "peak_of_budget": {name: peak / instance.capacity for name, peak in peaks.items()},
        "iterations": iterations,
    }


def table(made: Sequence[dict[str, Any]]) -> str:
    """For the page; milliseconds."""

    def cell(line: dict[str, Any], name: str) -> str:
        found = line["measured_us"].get(name)
        return "does not fit" if found is None else f"{found / 1000:.0f}"

    rows = []
    for line in made:
        measured, ratios = line["measured_us"], line["over_mixed"]
        mixed = measured["mixed"]
        others = [name for name in ("recompute all", "swap all", "torchtune") if name in measured]
        best = min(others, key=lambda name: measured[name])
        rows.append(
            (
                f"{line['link']:.2f}",
                ", ".join(f"{count} {policy}" for policy, count in line["policies"].items()),
                f"{line['bound_us'] / 1000:.0f}",
                f"{line['planned_us']['mixed'] / 1000:.0f}",
                f"{mixed / 1000:.0f}",
                f"{100 * (mixed / line['planned_us']['mixed'] - 1):+.1f} %",
                *(cell(line, name) for name in ("recompute all", "swap all", "torchtune", STAYS, "keep all")),
                spread(ratios[best]),
                f"{measured[best] / line['bound_us']:.2f}x",
                spread(ratios[STAYS]) if STAYS in ratios else "",
                f"{100 * line['peak_of_budget']['mixed']:.0f} %",
            )
        )
    heads = ("link", "policies", "bound", "planned", "mixed", "of planned", "recompute all", "swap all")
    heads += ("torchtune's design", STAYS, "keep all, no budget", "best other over mixed", "over the bound")
    return markdown((*heads, f"{STAYS}, over mixed", "peak of budget"), rows)


def spread(ratios: Sequence[float]) -> str:
    """Median, least and greatest of turns."""
    return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    """Measure, print, and keep if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace recorded lines and the table of the page")
    parser.add_argument("--quick", action="store_true", help="two link speeds, two iterations")
    parser.add_argument("--speeds", nargs="+", type=float, choices=SPEEDS, help="these alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    speeds = options.speeds or ((0.5, 2.0) if options.quick else SPEEDS)
    made = lines(speeds, iterations=2 if options.quick else 7, limit_s=2.0 if options.quick else 10.0)
    print(table(made))
    if options.write:
        shared = {"hardware": describe_hardware(), **stamp()}
        kept = [line for line in read(OUTPUT) if line["link"] not in speeds]
        OUTPUT.unlink(missing_ok=True)
        append(OUTPUT, sorted([*kept, *(line | shared for line in made)], key=lambda line: line["link"]))
        write_section(PAGE, "memory_swap", table(read(OUTPUT)))


if __name__ == "__main__":
    main()
