"""What every method reaches on every fabric, beside the bound: modelled exactly, and simulated at 16 MB.

    python benchmarks/quality.py                # all fabrics, a few minutes; makes lines, picture and table
    python benchmarks/quality.py --only ring8   # some fabrics: prints, and replaces their recorded lines

Fabrics are the test suite's (``tests/data/topologies``) and those of ``examples/clusters``. For each method that
serves a collective there:

- modelled: the schedule's algbw, bytes over the time of the busiest link, exact;
- simulated: size over simulated time at 16 MB in pieces of 32 KB. Fabrics with rates of sockets count the 29 us a
  message that sockets take; the suite's, whose links are a thousand times faster, count none, so that what is lost
  there is the filling of pipelines, whatever the unit.

Every schedule is verified. Lines go to ``benchmarks/recorded/quality/methods.jsonl``, one a fabric, collective and
method; neither column is a measurement.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from mycel.collectives.bound import bound
from mycel.collectives.simulate import OVERHEAD_S, simulate
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth import NAMED_ONLY, candidates_for, synthesize
from mycel.collectives.synth.classics import CLASSICS, classics_for
from mycel.collectives.verify import verify_schedule
from mycel.errors import MycelError, SynthesisError, UsageError
from mycel.topology.load import load_topology
from mycel.topology.model import Topology
from record import CLUSTERS, RECORDED, ROOT, SUITE, append, commit, markdown, read, write_section

COLLECTIVES: tuple[CollectiveName, ...] = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
SIZE = 16 << 20
#: Schedules of the fewest steps are searched for on fabrics of up to so many ranks, for so many seconds.
LARGEST_STEPS, STEPS_S = 8, 5.0
OUTPUT = RECORDED / "quality" / "methods.jsonl"
PICTURE = ROOT / "docs" / "images" / "quality.png"
PAGE = ROOT / "docs" / "guides" / "benchmarks.md"
#: Links slower than this carry their bytes over sockets; then a message's overhead is that of sockets.
SOCKET_RATE = 1e9


def fabrics() -> dict[str, Path]:
    """Files by name."""
    files = [*sorted(CLUSTERS.glob("*.yaml")), *sorted(SUITE.glob("*.json"))]
    return {file.stem: file for file in files if file.stem != "expected"}


def measure(name: str, topology: Topology, collective_name: CollectiveName) -> list[dict[str, Any]]:
    """A line a method that serves the collective on the fabric."""
    root = 0 if collective_name == "broadcast" else None
    collective = Collective(name=collective_name, num_ranks=topology.num_ranks, root=root)
    best = bound(topology, collective).algbw
    rate = float(topology.bytes_per_second_per_unit or 1e9)
    overhead = OVERHEAD_S if float(max(link.capacity for link in topology.links)) * rate < SOCKET_RATE else 0.0
    lines = []
    methods = [*candidates_for(collective_name), *classics_for(collective_name)]
    if collective_name in NAMED_ONLY["steps"] and topology.num_ranks <= LARGEST_STEPS:
        methods.append("steps")
    for method in methods:
        begin = time.perf_counter()
        try:
            options = {"time_limit_s": STEPS_S} if method == "steps" else {}
            schedule = synthesize(topology, collective, method, **options)
        except (SynthesisError, UsageError):
            continue
        seconds = time.perf_counter() - begin
        verify_schedule(schedule)
        run = simulate(schedule, SIZE, overhead_s=overhead)
        lines.append(
            {
                "fabric": name,
                "fingerprint": topology.fingerprint,
                "ranks": topology.num_ranks,
                "unit": topology.unit,
                "collective": collective_name,
                "method": method,
                "bound_algbw": float(best),
                "modelled_algbw": float(schedule.algbw),
                "modelled_of_bound": float(schedule.algbw / best),
                "simulated_algbw": run.algbw,
                "simulated_of_bound": run.algbw / float(best),
                "bytes": run.num_bytes,
                "piece_bytes": run.piece_bytes,
                "overhead_s": overhead,
                "synthesis_s": seconds,
            }
        )
    return lines


def is_classic(method: str) -> bool:
    return method in CLASSICS


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row a method and collective; of the bound, over all fabrics it serves."""
    rows = []
    for collective in COLLECTIVES:
        mine = [line for line in lines if line["collective"] == collective]
        everywhere = len({line["fabric"] for line in mine})
        for method in dict.fromkeys(line["method"] for line in mine):
            found = [line for line in mine if line["method"] == method]
            modelled = [line["modelled_of_bound"] for line in found]
            simulated = [line["simulated_of_bound"] for line in found]
            rows.append(
                (
                    collective,
                    method,
                    f"{len(found)} of {everywhere}",
                    f"{min(modelled):.3f}",
                    f"{geometric_mean(modelled):.3f}",
                    f"{min(simulated):.3f}",
                    f"{geometric_mean(simulated):.3f}",
                )
            )
    headings = ("collective", "method", "fabrics", "modelled: least", "mean", "simulated, 16 MB: least", "mean")
    return markdown(headings, rows)


