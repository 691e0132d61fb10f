"""Whether Adasum converges at eight times the batch where summing gradients does not, without another learning rate.

    python benchmarks/claims/adasum.py            # eight ranks on loopback, three seeds; about two minutes
    python benchmarks/claims/adasum.py --quick

Eight ranks train a small network on digits with plain SGD; each brings the batch that one rank alone would have. The
table counts steps to the accuracy asked for, for every learning rate and combiner; ``never`` after the last step.
One rank alone is the baseline whose learning rate is kept; the mean at its own best learning rate is there to be
compared with. Rows replace those of the last run in ``benchmarks/recorded/claims/adasum.jsonl``, and the table in
docs/concepts/combiners.md.

References:
    S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021, arXiv 2006.02924.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from digits import Digits, network, run_ranks

from mycel.comm.bundle import Packed
from mycel.data_parallel.combine import Adasum, Combiner, Mean, ModelCombiner, Sum
from record import RECORDED, ROOT, append, markdown, stamp, write_section

OUTPUT = RECORDED / "claims" / "adasum.jsonl"
PAGE = ROOT / "docs" / "concepts" / "combiners.md"
RANKS, BATCH = 8, 8
TARGET = 0.93
RATES = (0.1, 0.2, 0.4, 0.8)
COMBINERS: dict[str, Combiner | None] = {
    "one rank alone": None,
    "mean": Mean(),
    "sum": Sum(),
    "Adasum": Adasum(),
    "model combiner": ModelCombiner(),
}


def steps_to_target(combiner: Combiner | None, learning_rate: float, seed: int, most: int) -> int | None:
    """Steps until the held-out accuracy is reached; checked every third step."""
    digits, model = Digits(seed), network(seed)
    parameters = list(model.parameters())
    packed = Packed(parameters)
    optimizer = torch.optim.SGD(parameters, lr=learning_rate)
    for step in range(most):
        x, y = digits.batch(seed, 0 if combiner is None else dist.get_rank(), step, BATCH)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        if combiner is not None:
            gradients = [p.grad for p in parameters if p.grad is not None]
            packed.copy_from(gradients)
            assert dist.group.WORLD is not None
            for bundle in packed.bundles:
                combiner.start(bundle, dist.group.WORLD).wait()
            packed.copy_to(gradients)
        optimizer.step()
        if step % 3 == 2 and digits.judge(model)[0] >= TARGET:  # the same on every rank
            return step + 1
    return None


def be_rank(seeds: int, most: int, rates: tuple[float, ...]) -> None:
    """What every rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, combiner in COMBINERS.items():
        for learning_rate in rates:
            for seed in range(seeds):
                if combiner is not None or dist.get_rank() == 0:
                    steps = steps_to_target(combiner, learning_rate, seed, most)
                    line = {"combiner": name, "learning_rate": learning_rate, "seed": seed, "steps": steps}
                if dist.get_rank() == 0:
                    print(json.dumps({**line, "most": most}), flush=True)
                dist.barrier()
    dist.destroy_process_group()


def cell(steps: list[int | None]) -> str:
    """Median over the seeds, and how many never got there; nothing where nothing was measured."""
    if not steps:
        return "-"
    lost = sum(s is None for s in steps)
    if lost == len(steps):
        return "never"
    median = statistics.median([s if s is not None else float("inf") for s in steps])
    text = f"{median:.0f}" if median < float("inf") else "never"
    return f"{text} ({lost} of {len(steps)} never)" if lost and median < float("inf") else text


def table(lines: list[dict[str, Any]]) -> str:
    """A row a combiner, a column a learning rate."""
    rates = list(dict.fromkeys(line["learning_rate"] for line in lines))
    rows = []
    for name in dict.fromkeys(line["combiner"] for line in lines):
        cells = [
            cell([line["steps"] for line in lines if line["combiner"] == name and line["learning_rate"] == r])
            for r in rates
        ]
        rows.append((name, *cells))
    return markdown((f"steps to {TARGET:.0%}", *(f"rate {r:g}" for r in rates)), rows)


def main() -> None:
    """Run and print; also what ranks call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, two learning rates; records nothing")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--most", type=int, default=150, help="steps after which a run has failed")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.most = 1, 120
    rates = RATES[1::2] if options.quick else RATES
    if options.rank:
        be_rank(options.seeds, options.most, rates)
        return
    sizes = ["--seeds", str(options.seeds), "--most", str(options.most), *(["--quick"] if options.quick else [])]
    lines = run_ranks(
        RANKS,
        __file__,
        sizes,
        lambda line: print(*(line[k] for k in ("combiner", "learning_rate", "seed", "steps")), flush=True),
    )
    found = table(lines)
    print(found)
    if not options.quick:
        OUTPUT.unlink(missing_ok=True)
        append(OUTPUT, [{**line, **stamp()} for line in lines])
        write_section(PAGE, "adasum", found)


if __name__ == "__main__":
    main()
