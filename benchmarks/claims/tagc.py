"""TAGC: up to which load sketches are lossless, what ranks may keep, bytes and loss on FSDP2.

    python benchmarks/claims/tagc.py            # about two minutes
    python benchmarks/claims/tagc.py --quick    # half a minute, nothing is recorded

Losslessness is computed on sparse vectors of whole numbers, which float32 adds exactly, so that an error of 0 can be
asked for. Losses are those of four ranks on loopback that train a byte-level transformer sharded by FSDP2; nothing is
timed. Lines replace those of the last run in ``benchmarks/recorded/claims/tagc.jsonl``.
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from qsdp import Sharded
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from training import Sizes, Way, say, train

from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.bench.ranks import run_ranks
from mycel.bench.run import warm_up
from mycel.data_parallel import TAGC, CompressionPolicy, Compressor, TopK, compress, heavy_layers
from mycel.data_parallel.compress.sketch import insert, num_counters, peel
from record import RECORDED, ROOT, append, markdown, stamp, write_section

OUTPUT = RECORDED / "claims" / "tagc.jsonl"
PAGE = ROOT / "docs" / "concepts" / "compression_fsdp.md"
TIMEOUT = timedelta(seconds=120)
RANKS = 4
ELEMENTS = 200_000
RATIO = 2.0


def summed(world_size: int, kept: int, seed: int = 0) -> dict[str, Any]:
    """The sum of sparse vectors with independent places, by way of sketches."""
    counters = num_counters(ELEMENTS, RATIO)
    exact, sketch = torch.zeros(ELEMENTS), torch.zeros(counters)
    union = torch.zeros(ELEMENTS, dtype=torch.bool)
    for rank in range(world_size):
        generator = torch.Generator().manual_seed(100 * seed + rank)
        places = torch.randperm(ELEMENTS, generator=generator)[:kept]
        values = torch.randint(1, 1000, (kept,), generator=generator).float()
        sketch += insert(places, values, counters, seed)
        exact[places] += values
        union[places] = True
    places = union.nonzero().view(-1)
    found, estimated = peel(sketch, places, seed)
    return {
        "world_size": world_size,
        "density": kept / ELEMENTS,
        "load": len(places) / counters,
        "estimated": len(estimated) / len(places),
        "max_error": float((found - exact[places]).abs().max()),
    }


def ways() -> list[Way]:
    """Exact gradients, and the heavy layers' by sketches that fit, that do not, and by top-k of the same density."""

    def way(name: str, compressor: Compressor | None) -> Way:
        def make(model: nn.Module) -> Any:
            heavy = heavy_layers(model, 0.8)
            mesh = DeviceMesh.from_group(dist.new_group(timeout=TIMEOUT), "cpu")
            for block in model.get_submodule("blocks").children():
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            if compressor is None:
                return Sharded(model), compress(model, CompressionPolicy(None))
            return Sharded(model), compress(model, CompressionPolicy(None, rules=dict.fromkeys(heavy, compressor)))

        return Way(name, make)

    fits = 0.7 / (RATIO * RANKS)
    return [
        way("exact", None),
        way("TAGC, what fits", TAGC(RATIO)),
        way("TAGC, density 0.2", TAGC(RATIO, density=0.2)),
        way("top-k, what fits", TopK(fits)),
        way("top-k, density 0.2", TopK(0.2)),
    ]


def work(options: argparse.Namespace) -> None:
    """What each rank of the training does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    say(train(ways(), Sizes(width=96, layers=3, steps=options.steps, turn=options.steps)))
    dist.destroy_process_group()


def main() -> None:
    """Everything, in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, recorded nowhere")
    parser.add_argument("--steps", type=int, default=None, help="of training")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.steps = options.steps or (12 if options.quick else 60)
    if options.worker:
        work(options)
        return
    torch.set_num_threads(1)
    counters = num_counters(ELEMENTS, RATIO)
    loads = [summed(1, round(load * counters)) for load in (0.5, 0.7, 0.78, 0.8, 0.81, 0.82, 0.84, 0.9, 1.0, 1.2)]
    worlds = [summed(n, round(0.2 * ELEMENTS)) for n in (2, 3, 4, 8)]
    worlds += [summed(n, TAGC(RATIO).num_kept(ELEMENTS, n)) for n in (2, 4, 8, 64)]
    trained: list[dict[str, Any]] = []
    run_ranks(
        RANKS,
        [sys.executable, __file__, "--worker", *sys.argv[1:]],
        sink=lambda rank, record: trained.append(record) if rank == 0 else None,
        timeout_s=900,
        warm=warm_up,
    )
    texts = {
        "tagc_load": markdown(
            ("elements a counter", "taken apart exactly", "largest error"),
            [(f"{r['load']:.2f}", f"{100 * (1 - r['estimated']):.1f} %", f"{r['max_error']:g}") for r in loads],
        ),
        "tagc_worlds": markdown(
            ("ranks", "each keeps", "elements of all a counter", "taken apart exactly", "largest error"),
            [
                (
                    r["world_size"],
                    f"{100 * r['density']:.1f} %",
                    f"{r['load']:.2f}",
                    f"{100 * (1 - r['estimated']):.1f} %",
                    f"{r['max_error']:g}",
                )
                for r in worlds
            ],
        ),
        "tagc_training": markdown(
            ("", "KB of gradients a step", "loss, nats a byte"),
            [(r["way"], f"{r['metered_bytes'] / 1e3:.0f}", f"{r['validation_loss']:.3f}") for r in trained],
        ),
    }
    print("\n".join(texts.values()))
    if not options.quick:
        shared = {"hardware": describe_hardware(), "versions": describe_versions(), **stamp()}
        lines = [("load", r) for r in loads] + [("worlds", r) for r in worlds] + [("training", r) for r in trained]
        OUTPUT.unlink(missing_ok=True)
        append(OUTPUT, [{"part": part, **line, **shared} for part, line in lines])
        for name, text in texts.items():
            write_section(PAGE, name, text)


if __name__ == "__main__":
    main()
