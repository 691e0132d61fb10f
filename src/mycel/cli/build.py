"""``mycel build``: the schedule that a Python file writes, verified, beside its bound, and in any form."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from mycel.cli import consoles
from mycel.cli.bound import JsonOption, RootOption
from mycel.cli.fabric import load_fabric
from mycel.cli.request import RanksOption, WeightsOption, choose_group, group_record, read_weights
from mycel.cli.write import NAMES, SIZE, form_of, write_schedule
from mycel.collectives.bound import Bound, bound
from mycel.collectives.export import FORMATS, export
from mycel.collectives.language import load_written
from mycel.collectives.proof import prove_lowering
from mycel.collectives.schedule import Schedule
from mycel.collectives.simulate import simulate
from mycel.collectives.spec import COLLECTIVES
from mycel.collectives.time_bound import bound_seconds
from mycel.collectives.verify import sums_agree
from mycel.cost import link_costs
from mycel.units import format_seconds, format_size, parse_size

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the subcommand."""

    @app.command(
        "build", help="Build the schedule that a Python file writes, verify it, and compare it with the bound."
    )
    def command(
        source: Annotated[
            str,
            typer.Argument(
                metavar="FILE.py[:NAME]",
                help="Python file with a function under @collective; its name, where there are several. The file is "
                "run.",
                show_default=False,
            ),
        ],
        topology: Annotated[
            str, typer.Option("--topology", "-t", help="Topology file, or builder such as star:ranks=4.")
        ],
        collective: Annotated[
            str | None,
            typer.Option(
                "--collective", "-c", help=f"One of {', '.join(COLLECTIVES)}; the function's first if not given."
            ),
        ] = None,
        root: RootOption = None,
        weights: WeightsOption = None,
        ranks: RanksOption = None,
        sizes: Annotated[
            str, typer.Option(help="Sizes of the whole array to simulate, with commas.")
        ] = "64KB,1MB,16MB",
        output: Annotated[
            list[Path] | None,
            typer.Option(
                "-o",
                "--output",
                help=f"Write it in the form that its name means: {', '.join(NAMES)}; may be repeated.",
            ),
        ] = None,
        json_output: JsonOption = False,
    ) -> None:
        outputs = [(file, form_of(file)) for file in output or []]
        num_bytes = [parse_size(text) for text in sizes.split(",")]
        fabric, root = choose_group(load_fabric(topology), ranks, root)
        shares = None if weights is None else read_weights(weights)
        started = time.perf_counter()
        written = load_written(source)
        with consoles.doing(f"building {written.name} on {fabric.name}"):
            schedule = written.on(fabric, collective, root=root, weights=shares)  # type: ignore[arg-type]
            instructions = prove_lowering(schedule)
        seconds = time.perf_counter() - started
        with consoles.doing(f"bound of {schedule.collective.name} on {fabric.name}"):
            best = bound(fabric, schedule.collective)
        record = _record(schedule, best, instructions, seconds)
        with consoles.doing(f"simulating {written.name}"):
            record["sizes"] = _simulated(schedule, num_bytes)
        for _, form in outputs:  # what cannot be said in one of the forms is found before any file is written
            if form in FORMATS:
                export(schedule, form, num_bytes=SIZE)
        notes = [line for file, form in outputs for line in write_schedule(schedule, file, form, num_bytes=SIZE)]
        print(json.dumps(record | group_record(ranks)) if json_output else "\n".join([*_in_words(record), *notes]))


def _record(schedule: Schedule, best: Bound, instructions: int, seconds: float) -> dict[str, Any]:
    return {
        "method": schedule.method,
        "collective": schedule.collective.name,
        "root": schedule.collective.root,
        "num_ranks": schedule.collective.num_ranks,
        "topology": schedule.topology.name,
        "unit": schedule.topology.unit,
        "algbw": float(schedule.algbw),
        "bound_algbw": float(best.algbw),
        "share_of_bound": float(schedule.algbw / best.algbw),
        "optimal": schedule.algbw >= best.algbw,
        "num_chunks": len(schedule.chunks),
        "num_transfers": len(schedule.transfers),
        "depth": schedule.depth,
        "num_instructions": instructions,
        "same_bits": sums_agree(schedule),
        "verified": True,
        "build_s": seconds,
    }


def _simulated(schedule: Schedule, sizes: list[int]) -> list[dict[str, Any]]:
    """Simulated times, each with the best length of a piece, beside what nothing is quicker than."""
    costs, least = link_costs(schedule.topology), bound_seconds(schedule.topology, schedule.collective)
    found = []
    for size in sizes:
        seconds, piece = min((simulate(schedule, size, piece_bytes=p).seconds, -p) for p in costs.pieces(size))
        found.append({"bytes": size, "simulated_s": seconds, "piece_bytes": -piece, "bound_s": least.seconds(size)})
    return found


def _chunks(number: int) -> str:
    return "1 chunk" if number == 1 else f"{number} chunks"


def _in_words(record: dict[str, Any]) -> list[str]:
    verdict = "optimal" if record["optimal"] else f"{record['share_of_bound']:.1%} of the bound"
    lines = [
        f"{record['algbw']:.6g} of {record['bound_algbw']:.6g} {record['unit']}, {verdict}: {record['collective']} "
        f"over {record['num_ranks']} ranks of {record['topology']} by {record['method']}, verified",
        f"{record['num_transfers']} transfers of {_chunks(record['num_chunks'])}, depth {record['depth']}; programs "
        f"of every size are right, {record['num_instructions']:,} instructions seen",
    ]
    lines += [
        f"{format_size(row['bytes'])}: {format_seconds(row['simulated_s'])} simulated, in pieces of "
        f"{format_size(row['piece_bytes'])}; nothing takes less than {format_seconds(row['bound_s'])}"
        for row in record["sizes"]
    ]
    if not record["same_bits"]:
        lines.append(
            "ranks form their sums in different orders, so the last bits of floating-point results differ from "
            "rank to rank: it can be exported, and cannot be registered"
        )
    return lines
