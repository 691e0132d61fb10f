"""PowerSGD over slow links: uncompressed Gloo, torch's own hook, and ours with many buckets, in the same run.

    python benchmarks/claims/powersgd.py            # four to six minutes; root, for network namespaces
    python benchmarks/claims/powersgd.py --quick    # one minute, nothing is recorded

Four ranks behind a switch, links of 50 Mbit/s, a byte-level transformer on the standard library's source. Torch's
hook has all gradients in one bucket, the only way it works over Gloo; ours has buckets of 1 MiB. Lines replace those
of the last run in ``benchmarks/recorded/claims/powersgd.jsonl``; a table in the docs and docs/images/powersgd.png,
losses over seconds, are made from them.
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
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from training import Sizes, Way, draw, say, train

import mycel.runtime  # noqa: F401  (registers the backend)
from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.bench.run import run_ranks, warm_up
from mycel.data_parallel import CompressionPolicy, PowerSGD, compress, make_compressor
from mycel.topology.load import load_topology
from record import RECORDED, ROOT, append, markdown, stamp, write_section

OUTPUT = RECORDED / "claims" / "powersgd.jsonl"
PAGE = ROOT / "docs" / "concepts" / "compression.md"
PLOT = ROOT / "docs" / "images" / "powersgd.png"
#: Torch's hook compresses from the second step on at the earliest, when buckets are final.
START = 2
TIMEOUT = timedelta(seconds=120)


def ways(rank: int) -> list[Way]:
    """The baselines, then ours."""

    def plain(backend: str) -> Any:
        def make(model: nn.Module) -> Any:
            return DistributedDataParallel(
                model, process_group=dist.new_group(backend=backend, timeout=TIMEOUT)
            ), None

        return make

    def torchs(model: nn.Module) -> Any:
        ddp = DistributedDataParallel(model, process_group=dist.new_group(timeout=TIMEOUT), bucket_cap_mb=1000)
        state = PowerSGDState(ddp.process_group, matrix_approximation_rank=rank, start_powerSGD_iter=START)
        ddp.register_comm_hook(state, powerSGD_hook)
        return ddp, None

    def ours(backend: str, method: Any) -> Any:
        def make(model: nn.Module) -> Any:
            group = dist.new_group(backend=backend, timeout=TIMEOUT)
            ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=1)
            own = dist.new_group(backend=backend, timeout=TIMEOUT)
            return ddp, compress(ddp, CompressionPolicy(method, start_step=START), group=own)

        return make

    half = torch.bfloat16
    return [
        Way("uncompressed, gloo", plain("gloo")),
        Way(f"torch's hook, rank {rank}, one bucket, gloo", torchs),
        Way(f"ours, rank {rank}, gloo", ours("gloo", PowerSGD(rank))),
        Way(f"ours, rank {rank}, mycel", ours("mycel", PowerSGD(rank))),
        Way(f"ours, rank {rank} in bfloat16, mycel", ours("mycel", PowerSGD(rank, wire=half))),
        Way("int4, mycel", ours("mycel", make_compressor("int4"))),
    ]


def work(options: argparse.Namespace) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    chosen = [way for i, way in enumerate(ways(options.rank)) if options.only is None or str(i) in options.only]
    say(train(chosen, Sizes(steps=options.steps, width=options.width, batch_size=options.batch_size)))
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
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.steps = options.steps or (16 if options.quick else 120)
    options.only = options.only and options.only.split(",")
    if options.worker:
        work(options)
        return
    topology = load_topology(f"star:ranks=4,bandwidth={options.link}")
    records: list[dict[str, Any]] = []
    run_ranks(
        topology,
        [sys.executable, __file__, "--worker", *sys.argv[1:]],
        sink=lambda rank, record: records.append(record) if rank == 0 else None,
        timeout_s=1200,
        warm=warm_up,
    )
    text = table(records)
    print(text)
    if not options.quick and options.only is None:
        shared = {"link": options.link, "ranks": 4, "hardware": describe_hardware(), "versions": describe_versions()}
        OUTPUT.unlink(missing_ok=True)
        append(OUTPUT, [{**record, **shared, **stamp()} for record in records])
        write_section(PAGE, "powersgd", text)
        draw(records, PLOT)


if __name__ == "__main__":
    main()
