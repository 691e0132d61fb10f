"""``mycel show``: what a topology file is read as, with every assumption, and as a file that one can edit."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mycel.cli.bound import JsonOption, TopologyArgument
from mycel.cost import LinkClass, link_costs
from mycel.errors import UsageError
from mycel.topology.formats.description import Reading
from mycel.topology.json_format import to_json
from mycel.topology.load import read_topology
from mycel.topology.model import Link, Topology
from mycel.topology.yaml_format import to_yaml
from mycel.units import RATE_UNITS, format_seconds, format_size

__all__ = ["check_name", "class_lines", "link_lines", "reading_lines", "reading_record", "register", "write_reading"]

_ENDINGS = (".yaml", ".yml", ".json")


def link_lines(topology: Topology) -> list[str]:
    """A line for every cable; two directions that are alike are one.

    Examples:
        >>> link_lines(read_topology("ring:ranks=2,bandwidth=25 GB/s,latency=5us").topology)
        ['0 <-> 1  25 GB/s, 5 us, rdma']
    """
    classes = link_costs(topology).classes
    links = {(link.src, link.dst): link for link in topology.links}
    rows: list[tuple[str, str]] = []
    for (src, dst), link in links.items():
        back = links.get((dst, src))
        alike = back is not None and replace(back, src=src, dst=dst) == link
        if alike and src > dst:
            continue
        arrow = "<->" if alike else "->"
        rows.append(
            (f"{topology.label(src)} {arrow} {topology.label(dst)}", f"{_speed(topology, link)}, {classes[src, dst]}")
        )
    width = max((len(ends) for ends, _ in rows), default=0)
    return [f"{ends:{width}}  {speed}" for ends, speed in rows]


def class_lines(topology: Topology) -> list[str]:
    """What messages cost on links of each class that the topology has, and where that comes from.

    Examples:
        >>> class_lines(read_topology("ring:ranks=2,bandwidth=25 GB/s").topology)[0][:67]
        'rdma  2.7 us, wake 0 ns, work 0 ns, pieces 8KB 32KB 128KB 512KB (NC'
    """
    costs = link_costs(topology)
    names = [name for name in costs.table if name in set(costs.classes.values())]
    width = max(map(len, names))
    return [f"{name:{width}}  {_cost(costs.table[name])}" for name in names]


def _cost(of: LinkClass) -> str:
    times = f"{format_seconds(of.latency_s)}, wake {format_seconds(of.wake_s)}, work {format_seconds(of.work_s)}"
    return f"{times}, pieces {' '.join(map(format_size, of.piece_bytes))} ({of.source})"


def _speed(topology: Topology, link: Link) -> str:
    """Bandwidth in the largest unit of its family that is not too large for it, and the latency if there is one."""
    text = f"{link.capacity} (relative)"
    if topology.unit != "link":
        rate, bits = link.capacity * RATE_UNITS[topology.unit], "bit" in topology.unit or "b/" in topology.unit
        family = ("Gbit/s", "Mbit/s", "kbit/s", "bit/s") if bits else ("GB/s", "MB/s", "kB/s", "B/s")
        unit = next((name for name in family if rate >= RATE_UNITS[name]), family[-1])
        text = f"{float(rate / RATE_UNITS[unit]):,g} {unit}"
    return text + (f", {format_seconds(link.latency_s)}" if link.latency_s else "")


def check_name(output: Path) -> None:
    """Refuse a name that says no form of topology file.

    Raises:
        UsageError: it ends neither in .yaml, .yml nor .json.
    """
    if output.suffix.lower() not in _ENDINGS:
        raise UsageError(f"{output}: the name must end in {', '.join(_ENDINGS[:-1])} or {_ENDINGS[-1]}")


def write_reading(found: Reading, output: Path, origin: str) -> None:
    """Write a topology file that can be edited, with what was assumed in comments.

    Args:
        found: the topology and the assumptions.
        output: the file; its ending says which form.
        origin: what it was read from, for its first line.

    Raises:
        UsageError: the name says no form, or the file cannot be written.
    """
    check_name(output)
    if output.suffix.lower() == ".json":
        text = json.dumps(to_json(found.topology) | {"note": [f"read from {origin}", *found.notes]}, indent=1) + "\n"
    else:
        comments = [f"read from {origin}", *(f"assumed: {note}" for note in found.notes)]
        text = "".join(f"# {' '.join(line.split())}\n" for line in comments) + to_yaml(found.topology)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}") from None


def reading_record(found: Reading) -> dict[str, Any]:
    """The JSON object of a topology and what was assumed about it."""
    topology = found.topology
    costs = link_costs(topology)
    return {
        "name": topology.name,
        "unit": topology.unit,
        "num_ranks": topology.num_ranks,
        "ranks": [topology.label(vertex) for vertex in topology.ranks],
        "switches": [topology.label(vertex) for vertex in topology.switches],
        "links": [
            {"from": topology.label(link.src), "to": topology.label(link.dst), "capacity": link.capacity}
            | ({"latency_s": link.latency_s} if link.latency_s else {})
            | {"class": costs.classes[link.src, link.dst]}
            for link in topology.links
        ],
        "link_classes": {name: asdict(costs.table[name]) for name in sorted(set(costs.classes.values()))},
        "assumed": list(found.notes),
    }


def _vertex_lines(topology: Topology, vertices: tuple[int, ...]) -> list[str]:
    """A line for every vertex: of ranks with their number, of all with their node and whether they compute."""
    width = max((len(topology.label(vertex)) for vertex in vertices), default=0)
    lines = []
    for vertex in vertices:
        place = topology.vertices[vertex]
        number = f"{topology.rank_of[vertex]:>4}  " if place.kind == "rank" else ""
        about = [f"in {place.node}"] if place.node else []
        about += ["copies and adds"] if place.computes else []
        lines.append(f"{number}{place.label:{width}}  {', '.join(about)}".rstrip())
    return lines


def reading_lines(found: Reading) -> list[str]:
    """Everything about a topology for people, with what was assumed."""
    fabric = found.topology
    shown = [f"{fabric.name}: {fabric.num_ranks} ranks, {len(fabric.switches)} switches, {len(fabric.links)} links"]
    for title, lines in (
        ("ranks", _vertex_lines(fabric, fabric.ranks)),
        ("switches", _vertex_lines(fabric, fabric.switches)),
        ("links, and what each direction carries", link_lines(fabric)),
        ("what a message costs, by class of link", class_lines(fabric)),
        ("read so, because", list(found.notes)),
    ):
        shown += ["", f"{title}:", *(f"  {line}" for line in lines)] if lines else []
    return shown


def register(app: typer.Typer) -> None:
    """Add the subcommand."""

    @app.command("show", help="What a topology file is read as: ranks, switches, links and every assumption.")
    def command(
        topology: TopologyArgument,
        output: Annotated[
            Path | None,
            typer.Option("-o", "--output", help="Write it as a file that can be edited: .yaml, .yml or .json."),
        ] = None,
        json_output: JsonOption = False,
    ) -> None:
        if output is not None:
            check_name(output)
        found = read_topology(topology)
        if output is not None:
            write_reading(found, output, topology)
        if json_output:
            print(json.dumps(reading_record(found)))
            return
        print("\n".join(reading_lines(found)))
        if output is not None:
            print(f"\nwritten to {output}")
