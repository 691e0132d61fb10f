"""``mycel probe`` on every emulated fabric of ``examples/clusters``: what is there beside what it finds.

    python benchmarks/probe.py                          # all fabrics, some 4 minutes
    python benchmarks/probe.py --only ring4,two_boxes   # some of them
    python benchmarks/probe.py --silent                 # without asking routers: by bandwidth alone
    python benchmarks/probe.py --links                  # every link, not only the one furthest off
    python benchmarks/probe.py --record                 # and write the lines to recorded/probe/found.jsonl

A fabric counts as found if the structure is right and every link is within 10 % of the truth.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mycel.collectives.bound import bound
from mycel.collectives.spec import Collective
from mycel.emulate import acquire_privileges, launch
from mycel.errors import MycelError
from mycel.probe.compare import compare
from mycel.topology.load import load_topology
from mycel.topology.model import Topology
from record import CLUSTERS, RECORDED, append, markdown, stamp

#: Computing switches look like others from outside.
FABRICS = ("star4", "star8", "two_boxes", "ring4", "ring8", "torus_2x4", "shared_uplink", "slow_nic", "two_slow_nics")
#: How far off a link may be.
TOLERANCE = 0.1


def all_reduce_rate(topology: Topology) -> float:
    """The bound of all_reduce, in bytes a second."""
    best = bound(topology, Collective(name="all_reduce", num_ranks=topology.num_ranks))
    per_unit = topology.bytes_per_second_per_unit
    assert per_unit is not None
    return float(best.algbw * per_unit)


def probe(name: str, *, silent: bool) -> dict[str, Any]:
    """Probe one fabric; a line of facts."""
    truth = load_topology(CLUSTERS / f"{name}.yaml")
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.yaml"
        command = [sys.executable, "-m", "mycel", "probe", "-o", str(file), "--picture", "none", "--json"]
        before = time.monotonic()
        code = launch(
            truth,
            [*command, *(["--no-hops"] if silent else [])],
            output=lambda rank, line: lines.append(line),
            timeout_s=150,
        )
        seconds = time.monotonic() - before
        if code:
            raise SystemExit(f"{name}: exit code {code}\n" + "\n".join(lines))
        found = load_topology(file)
    report = json.loads(next(line for line in lines if line.startswith("{")))
    differences = compare(found, truth)
    rows = [] if differences is None else [[d.src, d.dst, d.expected, d.found] for d in differences]
    worst = max((abs(d.ratio - 1) for d in differences or ()), default=None)
    return {
        "fabric": name,
        "ranks": truth.num_ranks,
        "routers_asked": not silent,
        "structure_right": differences is not None,
        "furthest_off": worst,
        "found": differences is not None and worst is not None and worst <= TOLERANCE,
        "unit": truth.unit,
        "links": rows,
        "all_reduce_true": all_reduce_rate(truth),
        "all_reduce_found": all_reduce_rate(found),
        "confidence": report["confidence"],
        "explained": report["explained"],
        "checked": report["checked"],
        "probe_seconds": report["seconds"],
        "wall_seconds": seconds,
        "megabytes": report["bytes"] / 1e6,
        "load_1min": os.getloadavg()[0],
        **stamp(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="fabrics, by commas")
    parser.add_argument("--silent", action="store_true", help="do not ask routers")
    parser.add_argument("--links", action="store_true", help="print every link")
    parser.add_argument("--record", action="store_true", help="append to the recorded lines")
    arguments = parser.parse_args()
    names = [name for name in arguments.only.split(",") if name] or list(FABRICS)
    acquire_privileges()
    made = []
    for name in names:
        try:
            line = probe(name, silent=arguments.silent)
        except MycelError as error:
            raise SystemExit(f"{name}: {error}") from None
        made.append(line)
        if arguments.links:
            print(f"\n{name}: truth beside what was found, {line['unit']}")
            print(
                markdown(
                    ("from", "to", "truth", "found"), [(a, b, f"{t:g}", f"{f:g}") for a, b, t, f in line["links"]]
                )
            )
        print(
            f"{name}: {'found' if line['found'] else 'NOT FOUND'} in {line['probe_seconds']:.1f} s", file=sys.stderr
        )
        if arguments.record:
            append(RECORDED / "probe" / "found.jsonl", [line])
    print(table(made), end="")
    if not all(line["found"] for line in made):
        raise SystemExit(1)


def table(lines: list[dict[str, Any]]) -> str:
    """One row a fabric."""
    headings = (
        "fabric",
        "structure",
        "furthest link off by",
        "all_reduce bound, found / true",
        "confidence",
        "time",
        "traffic",
    )
    rows = [
        (
            f"{line['fabric']}, {line['ranks']} ranks",
            "right" if line["structure_right"] else "wrong",
            "" if line["furthest_off"] is None else f"{100 * line['furthest_off']:.1f} %",
            f"{line['all_reduce_found'] / line['all_reduce_true']:.3f}",
            line["confidence"],
            f"{line['probe_seconds']:.1f} s",
            f"{line['megabytes']:.0f} MB",
        )
        for line in lines
    ]
    return markdown(headings, rows)


if __name__ == "__main__":
    main()
