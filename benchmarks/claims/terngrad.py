"""TernGrad on handwritten digits: accuracy and bytes beside exact gradients, with and without clipping.

    python benchmarks/claims/terngrad.py                        # root, for network namespaces
    python benchmarks/claims/terngrad.py --steps 300 --seeds 5  # less of it
    python benchmarks/claims/terngrad.py --quick                # one seed, 100 steps, recorded nowhere

Four ranks behind a switch train on scikit-learn's digits with SGD, every way with the same batches, to the end of a
rate that falls to zero: where a high rate is left as it is, its noise is larger than what is asked for. Two models:
one layer, a softmax regression, whose loss has no valley but one, so that noise can only be in the way; and a
multilayer perceptron, which fits all digits that it sees, so that noise may also help with those that it does not.
Losses are given of both kinds of digits. Lines replace those of the last run
in ``benchmarks/recorded/claims/terngrad.jsonl``, and a table in the docs is made from them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable
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

HEADINGS = (
    "model",
    "gradients",
    "accuracy, %",
    "held-out loss (beside exact)",
    "training loss (beside exact)",
    "bytes a step",
    "times fewer",
    "by the interface",
)
OUTPUT = RECORDED / "claims" / "terngrad.jsonl"
PAGE = ROOT / "docs" / "concepts" / "compression.md"
HELD_OUT = 400
BATCH, RATE = 16, 0.05
#: The same digits in other bytes: it learns the same, and one seed says how many bytes.
TWO_BITS = "terngrad, two bits a digit"
MODELS: dict[str, Callable[[], nn.Module]] = {
    "one layer": lambda: nn.Sequential(nn.Linear(64, 10)),
    "three layers": lambda: nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)
    ),
}
WAYS: dict[str, Any] = {
    "exact": lambda: None,
    "terngrad, five digits a byte": TernGrad,
    TWO_BITS: lambda: TernGrad(packing="bits"),
    "terngrad, not clipped": lambda: TernGrad(None),
    "int4": lambda: make_compressor("int4"),
}


def run(kind: str, name: str, seed: int, steps: int) -> dict[str, Any]:
    """One model, way and seed: accuracy on held-out digits, losses, bytes a step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
    x = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    y = torch.tensor(digits.target)[order]
    torch.manual_seed(seed)
    model = MODELS[kind]()
    ddp = DistributedDataParallel(model)
    handle = compress(ddp, CompressionPolicy(WAYS[name](), min_elements=0), seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    sent = interface_bytes()
    for _ in range(steps):
        chosen = torch.randint(HELD_OUT, len(y), (BATCH,), generator=generator)
        loss = nn.functional.cross_entropy(ddp(x[chosen]), y[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    sent = interface_bytes() - sent
    with torch.no_grad():
        logits = model(x)
        right = (logits[:HELD_OUT].argmax(dim=1) == y[:HELD_OUT]).double().mean()
        held_out, seen = (
            nn.functional.cross_entropy(logits[part], y[part]) for part in (slice(HELD_OUT), slice(HELD_OUT, None))
        )
    counts = torch.tensor([sent, handle.stats.sent_bytes, handle.bytes_per_step() * steps], dtype=torch.float64)
    dist.all_reduce(counts)
    wire, metered, formula = (counts / steps / world_size).tolist()
    return {
        "model": kind,
        "way": name,
        "seed": seed,
        "accuracy": float(right),
        "loss": float(held_out),
        "training_loss": float(seen),
        "steps": steps,
        "interface_bytes": wire,
        "metered_bytes": metered,
        "formula_bytes": formula,
    }


def work(seeds: int, steps: int) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("mycel", timeout=timedelta(seconds=60))
    for seed in range(seeds):
        for kind in MODELS:
            for name in WAYS if seed == 0 else [way for way in WAYS if way != TWO_BITS]:
                say([run(kind, name, seed, steps)])
    dist.barrier()
    dist.destroy_process_group()


def table(records: list[dict[str, Any]]) -> str:
    """Means over seeds, and losses beside exact gradients of the same seed."""
    rows = []
    for kind in MODELS:
        for name in WAYS:
            own, exact = (
                {r["seed"]: r for r in records if r["model"] == kind and r["way"] == way} for way in (name, "exact")
            )
            accuracies = [100 * r["accuracy"] for r in own.values()]
            spread = statistics.stdev(accuracies) if len(own) > 1 else 0.0
            learnt = (
                f"{statistics.mean(accuracies):.2f} ± {spread:.2f}",
                *(beside(own, exact, key) for key in ("loss", "training_loss")),
            )
            metered = mean(own.values(), "metered_bytes")
            rows.append(
                (
                    kind,
                    name,
                    *(("the same",) * 3 if name == TWO_BITS else learnt),
                    f"{metered:,.0f}",
                    f"{mean(exact.values(), 'metered_bytes') / metered:.1f}",
                    f"{mean(own.values(), 'interface_bytes'):,.0f}",
                )
            )
    return markdown(HEADINGS, rows)


def mean(records: Iterable[dict[str, Any]], key: str) -> float:
    """Over seeds."""
    return statistics.mean(r[key] for r in records)


def beside(own: dict[int, dict[str, Any]], exact: dict[int, dict[str, Any]], key: str) -> str:
    """Mean loss; how far it is from that of exact gradients, and in how many seeds it is higher."""
    text = f"{mean(own.values(), key):.4f}"
    differences = [r[key] - exact[seed][key] for seed, r in own.items()]
    if not any(differences):
        return text
    higher = sum(d > 0 for d in differences)
    return f"{text} ({statistics.mean(differences):+.4f}; higher in {higher} of {len(own)})"


def main() -> None:
    """Launches the ranks and shows what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, 100 steps, recorded nowhere")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*((1, 100) if options.quick else (options.seeds, options.steps)))
        return
    records: list[dict[str, Any]] = []
    run_ranks(
        load_topology("star:ranks=4"),
        [sys.executable, __file__, "--worker", *sys.argv[1:]],
        sink=lambda rank, record: records.append(record) if rank == 0 else None,
        timeout_s=5400,
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
