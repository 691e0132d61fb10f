"""QSDP on FSDP2: step time and bytes over slow links, loss over seeds, beside full precision in the same run.

    python benchmarks/claims/qsdp.py            # about eight minutes; root, for network namespaces
    python benchmarks/claims/qsdp.py --quick    # a minute, nothing is recorded

First, four ranks behind a switch, links of 50 Mbit/s: a byte-level transformer on the standard library's source,
sharded by ``fully_shard``, whose ways of communicating take turns. Then the losses of three seeds, over loopback,
where nothing is timed. Lines replace those of the last run in ``benchmarks/recorded/claims/qsdp.jsonl``; tables in
the docs and docs/images/qsdp.png, losses over seconds, are made from them.
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
import training
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from training import Sizes, Way, draw, keep, launch, loss_table, say, train

import mycel.runtime  # noqa: F401  (registers the backend)
from mycel.data_parallel import QSDP, compress
from mycel.topology.load import load_topology
from record import RECORDED, ROOT, markdown, write_section

OUTPUT = RECORDED / "claims" / "qsdp.jsonl"
PAGE = ROOT / "docs" / "concepts" / "compression_fsdp.md"
PLOT = ROOT / "docs" / "images" / "qsdp.png"
TIMEOUT = timedelta(seconds=180)
RANKS = 4


class Sharded(nn.Module):
    """A sharded model that looks like one in DDP.

    Attributes:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        out: Tensor = self.module(tokens)
        return out


def way(name: str, backend: str, method: QSDP | None) -> Way:
    """A way of communicating, in groups of its own."""

    def make(model: nn.Module) -> Any:
        mesh = DeviceMesh.from_group(dist.new_group(backend=backend, timeout=TIMEOUT), "cpu")
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return Sharded(model), None if method is None else compress(model, method)

    return Way(name, make)


def timed_ways() -> list[Way]:
    """For slow links: the baselines, then ours."""
    return [
        way("full precision, gloo", "gloo", None),
        way("full precision, mycel", "mycel", None),
        way("W8G8, gloo", "gloo", QSDP()),
        way("W8G8, mycel", "mycel", QSDP()),
        way("W4G4, mycel", "mycel", QSDP(weight_bits=4, gradient_bits=4)),
    ]


def judged_ways() -> list[Way]:
    """For losses."""
    return [
        way("full precision", "gloo", None),
        way("W8G8", "gloo", QSDP()),
        way("W8G4", "gloo", QSDP(weight_bits=8, gradient_bits=4)),
        way("W4G8", "gloo", QSDP(weight_bits=4, gradient_bits=8)),
        way("W4G4", "gloo", QSDP(weight_bits=4, gradient_bits=4)),
    ]


def work(options: argparse.Namespace) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    if options.worker == "timed":
        say(train(timed_ways(), Sizes(steps=options.steps, turn=4)))
    else:
        for seed in range(options.seeds):
            training.SEED = 1234 + seed
            sizes = Sizes(width=96, layers=3, steps=options.loss_steps, turn=options.loss_steps, batch_size=4)
            say([{**record, "seed": seed} for record in train(judged_ways(), sizes)])
    dist.destroy_process_group()


def timed_table(records: list[dict[str, Any]]) -> str:
    """Step times and bytes beside the first record's."""
    base = records[0]
    rows = [
        (
            r["way"],
            f"{r['step_ms']:.0f}",
            f"{r['step_p10_ms']:.0f}–{r['step_p90_ms']:.0f}",
            f"{base['step_ms'] / r['step_ms']:.2f}",
            f"{r['interface_bytes'] / 1e3:.0f}",
            "" if r["metered_bytes"] is None else f"{r['metered_bytes'] / 1e3:.0f}",
            f"{base['interface_bytes'] / r['interface_bytes']:.2f}",
        )
        for r in records
    ]
    headings = (
        "",
        "step, ms",
        "p10–p90",
        "times faster",
        "KB a step by the interface",
        "by the meter",
        "times fewer",
    )
    return markdown(headings, rows)


def main() -> None:
    """Launches the ranks and shows what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, one seed, recorded nowhere")
    parser.add_argument("--steps", type=int, default=None, help="of each way over slow links")
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--loss-steps", type=int, default=None, help="of each way and seed where losses are compared")
    parser.add_argument("--link", default="50 Mbit/s")
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.steps = options.steps or (8 if options.quick else 40)
    options.seeds = options.seeds or (1 if options.quick else 3)
    options.loss_steps = options.loss_steps or (12 if options.quick else 100)
    if options.worker:
        work(options)
        return
    slow = load_topology(f"star:ranks={RANKS},bandwidth={options.link}")
    found = launch({"timed": slow, "judged": RANKS}, timeout_s=1500)
    texts = {"qsdp": timed_table(found["timed"]), "qsdp_loss": loss_table(found["judged"])}
    print("\n".join(texts.values()))
    if not options.quick:
        keep(found, OUTPUT, link=options.link, ranks=RANKS)
        for name, text in texts.items():
            write_section(PAGE, name, text)
        draw(found["timed"], PLOT)


if __name__ == "__main__":
    main()
