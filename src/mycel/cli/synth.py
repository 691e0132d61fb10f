"""``mycel synth``: a verified schedule for a collective on a fabric, beside its bound."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from mycel.cli import consoles
from mycel.cli.bound import (
    CollectiveOption,
    JsonOption,
    RootOption,
    TopologyArgument,
    bound_record,
    make_collective,
)
from mycel.cli.fabric import load_fabric
from mycel.cli.figures import count_trees, trees_a_root
from mycel.cli.forests import show_plan, summarise
from mycel.cli.request import RanksOption, WeightsOption, choose_group, group_record
from mycel.cli.sketch import plan_by_sketch, show_sketched
from mycel.cli.write import NAMES, SIZE, form_of, write_schedule
from mycel.collectives.bound import Bound, bound
from mycel.collectives.schedule import Schedule
from mycel.collectives.simulate import attained
from mycel.collectives.spec import POINTED, Collective
from mycel.collectives.synth import SYNTHESIZERS, methods_for, synthesize
from mycel.collectives.synth.classics import CLASSICS
from mycel.collectives.synth.options import parse_options
from mycel.collectives.synth.sketch import TIME_LIMIT_S
from mycel.collectives.verify import verify_schedule
from mycel.errors import UsageError
from mycel.topology.model import Topology
from mycel.units import parse_size

__all__ = ["method_options", "register", "schedule_record"]


def schedule_record(best: Bound, schedule: Schedule, *, k: int | None, seconds: float) -> dict[str, Any]:
    """The JSON object of a verified schedule beside its bound; ``k`` as asked for, ``None`` if it was not.

    Its ``"k"`` is null where nobody asked for one and the roots of all_reduce have different shares.
    """
    return bound_record(best, seconds) | {
        "method": schedule.method,
        "algbw": float(schedule.algbw),
        "optimal": schedule.algbw >= best.algbw,
        "k": k if k is not None else trees_a_root(schedule),
        "num_trees": count_trees(schedule),
        "depth": schedule.depth,
        "verified": True,
    }


def method_options(
    method: str,
    texts: Sequence[str],
    k: int | None = None,
    within: float | None = None,
    num_bytes: int | None = None,
) -> dict[str, Any]:
    """Arguments for a method from ``--option NAME=VALUE``, ``-k``, ``--within`` and ``--size``.

    Raises:
        UsageError: an option that the method does not have, given twice, or of the wrong kind.
    """
    methods = SYNTHESIZERS | CLASSICS
    options = parse_options(method, methods[method], texts) if method in methods else {}
    for name, value in (("k", k), ("within", within), ("num_bytes", num_bytes)):
        if value is None:
            continue
        if name in options:
            raise UsageError(f"option {name!r} is given twice")
        options[name] = value
    return options


def register(app: typer.Typer) -> None:
    """Add the subcommand."""

    @app.command(
        "synth",
        help="Find a schedule for a collective on a fabric, verify it, and compare it with the bound.",
        epilog="There are three ways: a schedule by a method; with --sketch, a plan for one size inside a person's "
        "outline of the fabric; with --summary, figures of a forest without its schedule. Options that belong to one "
        "of them say so.",
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
            int | None,
            typer.Option("-k", help="Trees a root; the fewest found that meet the bound if not given."),
        ] = None,
        within: Annotated[
            float | None,
            typer.Option(help="Share of the bound that is enough, such as 0.95: the shallowest forest found there."),
        ] = None,
        option: Annotated[
            list[str] | None,
            typer.Option(
                "--option",
                metavar="NAME=VALUE",
                help="For a schedule: an option of the method, such as k=2; may be repeated.",
            ),
        ] = None,
        root: RootOption = None,
        weights: WeightsOption = None,
        ranks: RanksOption = None,
        sketch: Annotated[
            Path | None,
            typer.Option("--sketch", help="Another way: plan for one size inside a communication sketch (JSON)."),
        ] = None,
        size: Annotated[
            str | None,
            typer.Option(
                help="Size of the array, such as 8MB: the forest that is simulated to be fastest there. With "
                "--sketch, chunks of 10^6 bytes if not given."
            ),
        ] = None,
        time_limit: Annotated[
            float | None, typer.Option(help=f"With --sketch: seconds to search, {TIME_LIMIT_S:.0f} if not given.")
        ] = None,
        summary: Annotated[
            bool,
            typer.Option(
                "--summary", help="Another way: only plan and check a forest, without a schedule (large fabrics)."
            ),
        ] = False,
        output: Annotated[
            Path | None,
            typer.Option("-o", "--output", help=f"Write it in the form that its name means: {', '.join(NAMES)}."),
        ] = None,
        json_output: JsonOption = False,
    ) -> None:
        given = {
            "--method": method is not None,
            "-k": k is not None,
            "--within": within is not None,
            "--option": bool(option),
            "--size": size is not None,
            "--time-limit": time_limit is not None,
            "-o": output is not None,
        }
        way = _way(given, sketch=sketch is not None, summary=summary, method=method)
        form = "json" if output is None else form_of(output)
        fabric, root = choose_group(load_fabric(topology), ranks, root)
        wanted = make_collective(fabric, collective, root, weights)
        num_bytes = SIZE if size is None else parse_size(size)
        made: Schedule | None = None
        if way == "--sketch":
            assert sketch is not None
            plan, record = plan_by_sketch(fabric, wanted, sketch, size, time_limit)
            text, made = show_sketched(plan, record), plan.schedule
        elif way == "--summary":
            with _drawn_progress() as report:
                best, record = summarise(fabric, wanted, report, k=k, within=within)
            text = show_plan(best, record)
        else:
            method = method or methods_for(wanted.name)[0]
            options = method_options(method, option or [], k, within, None if size is None else num_bytes)
            made, record, text = _synthesize(fabric, wanted, method, options)
        written = [] if made is None or output is None else write_schedule(made, output, form, num_bytes=num_bytes)
        print(json.dumps(record | group_record(ranks)) if json_output else "\n".join([text, *written]))


#: Three ways to plan: what each does, and the options that belong to it.
_WAYS = {
    "": ("a schedule is planned by a method", ("--method", "-k", "--within", "--option", "--size", "-o")),
    "--sketch": ("--sketch plans by method sketch", ("--size", "--time-limit", "-o")),
    "--summary": ("--summary plans a forest and makes no schedule", ("-k", "--within")),
}


def _way(given: dict[str, bool], *, sketch: bool, summary: bool, method: str | None) -> str:
    """Which of the three ways a command line asks for.

    Raises:
        UsageError: two of them, or an option that belongs to another.
    """
    if sketch and summary:
        raise UsageError("--sketch and --summary are two ways to plan: give one of them")
    way = "--sketch" if sketch else "--summary" if summary else ""
    does, own = _WAYS[way]
    if method == {"--sketch": "sketch", "--summary": "forest"}.get(way):
        given = {**given, "--method": False}  # says what is so anyway
    wrong = [name for name, is_given in given.items() if is_given and name not in own]
    if wrong and not way:
        raise UsageError(f"{', '.join(wrong)} would need --sketch FILE; without, {does}")
    if wrong:
        raise UsageError(f"{does}: leave out {', '.join(wrong)}")
    return way


def _synthesize(
    fabric: Topology, wanted: Collective, method: str, options: dict[str, Any]
) -> tuple[Schedule, dict[str, Any], str]:
    """A verified schedule, its JSON object, and that in words."""
    started = time.perf_counter()
    what = f"{wanted.name} over {fabric.num_ranks} ranks"
    with consoles.doing(f"bound of {what}"):
        best = bound(fabric, wanted)
    if method == "forest":
        with _drawn_progress() as report:
            schedule = synthesize(fabric, wanted, method, **options, progress=report)
    else:
        with consoles.doing(f"{what} by {method}"):
            schedule = synthesize(fabric, wanted, method, **options)
    with consoles.doing(f"verifying {what}"):
        verify_schedule(schedule)
    best = best.beside(schedule.algbw)
    record = schedule_record(best, schedule, k=options.get("k"), seconds=time.perf_counter() - started)
    with consoles.doing(f"simulating {what}"):
        shares = attained(schedule)
    words = _in_words(best, schedule, record)
    if shares is not None:
        record |= {"simulated_share": shares.by_load, "simulated_share_equal": shares.equally}
        words += (
            f"\nsimulated in {shares.num_pieces} pieces without latency: {shares.by_load:.1%} of that rate where "
            f"channels share links by load, {shares.equally:.1%} where equally"
        )
    return schedule, record, words


@contextmanager
def _drawn_progress() -> Iterator[Any]:
    """A progress bar on standard error, where that is a terminal."""
    console = consoles.notes()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)

        yield report


def _in_words(best: Bound, schedule: Schedule, record: dict[str, Any]) -> str:
    ratio = f"{float(schedule.algbw / best.algbw):.1%}"
    verdict = "optimal" if record["optimal"] else f"{ratio} of the bound"
    noun = "paths" if schedule.collective.name in POINTED else "trees"
    share = "uneven shares" if record["k"] is None else f"k={record['k']}"
    return (
        f"{float(schedule.algbw):.6g} {best.topology.unit}, {verdict}: {record['collective']} over "
        f"{record['num_ranks']} ranks of {best.topology.name} by {schedule.method}, verified\n"
        f"{record['num_trees']} {noun} ({share}), {len(schedule.chunks)} chunks, {len(schedule.columns)} "
        f"transfers, {schedule.depth} deep, {record['seconds']:.2f} s\n{best.explain()}"
    )
