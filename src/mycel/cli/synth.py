"""``mycel synth``: a verified schedule for a collective on a fabric, beside its bound."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress

from mycel.cli.bound import (
    CollectiveOption,
    JsonOption,
    RootOption,
    TopologyArgument,
    bound_record,
    load_fabric,
    make_collective,
)
from mycel.cli.plan import show_plan, summarise
from mycel.cli.request import RanksOption, WeightsOption, choose_group, group_record
from mycel.cli.sketch import plan_by_sketch, show_sketched
from mycel.cli.write import NAMES, SIZE, form_of, write_schedule
from mycel.collectives.bound import Bound, bound, root_weights
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import POINTED
from mycel.collectives.synth import SYNTHESIZERS, methods_for, synthesize
from mycel.collectives.synth.classics import CLASSICS
from mycel.collectives.synth.options import parse_options
from mycel.collectives.synth.sketch import TIME_LIMIT_S
from mycel.collectives.verify import verify_schedule
from mycel.errors import UsageError
from mycel.units import parse_size

__all__ = ["count_trees", "method_options", "register", "schedule_record", "trees_a_root"]


def count_trees(schedule: Schedule) -> int:
    """Different trees in a schedule; a chunk that is reduced up one and copied down another has two."""
    columns = schedule.columns
    tree = 2 * columns.chunk + columns.reduce
    order = np.lexsort((columns.path, tree))
    first = np.flatnonzero(np.diff(tree[order], prepend=-1))
    paths = np.split(columns.path[order], first[1:])
    return len(
        {(reduce, row.tobytes()) for reduce, row in zip(columns.reduce[order[first]].tolist(), paths, strict=True)}
    )


def trees_a_root(schedule: Schedule) -> int | None:
    """Units of the array that each root has, one a tree; ``None`` if roots have different shares (all_reduce).

    ``None`` as well where trees go through switches that copy and add: some of those may be roots, and some not.

    Of all_to_all, gather and scatter, units that each block has, one a path. Of uneven blocks, units of weight 1.
    """
    if schedule.collective.name in POINTED:
        return schedule.num_units // schedule.collective.total_weight
    if schedule.collective.name != "all_reduce":
        return schedule.num_units // sum(root_weights(schedule.collective)) or 1
    if schedule.num_nodes > schedule.collective.num_ranks:
        return None
    columns = schedule.columns
    receives = np.zeros((len(schedule.chunks), schedule.collective.num_ranks), dtype=np.bool_)
    receives[columns.chunk[~columns.reduce], columns.dst[~columns.reduce]] = True
    share: dict[bytes, int] = {}  # a root is who receives no copy
    for chunk, ranks in zip(schedule.chunks, receives, strict=True):
        share[ranks.tobytes()] = share.get(ranks.tobytes(), 0) + chunk.num_units
    return next(iter(share.values())) if len(set(share.values())) == 1 else None


def schedule_record(best: Bound, schedule: Schedule, *, k: int | None, seconds: float) -> dict[str, Any]:
    """The JSON object of a verified schedule beside its bound; ``k`` as asked for, ``None`` if it was not.

    Its ``"k"`` is null where nobody asked for one and the roots of all_reduce have different shares.
    """
    return bound_record(best, seconds) | {
        "method": schedule.method,
        "algbw": float(schedule.algbw),
        "optimal": schedule.algbw >= best.algbw and not best.is_composition,
        "k": k if k is not None else trees_a_root(schedule),
        "num_trees": count_trees(schedule),
        "depth": schedule.depth,
        "verified": True,
    }


def method_options(method: str, texts: Sequence[str], k: int | None) -> dict[str, Any]:
    """Arguments for a method from ``--option NAME=VALUE`` and ``-k``.

    Raises:
        UsageError: an option that the method does not have, given twice, or of the wrong kind.
    """
    methods = SYNTHESIZERS | CLASSICS
    options = parse_options(method, methods[method], texts) if method in methods else {}
    if k is not None:
        if "k" in options:
            raise UsageError("option 'k' is given twice")
        options["k"] = k
    return options


def register(app: typer.Typer) -> None:
    """Add the subcommand."""

    @app.command(
        "synth", help="Find a schedule for a collective on a fabric, verify it, and compare it with the bound."
    )
    def command(
        topology: TopologyArgument,
        collective: CollectiveOption,
        method: Annotated[
            str | None,
            typer.Option(
                help=f"One of {', '.join([*SYNTHESIZERS, *CLASSICS])}; if not given, the first that serves."
            ),
        ] = None,
        k: Annotated[
            int | None, typer.Option("-k", help="Trees a root; the fewest that meet the bound if not given.")
        ] = None,
        option: Annotated[
            list[str] | None,
            typer.Option(
                "--option", metavar="NAME=VALUE", help="An option of the method, such as k=2; may be repeated."
            ),
        ] = None,
        root: RootOption = None,
        weights: WeightsOption = None,
        ranks: RanksOption = None,
        sketch: Annotated[
            Path | None, typer.Option("--sketch", help="Plan for one size inside a communication sketch (JSON).")
        ] = None,
        size: Annotated[
            str | None,
            typer.Option(help="With --sketch: size of the array, such as 8MB; chunks of 10^6 bytes if not given."),
        ] = None,
        time_limit: Annotated[
            float | None, typer.Option(help=f"With --sketch: seconds to search, {TIME_LIMIT_S:.0f} if not given.")
        ] = None,
        summary: Annotated[
            bool, typer.Option("--summary", help="Only plan and check a forest; make no schedule (large fabrics).")
        ] = False,
        output: Annotated[
            Path | None,
            typer.Option("-o", "--output", help=f"Write it in the form that its name means: {', '.join(NAMES)}."),
        ] = None,
        json_output: JsonOption = False,
    ) -> None:
        form = "json" if output is None else form_of(output)
        fabric, root = choose_group(load_fabric(topology), ranks, root)
        wanted = make_collective(fabric, collective, root, weights)
        if sketch is not None:
            if k is not None or option or summary or method not in (None, "sketch"):
                raise UsageError(
                    "--sketch plans by method sketch: leave out -k, --option, --summary and other methods"
                )
            plan, record = plan_by_sketch(fabric, wanted, sketch, size, time_limit)
            if output is not None:
                write_schedule(plan.schedule, output, form, num_bytes=SIZE if size is None else parse_size(size))
            print(json.dumps(record) if json_output else show_sketched(plan, record))
            return
        if size is not None or time_limit is not None:
            raise UsageError("--size and --time-limit go with --sketch FILE")
        if summary:
            if k is not None or option or output is not None or method not in (None, "forest"):
                raise UsageError(
                    "--summary plans a forest and makes no schedule: leave out -k, --option, -o and --method"
                )
            with _drawn_progress() as report:
                best, record = summarise(fabric, wanted, report)
            print(json.dumps(record | group_record(ranks)) if json_output else show_plan(best, record))
            return
        started = time.perf_counter()
        best = bound(fabric, wanted)
        method = method or methods_for(wanted.name)[0]
        options = method_options(method, option or [], k)
        with _drawn_progress() as report:
            if method == "forest":
                options["progress"] = report
            schedule = synthesize(fabric, wanted, method, **options)
            verify_schedule(schedule)
        seconds = time.perf_counter() - started
        written = [] if output is None else write_schedule(schedule, output, form, num_bytes=SIZE)
        record = schedule_record(best, schedule, k=options.get("k"), seconds=seconds)
        if json_output:
            print(json.dumps(record | group_record(ranks)))
        else:
            _show(best, schedule, record, written)


@contextmanager
def _drawn_progress() -> Iterator[Any]:
    """A progress bar on standard error, where that is a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield report


def _show(best: Bound, schedule: Schedule, record: dict[str, Any], written: list[str]) -> None:
    console = Console(highlight=False)
    ratio = f"{float(schedule.algbw / best.algbw):.1%}"
    verdict = "optimal" if record["optimal"] else f"{ratio} of the bound"
    if best.is_composition:
        verdict = f"{ratio} of what reduce-scatter and then all-gather guarantee"
    console.print(
        f"[bold]{float(schedule.algbw):.6g} {best.topology.unit}[/], {verdict}: {record['collective']} over "
        f"{record['num_ranks']} ranks of {best.topology.name} by {schedule.method}, verified"
    )
    noun = "paths" if schedule.collective.name in POINTED else "trees"
    share = "uneven shares" if record["k"] is None else f"k={record['k']}"
    console.print(
        f"{record['num_trees']} {noun} ({share}), {len(schedule.chunks)} chunks, {len(schedule.columns)} "
        f"transfers, {schedule.depth} deep, {record['seconds']:.2f} s"
    )
    console.print(best.explain(), markup=False)
    for line in written:
        console.print(line, markup=False, soft_wrap=True)
