"""Whether DiLoCo keeps its loss when changes travel in int4 and in four fragments, and what that saves.

    python benchmarks/claims/outer.py          # three seeds over links of 50 Mbit/s, some minutes; needs root
    python benchmarks/claims/outer.py --quick  # one seed, few steps; records nothing

Four ranks behind one switch train a byte-level transformer on the standard library's source with AdamW inside and
DiLoCo's outer optimizer. All ways see the same batches and take turns of a few rounds in the same processes, so that
a busy machine slows all alike; what is under way at the end of a turn is waited for, and counted. A turn's step time
is that of the slowest rank; ``busy_s`` of a line is processor time a step, the mean of all ranks. Bytes are those
that left a rank's interface, headers and acknowledgements included, and those that the library counts. Rows replace
those of the last run in ``benchmarks/recorded/claims/outer.jsonl``, and the table in docs/concepts/local_updates.md.

References:
    A. Douillard et al., "DiLoCo", 2023, arXiv 2311.08105; "Streaming DiLoCo with overlapping communication", 2025,
    arXiv 2501.18512.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from training import interface_bytes

import mycel.runtime  # noqa: F401  (registers the backend)
from mycel.bench import ranks as launcher
from mycel.bench.run import warm_up
from mycel.data_parallel import DenseInt4, Periodic, Streaming, diloco, local_updates
from mycel.demo.corpus import Corpus, load_corpus, sample_batch
from mycel.demo.model import VOCABULARY, ByteGPT, ModelConfig
from mycel.topology.load import load_topology
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "outer.jsonl"
PAGE = ROOT / "docs" / "concepts" / "local_updates.md"
CLUSTER = "star:ranks=4,bandwidth=50 Mbit/s"
LENGTH, BATCH, PEAK, HELD_OUT = 64, 4, 2e-3, 256
#: Steps between two meetings of the same parameters.
ROUND = 16
#: Of the outer optimizer: with 0.9 and as few rounds as these DiLoCo itself is worse.
MOMENTUM = 0.5
WAYS: dict[str, dict[str, Any]] = {
    "float32": {"synchronizer": Periodic(ROUND)},
    "int4, four fragments": {"synchronizer": Streaming(steps=ROUND, fragments=4), "compressor": DenseInt4()},
    "the same, two steps late": {
        "synchronizer": Streaming(steps=ROUND, fragments=4, overlap=2),
        "compressor": DenseInt4(),
    },
    "two steps late, own steps kept": {
        "synchronizer": Streaming(steps=ROUND, fragments=4, overlap=2, own="since"),
        "compressor": DenseInt4(),
    },
}


class Way:
    """A model that is trained in one way."""

    def __init__(self, name: str, seed: int, steps: int) -> None:
        self.name, self.steps = name, steps
        torch.manual_seed(seed)
        self.net = ByteGPT(ModelConfig(width=96, num_layers=3, num_heads=3, max_length=LENGTH))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=PEAK, betas=(0.9, 0.95), fused=True)
        self.updates = local_updates(
            self.optimizer, model=self.net, outer=diloco(momentum=MOMENTUM), total_steps=steps, **WAYS[name]
        )
        self.generator = torch.Generator().manual_seed(seed * 1009 + dist.get_rank())
        self.step_s: list[float] = []
        self.busy_s = 0.0
        self.interface_bytes = 0

    def turn(self, text: torch.Tensor, steps: int) -> None:
        """Some steps, with everything that they have begun."""
        dist.barrier()
        sent, begin, busy = interface_bytes(), time.perf_counter(), time.process_time()
        for _ in range(steps):
            step = self.updates.step
            warm = min(1.0, (step + 1) / (2 * ROUND))
            for group in self.optimizer.param_groups:
                group["lr"] = warm * PEAK * (0.05 + 0.475 * (1 + math.cos(math.pi * step / self.steps)))
            inputs, targets = sample_batch(text, BATCH, LENGTH, self.generator)
            self.optimizer.zero_grad()
            cross_entropy(self.net(inputs).view(-1, VOCABULARY), targets.view(-1)).backward()
            self.optimizer.step()
        self.updates.state_dict(own=True)  # waits for what is under way
        self.step_s.append((time.perf_counter() - begin) / steps)
        self.busy_s += time.process_time() - busy
        self.interface_bytes += interface_bytes() - sent

    def record(self, corpus: Corpus, seed: int) -> dict[str, Any]:
        """What came of it, the same on every rank."""
        inputs, targets = sample_batch(corpus.held_out, HELD_OUT, LENGTH, torch.Generator().manual_seed(7))
        with torch.no_grad():
            loss = float(cross_entropy(self.net(inputs).view(-1, VOCABULARY), targets.view(-1)))
        slowest = torch.tensor(self.step_s, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        sent = torch.tensor(
            [self.interface_bytes, self.updates.stats.sent_bytes, self.busy_s / self.steps], dtype=torch.float64
        )
        dist.all_reduce(sent)
        wire, metered, busy = (sent / dist.get_world_size()).tolist()
        about = {"way": self.name, "seed": seed, "steps": self.steps, "parameters": self.net.num_parameters()}
        bytes_ = {"interface_bytes": wire, "metered_bytes": metered, "busy_s": busy}
        return {**about, "loss": loss, "step_s": slowest.tolist(), **bytes_, "rounds": self.updates.rounds}


def be_rank(seeds: int, steps: int, turn: int) -> None:
    """What every rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("mycel", timeout=timedelta(seconds=300))
    corpus = load_corpus(max_bytes=2 << 20)
    for seed in range(seeds):
        ways = [Way(name, seed, steps) for name in WAYS]
        for _ in range(steps // turn):
            for way in ways:
                way.turn(corpus.train, turn)
        for way in ways:
            line = way.record(corpus, seed)
            if dist.get_rank() == 0:
                print(json.dumps(line), flush=True)
            way.updates.close()
    dist.barrier()
    dist.destroy_process_group()


def table(lines: list[dict[str, Any]]) -> str:
    """A row a way; bytes and rates beside DiLoCo in float32."""
    of = {name: found for name in WAYS if (found := [line for line in lines if line["way"] == name])}
    exact = of["float32"]

    def ratio(name: str, key: str) -> float:
        return statistics.mean(e[key] / x[key] for e, x in zip(exact, of[name], strict=True))

    medians = {name: statistics.median(s for line in found for s in line["step_s"]) for name, found in of.items()}
    rows = []
    for name, found in of.items():
        apart = [x["loss"] - e["loss"] for e, x in zip(exact, found, strict=True)]
        rows.append(
            (
                name,
                f"{statistics.mean(x['metered_bytes'] for x in found) / 1e6:.2f}",
                f"{ratio(name, 'metered_bytes'):.2f}",
                f"{ratio(name, 'interface_bytes'):.2f}",
                f"{1e3 * medians[name]:.0f}",
                f"{medians['float32'] / medians[name]:.2f}",
                f"{statistics.mean(x['loss'] for x in found):.3f}",
                f"{statistics.mean(apart):+.4f} ({', '.join(f'{a:+.4f}' for a in apart)})",
            )
        )
    headings = ("changes", "MB a rank", "times fewer", "on the interface", "ms a step", "step rate")
    return markdown((*headings, "held-out loss", "beside float32, mean (seeds)"), rows)


def main() -> None:
    """Run and print; also what ranks call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        be_rank(*((1, 4 * ROUND, 2 * ROUND) if options.quick else (3, 24 * ROUND, 4 * ROUND)))
        return
    lines: list[dict[str, Any]] = []

    def take(rank: int, record: dict[str, Any]) -> None:
        if rank == 0:
            lines.append(record)
            print(json.dumps(record), flush=True)

    command = [sys.executable, __file__, "--rank", *(["--quick"] if options.quick else [])]
    launcher.run_ranks(load_topology(CLUSTER), command, sink=take, timeout_s=1800.0, warm=warm_up)
    if options.quick:
        print(table(lines))
    else:
        conclude(OUTPUT, PAGE, "outer", lines, table)


if __name__ == "__main__":
    main()