def draw(lines: Sequence[dict[str, Any]], file: Path) -> None:
    """One panel a collective: of the bound, a column a fabric; our methods in colour, classics as grey marks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(line["fabric"] for line in lines))
    colours = {"forest": "#1b6e5a", "tree": "#d98a2b", "flow": "#1b6e5a", "direct": "#d98a2b", "steps": "#5b4b8a"}
    colours["exchange"] = "#2b6cb0"
    marks = dict(zip(CLASSICS, "oD^vPsX*<>hd8pH", strict=False))
    figure, panels = plt.subplots(len(COLLECTIVES), 1, figsize=(12, 13), sharex=True, layout="constrained")
    for panel, collective in zip(panels, COLLECTIVES, strict=True):
        mine = [line for line in lines if line["collective"] == collective]
        for method in dict.fromkeys(line["method"] for line in mine):
            found = [line for line in mine if line["method"] == method]
            at = [names.index(line["fabric"]) for line in found]
            modelled = [line["modelled_of_bound"] for line in found]
            simulated = [line["simulated_of_bound"] for line in found]
            if is_classic(method):
                panel.scatter(at, modelled, s=26, marker=marks[method], color="#9a9a9a", label=method, linewidths=0)
                continue
            colour = colours[method]
            panel.scatter(at, modelled, s=52, marker="_", color=colour, label=f"{method}, modelled", linewidths=2.4)
            panel.scatter(
                at, simulated, s=30, facecolors="none", edgecolors=colour, label=f"{method}, simulated at 16 MB"
            )
        panel.axhline(1.0, color="#333333", linewidth=0.8)
        panel.set_ylim(0, 1.08)
        panel.set_xlim(-0.7, len(names) - 0.3)
        panel.grid(axis="y", color="#e5e5e5", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.set_ylabel("algbw / bound")
        panel.set_title(collective, loc="left", fontsize=11)
        panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    panels[-1].set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, records, draws, and puts the table into the docs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of fabrics; the others keep their recorded lines")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--no-docs", action="store_true", help="leave picture and table as they are")
    options = parser.parse_args(arguments)
    known = fabrics()
    chosen = options.only.split(",") if options.only else list(known)
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"no fabric is called {unknown[0]!r}; there are {', '.join(known)}")
    lines = [line for line in read(options.output) if line["fabric"] in known and line["fabric"] not in chosen]
    revision = commit()
    for name in chosen:
        topology = load_topology(known[name])
        begin = time.perf_counter()
        for collective in COLLECTIVES:
            lines += [{**line, "commit": revision} for line in measure(name, topology, collective)]
        print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)
    lines.sort(key=lambda line: (list(known).index(line["fabric"]), COLLECTIVES.index(line["collective"])))
    options.output.unlink(missing_ok=True)
    append(options.output, lines)
    text = table(lines)
    print(text, end="")
    if not options.no_docs:
        draw(lines, PICTURE)
        write_section(PAGE, "quality", text)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MycelError as error:
        sys.exit(f"quality: {error}")
