"""``mycel plan memory``: which blocks are kept, moved to far memory or computed again, and how good that is."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from mycel.cli import consoles
from mycel.cli.instances import checked_limit, read_instance
from mycel.planning.residency.instance import MemoryInstance
from mycel.planning.residency.plan import MemoryPlan

__all__ = ["register"]

#: Runs of blocks with one policy that are printed.
_MOST_RUNS = 40


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command(
        "memory",
        help="Plan what of a model's activations is kept, moved out or computed again, and say how good it is.",
    )
    def plan_memory(
        file: Annotated[Path, typer.Argument(help="Blocks, capacity and rates, as JSON.", show_default=False)],
        limit: Annotated[
            float, typer.Option(help="Seconds for the search; the best so far is kept, also on Ctrl-C.")
        ] = 60,
        json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        from mycel.planning.residency import check_plan, known_plans
        from mycel.planning.residency import plan_memory as plan_it

        instance = MemoryInstance.parse(read_instance(file, "instance of memory"), source=str(file))
        seconds = checked_limit(limit)
        with consoles.doing(f"memory of {file.name}") as say:
            plan = plan_it(instance, limit_s=seconds, told=lambda progress: say(str(progress)))
        most = check_plan(instance, plan)
        others = known_plans(instance)
        if json_output:
            print(json.dumps(plan.to_json()))
        else:
            print("\n".join(_told(instance, plan, most, others)))


def _told(instance: MemoryInstance, plan: MemoryPlan, most: int, others: dict[str, MemoryPlan]) -> list[str]:
    gap = plan.iteration_us / plan.lower_bound_us - 1
    quality = "no plan is better" if plan.proved else f"at most {gap:.2%} above the best"
    counts = ", ".join(f"{policy} {count}" for policy, count in plan.counts.items())
    lines = [
        f"{len(instance.blocks)} blocks, {most} of {instance.capacity} held at most: {plan.iteration_us} us, "
        f"{plan.iteration_us / instance.ideal_us - 1:.1%} above memory without end; bound {plan.lower_bound_us} us: "
        f"{quality} (found by {plan.source})",
        f"blocks by policy: {counts}",
    ]
    runs = [
        (policy, [k for k, _ in run]) for policy, run in groupby(enumerate(plan.policy), key=lambda each: each[1])
    ]
    shown = [f"{run[0]}-{run[-1]} {policy}" if len(run) > 1 else f"{run[0]} {policy}" for policy, run in runs]
    lines.append(", ".join(shown[:_MOST_RUNS]) + (", ..." if len(shown) > _MOST_RUNS else ""))
    for name, other in others.items():
        lines.append(f"{name}: {other.iteration_us} us, {other.iteration_us / plan.iteration_us:.2f} times as long")
    if plan.interrupted:
        lines.append("interrupted: this is the best so far")
    return lines
