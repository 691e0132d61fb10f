"""``mycel bound``: the least time a collective can take on a fabric, and the links that say so."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from mycel.collectives.bound import Bound, bound
from mycel.collectives.spec import COLLECTIVES, ROOTED, Collective, CollectiveName
from mycel.topology.load import load_topology
from mycel.topology.model import Topology

__all__ = [
    "CollectiveOption",
    "JsonOption",
    "RootOption",
    "TopologyArgument",
    "bound_record",
    "make_collective",
    "register",
]

TopologyArgument = Annotated[
    str, typer.Argument(help="File (JSON or YAML), or builder such as star:ranks=4.", show_default=False)
]
CollectiveOption = Annotated[
    str, typer.Option("--collective", "-c", help=f"One of {', '.join(COLLECTIVES)}.", show_default=False)
]
RootOption = Annotated[
    int | None,
    typer.Option("--root", help="Rank that has it (broadcast, scatter) or gets it (reduce, gather); 0 if not given."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def make_collective(topology: Topology, name: str, root: int | None) -> Collective:
    """The collective a command line names, over all ranks; its root is 0 where it needs one and none is given.

    Raises:
        UsageError: unknown name, or a root where none belongs or out of range.
    """
    if root is None and name in ROOTED:
        root = 0
    return Collective(name=cast(CollectiveName, name), num_ranks=topology.num_ranks, root=root)


def bound_record(best: Bound, seconds: float) -> dict[str, Any]:
    """The JSON object of a bound."""
    record: dict[str, Any] = {"collective": best.collective.name}
    if best.collective.root is not None:
        record["root"] = best.collective.root
    if best.composition is not None:
        record["reduce_scatter_then_all_gather"] = float(best.composition)
    return record | {
        "num_ranks": best.collective.num_ranks,
        "inverse_x": f"{best.inverse_x.numerator}/{best.inverse_x.denominator}",
        "bound_algbw": float(best.algbw),
        "unit": best.topology.unit,
        "cut": [list(hop) for hop in best.cut],
        "seconds": seconds,
    }


def register(app: typer.Typer) -> None:
    """Add the subcommand."""

    @app.command("bound", help="The least time a collective can take on a fabric, exactly, and which links bind.")
    def command(
        topology: TopologyArgument,
        collective: CollectiveOption,
        root: RootOption = None,
        json_output: JsonOption = False,
    ) -> None:
        fabric = load_topology(topology)
        wanted = make_collective(fabric, collective, root)
        started = time.perf_counter()
        best = bound(fabric, wanted)
        seconds = time.perf_counter() - started
        if json_output:
            print(json.dumps(bound_record(best, seconds)))
            return
        console = Console(highlight=False)
        console.print(
            f"[bold]{float(best.algbw):.6g} {fabric.unit}[/] of {wanted.name} over {wanted.num_ranks} ranks of "
            f"{fabric.name} (exactly {best.algbw}; 1/x = {best.inverse_x})"
        )
        console.print(best.explain(), markup=False)
