"""``mycel bound``: the least time a collective can take on a fabric, and the links that say so."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any, cast

import typer

from mycel.cli import consoles
from mycel.cli.fabric import load_fabric
from mycel.cli.request import RanksOption, WeightsOption, choose_group, group_record, read_weights
from mycel.collectives.bound import Bound, bound
from mycel.collectives.sensitivity import Gain, sensitivity
from mycel.collectives.spec import COLLECTIVES, POINTED, ROOTED, Collective, CollectiveName
from mycel.names import spelled
from mycel.topology.model import Topology
from mycel.units import bus_bandwidth_factor, format_seconds, format_size, parse_size

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
    str, typer.Argument(help="Topology file, or builder such as star:ranks=4.", show_default=False)
]
CollectiveOption = Annotated[
    str, typer.Option("--collective", "-c", help=f"One of {', '.join(COLLECTIVES)}.", show_default=False)
]
RootOption = Annotated[
    int | None,
    typer.Option("--root", help="Rank that has it (broadcast, scatter) or gets it (reduce, gather); 0 if not given."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


#: Links up to which what more capacity buys is worked out as well: where the bound is a cut, and where it is a flow.
_MOST_LINKS = {"cut": 1000, "flow": 150}


def make_collective(topology: Topology, name: str, root: int | None, weights: str | None = None) -> Collective:
    """The collective a command line names, over all ranks; its root is 0 where it needs one and none is given.

    Raises:
        UsageError: unknown name, a root where none belongs or out of range, or weights that do not fit.
    """
    name = spelled(name, COLLECTIVES, "collective")
    if root is None and name in ROOTED:
        root = 0
    sizes = None if weights is None else read_weights(weights)
    return Collective(name=cast(CollectiveName, name), num_ranks=topology.num_ranks, root=root, weights=sizes)


def bound_record(best: Bound, seconds: float) -> dict[str, Any]:
    """The JSON object of a bound."""
    record: dict[str, Any] = {"collective": best.collective.name}
    if best.collective.root is not None:
        record["root"] = best.collective.root
    if best.collective.weights is not None:
        record["weights"] = list(best.collective.weights)
    if best.composition is not None:
        record["reduce_scatter_then_all_gather"] = float(best.composition)
    return record | {
        "num_ranks": best.collective.num_ranks,
        "inverse_x": f"{best.inverse_x.numerator}/{best.inverse_x.denominator}",
        "bound_algbw": float(best.algbw),
        "reached_algbw": float(best.reached),
        "exact": best.is_exact,
        "unit": best.topology.unit,
        "cut": [list(hop) for hop in best.cut],
        "seconds": seconds,
    }


def _busbw(best: Bound) -> float:
    return float(best.algbw * bus_bandwidth_factor(best.collective.name, best.collective.num_ranks))


def _timed_record(best: Bound, num_bytes: int) -> dict[str, Any]:
    return {"bytes": num_bytes, "bound_s": best.seconds(num_bytes), "bound_busbw": _busbw(best)}


def _advice(gain: Gain, fabric: Topology) -> str:
    """Sentences on what more capacity would buy."""
    suffix = "" if fabric.unit == "link" else f" {fabric.unit}"
    (src, dst), others = gain.binding[0], len(gain.binding) - 1
    names = f"{fabric.label(src)} -> {fabric.label(dst)}" + (f" and the {others} like it that bind" if others else "")
    text = f"1{suffix} more on {names} buys {float(gain.binding_only):.4g}{suffix}"
    if len(gain.alike) > len(gain.binding):
        text += f", on all {len(gain.alike)} links like it {float(gain.every):.4g}{suffix}"
    if not gain.every and gain.then:
        src, dst = gain.then[0]
        others = len(gain.then) - 1
        text += f"; {fabric.label(src)} -> {fabric.label(dst)}" + (
            f" and {others} more bind too" if others else " binds too"
        )
    return text + "."


def register(app: typer.Typer) -> None:
    """Add the subcommand."""

    @app.command("bound", help="The least time a collective can take on a fabric, exactly, and which links bind.")
    def command(
        topology: TopologyArgument,
        collective: CollectiveOption,
        root: RootOption = None,
        weights: WeightsOption = None,
        ranks: RanksOption = None,
        size: Annotated[
            str | None, typer.Option(help="Also seconds and bus bandwidth of an array of this size, such as 1GB.")
        ] = None,
        json_output: JsonOption = False,
    ) -> None:
        fabric, root = choose_group(load_fabric(topology), ranks, root)
        wanted = make_collective(fabric, collective, root, weights)
        num_bytes = None if size is None else parse_size(size)
        started = time.perf_counter()
        with consoles.doing(f"bound of {wanted.name} on {fabric.name}"):
            best = bound(fabric, wanted)
        seconds = time.perf_counter() - started
        if json_output:
            timed = {} if num_bytes is None else _timed_record(best, num_bytes)
            print(json.dumps(bound_record(best, seconds) | timed | group_record(ranks)))
            return
        value, rest = f"{float(best.algbw):.6g} {fabric.unit}", f"exactly {best.algbw}; 1/x = {best.inverse_x}"
        if best.is_met and not best.is_exact:
            rest = f"at most {best.algbw}; reached to nine digits"
        elif not best.is_exact:
            value, rest = f"{float(best.reached):.6g} to {value}", "the least is reached, the most is proved"
        where = f"{wanted.name} over {wanted.num_ranks} ranks of {fabric.name}"
        typer.echo(typer.style(value, bold=True) + f" of {where} ({rest})")
        if num_bytes is not None:
            least, busbw = best.seconds(num_bytes), _busbw(best)
            print(f"{format_size(num_bytes)}: {format_seconds(least)} at least, busbw {busbw:.6g} {fabric.unit}.")
        print(best.explain())
        kind = "flow" if wanted.name == "all_reduce" or wanted.name in POINTED else "cut"
        if len(fabric.links) <= _MOST_LINKS[kind]:
            with consoles.doing("what more capacity would buy"):
                gains = sensitivity(best)
            for gain in gains:
                print(_advice(gain, fabric))
