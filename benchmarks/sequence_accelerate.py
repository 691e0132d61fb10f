"""Families of transformers on divided sequences: accelerate's refusal or its gradients, beside ours.

Tiny random models in float32, one document and three packed ones. A number is the norm of how far all gradients are
from those of one process in float64, relative to these. Nothing is timed.

    torchrun --nproc-per-node 2 benchmarks/sequence_accelerate.py --write
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch.distributed as dist

from record import RECORDED, ROOT, append, markdown, read, stamp, write_section

sys.path.append(str(ROOT))

from tests.distributed.checks.sequence_accelerate import families
from tests.distributed.checks.sequence_models import FAMILIES

FILE = RECORDED / "sequence_accelerate.jsonl"
PAGE = ROOT / "docs" / "guides" / "long_sequences.md"
COLUMNS = ("one", "packed", "ulysses", "our one", "our packed")


def table(lines: list[dict[str, Any]]) -> str:
    """Of the last run, by family."""
    if not lines:
        return ""
    headings = (
        *("family", "torch's ring by accelerate", "packed", "DeepSpeed by accelerate"),
        *("`mycel.sequence`", "packed"),
    )
    rows = [(f"`{name}`", *(cell(of[c]) for c in COLUMNS)) for name, of in lines[-1]["families"].items()]
    return markdown(headings, rows)


def cell(found: Any) -> str:
    """A distance, or what is said, up to the model's name."""
    if isinstance(found, float):
        return f"{found:.0e}" if found < 1e-3 else f"**{found:.2f}**"
    return "not refused" if found is None else str(found).partition(": ")[2].split(" (model ")[0]


def main() -> None:
    """Print the table on rank 0."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("families", nargs="*", default=list(FAMILIES))
    asked.add_argument("--backend", default="gloo")
    asked.add_argument(
        "--write", action="store_true", help=f"record it in {FILE.name}, and put the table in its page"
    )
    given = asked.parse_args()
    dist.init_process_group(given.backend)
    found = families(dist.get_rank(), dist.get_world_size(), given.families)
    if dist.get_rank() == 0:
        line = {"ranks": dist.get_world_size(), "families": found}
        print(table([line]))
        if given.write:
            append(FILE, [{**line, **stamp()}])
            write_section(PAGE, "sequence_accelerate", table(read(FILE)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
