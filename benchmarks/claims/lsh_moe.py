"""LSH-MoE's claim, a tenth to a fifth of the rows without loss, on a small model, beside codecs of as few bytes.

    python benchmarks/claims/lsh_moe.py          # four minutes; replaces its lines, and a table in the docs
    python benchmarks/claims/lsh_moe.py --quick  # a minute: few steps, nothing is written

Every line is a model trained with that exchange from its first step, all from the same weights on the same text, and
judged with it. ``rows`` is what travelled of the rows in the last 20 steps. The paper's models are large, with
thousands of tokens an expert; this one is small, so a loss here does not refute them, and no figure of theirs is
beside ours. What can be compared here is whether hashing or rounding buys more at the same number of bytes.

References:
    Nie et al., "LSH-MoE: Communication-efficient MoE Training via Locality-Sensitive Hashing", NeurIPS 2024,
    arXiv 2411.08446.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from moe_codecs import PAGE, by_variant, losses_of, mean, run
from record import RECORDED, markdown, read, write_section

OUTPUT = RECORDED / "claims" / "lsh_moe.jsonl"

COARSE = {"num_hashes": 1, "directions": 16}
FINE = {"num_hashes": 2, "directions": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "all rows, float32": {},
    "all rows, int8": {"codec": "int8"},
    "all rows, int4": {"codec": "int4"},
    "1 hash, residuals": {"lsh": {**COARSE, "radius": None}},
    "1 hash, no residuals": {"lsh": {**COARSE, "radius": None, "residuals": False}},
    "1 hash, residuals, radius 0.5": {"lsh": {**COARSE, "radius": 0.5}},
    "2 hashes, residuals": {"lsh": {**FINE, "radius": None}},
    "1 hash, residuals, radius 0.5, int8": {"codec": "int8", "lsh": {**COARSE, "radius": 0.5}},
}


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """The page's table."""
    rows = [
        (
            name,
            f"{100 * mean([line['rows'] for line in mine]):.0f} %",
            f"{mean([line['bytes_a_row'] for line in mine]):.0f}",
            *losses_of(mine, lines),
        )
        for name, mine in by_variant(lines).items()
    ]
    return markdown(
        ("exchange", "rows", "bytes a row of the model", "held-out loss, nats", "more than all rows"), rows
    )


def main() -> None:
    """Train, record, renew the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, no record")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps, seeds, file = (20, 1, None) if options.quick else (options.steps, options.seeds, OUTPUT)
    lines = run(VARIANTS, steps=steps, seeds=range(seeds), file=file)
    print()
    print(table(lines))
    if not options.quick:
        write_section(PAGE, "lsh_moe", table(read(OUTPUT)))


if __name__ == "__main__":
    main()
