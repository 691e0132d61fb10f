"""Prints simulated times beside the measured ones of ``benchmarks/recorded``, and writes the table of the docs page.

    python benchmarks/simulation.py [--write]

Measured are emulated runs over mycel of sizes at which links decide; simulated is the same forest with the same
piece size. The two have a column each.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from statistics import median

from mycel.collectives.simulate import simulate
from mycel.collectives.spec import Collective
from mycel.collectives.synth import synthesize
from mycel.topology.load import load_topology
from mycel.units import format_seconds, format_size

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "concepts" / "simulation.md"
MARKS = re.compile(r"(<!-- simulated:begin -->\n).*?(<!-- simulated:end -->)", re.DOTALL)


def table() -> str:
    """Markdown: a row a recorded case."""
    rows = ["| fabric | collective | size | measured | simulated | error |", "|---|---|---|---|---|---|"]
    errors = []
    for line in (ROOT / "benchmarks" / "recorded" / "two_boxes.jsonl").read_text(encoding="utf-8").splitlines():
        m = json.loads(line)
        if not m["emulated"] or m["backend"] != "mycel":
            continue
        topology = load_topology(str(ROOT / "examples" / "clusters" / f"{m['topology']}.yaml"))
        if topology.fingerprint != m["fingerprint"]:
            raise SystemExit(f"{m['topology']}: the fabric has changed since it was measured")
        collective = Collective(name=m["collective"], num_ranks=topology.num_ranks)
        seconds = simulate(synthesize(topology, collective, "forest"), m["bytes"]).seconds
        errors.append(seconds / m["median_s"] - 1)
        rows.append(
            f"| `{m['topology']}` | {m['collective']} | {format_size(m['bytes'])} | {format_seconds(m['median_s'])} "
            f"| {format_seconds(seconds)} | {errors[-1]:+.1%} |"
        )
    rows.append(f"\nMedian of the absolute errors: {median(abs(e) for e in errors):.1%} of {len(errors)} cases.")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    text = table()
    print(text, end="")
    if sys.argv[1:] == ["--write"]:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(MARKS.sub(lambda m: m.group(1) + text + m.group(2), page), encoding="utf-8")
