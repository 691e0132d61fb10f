"""L-GreCo beside the best uniform level at equal error, how long choosing takes, and what training makes of it.

    python benchmarks/claims/lgreco.py            # about three minutes
    python benchmarks/claims/lgreco.py --quick    # half a minute, nothing is recorded

Gradients are those of a byte-level transformer on the standard library's source after some training, the mean of ten
steps. For each family of compressors and each uniform level, L-GreCo finds the fewest bytes whose error is no larger;
errors are measured again with what was chosen. Then four ranks on loopback train in DDP, with uniform ranks and with
L-GreCo's; nothing is timed there. Lines replace those of the last run in ``benchmarks/recorded/claims/lgreco.jsonl``.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from training import SEED, Sizes, Way, say, train

from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.bench.ranks import run_ranks
from mycel.bench.run import warm_up
from mycel.data_parallel import CompressionPolicy, Compressor, LGreCo, PowerSGD, Quantised, TopK, compress
from mycel.data_parallel.level_choice import choose_levels
from mycel.demo.corpus import load_corpus, sample_batch
from mycel.demo.model import VOCABULARY, ByteGPT, ModelConfig
from record import RECORDED, ROOT, append, markdown, stamp, write_section

OUTPUT = RECORDED / "claims" / "lgreco.jsonl"
PAGE = ROOT / "docs" / "concepts" / "compression_fsdp.md"
TIMEOUT = timedelta(seconds=120)
RANKS = 4
WINDOW = 10
#: Families at a uniform level.
FAMILIES: dict[str, Compressor] = {
    "PowerSGD, rank 4": PowerSGD(4),
    "PowerSGD, rank 8": PowerSGD(8),
    "PowerSGD, rank 16": PowerSGD(16),
    "quantised, 4 bits": Quantised(4),
    "quantised, 6 bits": Quantised(6),
    "top-k, 1 %": TopK(0.01),
    "top-k, 10 %": TopK(0.1),
}


def gradients(steps: int) -> list[dict[str, Tensor]]:
    """Of the last ``WINDOW`` steps of some training on one rank."""
    torch.manual_seed(SEED)
    model = ByteGPT(ModelConfig(width=128, num_layers=4, num_heads=4, max_length=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    text, generator = load_corpus().train, torch.Generator().manual_seed(SEED)
    found = []
    for step in range(steps + WINDOW):
        inputs, targets = sample_batch(text, 8, 64, generator)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs).view(-1, VOCABULARY), targets.view(-1)).backward()
        if step >= steps:
            found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return found


def beside_uniform(name: str, compressor: Compressor, steps: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Bytes and errors of one uniform level and of what L-GreCo chooses instead."""
    policy = LGreCo(compressor, every=WINDOW, window=WINDOW)
    for step, means in enumerate(steps):
        for parameter, mean in means.items():
            policy.choose(parameter, mean.shape, step)
        policy.observe(means, step)
    first = next(iter(steps[0].items()))
    policy.choose(first[0], first[1].shape, WINDOW)
    found = policy.solution
    assert found is not None
    uniform_bytes = sum(row.uniform_bytes for row in policy.table)
    print(policy.explain(), end="\n\n", flush=True)
    return {
        "family": name,
        "layers": len(policy.table),
        "uniform_bytes": uniform_bytes,
        "bytes": found.num_bytes,
        "bound": found.bound,
        "uniform_error": math.sqrt(sum(row.uniform_error**2 for row in policy.table)),
        "error": math.sqrt(sum(row.error**2 for row in policy.table)),
        "solve_ms": 1e3 * found.solve_s,
    }


def solving(num_layers: int, seed: int) -> dict[str, Any]:
    """One problem of made-up layers with ten ranks each, whose errors fall by a power law."""
    rng = np.random.default_rng(seed)
    ranks = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32])
    rows, columns = rng.integers(16, 4096, (2, num_layers, 1))
    errors = rng.lognormal(0, 1, (num_layers, 1)) * rows * columns * ranks ** -rng.uniform(0.3, 1.5, (num_layers, 1))
    found = choose_levels((4 * (rows + columns) * ranks).tolist(), errors.tolist(), float(errors[:, 4].sum()))
    return {"ms": 1e3 * found.solve_s, "above_bound": found.num_bytes / found.bound - 1}


