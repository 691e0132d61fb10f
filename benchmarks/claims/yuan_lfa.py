"""What YUAN 2.0 claims of localized filtering: a model of equal size is better with it; and what it costs on wires.

    python benchmarks/claims/yuan_lfa.py [--steps 300]    # some minutes on one core; replaces its lines and the table

A byte-level transformer on the standard library's source, with and without localized filtering of what queries and
keys are made of. Without it the feed-forward layers are wider by as many parameters. Three seeds, the same batches
for both. The bytes of a halo are counted over 4 ranks, forwards and backwards, for two lengths.

References:
    Wu et al., "YUAN 2.0: A Large Language Model with Localized Filtering-based Attention", arXiv 2311.15786,
    section 2.1 and table 1 (loss 1.2069 against 1.2325 of LLaMA's attention with fewer parameters).
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.nn import functional

from moe_ranks import is_rank, join, on_cluster, say
from mycel.planning.sequence import contiguous
from mycel.sequence import LocalizedFiltering, SequenceContext
from mycel.topology import load_topology
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "yuan_lfa.jsonl"
PAGE = ROOT / "docs" / "concepts" / "sequence_scan.md"
DIM, HEADS, LAYERS, HIDDEN, LENGTH, BATCH = 64, 4, 3, 128, 128, 16
SEEDS = (0, 1, 2)


class Block(nn.Module):
    """Attention and feed-forward layer; with filtering, queries and keys are made from filtered tokens."""

    def __init__(self, *, filtered: bool, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.filtering = LocalizedFiltering(DIM) if filtered else None
        self.of_queries, self.of_values = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, hidden, bias=False), nn.Linear(hidden, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        q, k = self.of_queries(y if self.filtering is None else self.filtering(y)).chunk(2, -1)
        q, k, v = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in (q, k, self.of_values(y)))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(functional.silu(self.up(self.second(x))))


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, *, filtered: bool, hidden: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.Sequential(*(Block(filtered=filtered, hidden=hidden) for _ in range(LAYERS)))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.places.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def size_of(model: nn.Module) -> int:
    """Parameters."""
    return sum(p.numel() for p in model.parameters())


def equal_hidden() -> int:
    """How wide the feed-forward layers without filtering are, for as many parameters as with it, or just more."""
    more = size_of(LocalizedFiltering(DIM))
    return HIDDEN + -(-more // (2 * DIM))


def text() -> Tensor:
    """The standard library's source as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()


def trained(seed: int, steps: int, data: Tensor, *, filtered: bool) -> dict[str, Any]:
    """Nats a byte on bytes that were held out."""
    torch.manual_seed(seed)
    model = Model(filtered=filtered, hidden=HIDDEN if filtered else equal_hidden())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01, fused=True)
    draw = torch.Generator().manual_seed(seed)
    held = len(data) * 9 // 10
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 30) * (1 - step / steps)
        starts = torch.randint(held - LENGTH - 1, (BATCH,), generator=draw)
        rows = data[starts[:, None] + torch.arange(LENGTH + 1)]
        loss = functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    starts = torch.arange(held, len(data) - LENGTH - 1, LENGTH * 16)[:64]
    rows = data[starts[:, None] + torch.arange(LENGTH + 1)]
    with torch.no_grad():
        nats = functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    return {"seed": seed, "filtered": filtered, "parameters": size_of(model), "nats": float(nats), "steps": steps}


def count_bytes() -> None:
    """A rank: the meter's bytes of all ranks, for two lengths."""
    _, size = join()
    for length in (512, 8192):
        context = SequenceContext(contiguous([length], size))
        x = torch.randn(1, context.num_tokens, DIM, requires_grad=True)
        LocalizedFiltering(DIM)(x, context).sum().backward()
        sent = torch.tensor([context.meter.total()])
        torch.distributed.all_reduce(sent)
        say(length=length, ranks=size, sent=int(sent), each=2 * 2 * DIM * 4)


def table(lines: list[dict[str, Any]]) -> str:
    """Nats by seed, then bytes."""
    rows = []
    for filtered in (False, True):
        own = [line for line in lines if line.get("filtered") is filtered]
        nats = [line["nats"] for line in own]
        name = "localized filtering" if filtered else "wider feed-forward layers instead"
        spread = f"{mean(nats):.3f} ± {stdev(nats):.3f}"
        rows.append((name, f"{own[0]['parameters']:,}", *(f"{n:.3f}" for n in nats), spread))
    headings = ("measured held-out nats a byte", "parameters", *(f"seed {s}" for s in SEEDS), "mean")
    counted = [line for line in lines if "sent" in line]
    halo = [
        (f"{line['length']:,}", line["ranks"], line["sent"], (line["ranks"] - 1) * line["each"]) for line in counted
    ]
    return markdown(headings, rows) + "\n" + markdown(("tokens", "ranks", "halo bytes, metered", "formula"), halo)


def main() -> int:
    """Trains, counts and records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    data = text()
    lines = [trained(seed, steps, data, filtered=f) for seed in SEEDS for f in (False, True)]
    lines += on_cluster(load_topology("star:ranks=4,bandwidth=400 Mbit/s"), Path(__file__), [], timeout_s=120.0)
    conclude(OUTPUT, PAGE, "yuan_lfa", lines, table)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if is_rank():
        count_bytes()
    else:
        sys.exit(main())
