"""What FlexSP claims: groups of unequal degree in one step beat the one degree that the longest sequence needs.

    python benchmarks/claims/flexsp.py [--steps 40]     # some minutes, needs root; replaces its lines and the table
    python benchmarks/claims/flexsp.py --quick          # 6 steps, nothing recorded

Eight ranks on two emulated nodes train a small model on batches whose lengths are drawn from Wikipedia's articles,
up to 64 Ki tokens, divided by 64. The longest that is allowed needs all eight ranks; that degree for everything is
the baseline, with its sequences distributed by us. Both take turns step by step, each with a model of its own.
Exchanges (Ulysses, gradients, agreement), plans and losses are real; computation is paced: a rank computes little
and sleeps until the modelled time of its part is over. What the planner knows of exchanges and of the fixed part of
a micro-batch is measured at two sizes before the first step, without pace; predictions are made of that alone.

References:
    Y. Wang et al., "FlexSP: Accelerating Large Language Model Training via Flexible Sequence Parallelism",
    ASPLOS 2025, sections 4 and 6.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from moe_ranks import is_rank, join, on_cluster, say, step_s
from mycel.cost import Line
from mycel.planning.grouping import (
    Candidate,
    PlannedGroup,
    SequenceInstance,
    SequencePlan,
    SequencePlanner,
    static_plans,
)
from mycel.planning.grouping.greedy import ready
from mycel.sequence import MicroBatch, SequenceStep, apply, planned_step, steps
from mycel.topology import load_topology
from record import RECORDED, ROOT, cluster_file, conclude, markdown
from sequence_plans import wikipedia

OUTPUT = RECORDED / "claims" / "flexsp.jsonl"
PAGE = ROOT / "docs" / "concepts" / "sequence_plans.md"
RANKS, CAPACITY, LONGEST, SCALE = 8, 128, 1024, 64
DEGREES = (1, 2, 4, 8)
HEADS, WIDTH, LAYERS, WORDS = 8, 256, 2, 64
#: Of paced computation, in microseconds, forward and backward together: FlexSP's ratio of the square of a sequence
#: to the sequence at a length 64 times as large, and of the fixed part to a full rank's.
US_PER_TOKEN, US_PER_TOKEN2, US_PER_STEP = 6000.0, 10.7, 100_000.0
#: Tokens of each group while exchanges are measured, per rank.
SMALL, LARGE = 16, 96
REPEATS = 7


def lengths_of(step: int) -> list[int]:
    """Tokens of each sequence: four fifths of what ranks hold."""
    chance, found = np.random.default_rng(step), []
    while sum(found) < 0.8 * RANKS * CAPACITY:
        length = max(2, wikipedia(chance) // SCALE)
        if length <= LONGEST and sum(found) + length <= RANKS * CAPACITY:
            found.append(length)
    return found


def documents_of(lengths: Sequence[int], seed: int) -> list[dict[str, Tensor]]:
    """Tokens that count on from each other, so that there is something to learn."""
    chance = torch.Generator().manual_seed(seed)
    made = []
    for length in lengths:
        first, apart = torch.randint(0, WORDS, (2,), generator=chance).tolist()
        ids = (first + (1 + apart % 3) * torch.arange(length)) % WORDS
        made.append({"input_ids": ids, "labels": ids})
    return made


class Pace:
    """Seconds that a layer takes, forwards and backwards."""

    def __init__(self) -> None:
        self.forward_s = self.backward_s = self.begin = 0.0

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, self.begin + seconds - time.perf_counter()))


class Begin(torch.autograd.Function):
    """Last forwards and first backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pace: Pace) -> Tensor:
        ctx.pace = pace
        pace.sleep(pace.forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.pace.begin = time.perf_counter()
        return grad, None


class End(torch.autograd.Function):
    """First forwards and last backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pace: Pace) -> Tensor:
        ctx.pace = pace
        pace.begin = time.perf_counter()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.pace.sleep(ctx.pace.backward_s)
        return grad, None


class Layer(nn.Module):
    """Paced work on each token by itself, then attention, which exchanges."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(3, WIDTH))
        self.shift = nn.Parameter(0.1 * torch.randn(3, WIDTH))
        self._pace = pace

    def forward(self, x: Tensor) -> Tensor:
        y = End.apply(x, self._pace)
        q, k, v = Begin.apply(torch.tanh(y * self.scale[:, None, None] + self.shift[:, None, None]), self._pace)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, k, v))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + seen.transpose(1, 2).flatten(2)


