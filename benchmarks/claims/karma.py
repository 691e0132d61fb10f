"""KARMA's claim: swapping interleaved with recomputation is faster than out-of-core alone, and than recomputation.

    python benchmarks/claims/karma.py [--quick]    # under ten minutes; replaces its lines and the table of the page

The paper reports 1.52 times the speed of the best out-of-core method without recomputation, on GPUs behind PCIe. Here
blocks are paced and the link is emulated (``memory_swap.py``), at the three link speeds where mixing is meant to pay:
a third, half and three quarters of what would hide all transfers. What KARMA itself plans, keep, swap and recompute,
is beside what mycel plans, which may recompute from swapped inputs too. All times are measured in turns of one run;
gradients are those of the model with everything near, bit for bit, and the budget is never exceeded, or it fails.

References:
    M. Wahib et al., "Scaling Distributed Deep Learning Workloads beyond the Memory Capacity with KARMA", SC 2020
    (arXiv 2008.11421).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from memory_swap import STAYS, lines
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "karma.jsonl"
PAGE = ROOT / "docs" / "concepts" / "swapping.md"


def table(made: Sequence[dict[str, Any]]) -> str:
    """For the page; of one iteration's time."""
    rows = []
    for line in made:
        found = line["measured_us"]
        mixed = found["mixed"]
        rows.append(
            (
                f"{line['link']:.2f}",
                *(
                    f"{found[name] / mixed:.2f}x" if name in found else "does not fit"
                    for name in ("three policies", "swap all", STAYS, "torchtune", "recompute all")
                ),
                f"{mixed / found['keep all']:.2f}x",
            )
        )
    heads = ("link", "KARMA's three policies", "swap all", STAYS, "torchtune's design", "recompute all")
    return markdown((*heads, "mixed over keep all without a budget"), rows)


def main() -> None:
    """Measure, record, and renew the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one link speed, two iterations; nothing is kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    speeds = (0.5,) if options.quick else (0.33, 0.5, 0.75)
    made = lines(speeds, iterations=2 if options.quick else 7, limit_s=2.0 if options.quick else 10.0)
    if options.quick:
        print(table(made))
        return
    conclude(OUTPUT, PAGE, "karma", made, table)


if __name__ == "__main__":
    main()
