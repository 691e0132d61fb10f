"""What do the plans in a folder come to? Read, judged, run on numbers, and as programs judged again.

    python benchmarks/plans_of_others.py FOLDER
    torchrun --nproc-per-node 4 benchmarks/plans_of_others.py FOLDER   # on CPU ranks, those for so many

A plan that is right by the verifier must give right numbers in the machine, in every order it finds, and so must its
programs; the exit code is 1 if one does not. Of one that is refused the machine's finding stands beside: some faults
are of a kind that it has not, such as what a relaxed signal promises.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from mycel.collectives.plan_programs import load_plan, programs_of
from mycel.collectives.verify import verify_programs
from mycel.errors import ScheduleError

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "benchmarks")]

#: Elements of a block, by 4 bytes and in other numbers than chunks.
LENGTHS = (1, 16, 48, 1000, 70_000)


def judged(plan: dict[str, Any]) -> tuple[str, str | None, str | None]:
    """The verifier's word, what the machine finds, and what the judge of programs finds."""
    from judge import judge_programs
    from oracles.plan_machine import defect

    ops = [op for gpu in plan["gpus"] for block in gpu["threadblocks"] for op in block["ops"]]
    steps = [op["iter_context"]["unit_size"] for op in ops if "iter_context" in op]
    parts = max([op["tbg_info"]["tbg_size"] for op in ops if "tbg_info" in op], default=1)
    runs = 4 if plan.get("use_double_scratch_buffer") else 2
    options = {"units": 3 if steps else parts + parts // 2, "unit_bytes": min(steps, default=16), "runs": runs}
    found = defect(plan, range(3), **options)
    try:
        template = load_plan(plan)
    except ScheduleError as error:
        return str(error), found, None
    n = template.collective.num_ranks
    length = 37 if template.collective.name == "all_reduce" else n * 3
    programs = programs_of(template, length if template.collective.name != "all_to_all" else n * n * 3)
    verify_programs(programs)
    return "right", found, judge_programs(programs)


def alone(files: list[Path]) -> int:
    """Judge all; how many are not what the verifier takes them for."""
    missed = 0
    for file in files:
        word, machine, programs = judged(json.loads(file.read_text()))
        missed += word == "right" and bool(machine or programs)
        print(f"{file.name}: {word}; machine: {machine or 'right'}; programs: {programs or 'right'}", flush=True)
    return missed


def on_ranks(files: list[Path]) -> int:
    """Run those for so many ranks as collectives of torch; how many give wrong numbers."""
    import torch
    import torch.distributed as dist

    from mycel.errors import MycelError
    from mycel.runtime import register, unregister

    dist.init_process_group("mycel")
    rank, size, wrong = dist.get_rank(), dist.get_world_size(), 0
    for file in files:
        plan = json.loads(file.read_text())
        if len(plan["gpus"]) != size:
            continue
        try:
            registered = register(plan)
        except MycelError as error:
            if rank == 0:
                print(f"{file.name}: refused: {error}", flush=True)
            continue
        bad = torch.zeros(1)
        for length in LENGTHS:
            generator = torch.Generator().manual_seed(length)
            every = torch.randint(-1000, 1000, (size, length * size), generator=generator).float()
            mine, part = every[rank].clone(), torch.empty(length)
            if registered.name == "all_reduce":
                dist.all_reduce(mine)
                bad += not torch.equal(mine, every.sum(0))
            elif registered.name == "all_gather":
                dist.all_gather_into_tensor(mine, every[rank][:length].clone())
                bad += not torch.equal(mine, every[:, :length].reshape(-1))
            elif registered.name == "reduce_scatter":
                dist.reduce_scatter_tensor(part, mine)
                bad += not torch.equal(part, every.sum(0)[rank * length : (rank + 1) * length])
            else:
                dist.all_to_all_single(mine, every[rank].clone())
                own = every[:, rank * length : (rank + 1) * length]
                bad += not torch.equal(mine, own.reshape(-1))
        unregister(registered)
        dist.all_reduce(bad)
        wrong += bool(bad)
        if rank == 0:
            print(f"{file.name}: numbers {'wrong' if bad else 'right'} on {size} ranks", flush=True)
    dist.destroy_process_group()
    return wrong


def main(folder: str) -> int:
    """The number of plans that are not what they were taken for."""
    files = sorted(Path(folder).glob("*.json"))
    return on_ranks(files) if "RANK" in os.environ else alone(files)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) > 0)
