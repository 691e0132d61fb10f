"""``mycel plan search``: which parallelism for a model on a cluster, and will it fit."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from mycel.cli import consoles
from mycel.cli.plan_files import limits_of, write_page, write_text
from mycel.errors import UsageError
from mycel.planning.cluster import load_cluster
from mycel.planning.job import EXECUTORS, Job, Mesh
from mycel.planning.models import load_model
from mycel.planning.plan import Plan, plan_of
from mycel.planning.plan.explain import ways
from mycel.planning.plan.orders import plan_with_orders
from mycel.planning.search import Found, Progress, search
from mycel.units import format_seconds

__all__ = ["found_told", "register"]

_GIB = float(1 << 30)
#: Others that are shown.
_SHOWN = 4


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("search", help="Which parallelism for a model on a cluster, and will it fit: search, prove, write.")
    def plan_search(
        cluster: Annotated[
            str, typer.Argument(help="Topology file with devices, or a preset: h100:nodes=4.", show_default=False)
        ],
        model: Annotated[
            str, typer.Option(help="config.json, a folder with one, a name, or a description.", show_default=False)
        ],
        batch: Annotated[int, typer.Option(help="Sequences of a step, over all replicas.", show_default=False)],
        seq: Annotated[int, typer.Option(help="Tokens of a sequence.", show_default=False)],
        limit: Annotated[
            list[str] | None, typer.Option(help="What a plan must keep: 'tp<=8', 'tp in node', 'memory<=70GiB'.")
        ] = None,
        limits: Annotated[Path | None, typer.Option(help="File of limits, YAML.")] = None,
        machine: Annotated[
            str | None, typer.Option(help="Machine whose coefficients count, by name or file.")
        ] = None,
        way: Annotated[str | None, typer.Option(help="How models are run, by one of the machine's fits.")] = None,
        executor: Annotated[str, typer.Option(help=f"Who runs the pipeline: {', '.join(EXECUTORS)}.")] = "mycel",
        time_limit: Annotated[
            float | None, typer.Option("--time", help="Seconds for the search; the best so far is kept.")
        ] = None,
        orders: Annotated[
            int, typer.Option(min=0, help="For how many of the best to search an order, by the extra solver.")
        ] = 0,
        json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
        output: Annotated[Path | None, typer.Option("-o", "--output", help="File that gets the plan.")] = None,
        page: Annotated[Path | None, typer.Option(help="File that gets the plan as a page of HTML.")] = None,
    ) -> None:
        if time_limit is not None and not time_limit > 0:
            raise UsageError(f"--time {time_limit:g}: must be above 0 seconds")
        _check_ends(output, page)
        where = load_cluster(cluster, machine=machine, way=way)
        what = load_model(model)
        kept = limits_of(limit or [], limits)
        base = _base(batch, seq, executor)
        began = time.monotonic()
        with consoles.doing(f"{what.shape.name} on {where.name}") as say:
            found = search(
                where,
                what.shape,
                batch=batch,
                seq=seq,
                limits=kept,
                base=base,
                limit_s=time_limit,
                progress=lambda progress: say(_progress(progress)),
            )
            plan = (
                plan_with_orders(found, what, where, count=orders, limits=kept.texts, told=say)
                if orders
                else plan_of(found, model=what, cluster=where, limits=kept.texts)
            )
        lasted = time.monotonic() - began
        plan.validate(cluster=where)
        if output is not None:
            write_text(plan.to_text(), output)
        if page is not None:
            write_page(plan, page, where, found_told(plan, found))
        if json_output:
            print(json.dumps({**_facts(found, lasted), "plan": plan.to_json()}))
            return
        print("\n".join(found_told(plan, found)))
        for file in (output, page):
            if file is not None:
                print(f"{file}: written")


def found_told(plan: Plan, found: Found) -> list[str]:
    """What was found, in lines for people.

    Args:
        plan: of the best.
        found: by the search.
    """
    step, job, cluster = plan.predicted, plan.job, plan.cluster
    tokens = job.global_batch * job.seq / step.seconds
    fullest = max(plan.ranks, key=lambda rank: plan.memory[rank] / cluster.memory_bytes[rank])
    layers = set(plan.model.layers)
    counts = [sum(name in layers for name in stage) for stage in plan.cut]
    lines = [
        f"{plan.model.shape.name} on {cluster.name}: {step} a step, modelled; {tokens:,.0f} tokens a second",
        f"{ways(job)}" + ("" if job.shares else f"; {job.num_micro_batches} micro-batches a replica"),
        f"memory: {plan.memory[fullest] / _GIB:.1f} of {cluster.memory_bytes[fullest] / _GIB:.1f} GiB on rank "
        f"{fullest} ({cluster.rank_names[fullest]}), the fullest",
        f"largest part: {plan.binding}",
    ]
    if len(counts) > 1:
        shown = ", ".join(map(str, counts[:32])) + (", ..." if len(counts) > 32 else "")
        lines.insert(2, f"layers of stages: {shown}")
    if plan.predicted.seconds < found.best.seconds.seconds:
        known = format_seconds(found.best.seconds.seconds)
        lines.append(f"order: {plan.order.name}; by known orders the best takes {known}, and of these it is said:")
    if found.is_proved:
        lines.append(f"proved: by the model nothing is faster; {found.visited} jobs looked at in detail")
    else:
        why = "stopped; the best so far" if found.interrupted else "the best found"
        lines.append(f"{why}, at most {found.gap:.1%} above the least that is possible by the model")
    for other in plan.runners_up[:_SHOWN]:
        behind = other.seconds / step.seconds - 1.0
        lines.append(f"behind it: {ways(other.job)}: {format_seconds(other.seconds)} ({behind:+.1%})")
    return lines


def _facts(found: Found, lasted: float) -> dict[str, Any]:
    return {
        "seconds": found.best.seconds.seconds,
        "error": found.best.seconds.error,
        "is_proved": found.is_proved,
        "bound_s": found.bound_s,
        "gap": found.gap,
        "interrupted": found.interrupted,
        "visited": found.visited,
        "simulated": found.simulated,
        "search_s": round(lasted, 3),
        "refused": {
            degree: [
                {
                    "reason": one.reason,
                    "count": one.count,
                    "least_bytes": one.least_bytes,
                    "least_seconds": one.least_seconds,
                }
                for one in refusals
            ]
            for degree, refusals in found.refused.items()
        },
    }


def _base(batch: int, seq: int, executor: str) -> Job:
    if executor not in EXECUTORS:
        raise UsageError(f"--executor {executor}: {', '.join(EXECUTORS)} are known")
    one = next(known for known in EXECUTORS if known == executor)
    return Job(mesh=Mesh(), global_batch=batch, micro_batch=1, seq=seq, executor=one)


def _check_ends(output: Path | None, page: Path | None) -> None:
    if output is not None and output.suffix != ".json":
        raise UsageError(f"{output}: a plan is JSON; let its name end in .json")
    if page is not None and page.suffix not in (".html", ".htm"):
        raise UsageError(f"{page}: a page is HTML; let its name end in .html")


def _progress(progress: Progress) -> str:
    best = format_seconds(progress.best_s) if progress.best_s < float("inf") else "none yet"
    return (
        f"{progress.doing} {progress.done} of {progress.total}, best {best}, bound {format_seconds(progress.bound_s)}"
    )
