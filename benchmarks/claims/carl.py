"""Whether a simple reward survives large mini-batches, as CaRL claims, and a shaped one does not.

    python benchmarks/claims/carl.py                    # three seeds, four ranks; about ten minutes
    python benchmarks/claims/carl.py --only simple      # one reward, or cartpole, rate or slow
    python benchmarks/claims/carl.py --quick            # one seed, few steps; records nothing

Cars follow routes (examples/reinforcement). A row is a reward and a mini-batch: percent of the route that episodes of
the last fifth of training complete. Mini-batches of 256 are of one rank, of 2,048 of four ranks; results do not
depend on the number of ranks (tests/distributed/test_annex_examples.py), the time does. The rate of Adam grows with
the square root of the mini-batch. Rates are environment steps a second, collecting and learning together; ``slow``
is the rate of four ranks of which the last takes 5 ms a step more, waited for and stopped when three are through.
Lines replace those of the same kind in ``benchmarks/recorded/claims/carl.jsonl``, and the table in
docs/concepts/annex.md. The reward's terms are ours; the authors' simulator is not used.

References:
    B. Jaeger et al., "CaRL: Learning Scalable Planning Policies with Simple Rewards", 2025, arXiv 2504.17838.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "reinforcement"))

import drive
import torch
import torch.distributed as dist
from digits import run_ranks
from proximal import Settings

from record import RECORDED, ROOT, conclude_parts, markdown

OUTPUT = RECORDED / "claims" / "carl.jsonl"
PAGE = ROOT / "docs" / "concepts" / "annex.md"
#: Kinds of lines: task, mini-batch, ranks.
RUNS = {
    "simple": (("simple", 256, 1), ("simple", 2048, 4)),
    "shaped": (("shaped", 256, 1), ("shaped", 2048, 4)),
    "cartpole": (("cartpole", 256, 1),),
    "rate": (("simple", 2048, 1), ("simple", 2048, 2), ("simple", 2048, 4)),
    "slow": (("simple", 2048, 4),),
}
#: Seconds a step that the slow rank takes more, and shares of ranks after which the others stop.
SLOW_S, PREEMPT = 0.005, (1.0, 0.6)
#: Updates of a run that is only timed.
TIMED_UPDATES = 4


def train(task: str, minibatch: int, seed: int, steps: int | None) -> dict[str, Any]:
    """One run, on this process or all ranks."""
    settings = drive.settings_for(task, minibatch, seed=seed, **({"steps": steps} if steps else {}))
    return drive.line(task, settings, drive.train(task, settings))


def with_a_slow_rank(task: str, minibatch: int, steps: int, preempt: float, store: dist.Store) -> dict[str, Any]:
    """One run in which the last rank is slow."""
    settings = drive.settings_for(task, minibatch, steps=steps, preempt=preempt)
    own = dist.PrefixStore(f"slow {preempt}", store)
    learned = drive.train(task, settings, store=own, slow_s=SLOW_S)
    whole = settings.samples * len(learned.scores)
    return {**drive.line(task, settings, learned), "preempt": preempt, "taken": learned.steps / whole}


def be_rank(kind: str, task: str, minibatch: int, seeds: int, steps: int | None) -> None:
    """What every rank does."""
    torch.set_num_threads(1)
    store = drive.begin("mycel")
    if kind == "slow":
        made = (with_a_slow_rank(task, minibatch, steps or 0, preempt, store) for preempt in PREEMPT)
    else:
        made = (train(task, minibatch, seed, steps) for seed in range(seeds))
    for found in made:
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def lines_of(kind: str, seeds: int, steps: int | None) -> list[dict[str, Any]]:
    """All runs of a kind."""
    lines: list[dict[str, Any]] = []
    if kind in ("rate", "slow"):
        seeds, steps = 1, TIMED_UPDATES * Settings().samples
    for task, minibatch, ranks in RUNS[kind]:
        if ranks == 1:
            lines += [train(task, minibatch, seed, steps) for seed in range(seeds)]
        else:
            words = [kind, task, str(minibatch), str(seeds), str(steps or 0)]
            lines += run_ranks(ranks, __file__, ["--run", *words], lambda found: print(found, flush=True))
    return [{**line, "kind": kind} for line in lines]


def table(lines: list[dict[str, Any]]) -> str:
    """A row a task and mini-batch, and one of rates."""
    rows = []
    judged = [line for kind in RUNS for line in lines if line["kind"] == kind and kind not in ("rate", "slow")]
    for task, minibatch, ranks in dict.fromkeys((li["task"], li["minibatch"], li["ranks"]) for li in judged):
        mine = [line for line in judged if (line["task"], line["minibatch"]) == (task, minibatch)]
        scores = [line["score"] for line in mine]
        pole = task == "cartpole"
        name = "CartPole, steps of 500" if pole else f"route, {task} reward, %"
        each = ", ".join(f"{score:.0f}" if pole else f"{score:.1f}" for score in scores)
        steps = mine[0]["steps"]
        rows.append((name, minibatch, ranks, steps, each, f"{statistics.mean(scores):.1f}"))
    made = markdown(("task", "mini-batch", "ranks", "steps", "by seed", "mean"), rows)
    timed = [line for line in lines if line["kind"] == "rate"]
    if timed:
        rates = ", ".join(f"{line['steps_per_s']:.0f} on {line['ranks']}" for line in timed)
        made += f"\nEnvironment steps a second, by ranks on this one machine: {rates}.\n"
    for line in lines:
        if line["kind"] == "slow":
            who = "all wait for it" if line["preempt"] == 1 else f"stopped at {line['preempt']:.0%} of the ranks"
            made += (
                f"\nOf {line['ranks']} ranks one slow, {who}: {line['steps_per_s']:.0f} steps a second, "
                f"{line['taken']:.0%} of the steps taken.\n"
            )
    return made


def main() -> None:
    """Run and print; also what ranks call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, one update; records nothing")
    parser.add_argument("--only", choices=tuple(RUNS), default=None, help="the others' lines stay")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--run", nargs=5, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rank:
        kind, task, minibatch, seeds, steps = options.run
        be_rank(kind, task, int(minibatch), int(seeds), int(steps) or None)
        return
    if options.quick:
        print(table(lines_of(options.only or "simple", 1, Settings().samples)))
        return
    for kind in (options.only,) if options.only else tuple(RUNS):
        conclude_parts(OUTPUT, PAGE, {"carl": table}, lines_of(kind, options.seeds, None), key="kind")


if __name__ == "__main__":
    main()
