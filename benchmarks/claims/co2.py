"""Whether CO2 hides its exchange behind local steps, and what it costs in quality.

    python benchmarks/claims/co2.py              # both parts, about six minutes on two quiet cores
    python benchmarks/claims/co2.py --part rate  # step rates over links of 50 Mbit/s; needs root
    python benchmarks/claims/co2.py --quick      # both, small; records nothing

*Rate*: four ranks behind one switch, links of 50 Mbit/s, train a byte-level transformer on the standard library's
source. Rounds are about twice as long as one exchange takes, both measured at the beginning. Ways take turns of a few
rounds in the same processes; the first round of a turn is not counted, since no exchange of the round before runs
beside it. ``alone`` never exchanges anything.

*Quality*: four ranks on loopback, digits, three seeds, with and without penalty and clipping.

Rows replace those of the last run in ``benchmarks/recorded/claims/co2.jsonl``, and the tables in
docs/concepts/local_updates.md.

References:
    W. Sun et al., "CO2: Efficient Distributed Training with Full Communication-Computation Overlap", ICLR 2024, arXiv
    2401.16265.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from digits import Digits, network, run_ranks, spread
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import mycel.runtime  # noqa: F401  (registers the backend)
from mycel.bench import ranks as launcher
from mycel.bench.measurement import describe_hardware
from mycel.bench.run import warm_up
from mycel.data_parallel.local import Delayed, LocalUpdates, MakeOuter, Periodic, co2, local_updates, slowmo
from mycel.demo.corpus import load_corpus, sample_batch
from mycel.demo.model import VOCABULARY, ByteGPT, ModelConfig
from mycel.topology.load import load_topology
from record import RECORDED, ROOT, append, markdown, read, stamp, write_section

OUTPUT = RECORDED / "claims" / "co2.jsonl"
PAGE = ROOT / "docs" / "concepts" / "local_updates.md"
CLUSTER = "star:ranks=4,bandwidth=50 Mbit/s"
RANKS, LENGTH = 4, 64

# -- rate ---------------------------------------------------------------------------------------------------------


class Way:
    """A model that is trained in one way."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps = name, steps
        torch.manual_seed(0)
        self.net = ByteGPT(ModelConfig(width=96, num_layers=3, num_heads=3, max_length=LENGTH))
        self.model: nn.Module = self.net
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3, fused=True)
        self.updates: LocalUpdates | None = None
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        if name == "DDP":
            self.model = DistributedDataParallel(self.net)
        elif name == "local SGD":
            self.updates = local_updates(self.optimizer, Periodic(steps), model=self.net)
        elif name == "SlowMo":
            self.updates = local_updates(self.optimizer, Periodic(steps), model=self.net, outer=slowmo())
        elif name == "CO2":
            self.updates = local_updates(self.optimizer, Delayed(Periodic(steps)), model=self.net, outer=co2())

    def round(self, text: torch.Tensor, steps: int) -> float:
        """Seconds a step over one round of this rank."""
        begin = time.perf_counter()
        for _ in range(steps):
            inputs, targets = sample_batch(text, 2, LENGTH, self.generator)
            self.optimizer.zero_grad()
            cross_entropy(self.model(inputs).view(-1, VOCABULARY), targets.view(-1)).backward()
            self.optimizer.step()
        return (time.perf_counter() - begin) / steps

    def settle(self) -> None:
        """Wait for what is under way, so that it does not run into another way's turn."""
        if self.updates is not None:
            self.updates.state_dict()


def find_period(text: torch.Tensor) -> int:
    """Steps that take about twice as long as an exchange, the same on every rank."""
    way = Way("alone", 0)
    way.round(text, 2)
    flat = torch.zeros(way.net.num_parameters())
    dist.all_reduce(flat)
    took = torch.tensor([way.round(text, 6), 0.0], dtype=torch.float64)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(2):
        dist.all_reduce(flat)
    took[1] = (time.perf_counter() - begin) / 2
    dist.all_reduce(took)
    return max(2, round(2 * float(took[1] / took[0])))


