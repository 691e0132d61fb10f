"""``mycel plan sequences``: which ranks share which sequences of a step, and how good that is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mycel.cli import consoles
from mycel.cli.instances import checked_limit, read_instance
from mycel.planning.grouping.instance import SequenceInstance
from mycel.planning.grouping.plan import SequencePlan

__all__ = ["register"]

#: Groups of which a line is printed.
_MOST_LINES = 40


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("sequences", help="Plan which ranks share which sequences of a step, and say how good the plan is.")
    def plan_sequences(
        file: Annotated[Path, typer.Argument(help="Lengths, ranks and costs, as JSON.", show_default=False)],
        limit: Annotated[
            float, typer.Option(help="Seconds for the search; the best so far is kept, also on Ctrl-C.")
        ] = 60,
        json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        from mycel.planning.grouping import check_plan
        from mycel.planning.grouping import plan_sequences as plan_them

        instance = SequenceInstance.parse(read_instance(file, "instance of sequences"), source=str(file))
        seconds = checked_limit(limit)
        with consoles.doing(f"sequences of {file.name}") as say:
            plan = plan_them(instance, limit_s=seconds, told=lambda progress: say(str(progress)))
        check_plan(instance, plan)
        if json_output:
            print(json.dumps(plan.to_json()))
        else:
            print("\n".join(_told(instance, plan)))


def _told(instance: SequenceInstance, plan: SequencePlan) -> list[str]:
    quality = "no plan is better" if plan.proved else f"no plan is more than {plan.gap:.3%} better"
    lines = [
        f"{len(instance.lengths)} sequences, {sum(instance.lengths)} tokens, on {instance.num_ranks} ranks in "
        f"{plan.num_micro_batches} micro-batch{'es' if plan.num_micro_batches > 1 else ''}: "
        f"{plan.total_us / 1e3:.3f} ms; bound {plan.lower_bound_us / 1e3:.3f} ms: {quality} (found by {plan.source})"
    ]
    for group in plan.groups[:_MOST_LINES]:
        tokens = [instance.lengths[k] for k in group.sequences]
        lines.append(
            f"micro-batch {group.micro_batch}, ranks {_ranks(group.ranks)}: {len(tokens)} "
            f"sequence{'s' if len(tokens) > 1 else ''}, {sum(tokens)} tokens, the longest {max(tokens)}"
        )
    if len(plan.groups) > _MOST_LINES:
        lines.append(f"... and {len(plan.groups) - _MOST_LINES} more groups: --json prints all")
    if plan.interrupted:
        lines.append("interrupted: this is the best so far")
    return lines


def _ranks(ranks: tuple[int, ...]) -> str:
    first, last = ranks[0], ranks[-1]
    if len(ranks) > 2 and ranks == tuple(range(first, last + 1)):
        return f"{first} to {last}"
    return ", ".join(map(str, ranks))
