"""Whether an autoencoder that is solved for in one exchange a layer finds anomalies as well as trained ones.

    python benchmarks/claims/daef.py             # four ranks on loopback, five seeds, two data sets; some minutes
    python benchmarks/claims/daef.py --quick

The runs are those of ``examples/federated``: DAEF from four parts, an autoencoder of the same widths trained where
all data are, and federated averaging until it is as good as DAEF or its rounds are over. Rows replace those of the
last run in ``benchmarks/recorded/claims/daef.jsonl``, and the table in docs/concepts/closed_form.md.

References:
    D. Novoa-Paradela et al., "Fast Deep Autoencoder for Federated Learning", 2022, arXiv 2206.05136.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "federated"))

import find_anomalies as example
import torch
import torch.distributed as dist
from digits import run_ranks

from record import RECORDED, ROOT, conclude

OUTPUT = RECORDED / "claims" / "daef.jsonl"
PAGE = ROOT / "docs" / "concepts" / "closed_form.md"
RANKS = 4
SECTIONS = {"daef": example.table}


def be_rank(seeds: int, names: list[str]) -> None:
    """What every rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("mycel")
    for name in names:
        for seed in range(seeds):
            found = example.compare(name, seed)
            if dist.get_rank() == 0:
                print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Run and print; also what ranks call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, one data set; records nothing")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    seeds, names = (1, ["breast_cancer"]) if options.quick else (options.seeds, list(example.DATA))
    if options.rank:
        be_rank(seeds, names)
        return
    arguments = ["--seeds", str(seeds), *(["--quick"] if options.quick else [])]
    lines = run_ranks(RANKS, __file__, arguments, lambda line: print(line, flush=True))
    if options.quick:
        print(example.table(lines))
        return
    conclude(OUTPUT, PAGE, "daef", lines, example.table)


if __name__ == "__main__":
    main()
