"""TernGrad on handwritten digits: accuracy and bytes beside exact gradients, with and without clipping.

    python benchmarks/claims/terngrad.py            # about ten minutes; root, for network namespaces
    python benchmarks/claims/terngrad.py --quick    # one seed, recorded nowhere

Four ranks behind a switch train a multilayer perceptron on scikit-learn's digits with SGD, every way with the same
batches, to the end of a rate that falls to zero: where a high rate is left as it is, its noise is larger than what is
asked for. Lines replace those of the last run in ``benchmarks/recorded/claims/terngrad.jsonl``, and a table in the
docs is made from them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import interface_bytes, say

import mycel.runtime  # noqa: F401  (registers the backend)
from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.bench.ranks import run_ranks
from mycel.bench.run import warm_up
from mycel.data_parallel import CompressionPolicy, TernGrad, compress, make_compressor
from mycel.topology.load import load_topology
from record import RECORDED, ROOT, append, markdown, stamp, write_section

OUTPUT = RECORDED / "claims" / "terngrad.jsonl"
PAGE = ROOT / "docs" / "concepts" / "compression.md"
HELD_OUT = 400
STEPS, BATCH, RATE = 300, 16, 0.05
WAYS: dict[str, Any] = {
    "exact": lambda: None,
    "terngrad, five digits a byte": TernGrad,
    "terngrad, two bits a digit": lambda: TernGrad(packing="bits"),
    "terngrad, not clipped": lambda: TernGrad(None),
    "int4": lambda: make_compressor("int4"),
}


def run(name: str, seed: int) -> dict[str, Any]:
    """One way and seed: accuracy on held-out digits, bytes a step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
    x = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    y = torch.tensor(digits.target)[order]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
    ddp = DistributedDataParallel(model)
    handle = compress(ddp, CompressionPolicy(WAYS[name](), min_elements=0), seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    sent = interface_bytes()
    for _ in range(STEPS):
        chosen = torch.randint(HELD_OUT, len(y), (BATCH,), generator=generator)
        loss = nn.functional.cross_entropy(ddp(x[chosen]), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    sent = interface_bytes() - sent
    with torch.no_grad():
        logits = model(x[:HELD_OUT])
        right = (logits.argmax(dim=1) == y[:HELD_OUT]).double().mean()
        held_out = nn.functional.cross_entropy(logits, y[:HELD_OUT])
    counts = torch.tensor([sent, handle.stats.sent_bytes, handle.bytes_per_step() * STEPS], dtype=torch.float64)
    dist.all_reduce(counts)
    wire, metered, formula = (counts / STEPS / world_size).tolist()
    return {
        "way": name,
        "seed": seed,
        "accuracy": float(right),
        "loss": float(held_out),
        "steps": STEPS,
        "interface_bytes": wire,
        "metered_bytes": metered,
        "formula_bytes": formula,
    }


def work(seeds: int) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("mycel", timeout=timedelta(seconds=60))
    for seed in range(seeds):
        for name in WAYS:
            say([run(name, seed)])
    dist.barrier()
    dist.destroy_process_group()


def table(records: list[dict[str, Any]]) -> str:
    """Means over seeds."""
    rows = []
    exact = 0.0
    for name in WAYS:
        own = [r for r in records if r["way"] == name]
        accuracies = [100 * r["accuracy"] for r in own]
        metered = statistics.mean(r["metered_bytes"] for r in own)
        exact = exact or metered
        spread = statistics.stdev(accuracies) if len(own) > 1 else 0.0
        interface = statistics.mean(r["interface_bytes"] for r in own)
        rows.append(
            (
                name,
                f"{statistics.mean(accuracies):.1f} ± {spread:.1f}",
                f"{statistics.mean(r['loss'] for r in own):.3f}",
                f"{metered:,.0f}",
                f"{exact / metered:.1f}",
                f"{interface:,.0f}",
            )
        )
    return markdown(("", "accuracy, %", "held-out loss", "bytes a step", "times fewer", "by the interface"), rows)


def main() -> None:
    """Launches the ranks and shows what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, recorded nowhere")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(1 if options.quick else options.seeds)
        return
    records: list[dict[str, Any]] = []
    run_ranks(
        load_topology("star:ranks=4"),
        [sys.executable, __file__, "--worker", *sys.argv[1:]],
        sink=lambda rank, record: records.append(record) if rank == 0 else None,
        timeout_s=2400,
        warm=warm_up,
    )
    text = table(records)
    print(text)
    if not options.quick:
        shared = {"ranks": 4, "hardware": describe_hardware(), "versions": describe_versions()}
        OUTPUT.unlink(missing_ok=True)
        append(OUTPUT, [{**record, **shared, **stamp()} for record in records])
        write_section(PAGE, "terngrad", text)


if __name__ == "__main__":
    main()
