"""Is any wrong plan taken for right? Mutants of plans against a machine that runs them on numbers.

Plans with packets, switch channels, groups of thread blocks, pipelines and ports, and random changes of each. Every
one that the verifier takes is run in hostile orders, at several sizes, several runs after each other.

    python benchmarks/plan_mutants.py 3000
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from mycel.collectives.verify import check_plan
from mycel.errors import ScheduleError

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "examples")]

from plans import PLANS  # noqa: E402

from oracles.plan_machine import defect  # noqa: E402
from oracles.plan_mutants import mutant  # noqa: E402


def sizes_of(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Sizes at which the machine runs a plan."""
    ops = [op for gpu in plan["gpus"] for block in gpu["threadblocks"] for op in block["ops"]]
    steps = [op["iter_context"]["unit_size"] for op in ops if "iter_context" in op]
    runs = 4 if plan["use_double_scratch_buffer"] else 2
    if steps:
        unit = max(16, min(steps))
        return [{"units": units, "unit_bytes": unit, "runs": runs} for units in (1, 2, 3, 5)]
    parts = max([op["tbg_info"]["tbg_size"] for op in ops if "tbg_info" in op], default=1)
    return [{"units": units, "runs": runs} for units in ((parts, parts + 1, 2 * parts + 3) if parts > 1 else (1,))]


def judge(plan: dict[str, Any], seeds: range) -> str | None:
    """What the machine finds."""
    for options in sizes_of(plan):
        if found := defect(plan, seeds, **options):
            return found
    return None


def main(number: int, seed: int = 1) -> int:
    """Judge so many mutants; the number of wrong ones that were taken for right."""
    chance = random.Random(seed)
    sources = [make() for make in PLANS] + [make(3) for make in PLANS]
    plans = [source.build() for source in sources]
    seen: Counter[str] = Counter()
    wrong = 0
    for _ in range(number):
        plan = chance.choice(plans)
        what, changed = mutant(plan, chance)
        try:
            check_plan(changed)
        except ScheduleError:
            seen["refused"] += 1
            continue
        seen["taken"] += 1
        if found := judge(changed, range(4)):
            wrong += 1
            print(f"{plan['name']}: {what}: taken, but {found}")
    print(json.dumps({"mutants": number, **seen, "taken but wrong": wrong}))
    return wrong


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000, int(sys.argv[2]) if len(sys.argv) > 2 else 1) > 0)
