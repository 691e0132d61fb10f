"""``mycel plan order``: searches for the order in which the blocks of a placement run, and says how good it is."""

from __future__ import annotations

import json
import time
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer

from mycel.cli import consoles
from mycel.collectives.cp_sat import cp_sat
from mycel.errors import MycelError, UsageError
from mycel.pipeline.order import Order
from mycel.pipeline.placement import Placement
from mycel.pipeline.timed import Timed, earliest

__all__ = ["read_placement", "register"]

#: Ends of files' names, and what is written there; the first that fits counts.
_FORMS = {"trace.json": "trace", ".json": "json", ".csv": "csv", ".svg": "svg"}
#: Bytes of a file that is read.
_LONGEST_FILE = 1 << 26


def read_placement(file: Path) -> Placement:
    """The placement in a JSON file.

    Args:
        file: its name.

    Raises:
        UsageError: it cannot be read, or holds no placement; the message names the file.
    """
    try:
        if file.stat().st_size > _LONGEST_FILE:
            raise UsageError(f"{file}: more than {_LONGEST_FILE >> 20} MB, which no placement takes")
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file}: no placement: not JSON in UTF-8") from None
    return Placement.parse(text, source=str(file))


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("order", help="Search for the order in which a placement's blocks run, and prove how good it is.")
    def plan_order(
        file: Annotated[Path, typer.Argument(help="Placement, as JSON.", show_default=False)],
        micro_batches: Annotated[
            int | None,
            typer.Option(
                "--micro-batches", "-m", help="Shortest batch of so many; the shortest period if not given."
            ),
        ] = None,
        repetend: Annotated[
            int | None, typer.Option(help="Micro-batches that repeat together, at most; 8 if not given.")
        ] = None,
        time_limit: Annotated[
            float,
            typer.Option(
                "--time-limit", "--limit", help="Seconds for the search; the best so far is kept, also on Ctrl-C."
            ),
        ] = 60,
        output: Annotated[
            Path | None, typer.Option("--output", "-o", help=f"File that gets the order: {', '.join(_FORMS)}.")
        ] = None,
        json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        placement = read_placement(file)
        form = None if output is None else _form(output)
        if micro_batches is not None and micro_batches < 1:
            raise UsageError(f"--micro-batches {micro_batches}: at least 1")
        if micro_batches is not None and repetend is not None:
            raise UsageError("--repetend is for periods, and --micro-batches for a batch: say one of the two")
        cp_sat("mycel plan order")  # importing OR-tools takes a second, and is no part of the search
        began = time.process_time()
        with consoles.doing(f"orders of {placement.name or file}") as say:
            if micro_batches is None:
                timed, record, lines = _period(placement, repetend, time_limit, say, is_written=output is not None)
            else:
                timed, record, lines = _makespan(placement, micro_batches, time_limit, say)
        record["search_processor_s"] = round(time.process_time() - began, 3)
        order, record["validated"], complaint = _proved(timed)
        if complaint:
            lines.append(f"the order is not right: {complaint}")
        if output is not None and form is not None:
            if order is None:
                raise UsageError(f"{output}: nothing to write: {complaint}")
            _write(order, timed, output, form)
            lines.append(f"{output}: {timed.num_micro_batches} micro-batches, makespan {timed.makespan}")
        if json_output:
            print(json.dumps(record))
        else:
            print("\n".join(lines))


def _period(
    placement: Placement, repetend: int | None, time_limit: float, say: Any, *, is_written: bool
) -> tuple[Timed, dict[str, Any], list[str]]:
    from mycel.pipeline.search import find_steady
    from mycel.pipeline.search.steady import MOST_MICRO_BATCHES

    found = find_steady(
        placement,
        most_micro_batches=MOST_MICRO_BATCHES if repetend is None else repetend,
        time_limit_s=time_limit,
        tighten_s=0.5 if is_written else 0.0,  # warm-up and cool-down are part of a file
        told=lambda progress: say(str(progress)),
    )
    best = found.repetend
    # What is written and proved right: enough micro-batches for the steady state to be seen.
    count = max(2 * placement.num_devices, 2 * best.num_micro_batches)
    record = {
        "placement": placement.name,
        "period": str(best.period),
        "bound": str(found.bound.value),
        "binds": found.bound.kind,
        "proved": found.is_least,
        "proof": found.proof,
        "micro_batches_in_repetend": best.num_micro_batches,
        "length": best.time,
        "peak": list(best.peak),
        "work": list(placement.work),
        "interrupted": found.interrupted,
    }
    rate = max(placement.work) / best.period
    lines = [
        f"{placement.name or 'placement'}: period {best.period}, {best.num_micro_batches} micro-batch"
        f"{'es' if best.num_micro_batches > 1 else ''} in a repetend of {best.time}; {found.proof}",
        f"bound {found.bound}; the busiest device works {float(rate):.1%} of the time",
        f"most memory, by device: {_memory(best.peak, placement)}",
    ]
    if found.interrupted:
        lines.append("interrupted: this is the best so far")
    return earliest(placement, best.rows(count)), record, lines


def _makespan(
    placement: Placement, count: int, time_limit: float, say: Any
) -> tuple[Timed, dict[str, Any], list[str]]:
    from mycel.pipeline.search import find_batch

    found = find_batch(placement, count, time_limit_s=time_limit, told=lambda progress: say(str(progress)))
    timed = found.timed
    record = {
        "placement": placement.name,
        "micro_batches": count,
        "makespan": timed.makespan,
        "bound": found.bound,
        "binds": found.binding.kind,
        "proved": found.is_least,
        "bubble": round(timed.idle, 6),
        "peak": list(timed.peak),
        "work": list(placement.work),
        "interrupted": found.interrupted,
    }
    told = (
        "the least of any schedule"
        if found.is_least
        else f"at most {_above(timed.makespan, found.bound)} above the least"
    )
    lines = [
        f"{placement.name or 'placement'}: {count} micro-batches, makespan {timed.makespan}; {told}",
        f"bound {found.bound}; without search {found.binding}; devices idle {timed.idle:.1%} of the time",
        f"most memory, by device: {_memory(timed.peak, placement)}",
    ]
    if found.interrupted:
        lines.append("interrupted: this is the best so far")
    return timed, record, lines


def _above(makespan: int, bound: int) -> str:
    return f"{float(Fraction(makespan, bound) - 1):.1%}"


def _memory(peak: tuple[int, ...], placement: Placement) -> str:
    return ", ".join(
        f"{held} of {'any' if cap is None else cap}" for held, cap in zip(peak, placement.cap, strict=True)
    )


def _proved(timed: Timed) -> tuple[Order | None, bool, str]:
    """The order, and whether the check, which knows nothing of the search, finds it right."""
    from mycel.pipeline.check import check
    from mycel.pipeline.stages import order_of

    try:
        order = order_of(timed)
    except MycelError as error:
        return None, False, str(error)
    try:
        check(order)
    except MycelError as error:
        return order, False, str(error)
    return order, True, ""


def _form(output: Path) -> str:
    """What the end of a file's name asks for."""
    form = next((form for end, form in _FORMS.items() if output.name.endswith(end)), None)
    if form is None:
        raise UsageError(f"{output}: its name says no form; let it end in {', '.join(_FORMS)}")
    if not output.parent.is_dir():
        raise UsageError(f"{output}: there is no folder {output.parent}")
    return form


def _write(order: Order, timed: Timed, output: Path, form: str) -> None:
    if form == "csv":
        text = order.to_csv()
    elif form == "json":
        text = json.dumps(order.to_json()) + "\n"
    else:
        from mycel.pipeline.simulate import simulate
        from mycel.pipeline.timeline import chrome_trace, svg

        run = simulate(order, timed.placement)
        # A unit of the placement is a millisecond of the viewer.
        text = svg(run) if form == "svg" else json.dumps(chrome_trace(run, unit_s=1e-3)) + "\n"
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}") from None
