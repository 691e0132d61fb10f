"""``mycel select``: which method for which size, by simulation."""

from __future__ import annotations

import json
from statistics import median
from typing import Annotated

import typer
from rich.table import Table

from mycel.cli import consoles
from mycel.cli.bound import (
    CollectiveOption,
    JsonOption,
    RootOption,
    TopologyArgument,
    make_collective,
)
from mycel.cli.fabric import load_fabric
from mycel.cli.own import load_own
from mycel.cli.request import RanksOption, WeightsOption, choose_group, group_record
from mycel.collectives.select import DEFAULT_SIZES, Selection, select
from mycel.cost import LINK_CLASSES
from mycel.units import format_seconds, format_size, parse_size

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the subcommand."""

    @app.command("select", help="Simulate all methods at several sizes and say which to use where.")
    def command(
        topology: TopologyArgument,
        collective: CollectiveOption,
        sizes: Annotated[str, typer.Option(help="Sizes of the whole array, powers of 1024, with commas.")] = ",".join(
            format_size(size) for size in DEFAULT_SIZES
        ),
        root: RootOption = None,
        weights: WeightsOption = None,
        ranks: RanksOption = None,
        links: Annotated[
            str | None,
            typer.Option(
                help=f"What all links are: {', '.join(LINK_CLASSES)}; if not given, as 'mycel show' has it."
            ),
        ] = None,
        own: Annotated[
            list[str] | None,
            typer.Option(
                "--schedule",
                help="A schedule of one's own to compare as well: its file, or FILE.py[:NAME]; may be repeated.",
            ),
        ] = None,
        json_output: JsonOption = False,
    ) -> None:
        fabric, root = choose_group(load_fabric(topology), ranks, root)
        wanted = make_collective(fabric, collective, root, weights)
        byte_sizes = [parse_size(text) for text in sizes.split(",")]
        schedules = [load_own(text, fabric, wanted.name, wanted.root) for text in own or []]
        with consoles.doing(f"simulating {wanted.name} on {fabric.name}") as say:
            chosen = select(fabric, wanted, byte_sizes, links=links, schedules=schedules, progress=say)
        if json_output:
            print(json.dumps(_record(chosen) | group_record(ranks)))
        else:
            _show(chosen)


def _record(chosen: Selection) -> dict[str, object]:
    return {
        "collective": chosen.collective.name,
        "num_ranks": chosen.collective.num_ranks,
        "links": sorted(set(chosen.costs.classes.values())),
        "simulated": True,
        "rows": [
            {
                "bytes": row.num_bytes,
                "method": row.method,
                "tied": [method for method in row.tied if method != row.method],
                "piece_bytes": row.piece_bytes[row.method],
                "simulated_s": row.seconds,
                "bound_s": row.least_s,
                "gap": row.gap,
            }
            for row in chosen.rows
        ],
        "refused": chosen.refused,
    }


def _show(chosen: Selection) -> None:
    table = Table(title=f"simulated {chosen.collective.name} on {chosen.topology.name}")
    for heading in ("size", "fastest", "time", "at least", "next", "time"):
        table.add_column(heading, justify="left" if heading in ("fastest", "next") else "right", overflow="fold")
    for row in chosen.rows:
        best, *others = sorted(row.seconds, key=lambda method: (method != row.method, row.seconds[method]))
        rest = [others[0], format_seconds(row.seconds[others[0]])] if others else []
        times = format_seconds(row.seconds[best]), format_seconds(row.least_s)
        table.add_row(format_size(row.num_bytes), best, *times, *rest)
    consoles.output(wide=True).print(table)
    print(chosen.explain())
    gaps = sorted(row.gap for row in chosen.rows)
    print(
        f"No schedule takes less than the time under 'at least'; the fastest takes {median(gaps):.2f} times that in "
        f"the median, {gaps[-1]:.2f} at most."
    )
    used = sorted(set(chosen.costs.classes.values()))
    print(f"Messages cost what they cost over {' and '.join(used)} ('mycel show' prints it; --links says otherwise).")
    for reason in chosen.refused.values():
        print(f"left out: {reason}")
