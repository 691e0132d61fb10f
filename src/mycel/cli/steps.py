"""``mycel steps``: which numbers of steps and rounds a collective can have on a small fabric."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer
from rich.table import Table

from mycel.cli import consoles
from mycel.cli.bound import CollectiveOption, JsonOption, RootOption, TopologyArgument, make_collective
from mycel.cli.fabric import load_fabric
from mycel.collectives.synth.steps import Front, Point, front
from mycel.collectives.verify import verify_schedule
from mycel.topology.model import Topology

__all__ = ["register"]

_PROOFS = {
    "any chunks": "the least",
    "chunks tried": "the least tried",
    "not proven": "not proven",
}


def register(app: typer.Typer) -> None:
    """Add the subcommand."""

    @app.command(
        "steps", help="Schedules from the fewest steps to the most bandwidth, proven one by one (small fabrics)."
    )
    def command(
        topology: TopologyArgument,
        collective: CollectiveOption,
        chunks: Annotated[
            int | None, typer.Option(help="Chunks a block, at most; 8 if not given, 16 for broadcast and reduce.")
        ] = None,
        time_limit: Annotated[
            float, typer.Option(help="Seconds for all of it; what was found by then is kept.")
        ] = 60,
        root: RootOption = None,
        json_output: JsonOption = False,
    ) -> None:
        fabric = load_fabric(topology)
        wanted = make_collective(fabric, collective, root)
        started = time.perf_counter()
        seconds: list[float] = []

        def note(point: Point) -> None:
            verify_schedule(point.schedule)
            seconds.append(time.perf_counter() - started)

        what = f"schedules of {wanted.name} on {fabric.name}"
        with consoles.doing(f"{what}: none found yet") as say:

            def tell(point: Point) -> None:
                note(point)
                say(f"{what}: {len(seconds)} found, the last of {point.steps} steps")

            try:
                found = front(fabric, wanted, chunks=chunks, time_limit_s=time_limit, found=tell)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"{len(seconds)} schedules were found, none was written; --time-limit keeps them"
                ) from None
        if json_output:
            print(json.dumps(_record(found, seconds)))
        else:
            _show(fabric, found, seconds)


def _record(found: Front, seconds: list[float]) -> dict[str, Any]:
    return {
        "collective": found.points[0].schedule.collective.name,
        "num_ranks": found.points[0].schedule.collective.num_ranks,
        "least_rounds_per_chunk": str(found.optimum),
        "ended": found.ended,
        "points": [
            {
                "steps": point.steps,
                "rounds": point.rounds,
                "chunks": point.chunks,
                "rounds_per_chunk": str(point.ratio),
                "algbw": float(point.schedule.algbw),
                "proof": point.proof,
                "verified": True,
                "seconds": at,
            }
            for point, at in zip(found.points, seconds, strict=True)
        ],
    }


def _show(fabric: Topology, found: Front, seconds: list[float]) -> None:
    table = Table(title=f"{found.points[0].schedule.collective.name} on {fabric.name}, verified")
    for heading in ("steps", "rounds", "chunks", "rounds / chunk", f"algbw, {fabric.unit}", "found after"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("rounds a chunk are", overflow="fold")
    for point, at in zip(found.points, seconds, strict=True):
        table.add_row(
            *(str(value) for value in (point.steps, point.rounds, point.chunks, point.ratio)),
            f"{float(point.schedule.algbw):.6g}",
            f"{at:.2f} s",
            _PROOFS[point.proof],
        )
    consoles.output().print(table)
    print(f"No schedule has fewer than {found.optimum} rounds a chunk. Ended: {found.ended}.")
