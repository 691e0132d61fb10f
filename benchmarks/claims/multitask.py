"""Combiners of tasks on three tasks that share a small trunk, and the bytes that they send beside an all_reduce.

    python benchmarks/claims/multitask.py                   # both parts; root, for namespaces; about five minutes
    python benchmarks/claims/multitask.py --part quality    # one, which needs no root; the other's lines stay
    python benchmarks/claims/multitask.py --quick           # both, small; records nothing

*Quality*: three tasks on digits, all on one rank: which digit, whether it is odd, and which digit the mirrored image
shows. They share one layer of a few units, so that they pull in different directions, and have a head each. The same
rate of Adam everywhere, which does not see how long a combination is; several seeds.

*Bytes*: three ranks behind a switch, links of 50 Mbit/s; what leaves a rank's interface for one combination, beside
``all_reduce`` of as many numbers in the same run.

Rows replace those of the same part's last run in ``benchmarks/recorded/claims/multitask.jsonl``, and the tables in
docs/guides/tasks_and_ensembles.md.

References:
    Y. Zhang, Q. Yang, "A Survey on Multi-Task Learning", TKDE 2021; the methods' papers are named in their modules.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
import torch.distributed as dist
from digits import Digits, spread
from numpy.typing import NDArray
from torch import Tensor, nn
from training import interface_bytes, launch, say

import mycel.runtime  # noqa: F401  (registers the backend)
from mycel.comm.bundle import Bundle
from mycel.data_parallel import (
    FAMO,
    IMTLG,
    MGDA,
    AlignedMTL,
    CAGrad,
    GradNorm,
    GradVac,
    NashMTL,
    PCGrad,
    UncertaintyWeighting,
    UPGrad,
    combine_tasks,
)
from mycel.data_parallel.combine.tasks import ByGram, TaskCombiner
from mycel.topology.load import load_topology
from record import RECORDED, ROOT, conclude_parts, markdown

OUTPUT = RECORDED / "claims" / "multitask.jsonl"
PAGE = ROOT / "docs" / "guides" / "tasks_and_ensembles.md"
TASKS = ("digit", "parity", "mirrored digit")
CLASSES = (10, 2, 10)
WIDTH, BATCH, RATE = 10, 64, 5e-3


def of_task(task: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Images and labels as a task has them."""
    if task == 1:
        return x, y % 2
    return (x.view(-1, 8, 8).flip(2).reshape(-1, 64), y) if task == 2 else (x, y)


class Equal(ByGram):
    """The mean."""

    def weights(self, gram: NDArray[np.float64]) -> NDArray[np.float64]:
        """See ``ByGram``."""
        return np.full(len(gram), 1 / len(gram))


METHODS: dict[str, Callable[[], TaskCombiner]] = {
    "mean": Equal,
    "MGDA": MGDA,
    "MGDA, normalised": lambda: MGDA(normalised=True),
    "PCGrad": PCGrad,
    "GradVac": GradVac,
    "CAGrad": CAGrad,
    "IMTL-G": IMTLG,
    "Nash-MTL": NashMTL,
    "Aligned-MTL": AlignedMTL,
    "UPGrad": UPGrad,
    "FAMO": FAMO,
    "GradNorm": GradNorm,
    "uncertainty": UncertaintyWeighting,
}


def errors_of(make: Callable[[], TaskCombiner], seed: int, steps: int) -> list[float]:
    """Held-out errors of every task after training, in percent."""
    digits = Digits(seed)
    torch.manual_seed(seed)
    trunk = nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh())
    heads = [nn.Linear(WIDTH, classes) for classes in CLASSES]
    optimizer = torch.optim.Adam([p for part in (trunk, *heads) for p in part.parameters()], lr=RATE)
    combiner = make()
    for step in range(steps):
        images, labels = digits.batch(seed, 0, step, BATCH)
        losses = []
        for task, head in enumerate(heads):
            x, y = of_task(task, images, labels)
            losses.append(nn.functional.cross_entropy(head(trunk(x)), y))
        optimizer.zero_grad()
        combine_tasks(losses, trunk.parameters(), combiner)
        optimizer.step()
    found = []
    for task, head in enumerate(heads):
        x, y = of_task(task, *digits.test)
        with torch.no_grad():
            found.append(round(100 * float((head(trunk(x)).argmax(1) != y).float().mean()), 4))
    return found


