"""What adapters for point clouds give and send, beside tuning everything, the head alone, and training from scratch.

    python benchmarks/claims/dapt.py                   # root, for network namespaces; three seeds, ten minutes
    python benchmarks/claims/dapt.py --only accuracy   # no root needed; bytes stay as they were recorded
    python benchmarks/claims/dapt.py --quick           # accuracies of one seed, small; records nothing

*accuracy*: a transformer that knows six shapes is tuned to six others (examples/point_clouds). *bytes*: two ranks on
emulated links of 1 Gbit/s, what left a rank's interface in a step of each way, headers included. Lines replace those
of the same kind in ``benchmarks/recorded/claims/dapt.jsonl``, and the table in docs/concepts/annex.md. The authors'
data and backbones are not here; memory is not measured.

References:
    X. Zhou et al., "Dynamic Adapter Meets Prompt Tuning: Parameter-Efficient Transfer Learning for Point Cloud
    Analysis", CVPR 2024, arXiv 2403.01439.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "point_clouds"))

import torch
import torch.distributed as dist
import tune_clouds
from adapters import CloudNet
from clouds import PRETRAINED
from training import interface_bytes, launch, say
from tune_clouds import WAYS, Settings

import mycel.runtime  # noqa: F401  (registers the backend)
from mycel.topology.load import load_topology
from record import RECORDED, ROOT, conclude_parts, markdown

OUTPUT = RECORDED / "claims" / "dapt.jsonl"
PAGE = ROOT / "docs" / "concepts" / "annex.md"
#: Epochs of tuning in which bytes are counted, beside one of as many fewer: what begins and ends a run cancels out.
COUNTED = (1, 3)
#: Clouds a shape in these.
COUNTED_CLOUDS = 32


def accuracies(seed: int, *, quick: bool) -> list[dict[str, Any]]:
    """A line a way."""
    settings = Settings(seed=seed)
    if quick:
        settings = replace(settings, pretrain=(40, 2), tune=(20, 3), held_out=20)
    before = tune_clouds.pretrained(settings)
    lines = []
    for way in WAYS:
        found = tune_clouds.tune(before, way, settings)
        shared = {"kind": "accuracy", "way": way, "seed": seed}
        lines.append({**shared, "accuracy": found.accuracy, "trained": found.trained})
        print(lines[-1], flush=True)
    return lines


def be_rank() -> None:
    """Bytes a step of each way; a model that knows nothing has as many gradients."""
    torch.set_num_threads(1)
    dist.init_process_group("mycel", timeout=timedelta(seconds=240))
    torch.manual_seed(0)
    settings = Settings(held_out=1)
    before = CloudNet(len(PRETRAINED), width=settings.width)
    for way in WAYS:
        sent = []
        for epochs in COUNTED:
            begin = interface_bytes()
            found = tune_clouds.tune(before, way, replace(settings, tune=(COUNTED_CLOUDS, epochs)))
            dist.barrier()
            sent.append((interface_bytes() - begin, found.steps))
        each = (sent[1][0] - sent[0][0]) / (sent[1][1] - sent[0][1])
        say([{"kind": "bytes", "way": way, "interface_bytes": each, "gradient_bytes": found.gradient_bytes}])
    dist.destroy_process_group()


def table(lines: list[dict[str, Any]]) -> str:
    """A row a way; what was not measured is a dash."""
    sent = {line["way"]: line for line in lines if line["kind"] == "bytes"}
    judged = [line for line in lines if line["kind"] == "accuracy"]
    rows = []
    for way in WAYS:
        scores = [line["accuracy"] for line in judged if line["way"] == way]
        trained = [4 * line["trained"] for line in judged if line["way"] == way]
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        shown, counted = "-", ("-", "-")
        if scores:
            shown = f"{statistics.mean(scores):.3f}" + (f" ± {spread:.3f}" if len(scores) > 1 else "")
        if way in sent:
            each, trained = sent[way]["interface_bytes"], [sent[way]["gradient_bytes"]]
            counted = (f"{each / 1e3:.1f}", f"{sent['all weights']['interface_bytes'] / each:.1f}")
        gradients = f"{trained[0] / 1e3:.1f}" if trained else "-"
        rows.append((way, shown, gradients, *counted))
    seeds = len({line["seed"] for line in judged})
    return markdown(
        (
            "trained",
            f"accuracy, {seeds} seeds" if seeds else "accuracy",
            "KB of gradients",
            "KB a step by the interface",
            "times fewer than all weights",
        ),
        rows,
    )


def main() -> None:
    """Run and print; also what ranks call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, small; records nothing")
    parser.add_argument("--only", choices=("accuracy", "bytes"), default=None, help="the other's lines stay")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.worker:
        be_rank()
        return
    if options.quick:
        print(table(accuracies(0, quick=True)))
        return
    found: list[dict[str, Any]] = []
    if options.only != "bytes":
        for seed in range(options.seeds):
            found += accuracies(seed, quick=False)
            conclude_parts(OUTPUT, PAGE, {"dapt": table}, found, key="kind")
    if options.only != "accuracy":
        star = load_topology("star:ranks=2,bandwidth=1 Gbit/s")
        found += launch({"bytes": star}, timeout_s=600)["bytes"]
        conclude_parts(OUTPUT, PAGE, {"dapt": table}, found, key="kind")


if __name__ == "__main__":
    main()
