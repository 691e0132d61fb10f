"""What direct feedback costs in quality, and what a pipeline gains by it over slow links.

    python benchmarks/claims/dfa.py                 # all parts, three seeds; some minutes
    python benchmarks/claims/dfa.py --part rate     # four stages over emulated links of 50 Mbit/s alone
    python benchmarks/claims/dfa.py --quick

Digits: networks of 2, 4 and 8 hidden layers of 256 tanh, trained by back-propagation, by direct feedback with its
error as it is and in three values, and with only the last layer trained, which any rule has to beat. Text: a
byte-level transformer, a block an error, likewise. Rate: four stages, a pipeline (1F1B) and direct feedback, in
turns. Rows replace those of the same part's last run in ``benchmarks/recorded/claims/dfa.jsonl``, and the tables in
docs/concepts/closed_form.md.

References:
    J. Launay et al., "Direct Feedback Alignment Scales to Modern Deep Learning Tasks and Architectures", NeurIPS
    2020, arXiv 2006.12878.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from digits import Digits, spread
from torch import Tensor, nn

from mycel.bench import ranks as launcher
from mycel.demo.corpus import load_corpus, sample_batch
from mycel.parallel import Pipeline
from mycel.parallel.direct_feedback import DirectFeedback, feedback_bytes
from mycel.pipeline.known import known_order
from mycel.topology import load_topology
from record import RECORDED, ROOT, conclude_parts, markdown

OUTPUT = RECORDED / "claims" / "dfa.jsonl"
PAGE = ROOT / "docs" / "concepts" / "closed_form.md"
CLUSTER, RANKS = "star:ranks=4,bandwidth=50 Mbit/s", 4
METHODS = ("back-propagation", "direct feedback", "direct feedback, ternary", "last layer alone")
WIDTH, BATCH, MICRO_BATCHES, CLASSES, BYTES = 256, 128, 4, 10, 256


# -- quality ------------------------------------------------------------------------------------------------------


def hidden(count: int, first: int = 64) -> list[nn.Module]:
    """So many layers of tanh."""
    sizes = [first, *[WIDTH] * count]
    return [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.Tanh())]


class Reading(nn.Module):
    """Bytes and their places as vectors."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, width), nn.Embedding(length, width)

    def forward(self, x: Tensor) -> Tensor:
        embedded: Tensor = self.bytes(x) + self.places(torch.arange(x.shape[1]))
        return embedded


class Attending(nn.Module):
    """A transformer block that looks back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y: Tensor = self.layer(x, src_mask=mask, is_causal=True)
        return y


def trained(
    model: nn.Sequential, method: str, batch: Callable[[int], tuple[Tensor, Tensor]], steps: int, loss: Any
) -> None:
    """Train in place with Adam."""
    rate = 1e-3
    if method == "last layer alone":
        for module in list(model)[:-1]:
            module.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate)
    error = "ternary" if method.endswith("ternary") else "float32"
    trainer = DirectFeedback(model, loss, error=error) if method.startswith("direct") else None
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        if trainer is None:
            loss(model(x), y).backward()
        else:
            trainer.step(x, target=y)
        optimizer.step()


def quality(seed: int, steps: int, depths: tuple[int, ...]) -> list[dict[str, Any]]:
    """Lines of the first two parts; one process, with a group of its own."""
    lines = []
    for depth in depths:
        for method in METHODS:
            digits = Digits(seed)
            torch.manual_seed(seed)
            model = nn.Sequential(*hidden(depth), nn.Linear(WIDTH, CLASSES))
            trained(
                model,
                method,
                lambda step, digits=digits: digits.batch(seed, 0, step, BATCH),
                steps,
                nn.functional.cross_entropy,
            )
            accuracy = 100 * digits.judge(model)[0]
            lines.append({"part": "digits", "depth": depth, "method": method, "seed": seed, "accuracy": accuracy})
            print(lines[-1], flush=True)
    text = load_corpus(max_bytes=1 << 20)
    for method in METHODS:
        torch.manual_seed(seed)
        model = nn.Sequential(Reading(64, 64), Attending(64), Attending(64), nn.Linear(64, BYTES))
        made = torch.Generator().manual_seed(seed)
        trained(model, method, lambda _, made=made: sample_batch(text.train, 8, 64, made), steps, per_byte)
        with torch.no_grad():
            x, y = sample_batch(text.held_out, 128, 64, torch.Generator().manual_seed(99))
            loss = float(per_byte(model(x), y))
        lines.append({"part": "text", "method": method, "seed": seed, "loss": loss})
        print(lines[-1], flush=True)
    return lines


def per_byte(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of bytes."""
    return nn.functional.cross_entropy(logits.reshape(-1, BYTES), target.reshape(-1))


