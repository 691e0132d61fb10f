"""Simulated times beside the recorded measurements of emulated fabrics, and the table of the docs page.

    python benchmarks/simulation.py [--write]

Measured are the runs over mycel in ``benchmarks/recorded`` (``fabrics/measured.jsonl`` and ``two_boxes.jsonl``; of
several of one case the last counts). Simulated is the schedule that ran, in the pieces in which it ran, twice: as
the simulator does by itself, and with the machine that played all ranks. With ``--write``, each pair is kept as a
line of ``benchmarks/recorded/fabrics/simulated.jsonl`` and the table goes into the page.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from mycel.collectives.cost import PIECE_BYTES
from mycel.collectives.schedule import Schedule
from mycel.collectives.simulate import Machine, simulate
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth import synthesize
from mycel.topology.load import load_topology
from mycel.units import format_seconds, format_size
from record import RECORDED, ROOT, append, cluster_file, markdown, read, write_section

PAGE = ROOT / "docs" / "concepts" / "simulation.md"
MEASURED = (RECORDED / "two_boxes.jsonl", RECORDED / "fabrics" / "measured.jsonl")
OUTPUT = RECORDED / "fabrics" / "simulated.jsonl"


@cache
def schedule_of(fabric: str, fingerprint: str, name: CollectiveName, method: str) -> Schedule:
    """The schedule that a line was measured with."""
    topology = load_topology(cluster_file(fabric))
    if topology.fingerprint != fingerprint:
        raise SystemExit(f"{fabric}: the fabric has changed since it was measured")
    root = 0 if name == "broadcast" else None
    return synthesize(topology, Collective(name=name, num_ranks=topology.num_ranks, root=root), method)


def cases(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Measured lines of mycel on emulated fabrics, the last of each case."""
    lines = [m for file in files for m in read(file)]
    ours = [m for m in lines if m["emulated"] and m["backend"] == "mycel" and m["mode"] == "blocking"]
    return list({(m["topology"], m["collective"], m["bytes"]): m for m in ours}.values())


def compare(m: dict[str, Any]) -> dict[str, Any]:
    """A measured line's case with both simulated times; lines of before methods were recorded ran forests."""
    method, piece_bytes = m.get("method") or "forest", m.get("piece_bytes") or PIECE_BYTES[-1]
    schedule = schedule_of(m["topology"], m["fingerprint"], m["collective"], method)
    cores = int(re.findall(r"(\d+) cores", m["hardware"])[0])
    plain = simulate(schedule, m["bytes"], piece_bytes=piece_bytes)
    emulated = simulate(schedule, m["bytes"], piece_bytes=piece_bytes, machine=Machine(cores=cores))
    return {
        "fabric": m["topology"],
        "fingerprint": m["fingerprint"],
        "collective": m["collective"],
        "bytes": m["bytes"],
        "method": method,
        "piece_bytes": piece_bytes,
        "cores": cores,
        "measured_s": m["median_s"],
        "measured_at": m["commit"],
        "simulated_s": plain.seconds,
        "simulated_on_machine_s": emulated.seconds,
    }


def error(line: dict[str, Any], key: str = "simulated_on_machine_s") -> float:
    """Simulated over measured, less 1."""
    return float(line[key] / line["measured_s"]) - 1


def typical(lines: Iterable[dict[str, Any]], key: str = "simulated_on_machine_s") -> float:
    """Median of the absolute errors."""
    return median(abs(error(line, key)) for line in lines)


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row a fabric and size, then a row a size."""
    rows: list[tuple[str, ...]] = []
    sizes = sorted({line["bytes"] for line in lines})
    for fabric in dict.fromkeys(line["fabric"] for line in lines):
        for size in sizes:
            here = [line for line in lines if line["fabric"] == fabric and line["bytes"] == size]
            if not here:
                continue
            first = here[0]
            shown = (first["measured_s"], first["simulated_s"], first["simulated_on_machine_s"])
            rows.append(
                (
                    f"`{fabric}`",
                    format_size(size),
                    *(format_seconds(seconds) for seconds in shown),
                    f"{error(first):+.1%}",
                    f"{typical(here, 'simulated_s'):.1%}",
                    f"{typical(here):.1%}",
                    str(len(here)),
                )
            )
    for size in (*sizes, None):
        here = [line for line in lines if size in (None, line["bytes"])]
        name = "all" if size is None else format_size(size)
        cells = (f"{typical(here, 'simulated_s'):.1%}", f"**{typical(here):.1%}**", str(len(here)))
        rows.append(("**all fabrics**", name, "", "", "", "", *cells))
    headings = (
        "fabric",
        "size",
        f"{lines[0]['collective']} measured",
        "simulated",
        "on the machine",
        "its error",
        "typical error, simulated",
        "on the machine",
        "cases",
    )
    return markdown(headings, rows)


def main() -> None:
    """Compare; with ``--write``, keep the lines and rewrite the page."""
    lines = [compare(m) for m in cases(MEASURED)]
    text = table(lines)
    print(text, end="")
    if sys.argv[1:] == ["--write"]:
        OUTPUT.unlink(missing_ok=True)
        append(OUTPUT, lines)
        write_section(PAGE, "simulated", text)


if __name__ == "__main__":
    main()