class Net(nn.Module):
    """Few parameters, wide tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.pace = Pace()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList([Layer(self.pace) for _ in range(LAYERS)])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def __deepcopy__(self, memo: Any) -> Net:
        made = Net()
        made.load_state_dict(self.state_dict())
        return made


def losses_of(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100)


def paced_us(lengths: Sequence[int], degree: int) -> float:
    """Of computation, forwards and backwards, of one of ``degree`` ranks."""
    return US_PER_STEP + sum(US_PER_TOKEN2 * n * n + US_PER_TOKEN * n for n in lengths) / degree


class Trained:
    """A model in DDP, and what a step is on it."""

    def __init__(self, net: Net) -> None:
        self.net = copy.deepcopy(net)
        self.handle = apply(self.net, way="ulysses")
        self.ddp = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.lengths: tuple[int, ...] = ()

    def loss(self, model: nn.Module, part: MicroBatch) -> Tensor:
        seconds = 0.0
        if self.lengths:
            seconds = paced_us([self.lengths[k] for k in part.sequences], len(part.ranks)) / 1e6 / LAYERS
        self.net.pace.forward_s, self.net.pace.backward_s = seconds / 3, 2 * seconds / 3
        return part.mean(losses_of(model(part.batch["input_ids"]), part.batch["labels"]))

    def run(self, step: SequenceStep, *, paced: bool = True) -> float:
        self.lengths = step.lengths if paced else ()
        loss = step.run(self.ddp, self.loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)


def of_one_degree(degree: int, tokens: int, micro_batches: int) -> tuple[SequencePlan, list[dict[str, Tensor]]]:
    """All ranks in groups of a degree, each with one sequence of so many tokens a rank."""
    groups, lengths = [], []
    for index in range(micro_batches):
        for first in range(0, RANKS, degree):
            ranks = tuple(range(first, first + degree))
            groups.append(PlannedGroup(micro_batch=index, ranks=ranks, sequences=(len(lengths),)))
            lengths.append(tokens * degree)
    return SequencePlan(groups=tuple(groups), total_us=1.0, lower_bound_us=0.0), documents_of(lengths, 0)


def calibrated(model: Trained) -> dict[str, Any]:
    """Microseconds of a token by degree, of a micro-batch and of a step, besides what is paced."""

    def measured(degree: int, tokens: int, micro_batches: int = 1) -> float:
        plan, documents = of_one_degree(degree, tokens, micro_batches)
        times = []
        for turn in range(REPEATS + 1):
            spent = step_s(lambda: model.run(planned_step(plan, documents, model.handle), paced=False))
            if turn:
                times.append(spent)
        return 1e6 * statistics.median(times)

    fixed, comm = {}, {}
    for degree in DEGREES:
        small, large = SMALL * degree, LARGE * degree
        line = Line.through((small, measured(degree, SMALL)), (large, measured(degree, LARGE)))
        fixed[degree], comm[degree] = line.at(0), max(0.0, (line.at(large) - line.at(small)) / (large - small))
    # A second micro-batch costs its fixed part again, and not what a step has once: agreement, gradients, optimizer.
    one, two = (measured(DEGREES[-2], SMALL, count) for count in (1, 2))
    return {"comm": comm, "fixed": fixed, "once": max(0.0, one - (two - one))}


def replayed_us(plan: SequencePlan, lengths: Sequence[int], costs: dict[str, Any]) -> float:
    """What a plan takes: a group begins when the last of its ranks is free; gradients are averaged at the end."""
    free = [0.0] * RANKS
    for group in sorted(plan.groups, key=lambda g: g.micro_batch):
        own, degree = [lengths[k] for k in group.sequences], len(group.ranks)
        ends = max(free[r] for r in group.ranks) + max(0.0, costs["fixed"][degree] - costs["once"])
        ends += paced_us(own, degree) + costs["comm"][degree] * sum(own)
        for rank in group.ranks:
            free[rank] = ends
    return max(free) + costs["once"]


def be_rank(count: int, limit_s: float) -> None:
    """A rank: measures what exchanges take, then trains twice over, in turns."""
    join()
    torch.manual_seed(0)
    net = Net()
    ready()
    costs = calibrated(Trained(net))
    micro_us = max(0.0, statistics.mean(costs["fixed"].values()) - costs["once"])  # plans know one for all
    candidates = tuple(Candidate(size=d, comm_us_per_token=costs["comm"][d]) for d in DEGREES)
    shared: dict[str, Any] = {
        "num_ranks": RANKS,
        "capacity_tokens": CAPACITY,
        "us_per_token2": US_PER_TOKEN2,
        "us_per_token": US_PER_TOKEN,
        "us_per_step": US_PER_STEP + micro_us,
        "candidates": candidates,
        "max_micro_batches": 4,
    }

    def static(lengths: tuple[int, ...]) -> SequencePlan:
        return static_plans(SequenceInstance(lengths=lengths, **shared))[RANKS]

    batches = [documents_of(lengths_of(step), step) for step in range(count + 1)]
    planner = SequencePlanner(**shared, limit_s=limit_s)
    trained = {name: Trained(net) for name in ("groups", "static")}
    with planner:
        plans: dict[str, Any] = {"groups": planner, "static": static}
        going = {name: steps(batches, plans[name], model.handle) for name, model in trained.items()}
        for number in range(count + 1):  # the first is for warming up: the solver is loaded, groups are made
            for name, model in trained.items():
                found: dict[str, Any] = {}

                def one(name: str = name, model: Trained = model, found: dict[str, Any] = found) -> None:
                    step = next(going[name])
                    found.update(step=step, loss=model.run(step))

                seconds = step_s(one)
                step: SequenceStep = found["step"]
                say(
                    case=name,
                    step=number,
                    paced_s=seconds,
                    predicted_s=replayed_us(step.plan, step.lengths, costs) / 1e6,
                    planned_s=step.plan.total_us / 1e6,
                    waited_s=step.waited_s,
                    new_groups=step.new_groups,
                    loss=found["loss"],
                    degrees=sorted(len(group.ranks) for group in step.plan.groups),
                    micro_batches=step.plan.num_micro_batches,
                )
    say(costs=costs)
    dist.destroy_process_group()


def alone(count: int) -> list[float]:
    """Losses of one process, every sequence by itself."""
    torch.manual_seed(0)
    net, found = Net(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(count + 1):
        documents = documents_of(lengths_of(step), step)
        labels = sum(len(d["labels"]) - 1 for d in documents)
        loss = torch.zeros(())
        for d in documents:
            loss = loss + losses_of(net(d["input_ids"][None])[:, :-1], d["labels"][None, 1:]).sum() / labels
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def summed_up(heard: list[dict[str, Any]], wanted: list[float]) -> list[dict[str, Any]]:
    """A line for each way, and one for what they compare to."""
    found: list[dict[str, Any]] = []
    of = {name: [line for line in heard if line.get("case") == name][1:] for name in ("groups", "static")}
    for name, lines in of.items():
        off = [line["predicted_s"] / line["paced_s"] - 1 for line in lines]
        found.append(
            {
                "case": name,
                "steps": len(lines),
                "paced_s": [line["paced_s"] for line in lines],
                "predicted_s": [line["predicted_s"] for line in lines],
                "off_median": statistics.median(map(abs, off)),
                "off_most": max(off, key=abs),
                "off_total": sum(line["predicted_s"] for line in lines) / sum(line["paced_s"] for line in lines) - 1,
                "waited_s": statistics.median(line["waited_s"] for line in lines),
                "degrees": [line["degrees"] for line in lines],
                "loss": max(abs(line["loss"] / w - 1) for line, w in zip(lines, wanted[1:], strict=True)),
                "losses": [lines[0]["loss"], lines[-1]["loss"]],
            }
        )
    pairs = zip(of["static"], of["groups"], strict=True)
    ratios = sorted(static["paced_s"] / groups["paced_s"] for static, groups in pairs)
    total = sum(line["paced_s"] for line in of["static"]) / sum(line["paced_s"] for line in of["groups"])
    costs = next(line["costs"] for line in heard if "costs" in line)
    found.append(
        {
            "speed_up": statistics.median(ratios),
            "between": [ratios[0], ratios[-1]],
            "of_all": total,
            "costs": costs,
        }
    )
    return found


def table(lines: list[dict[str, Any]]) -> str:
    """Both ways, and how much sooner."""
    names = {"groups": "groups of unequal degree", "static": "degree 8 for all"}
    rows = []
    for line in lines:
        if "case" not in line:
            continue
        rows.append(
            (
                names[line["case"]],
                line["steps"],
                f"{statistics.median(line['paced_s']):.2f} s",
                f"{statistics.median(line['predicted_s']):.2f} s",
                f"{line['off_total']:+.1%}; {line['off_median']:.1%}, {line['off_most']:+.1%} at most",
                f"{line['waited_s'] * 1e3:.1f} ms",
                f"{line['loss']:.1e}",
            )
        )
    headings = (
        "plan",
        "steps",
        "step, paced",
        "step, predicted",
        "predicted is off: all steps; one, median and most",
        "waited for the plan, measured",
        "losses off one process",
    )
    text = markdown(headings, rows)
    for line in lines:
        if "speed_up" in line:
            low, high = line["between"]
            text += (
                f"\nGroups of unequal degree are {line['speed_up']:.2f} times as fast, the median of pairs of steps "
                f"({low:.2f} to {high:.2f}); all steps together {line['of_all']:.2f} times. Both paced.\n"
            )
    return text


def main() -> int:
    """Measures and records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--limit", type=float, default=0.2, help="seconds of search for a plan")
    parser.add_argument("--quick", action="store_true", help="6 steps, nothing recorded")
    arguments = parser.parse_args()
    count = 6 if arguments.quick else arguments.steps
    heard = on_cluster(
        load_topology(cluster_file("slow_boxes")), Path(__file__), [str(count), str(arguments.limit)], timeout_s=540.0
    )
    lines = summed_up(heard, alone(count))
    if arguments.quick:
        print(json.dumps(lines[-1]))
        print(table(lines))
    else:
        conclude(OUTPUT, PAGE, "flexsp", lines, table)
    return 0


if __name__ == "__main__":
    if is_rank():
        be_rank(int(sys.argv[1]), float(sys.argv[2]))
    else:
        sys.exit(main())