def quality_table(every: list[dict[str, Any]]) -> str:
    """A row a method, a column a depth, and the text; no text where nothing is recorded."""
    lines = [line for line in every if line["part"] != "rate"]
    if not lines:
        return ""
    depths = sorted({line["depth"] for line in lines if line["part"] == "digits"})
    rows = []
    for method in METHODS:
        own = [line for line in lines if line.get("method") == method]
        cells = [spread([x["accuracy"] for x in own if x.get("depth") == depth]) for depth in depths]
        rows.append((method, *cells, spread([x["loss"] for x in own if x["part"] == "text"])))
    seeds = len({line["seed"] for line in lines})
    heads = (f"digits right, %, {seeds} seeds", *(f"{d} hidden layers" for d in depths), "text: loss a byte, nats")
    return markdown(heads, rows)


# -- rate -----------------------------------------------------------------------------------------------------------


def rate_rank(steps: int) -> None:
    """What each of four ranks does: a pipeline's steps and direct feedback's, in turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [*hidden(2 * RANKS), nn.Linear(WIDTH, CLASSES)]
    own = layers[4 * rank : 4 * rank + 4 if rank < RANKS - 1 else None]
    loss = nn.functional.cross_entropy
    pipeline = Pipeline(known_order("1f1b", RANKS, MICRO_BATCHES), {rank: nn.Sequential(*own)}, loss)
    feedback = DirectFeedback(nn.Sequential(*own), loss, micro_batches=MICRO_BATCHES)
    ternary = DirectFeedback(nn.Sequential(*own), loss, micro_batches=MICRO_BATCHES, error="ternary")
    x, y = torch.randn(BATCH, 64), torch.randint(0, CLASSES, (BATCH,))
    given = {"batch": x if rank == 0 else None, "target": y if rank == RANKS - 1 else None}
    last = rank == RANKS - 1
    ways: dict[str, Callable[[], object]] = {
        "pipeline, 1F1B": lambda: pipeline.step(*([x] if rank == 0 else []), target=y if last else None),
        "direct feedback": lambda: feedback.step(given["batch"], target=given["target"]),
        "direct feedback, ternary": lambda: ternary.step(given["batch"], target=given["target"]),
    }
    back = {
        "pipeline, 1F1B": 4 * BATCH * WIDTH * (RANKS - 1),
        "direct feedback": feedback_bytes(BATCH, CLASSES, WIDTH) * (RANKS - 1),
        "direct feedback, ternary": feedback_bytes(BATCH, CLASSES, WIDTH, "ternary") * (RANKS - 1),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for step in range(steps + 1):
        for way, do in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            do()
            dist.barrier()
            if step:
                times[way].append(time.perf_counter() - begin)
    waited = torch.tensor([feedback.waited_s, feedback.feedback_s])
    dist.all_reduce(waited)
    if rank == 0:
        for way, taken in times.items():
            line = {"part": "rate", "way": way, "seconds": statistics.median(taken), "back_bytes": back[way]}
            if way == "direct feedback":
                line |= {"waited_forward_s": float(waited[0]) / RANKS, "waited_error_s": float(waited[1]) / RANKS}
            print(json.dumps(line), flush=True)
    sent = feedback.meter.total(["error"])
    # A message of 8 bytes says how many rows come.
    assert not last or sent == (steps + 1) * (back["direct feedback"] + 8 * (RANKS - 1))
    dist.destroy_process_group()


def rate_table(lines: list[dict[str, Any]]) -> str:
    """A row a way; no text where nothing is recorded."""
    rows = [
        (line["way"], f"{1e3 * line['seconds']:.0f} ms", f"{line['back_bytes'] / 1e3:.1f} KB")
        for line in lines
        if line["part"] == "rate"
    ]
    return (
        markdown(("four stages, 50 Mbit/s", "a step, measured", "sent backwards by all ranks"), rows) if rows else ""
    )


def rate(steps: int) -> list[dict[str, Any]]:
    """Lines of the last part."""
    lines: list[dict[str, Any]] = []

    def take(rank: int, record: dict[str, Any]) -> None:
        if rank == 0:
            lines.append(record)

    command = [sys.executable, __file__, "--rank", "--steps", str(steps)]
    launcher.run_ranks(load_topology(CLUSTER), command, sink=take, timeout_s=600.0)
    return lines


SECTIONS = {"dfa-quality": quality_table, "dfa-rate": rate_table}


def main() -> None:
    """Run and print; also what ranks call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("quality", "rate"))
    parser.add_argument("--quick", action="store_true", help="one seed, few steps; records nothing")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=15, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rate_rank(options.steps)
        return
    lines: list[dict[str, Any]] = []
    if options.part != "rate":
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for seed in range(1 if options.quick else options.seeds):
            lines += quality(seed, 100, (2,)) if options.quick else quality(seed, 600, (2, 4, 8))
            conclude_parts(OUTPUT, PAGE, SECTIONS, lines, quick=options.quick)
        dist.destroy_process_group()
    if options.part != "quality":
        lines += rate(3 if options.quick else options.steps)
        conclude_parts(OUTPUT, PAGE, SECTIONS, lines, quick=options.quick)


if __name__ == "__main__":
    main()
