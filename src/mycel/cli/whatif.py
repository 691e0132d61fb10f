"""``mycel whatif``: what a faster link, a broken cable, one more cable or other interfaces would do to a bound."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Annotated

import typer

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
from mycel.cli.request import RanksOption, WeightsOption, choose_group, group_record
from mycel.collectives.bound import bound
from mycel.errors import UsageError
from mycel.topology.change import add_link, change_link, compute_in_switch, remove_link, scale_interfaces, scale_link
from mycel.topology.model import Topology
from mycel.units import RATE_UNITS

__all__ = ["register"]

#: typer makes a new list a call.
_NONE: list[str] = []


def register(app: typer.Typer) -> None:
    """Add the subcommand."""

    @app.command("whatif", help="The bound before and after a change to the fabric.")
    def command(
        topology: TopologyArgument,
        collective: CollectiveOption,
        change: Annotated[
            list[str],
            typer.Option("--change", help="New bandwidth of links: 'A->B=400 Mbit/s', both ways 'A<->B=...'."),
        ] = _NONE,
        add: Annotated[list[str], typer.Option("--add", help="One more cable: 'A<->B=400 Mbit/s'.")] = _NONE,
        remove: Annotated[
            list[str], typer.Option("--remove", help="Links that are gone: 'A->B', 'left/*<->core'.")
        ] = _NONE,
        scale: Annotated[list[str], typer.Option("--scale", help="So many times the bandwidth: 'A->B=2'.")] = _NONE,
        scale_nic: Annotated[
            str | None, typer.Option("--scale-nic", help="So many times the bandwidth of every link out of a node.")
        ] = None,
        compute: Annotated[
            list[str],
            typer.Option("--compute", help="Switches that copy and add (SHARP): 'node0/nvswitch', '*/nvswitch'."),
        ] = _NONE,
        root: RootOption = None,
        weights: WeightsOption = None,
        ranks: RanksOption = None,
        json_output: JsonOption = False,
    ) -> None:
        fabric = load_fabric(topology)
        group, root = choose_group(fabric, ranks, root)
        wanted = make_collective(group, collective, root, weights)
        steps: list[tuple[Callable[[Topology, str], Topology], str, str]] = [
            *((add_link, text, f"{text} added") for text in add),
            *((change_link, text, text) for text in change),
            *((scale_link, text, f"{text} times") for text in scale),
            *(
                (scale_interfaces, text, f"network interfaces {text} times as fast")
                for text in filter(None, [scale_nic])
            ),
            *((remove_link, text, f"{text} removed") for text in remove),
            *((compute_in_switch, text, f"{text} copies and adds") for text in compute),
        ]
        if not steps:
            raise UsageError("nothing to change: give --change, --add, --remove, --scale, --scale-nic or --compute")
        started = time.perf_counter()
        changed = fabric
        for apply, text, _ in steps:
            changed = apply(changed, text)
        changed, _ = choose_group(changed, ranks, None)
        with consoles.doing(f"bound of {wanted.name} on {fabric.name}, before and after"):
            before, after = bound(group, wanted), bound(changed, wanted)
        seconds = time.perf_counter() - started
        in_unit = RATE_UNITS.get(changed.unit, Fraction(1)) / RATE_UNITS.get(fabric.unit, Fraction(1))
        ratio = after.algbw * in_unit / before.algbw
        words = [words for _, _, words in steps]
        if json_output:
            record = {
                "changes": words,
                "before": bound_record(before, seconds),
                "after": bound_record(after, seconds),
                "ratio": float(ratio),
            }
            print(json.dumps(record | group_record(ranks)))
            return
        new = float(after.algbw * in_unit)
        print(f"{wanted.name} over {wanted.num_ranks} ranks of {group.name}")
        print(f"before: {float(before.algbw):.6g} {fabric.unit}")
        print(f"after:  {new:.6g} {fabric.unit} ({_verdict(ratio)}): {'; '.join(words)}")
        print(f"before: {before.explain()}")
        print(f"after: {after.explain()}")


def _verdict(ratio: Fraction) -> str:
    if ratio == 1:
        return "no difference"
    return f"{float(ratio):.4g} times as much"