def bytes_of(count: int, repeats: int) -> list[dict[str, Any]]:
    """Bytes that leave the first rank's interface, and the slowest rank's seconds, in turns."""
    found: dict[str, list[tuple[int, float]]] = {"all_reduce": [], "mgda": []}
    method, values = MGDA(), torch.randn(count, generator=torch.Generator().manual_seed(dist.get_rank()))
    for turn in range(repeats + 1):
        for name, taken in found.items():
            own = values.clone()
            dist.barrier()
            sent, begin = interface_bytes(), time.perf_counter()
            if name == "all_reduce":
                dist.all_reduce(own)
            else:
                method.start(Bundle.over(own, [own]), dist.group.WORLD).wait()
            took = torch.tensor([time.perf_counter() - begin])
            dist.barrier()
            counted = interface_bytes() - sent
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if turn:
                taken.append((counted, float(took)))
    return [
        {
            "what": name,
            "numbers": count,
            "interface_bytes": statistics.median(b for b, _ in taken),
            "formula_bytes": 2 * 2 / 3 * 4 * count + (8 * 9 if name == "mgda" else 0),
            "milliseconds": 1e3 * statistics.median(s for _, s in taken),
        }
        for name, taken in found.items()
    ]


def be_rank(repeats: int) -> None:
    """What each rank does for the bytes."""
    torch.set_num_threads(1)
    dist.init_process_group("mycel", timeout=timedelta(seconds=120))
    say(bytes_of(1_000_000, repeats))
    dist.destroy_process_group()


def judged(seed: int, steps: int) -> list[dict[str, Any]]:
    """A line a method."""
    return [
        {"part": "quality", "method": name, "seed": seed, "errors": errors_of(make, seed, steps)}
        for name, make in METHODS.items()
    ]


def table(every: list[dict[str, Any]]) -> str:
    """A row a method: errors of the tasks, of the worst one, and the mean beside that of ``mean``."""
    lines = [line for line in every if line["part"] == "quality"]
    if not lines:
        return ""
    base = statistics.mean(statistics.mean(line["errors"]) for line in lines if line["method"] == "mean")
    rows = []
    for name in dict.fromkeys(line["method"] for line in lines):
        mine = [line["errors"] for line in lines if line["method"] == name]
        mean = statistics.mean(statistics.mean(errors) for errors in mine)
        each = (spread([errors[task] for errors in mine]) for task in range(len(TASKS)))
        rows.append((name, *each, spread([max(errors) for errors in mine]), f"{mean - base:+.2f}"))
    seeds = len({line["seed"] for line in lines})
    return markdown((f"errors, %, {seeds} seeds", *TASKS, "worst task", "mean, beside the mean's"), rows)


def bytes_table(every: list[dict[str, Any]]) -> str:
    """Bytes beside the formula."""
    lines = [line for line in every if line["part"] == "bytes"]
    if not lines:
        return ""
    rows = [
        (
            line["what"],
            f"{line['interface_bytes'] / 1e6:.3f}",
            f"{line['formula_bytes'] / 1e6:.3f}",
            f"{line['interface_bytes'] / lines[0]['interface_bytes']:.3f}",
            f"{line['milliseconds']:.0f}",
        )
        for line in lines
    ]
    headings = ("a million float32, 3 ranks", "MB by the interface", "by the formula", "of all_reduce", "ms")
    return markdown(headings, rows)


SECTIONS = {"multitask": table, "multitask_bytes": bytes_table}


def main() -> None:
    """Launches the ranks and shows what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, few steps, recorded nowhere")
    parser.add_argument("--part", choices=("quality", "bytes"), default=None, help="the other's lines stay")
    parser.add_argument("--seeds", type=int, default=None)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.seeds = options.seeds or (1 if options.quick else 5)
    options.steps = options.steps or (60 if options.quick else 400)
    if options.worker:
        be_rank(3 if options.quick else 9)
        return
    lines: list[dict[str, Any]] = []
    if options.part != "bytes":
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for seed in range(options.seeds):
            lines += judged(seed, options.steps)
            conclude_parts(OUTPUT, PAGE, SECTIONS, lines, quick=options.quick)
        dist.destroy_process_group()
    if options.part != "quality":
        found = launch({"bytes": load_topology("star:ranks=3,bandwidth=50 Mbit/s")}, timeout_s=600)["bytes"]
        lines += [{"part": "bytes", **line} for line in found]
        conclude_parts(OUTPUT, PAGE, SECTIONS, lines, quick=options.quick)


if __name__ == "__main__":
    main()
