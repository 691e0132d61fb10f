"""Families of transformers on divided sequences: accelerate's refusal or its gradients, beside ours.

Tiny random models in float32, one document and three packed ones. A number is the norm of how far all gradients are
from those of one process in float64, relative to these. Nothing is timed.

    torchrun --nproc-per-node 2 benchmarks/sequence_accelerate.py --record
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from tests.distributed.checks.sequence_accelerate import families  # noqa: E402
from tests.distributed.checks.sequence_models import FAMILIES  # noqa: E402

from record import RECORDED, append, markdown, stamp  # noqa: E402

FILE = RECORDED / "sequence_accelerate.jsonl"


def cell(found: Any) -> str:
    """A distance, or what is said, without what follows the model's name."""
    return f"{found:.1e}" if isinstance(found, float) else str(found or "nothing said").split(" (model ")[0]


def main() -> None:
    """Print the table on rank 0."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("families", nargs="*", default=list(FAMILIES))
    asked.add_argument("--backend", default="gloo")
    asked.add_argument("--record", action="store_true", help=f"add a line to {FILE.name}")
    given = asked.parse_args()
    dist.init_process_group(given.backend)
    found = families(dist.get_rank(), dist.get_world_size(), given.families)
    if dist.get_rank() == 0:
        columns = ("one", "packed", "ulysses", "our one", "our packed")
        headings = (
            *("family", "accelerate, one document", "accelerate, packed"),
            *("accelerate with DeepSpeed", "ours, one document", "ours, packed"),
        )
        print(markdown(headings, [(name, *(cell(of[c]) for c in columns)) for name, of in found.items()]))
        if given.record:
            append(FILE, [{"ranks": dist.get_world_size(), "families": found, **stamp()}])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
