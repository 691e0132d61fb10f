"""PowerSGD over slow links: uncompressed Gloo, torch's own hook, and ours with many buckets, in the same run.

    python benchmarks/claims/powersgd.py            # four to six minutes; root, for network namespaces
    python benchmarks/claims/powersgd.py --quick    # one minute, nothing is recorded

Four ranks behind a switch, links of 50 Mbit/s, a byte-level transformer on the standard library's source. Torch's
hook has all gradients in one bucket, the only way it works over Gloo; ours has buckets of 1 MiB. Then losses of
several seeds, of the model and of the hook's first directions, over loopback, where nothing is timed. Lines replace
those of the last run in ``benchmarks/recorded/claims/powersgd.jsonl``; tables in the docs and
docs/images/powersgd.png, losses over seconds, are made from them.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
import training
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from training import Sizes, Way, draw, keep, launch, loss_table, say, train

import mycel.runtime  # noqa: F401  (registers the backend)
from mycel.data_parallel import CompressionPolicy, PowerSGD, compress, make_compressor
from mycel.topology.load import load_topology
from record import RECORDED, ROOT, markdown, write_section

OUTPUT = RECORDED / "claims" / "powersgd.jsonl"
PAGE = ROOT / "docs" / "concepts" / "compression.md"
PLOT = ROOT / "docs" / "images" / "powersgd.png"
#: Torch's hook compresses from the second step on at the earliest, when buckets are final.
START = 2
TIMEOUT = timedelta(seconds=120)
RANKS = 4


def plain(backend: str) -> Any:
    """Uncompressed."""

    def make(model: nn.Module) -> Any:
        return DistributedDataParallel(model, process_group=dist.new_group(backend=backend, timeout=TIMEOUT)), None

    return make


def torchs(rank: int, seed: int = 0) -> Any:
    """Torch's hook, over Gloo; ``seed`` is that of its first directions."""

    def make(model: nn.Module) -> Any:
        ddp = DistributedDataParallel(model, process_group=dist.new_group(timeout=TIMEOUT), bucket_cap_mb=1000)
        state = PowerSGDState(
            ddp.process_group, matrix_approximation_rank=rank, start_powerSGD_iter=START, random_seed=seed
        )
        ddp.register_comm_hook(state, powerSGD_hook)
        return ddp, None

    return make


def ours(backend: str, method: Any) -> Any:
    """Ours, in groups of its own."""

    def make(model: nn.Module) -> Any:
        group = dist.new_group(backend=backend, timeout=TIMEOUT)
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=1)
        own = dist.new_group(backend=backend, timeout=TIMEOUT)
        return ddp, compress(ddp, CompressionPolicy(method, start_step=START), group=own)

    return make


def timed_ways(rank: int) -> list[Way]:
    """For slow links: the baselines, then ours."""
    return [
        Way("uncompressed, gloo", plain("gloo")),
        Way(f"torch's hook, rank {rank}, one bucket, gloo", torchs(rank)),
        Way(f"ours, rank {rank}, gloo", ours("gloo", PowerSGD(rank))),
        Way(f"ours, rank {rank}, mycel", ours("mycel", PowerSGD(rank))),
        Way(f"ours, rank {rank} in bfloat16, mycel", ours("mycel", PowerSGD(rank, wire=torch.bfloat16))),
        Way("int4, mycel", ours("mycel", make_compressor("int4"))),
    ]


def judged_ways(rank: int, seed: int) -> list[Way]:
    """For losses."""
    return [
        Way("uncompressed", plain("gloo")),
        Way(f"torch's hook, rank {rank}", torchs(rank, seed)),
        Way(f"ours, rank {rank}", ours("gloo", PowerSGD(rank))),
        Way(f"ours, rank {rank} in bfloat16", ours("gloo", PowerSGD(rank, wire=torch.bfloat16))),
    ]


def work(options: argparse.Namespace) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    sizes = Sizes(steps=options.steps, width=options.width, batch_size=options.batch_size)
    if options.worker == "timed":
        everything = timed_ways(options.rank)
        say(train([w for i, w in enumerate(everything) if options.only is None or str(i) in options.only], sizes))
    else:
        for seed in range(options.seeds):
            training.SEED = 1234 + seed
            records = train(judged_ways(options.rank, seed), replace(sizes, turn=options.steps))
            say([{**record, "seed": seed} for record in records])
    dist.destroy_process_group()


def table(records: list[dict[str, Any]]) -> str:
    """Step times beside the first record's."""
    base = records[0]["step_ms"]
    rows = [
        (
            r["way"],
            f"{r['step_ms']:.0f}",
            f"{r['step_p10_ms']:.0f}–{r['step_p90_ms']:.0f}",
            f"{base / r['step_ms']:.1f}",
            f"{r['interface_bytes'] / 1e3:.0f}",
            "" if r["metered_bytes"] is None else f"{r['metered_bytes'] / 1e3:.0f}",
            f"{r['validation_loss']:.3f}",
        )
        for r in records
    ]
    headings = ("", "step, ms", "p10–p90", "times faster", "KB a step by the interface", "by the meter", "loss")
    return markdown(headings, rows)


def main() -> None:
    """Launches the ranks and shows what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, recorded nowhere")
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--rank", type=int, default=4, help="of PowerSGD")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--link", default="50 Mbit/s")
    parser.add_argument("--only", default=None, help="numbers of the ways to run, such as 0,2,5; recorded nowhere")
    parser.add_argument("--seeds", type=int, default=None, help="for losses over loopback, where nothing is timed")
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.steps = options.steps or (16 if options.quick else 120)
    options.seeds = options.seeds or (1 if options.quick else 4)
    options.only = options.only and options.only.split(",")
    if options.worker:
        work(options)
        return
    slow = load_topology(f"star:ranks={RANKS},bandwidth={options.link}")
    found = launch({"timed": slow, "judged": RANKS}, timeout_s=1200)
    texts = {"powersgd": table(found["timed"]), "powersgd_loss": loss_table(found["judged"])}
    print("\n".join(texts.values()))
    if not options.quick and options.only is None:
        keep(found, OUTPUT, link=options.link, ranks=RANKS)
        for name, text in texts.items():
            write_section(PAGE, name, text)
        draw(found["timed"], PLOT)


if __name__ == "__main__":
    main()