def ways() -> list[Way]:
    """Exact gradients, uniform ranks, and L-GreCo from each."""

    def way(name: str, method: CompressionPolicy | None) -> Way:
        def make(model: nn.Module) -> Any:
            ddp = DistributedDataParallel(model, process_group=dist.new_group(timeout=TIMEOUT))
            return ddp, None if method is None else compress(ddp, method)

        return Way(name, make)

    found = [way("exact", None)]
    for rank in (4, 8):
        found.append(way(f"rank {rank}", CompressionPolicy(PowerSGD(rank), start_step=2)))
        found.append(way(f"L-GreCo from rank {rank}", LGreCo(PowerSGD(rank), every=20, window=10, start_step=2)))
    return found


def work(options: argparse.Namespace) -> None:
    """What each rank of the training does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    say(train(ways(), Sizes(steps=options.steps, turn=options.steps)))
    dist.destroy_process_group()


def main() -> None:
    """Everything, in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, recorded nowhere")
    parser.add_argument("--steps", type=int, default=None, help="of training, before gradients are taken and in DDP")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.steps = options.steps or (24 if options.quick else 60)
    if options.worker:
        work(options)
        return
    torch.set_num_threads(1)
    taken = gradients(options.steps)
    solving(10, 0)  # compiled now
    families = [beside_uniform(name, compressor, taken) for name, compressor in FAMILIES.items()]
    solved = [solving(500, seed) for seed in range(9)]
    trained: list[dict[str, Any]] = []
    run_ranks(
        RANKS,
        [sys.executable, __file__, "--worker", *sys.argv[1:]],
        sink=lambda rank, record: trained.append(record) if rank == 0 else None,
        timeout_s=900,
        warm=warm_up,
    )
    texts = {
        "lgreco": markdown(
            ("uniform level", "KB", "L-GreCo, KB", "times fewer", "error of uniform", "of L-GreCo", "solved in ms"),
            [
                (
                    f["family"],
                    f"{f['uniform_bytes'] / 1e3:.1f}",
                    f"{f['bytes'] / 1e3:.1f}",
                    f"{f['uniform_bytes'] / f['bytes']:.2f}",
                    f"{f['uniform_error']:.4f}",
                    f"{f['error']:.4f}",
                    f"{f['solve_ms']:.1f}",
                )
                for f in families
            ],
        ),
        "lgreco_solving": markdown(
            ("layers", "levels each", "median, ms", "slowest of 9", "at most above the bound"),
            [
                (
                    500,
                    10,
                    f"{statistics.median(s['ms'] for s in solved):.0f}",
                    f"{max(s['ms'] for s in solved):.0f}",
                    f"{100 * max(s['above_bound'] for s in solved):.3f} %",
                )
            ],
        ),
        "lgreco_training": markdown(
            ("", "KB a step sent by a rank", "loss, nats a byte"),
            [
                (
                    r["way"],
                    "" if r["metered_bytes"] is None else f"{r['metered_bytes'] / 1e3:.0f}",
                    f"{r['validation_loss']:.3f}",
                )
                for r in trained
            ],
        ),
    }
    print("\n".join(texts.values()))
    if not options.quick:
        shared = {"hardware": describe_hardware(), "versions": describe_versions(), **stamp()}
        lines = (
            [("families", f) for f in families]
            + [("solving", s) for s in solved]
            + [("training", r) for r in trained]
        )
        OUTPUT.unlink(missing_ok=True)
        append(OUTPUT, [{"part": part, **line, **shared} for part, line in lines])
        for name, text in texts.items():
            write_section(PAGE, name, text)


if __name__ == "__main__":
    main()
