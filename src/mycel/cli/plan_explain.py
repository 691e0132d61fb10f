"""``mycel plan explain``: what binds a plan, why others lost, and what more of everything would buy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mycel.cli import consoles
from mycel.cli.plan_files import cluster_of, write_page
from mycel.errors import UsageError
from mycel.planning.plan import read_plan
from mycel.planning.plan.explain import SEARCH_S

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("explain", help="Why a plan: what binds, why others lost, what 10 GiB or one more node would buy.")
    def plan_explain(
        file: Annotated[Path, typer.Argument(help="Plan, as 'mycel plan search' writes it.", show_default=False)],
        cluster: Annotated[
            str | None, typer.Argument(help="Cluster that it is for; not needed for a preset.", show_default=False)
        ] = None,
        machine: Annotated[
            str | None, typer.Option(help="Machine whose coefficients count, by name or file.")
        ] = None,
        time_limit: Annotated[
            float, typer.Option("--time", help="Seconds for each of about ten searches; the best so far is taken.")
        ] = SEARCH_S,
        page: Annotated[Path | None, typer.Option(help="File that gets the plan as a page of HTML.")] = None,
        json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        if not time_limit > 0:
            raise UsageError(f"--time {time_limit:g}: must be above 0 seconds")
        plan = read_plan(file)
        where = cluster_of(plan, cluster, machine)
        plan.validate(cluster=where)
        with consoles.doing(f"{plan.model.shape.name} on {where.name}") as say:
            explanation = plan.explain(where, limit_s=time_limit, told=say)
        rewrites = plan.rewrites(where)
        sentences = [*explanation.sentences(), *(rewrite.told for rewrite in rewrites)]
        if page is not None:
            write_page(plan, page, where, sentences)
        if json_output:
            print(json.dumps({**explanation.to_json(), "rewrites": [rewrite.to_json() for rewrite in rewrites]}))
        else:
            print("\n".join(sentences))
