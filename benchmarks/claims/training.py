"""What the claims about compressed training share: a byte-level transformer in DDP, several ways of reducing in turn.

All ways live in one process a rank and take turns of a few steps, so that a busy machine slows all of them alike.
Each has its own model from the same seed, its own optimizer and its own process groups; all see the same batches.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.bench.ranks import run_ranks
from mycel.bench.run import warm_up
from mycel.demo.corpus import Corpus, load_corpus, sample_batch
from mycel.demo.model import VOCABULARY, ByteGPT, ModelConfig
from mycel.demo.train import learning_rate
from mycel.topology.model import Topology
from record import append, markdown, stamp

SEED = 1234
EVAL_WINDOWS = 128
#: Rate of AdamW where a way has no optimizer of its own.
PEAK = 2e-3
#: Steps until buckets are final and everything is compiled; not timed.
WARM_UP = 4
#: Steps whose mean is a point of a drawn line.
SMOOTHED = 5


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of model, batch and run."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    length: int = 64
    batch_size: int = 2
    steps: int = 60
    turn: int = 6


@dataclass
class Way:
    """One way of reducing gradients, with the model that it trains.

    Attributes:
        make: wraps a model, and returns the wrapped one and a handle with ``stats``, if there is one.
        step_s: slowest rank's seconds of each timed step.
        losses: in each of these steps, of all ranks' batches.
        wire_bytes: that left this rank's interface, headers included, in timed steps.
    """

    name: str
    make: Callable[[nn.Module], tuple[DistributedDataParallel, Any]]
    ddp: Any = None
    handle: Any = None
    optimizer: Any = None
    generator: Any = None
    done: int = 0
    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    wire_bytes: int = 0
    rates: list[float] = field(default_factory=list)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Of a model that is wrapped already; its groups' rates are the peaks of the schedule."""
        return torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def train(ways: Sequence[Way], sizes: Sizes) -> list[dict[str, Any]]:
    """Trains every way for ``sizes.steps`` steps; a record of each, the same on every rank."""
    rank = dist.get_rank()
    corpus = load_corpus()
    for way in ways:
        torch.manual_seed(SEED)
        model = ByteGPT(
            ModelConfig(width=sizes.width, num_layers=sizes.layers, num_heads=sizes.heads, max_length=sizes.length)
        )
        way.ddp, way.handle = way.make(model)
        way.optimizer = way.make_optimizer(model)
        way.rates = [group["lr"] for group in way.optimizer.param_groups]
        way.generator = torch.Generator().manual_seed(SEED * 1009 + rank)
    while any(way.done < sizes.steps for way in ways):
        for way in ways:
            _turn(way, corpus, sizes)
    return [_record(way, corpus, sizes) for way in ways]


