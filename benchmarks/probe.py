"""``mycel probe`` on every emulated fabric of ``examples/clusters``: what is there beside what it finds.

    python benchmarks/probe.py                          # all fabrics, some 4 minutes
    python benchmarks/probe.py --only ring4,two_boxes   # some of them
    python benchmarks/probe.py --silent                 # without asking routers: by bandwidth alone (not rings)
    python benchmarks/probe.py --links                  # every link, not only the one furthest off
    python benchmarks/probe.py --record                 # keep the lines in recorded/probe/found.jsonl, instead of
                                                        # earlier ones of the same fabric; the guide's table anew

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

from mycel.bench.measurement import describe_hardware
from mycel.collectives.bound import bound
from mycel.collectives.spec import Collective
from mycel.emulate import acquire_privileges, launch
from mycel.errors import MycelError
from mycel.probe.compare import compare
from mycel.topology.load import load_topology
from mycel.topology.model import Topology
from record import CLUSTERS, RECORDED, ROOT, append, markdown, read, stamp, write_section

#: Computing switches look like others from outside.
FABRICS = ("star4", "star8", "two_boxes", "ring4", "ring8", "torus_2x4", "shared_uplink", "slow_nic", "two_slow_nics")
#: What bandwidth alone can tell: not how ranks are cabled that forward packets for each other.
SWITCHED = tuple(name for name in FABRICS if not name.startswith(("ring", "torus")))
RECORDS = RECORDED / "probe" / "found.jsonl"
GUIDE = ROOT / "docs" / "guides" / "probe.md"
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
    load = os.getloadavg()[0]
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
        "load_1min": load,
        "hardware": describe_hardware(),
        **stamp(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="fabrics, by commas")
    parser.add_argument("--silent", action="store_true", help="do not ask routers")
    parser.add_argument("--links", action="store_true", help="print every link")
    parser.add_argument("--record", action="store_true", help="append to the recorded lines")
    arguments = parser.parse_args()
    names = [name for name in arguments.only.split(",") if name] or list(SWITCHED if arguments.silent else FABRICS)
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
            keep(line)
            write_section(GUIDE, "probe", guide_table(read(RECORDS)))
    print(table(made), end="")
    if not all(line["found"] for line in made):
        raise SystemExit(1)


def keep(line: dict[str, Any]) -> None:
    """Record a line in the place of an earlier one of the same kind, in the order of ``FABRICS``."""
    kind = (line["fabric"], line["routers_asked"])
    lines = [old for old in read(RECORDS) if (old["fabric"], old["routers_asked"]) != kind] + [line]
    lines.sort(key=lambda kept: (not kept["routers_asked"], FABRICS.index(kept["fabric"])))
    RECORDS.unlink(missing_ok=True)
    append(RECORDS, lines)


def guide_table(lines: list[dict[str, Any]]) -> str:
    """The table of the guide, from recorded lines."""
    loads = [line["load_1min"] for line in lines]
    return table(lines) + (
        f"\nOn {lines[0]['hardware']}, which played all ranks, at a load average of {min(loads):.0f} to "
        f"{max(loads):.0f} from other work. Lines with commits: `benchmarks/recorded/probe/found.jsonl`.\n"
    )


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
            f"{line['fabric']}, {line['ranks']} ranks{'' if line['routers_asked'] else ', by bandwidth alone'}",
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
