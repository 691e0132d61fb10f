"""Gloo and mycel on emulated fabrics: five collectives, 64 KB to 16 MB.

The fabrics are those of ``examples/clusters`` but for one that computes in its switch, and two on which links are
loaded unevenly: ``benchmarks/fat_tree.yaml`` and ``benchmarks/unlike_boxes.yaml``.

    python benchmarks/fabrics.py                          # all fabrics, some 17 minutes on two quiet cores
    python benchmarks/fabrics.py --only ring4,two_boxes   # some of them
    python benchmarks/fabrics.py --fresh                  # forget what is recorded of them, and begin anew

Every measurement is appended to ``benchmarks/recorded/fabrics/measured.jsonl`` as soon as it is there, with the
commit and the time. A case that is recorded for this fabric is not measured again, so an interrupted sweep goes on
where it stopped. ``python benchmarks/simulation.py --write`` puts the figures beside simulated ones.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mycel.bench import Case, Measurement, bench_cases
from mycel.cli.bench import bench_table
from mycel.cli.consoles import output
from mycel.emulate import acquire_privileges
from mycel.errors import MycelError
from mycel.topology import load_topology
from mycel.units import format_size, parse_size
from record import RECORDED, append, cluster_file, read, stamp

FABRICS = (
    *("star4", "star8", "two_boxes", "shared_uplink", "slow_nic", "ring4", "ring8", "torus_2x4"),
    *("fat_tree", "unlike_boxes"),
)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
SIZES = ("64KB", "256KB", "1MB", "4MB", "16MB")
BACKENDS = ("gloo", "mycel")
OUTPUT = RECORDED / "fabrics" / "measured.jsonl"
#: From this size on a case gets fewer repeats, for Gloo takes seconds a call there; below the other one more, for a
#: call takes milliseconds, and two cores that play eight ranks are late by as much now and then.
LARGE, SMALL = 4 << 20, 1 << 20


def cases(collectives: Sequence[str], sizes: Sequence[int], repeats: int) -> list[Case]:
    """Every collective at every size."""
    return [
        Case(
            collective=c,
            num_bytes=size,
            repeats=5 * repeats if size < SMALL else max(1, repeats - 2 * (size >= LARGE)),
        )
        for c in collectives
        for size in sizes
    ]


def missing(wanted: Sequence[Case], fingerprint: str, output: Path) -> list[Case]:
    """Cases that the file does not have for this fabric over every backend."""
    have = {
        (row["collective"], row["bytes"], row["backend"]) for row in read(output) if row["fingerprint"] == fingerprint
    }
    return [case for case in wanted if any((case.collective, case.num_bytes, b) not in have for b in BACKENDS)]


def forget(fabrics: Sequence[str], output: Path) -> None:
    """Take the fabrics' lines out of the file."""
    kept = [row for row in read(output) if row["topology"] not in fabrics]
    output.unlink(missing_ok=True)
    append(output, kept)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is missing; exit code 1 where a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(FABRICS), help="names of files in examples/clusters or here")
    parser.add_argument("--collectives", default=",".join(COLLECTIVES))
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument(
        "--repeats", type=int, default=5, help="rounds; two fewer from 4MB on, five times as many below 1MB"
    )
    parser.add_argument("--fresh", action="store_true", help="drop what is recorded of these fabrics first")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    wanted = cases(options.collectives.split(","), [parse_size(s) for s in options.sizes.split(",")], options.repeats)
    acquire_privileges()
    chosen = options.only.split(",")
    if options.fresh:
        forget(chosen, options.output)
    console, right, begin = output(wide=True), True, time.monotonic()
    for name in chosen:
        topology = load_topology(cluster_file(name))
        left = missing(wanted, topology.fingerprint, options.output)
        if not left:
            console.print(f"{name}: recorded already")
            continue
        marks = stamp()

        def keep(m: Measurement, marks: dict[str, str] = marks) -> None:
            append(options.output, [{**m.to_json(), **marks}])
            print(f"{m.topology} {m.collective} {format_size(m.bytes)} {m.backend}: {m.median_s:.4f} s", flush=True)

        rows = bench_cases(topology, left, backends=BACKENDS, progress=keep)
        console.print(bench_table(rows, baseline=BACKENDS[0]))
        console.print(f"{name}: after {time.monotonic() - begin:.0f} s")
        right = right and all(m.correct for m in rows)
    return 0 if right else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MycelError as error:
        sys.exit(f"fabrics: {error}")