def rate_rank(turns: int, rounds: int) -> None:
    """What every rank of the first part does."""
    torch.set_num_threads(1)
    dist.init_process_group("mycel", timeout=timedelta(seconds=300))
    text = load_corpus(max_bytes=2 << 20).train
    steps = find_period(text)
    ways = [Way(name, steps) for name in ("alone", "CO2", "local SGD", "SlowMo", "DDP")]
    for turn in range(turns):
        for way in ways:
            length = 2 if way.name == "DDP" else steps
            dist.barrier()
            seconds = [way.round(text, length) for _ in range(1 + rounds)][1:]
            way.settle()
            slowest = torch.tensor(seconds, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if dist.get_rank() == 0:
                line = {"part": "rate", "way": way.name, "turn": turn, "period": steps, "step_s": slowest.tolist()}
                print(json.dumps({**line, "parameters": way.net.num_parameters()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def rate_table(lines: list[dict[str, Any]]) -> str:
    """A row a way."""
    medians = {
        name: statistics.median(s for line in lines if line["way"] == name for s in line["step_s"])
        for name in dict.fromkeys(line["way"] for line in lines)
    }
    period = lines[0]["period"]
    rows = [
        (
            name,
            1 if name == "DDP" else "-" if name == "alone" else period,
            f"{1e3 * s:.0f}",
            f"{medians['alone'] / s:.3f}",
        )
        for name, s in medians.items()
    ]
    return markdown(("way", "steps a round", "median ms a step, slowest rank", "of the rate without exchange"), rows)


# -- quality ------------------------------------------------------------------------------------------------------

CLIP = 0.03
METHODS: dict[str, tuple[bool, MakeOuter | None]] = {
    "local SGD": (False, None),
    "SlowMo 0.5": (False, slowmo(momentum=0.5)),
    "one round late, no momentum": (True, None),
    "CO2 0.5": (True, co2(momentum=0.5, penalty=False)),
    f"CO2 0.5, clip {CLIP}": (True, co2(momentum=0.5, penalty=False, clip=CLIP)),
    "CO2 0.5, penalty": (True, co2(momentum=0.5)),
    f"CO2 0.5, penalty, clip {CLIP}": (True, co2(momentum=0.5, clip=CLIP)),
}
RATES = (0.02, 0.1)
PERIOD = 12


def quality_rank(seeds: int, steps: int) -> None:
    """What every rank of the second part does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for learning_rate in RATES:
        for name, (delayed, outer) in METHODS.items():
            for seed in range(seeds):
                digits, model = Digits(seed), network(seed)
                optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
                rule = Delayed(Periodic(PERIOD)) if delayed else Periodic(PERIOD)
                updates = local_updates(optimizer, rule, model=model, outer=outer, total_steps=steps)
                for step in range(steps):
                    x, y = digits.batch(seed, rank, step, 16)
                    optimizer.zero_grad()
                    cross_entropy(model(x), y).backward()
                    optimizer.step()
                updates.close()
                accuracy, loss = digits.judge(model)
                line = {"part": "quality", "method": name, "learning_rate": learning_rate, "seed": seed}
                if rank == 0:
                    print(json.dumps({**line, "accuracy": 100 * accuracy, "loss": loss}), flush=True)
    dist.destroy_process_group()


def quality_table(lines: list[dict[str, Any]]) -> str:
    """A row a method, a column a learning rate."""
    rows = []
    for name in dict.fromkeys(line["method"] for line in lines):
        of = [[x for x in lines if x["method"] == name and x["learning_rate"] == r] for r in RATES]
        cells = [spread([x["accuracy"] for x in found]) for found in of]
        losses = [f"{statistics.mean(x['loss'] for x in found):.3f}" for found in of]
        rows.append((name, cells[0], losses[0], cells[1], losses[1]))
    headings = [h for r in RATES for h in (f"accuracy, %, rate {r}", "loss")]
    return markdown(("method", *headings), rows)


# -- both ---------------------------------------------------------------------------------------------------------


def measure_rate(quick: bool, show: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Lines of the first part."""
    lines: list[dict[str, Any]] = []

    def take(rank: int, record: dict[str, Any]) -> None:
        if rank == 0:
            lines.append(record)
            show(record)

    command = [sys.executable, __file__, "--rank", "rate", *(["--quick"] if quick else [])]
    launcher.run_ranks(load_topology(CLUSTER), command, sink=take, timeout_s=1200.0, warm=warm_up)
    return lines


def main() -> None:
    """Run and print; also what ranks call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("rate", "quality"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rank", choices=("rate", "quality"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank == "rate":
        rate_rank(*((2, 2) if options.quick else (3, 4)))
        return
    if options.rank == "quality":
        quality_rank(*((1, 120) if options.quick else (3, 480)))
        return
    kept = [] if options.quick else read(OUTPUT)
    tables = {"rate": rate_table, "quality": quality_table}
    for part, make in tables.items():
        if options.part not in (None, part):
            continue
        if part == "rate":
            lines = measure_rate(options.quick, print)
        else:
            lines = run_ranks(RANKS, __file__, ["quality", *(["--quick"] if options.quick else [])], print)
        print(make(lines))
        if not options.quick:
            about = {**stamp(), "hardware": describe_hardware()}
            kept = [line for line in kept if line["part"] != part] + [{**line, **about} for line in lines]
            OUTPUT.unlink(missing_ok=True)
            append(OUTPUT, kept)
            write_section(PAGE, f"co2-{part}", make(lines))


if __name__ == "__main__":
    main()