def _turn(way: Way, corpus: Corpus, sizes: Sizes) -> None:
    """A few steps of one way, after everybody is ready."""
    dist.barrier()
    times, losses = [], []
    for _ in range(min(sizes.turn, sizes.steps - way.done)):
        for options, peak in zip(way.optimizer.param_groups, way.rates, strict=True):
            options["lr"] = learning_rate(way.done, peak=peak, warm_up=8, steps=sizes.steps)
        inputs, targets = sample_batch(corpus.train, sizes.batch_size, sizes.length, way.generator)
        sent = interface_bytes()
        if way.done == WARM_UP and way.handle is not None:
            way.handle.stats.reset()
        begin = time.perf_counter()
        loss = functional.cross_entropy(way.ddp(inputs).view(-1, VOCABULARY), targets.view(-1))
        way.optimizer.zero_grad()
        loss.backward()
        way.optimizer.step()
        times.append(time.perf_counter() - begin)
        losses.append(float(loss.detach()))
        if way.done >= WARM_UP:
            way.wire_bytes += interface_bytes() - sent
        else:
            times[-1] = float("nan")
        way.done += 1
    slowest, mean = torch.tensor([times, losses], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    timed = [(t, loss) for t, loss in zip(slowest.tolist(), mean.tolist(), strict=True) if t == t]
    way.step_s += [t for t, _ in timed]
    way.losses += [loss for _, loss in timed]


def _record(way: Way, corpus: Corpus, sizes: Sizes) -> dict[str, Any]:
    timed = sizes.steps - WARM_UP
    counted = torch.tensor([way.wire_bytes / timed, 0.0], dtype=torch.float64)
    if way.handle is not None:
        counted[1] = way.handle.stats.sent_bytes / timed
    dist.all_reduce(counted)
    wire, metered = (counted / dist.get_world_size()).tolist()
    quartiles = statistics.quantiles(way.step_s, n=10)
    return {
        "way": way.name,
        "steps": sizes.steps,
        "step_ms": 1e3 * statistics.median(way.step_s),
        "step_p10_ms": 1e3 * quartiles[0],
        "step_p90_ms": 1e3 * quartiles[-1],
        "interface_bytes": wire,
        "metered_bytes": metered if way.handle is not None else None,
        "validation_loss": _validation_loss(way.ddp.module, corpus.held_out, sizes),
        "course": [[round(t, 4), round(loss, 4)] for t, loss in zip(accumulate(way.step_s), way.losses, strict=True)],
    }


def loss_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Held-out losses over seeds, and how far from those of the first way with the same seed."""
    exact = {r["seed"]: r["validation_loss"] for r in records if r["way"] == records[0]["way"]}
    rows = []
    for name in dict.fromkeys(r["way"] for r in records):
        mine = [r for r in records if r["way"] == name]
        losses = [r["validation_loss"] for r in mine]
        differences = [r["validation_loss"] - exact[r["seed"]] for r in mine]
        spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
        rows.append(
            (
                name,
                f"{statistics.mean(losses):.3f}{spread}",
                ", ".join(f"{d:+.3f}" for d in differences),
                f"{statistics.mean(differences):+.3f}",
            )
        )
    return markdown(("", "loss, nats a byte", f"beside {records[0]['way']}, by seed", "mean"), rows)


def draw(records: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Losses over seconds of training, each the mean of a few steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panel = plt.subplots(figsize=(8, 4), layout="constrained")
    colours = ("#202020", "#b98d5f", "#7fc3a4", "#1d7f55", "#3b5fa8", "#c2682b")
    for record, colour in zip(records, colours, strict=False):
        seconds, losses = zip(*record["course"], strict=True)
        smooth = [statistics.fmean(losses[max(0, i - SMOOTHED + 1) : i + 1]) for i in range(len(losses))]
        panel.plot(seconds, smooth, color=colour, label=record["way"])
        panel.plot(seconds[-1:], smooth[-1:], "o", color=colour, markersize=4)
    panel.set(xlabel="seconds of training", ylabel="loss, nats a byte", xscale="log")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=110)
    plt.close(figure)


@torch.no_grad()
def _validation_loss(model: nn.Module, text: Tensor, sizes: Sizes) -> float:
    """Nats a byte on held-out windows, divided among the ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    inputs, targets = sample_batch(text, EVAL_WINDOWS, sizes.length, torch.Generator().manual_seed(SEED + 1))
    logits = model(inputs[rank::world_size]).view(-1, VOCABULARY)
    total = functional.cross_entropy(logits, targets[rank::world_size].reshape(-1), reduction="sum").double()
    dist.all_reduce(total)
    return float(total) / targets.numel()


def interface_bytes() -> int:
    """Bytes that have left this rank's interfaces, loopback excepted."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]
    fields = (line.partition(":") for line in lines)
    return sum(int(counts.split()[8]) for name, _, counts in fields if name.strip() != "lo")


def launch(places: Mapping[str, Topology | int], *, timeout_s: float) -> dict[str, list[dict[str, Any]]]:
    """What rank 0 says in each phase, in the phases' order.

    Args:
        places: where the ranks of a phase are. They run the same script, its arguments and ``--worker PHASE``.
        timeout_s: for a phase.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for phase, place in places.items():
        found[phase] = []
        run_ranks(
            place,
            [sys.executable, *sys.argv, "--worker", phase],
            sink=lambda rank, record, kept=found[phase]: kept.append(record) if rank == 0 else None,
            timeout_s=timeout_s,
            warm=warm_up,
        )
    return found


def keep(found: Mapping[str, Sequence[Mapping[str, Any]]], file: Path, **shared: Any) -> None:
    """Replace a file's lines by those of all phases."""
    common = {**shared, "hardware": describe_hardware(), "versions": describe_versions(), **stamp()}
    file.unlink(missing_ok=True)
    append(file, [{**r, "phase": phase, **common} for phase, records in found.items() for r in records])


def say(records: Sequence[Mapping[str, Any]]) -> None:
    """Rank 0 prints them, a line each."""
    if dist.get_rank() == 0:
        for record in records:
            print(json.dumps(record), flush=True)
