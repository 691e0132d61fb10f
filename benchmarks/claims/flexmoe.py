"""FlexMoE: few moves a step keep ranks nearly even, and training does not notice that experts move.

    python benchmarks/claims/flexmoe.py [--quick]     # about a minute; replaces its lines, and its table in the docs

*Evenness*, counted: the last 160 batches of the trace that ``moe_placement.py`` recorded, replayed on 4 ranks with a
spare slot a rank and 1, 2 and 4 moves a step; beside it the static placement. The time of a step is *modelled* for a
rank of 10 TFLOP/s and 5 GB/s and experts of 1024 x 4096.

*Losses*, measured: a layer trained with AdamW over 2 processes, with its experts where they are, and with FlexMoE
moving them and their moments after every step.

The paper reports 1.70x over DeepSpeed on 64 A100 GPUs; that is a matter of GPUs and networks that are not here.

References:
    Nie et al., "FlexMoE: Scaling Large-scale Sparse Pre-trained Model Training via Dynamic Device Placement",
    SIGMOD 2023 (arXiv 2304.03946).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh

from mycel.bench.measurement import describe_hardware
from mycel.moe import MoE
from mycel.moe.placement import ExpertPlacement, PlacedDispatcher, PlacementCost, Rebalancer, RoutingTrace, replay
from mycel.moe.placement.policies import flex, static
from record import RECORDED, ROOT, append, markdown, read, stamp, write_section

OUTPUT = RECORDED / "claims" / "flexmoe.jsonl"
PAGE = ROOT / "docs" / "concepts" / "moe_placement.md"
TRACE = ROOT / "tests" / "data" / "moe" / "routing.npz"
RANKS = 4


def evenness(*, quick: bool) -> list[dict[str, Any]]:
    """A row for each number of moves."""
    whole = RoutingTrace.load(TRACE)
    trace = RoutingTrace(counts=whole.counts[-40 if quick else -160 :], layers=whole.layers)
    # Two matrices of 1024 x 4096 an expert, float32, on ranks that reach 10 Tflop/s and 5 GB/s.
    numbers = 2 * 1024 * 4096
    cost = PlacementCost(token_s=6 * numbers / 10e12, carry_s=1024 * 4 / 5e9, expert_s=numbers * 4 / 5e9)
    skip = len(trace.counts) // 4
    start = ExpertPlacement.contiguous(trace.counts.shape[2], RANKS, spare=1)
    # Loads scaled to 32768 tokens a rank, two experts each; the trace's own batches are small.
    scale = RANKS * 32768 * 2 / float(trace.counts[0, 0].sum())
    made = []
    for name, policy in (
        ("static", static),
        *((f"at most {n} move{'s' * (n > 1)}", partial(flex, max_moves=n)) for n in (1, 2, 4)),
    ):
        seen = [s for s in replay(trace, policy, start) if s.batch >= skip]
        seconds = [cost.of(s.placement.slots, (trace.counts[s.batch, s.layer] * scale).tolist()) for s in seen]
        made.append(
            {
                "policy": name,
                "imbalance": float(np.mean([s.imbalance for s in seen])),
                "moved": sum(s.moved for s in seen) / len(seen),
                "modelled_ms": 1e3 * float(np.mean(seconds)),
            }
        )
    return made


def _rank(rank: int, size: int, folder: str, steps: int) -> None:
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    found: list[Any] = []
    mesh = DeviceMesh("cpu", list(range(size)))
    for moves in (False, True):
        torch.manual_seed(0)
        start = ExpertPlacement.contiguous(8, size, spare=1)
        layer = MoE(16, 32, 8, 2, dispatcher=PlacedDispatcher(start, mesh)).double()
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
        balancer = Rebalancer(layer, "flex", [optimizer])
        generator = torch.Generator().manual_seed(rank)
        losses, moved = [], 0
        for _ in range(steps):
            x = torch.randn(64, 16, generator=generator, dtype=torch.float64) + 0.5
            optimizer.zero_grad()
            loss = (layer(x) - x.flip(1)).square().mean()
            loss.backward()
            for name, parameter in layer.named_parameters():
                if not name.startswith("experts."):
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= size
            optimizer.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(float(total) / size)
            if moves:
                moved += sum(m.experts for m in balancer.step().values())
        found.append((losses, moved))
    dist.destroy_process_group()
    if rank == 0:
        torch.save(found, f"{folder}/losses")


def losses(steps: int) -> dict[str, Any]:
    """Largest difference of a step's loss, with and without moves."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(2, folder, steps), nprocs=2)
        (still, _), (moving, moved) = torch.load(f"{folder}/losses")
    gap = max(abs(a - b) / abs(a) for a, b in zip(still, moving, strict=True))
    return {"steps": steps, "moved": moved, "first": still[0], "last": still[-1], "largest_relative_gap": gap}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """For the page."""
    headings = ("placement", "max/mean load, counted", "experts moved a step and layer", "ms a step, modelled")
    counted = [r for r in rows if "policy" in r]
    lines = [(r["policy"], f"{r['imbalance']:.3f}", f"{r['moved']:.2f}", f"{r['modelled_ms']:.1f}") for r in counted]
    run = next(r for r in rows if "largest_relative_gap" in r)
    return markdown(headings, lines) + (
        f"\nOver {run['steps']} steps of AdamW in float64, {run['moved']} experts moved; losses went from "
        f"{run['first']:.4f} to {run['last']:.4f} and differed from those without moves by at most "
        f"{run['largest_relative_gap']:.0e} of themselves.\n"
    )


def main() -> None:
    """Count, train, record, and renew the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="part of the trace, few steps; nothing is kept")
    options = parser.parse_args()
    rows = [*evenness(quick=options.quick), losses(8 if options.quick else 60)]
    print(table(rows))
    if not options.quick:
        common = {**stamp(), "hardware": describe_hardware()}
        OUTPUT.unlink(missing_ok=True)
        append(OUTPUT, [row | common for row in rows])
        write_section(PAGE, "flexmoe", table(read(OUTPUT)))


if __name__ == "__main__":
    main()
