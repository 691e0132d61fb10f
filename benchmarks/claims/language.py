"""What written collectives reach beside the bound, simulated and measured; mutants; and what registering costs.

    python benchmarks/claims/language.py [--only order,registered,mutants]    # some minutes

Replaces its lines, and the tables in ``docs/guides/write_a_collective.md``. *order*: three all_reduces of 4 MB on two
emulated boxes, in turns in one run: is the order that the simulator gives the measured one? *registered*: what the
cost model takes by itself and the very same schedule registered, in turns, at three sizes on an emulated star.
*mutants*: 3,000 programs with one mistake (``benchmarks/language_mutants.py``).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import language_mutants
from mycel.bench.ranks import run_ranks
from mycel.bench.run import warm_up
from mycel.collectives.bound import bound
from mycel.collectives.language import load_written
from mycel.collectives.simulate import simulate
from mycel.emulate import acquire_privileges
from mycel.topology.load import load_topology
from mycel.units import format_seconds, format_size
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "language.jsonl"
PAGE = ROOT / "docs" / "guides" / "write_a_collective.md"
EXAMPLES = ROOT / "examples" / "collectives.py"
BOXES, STAR = "two_boxes:ranks=8", "star:ranks=4"
ORDERED = ("hierarchical", "all_pairs", "ring")
SIZES = (1 << 16, 1 << 20, 1 << 23)
PARTS = ("order", "registered", "mutants")


def measured(fabric: str, num_bytes: int, rounds: int, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What the ranks say of each name."""
    found: dict[str, dict[str, Any]] = {}
    command = [sys.executable, str(ROOT / "benchmarks" / "language_rank.py"), str(EXAMPLES), str(num_bytes)]
    run_ranks(
        load_topology(fabric),
        [*command, str(rounds), *names],
        sink=lambda _, said: found.update({said["name"]: said}),
        timeout_s=170.0,
        env={"OMP_NUM_THREADS": "1"},
        warm=warm_up,
    )
    return found


def order(rounds: int = 5, num_bytes: int = 1 << 22) -> list[dict[str, Any]]:
    """A line a collective."""
    fabric = load_topology(BOXES)
    best, said = bound(fabric, "all_reduce"), measured(BOXES, num_bytes, rounds, ORDERED)
    lines = []
    for name in ORDERED:
        schedule = load_written(f"{EXAMPLES}:{name}").on(fabric)
        lines.append(
            {
                "order": name,
                "fabric": fabric.name,
                "bytes": num_bytes,
                "algbw": float(schedule.algbw),
                "bound_algbw": float(best.algbw),
                "simulated_s": simulate(schedule, num_bytes, piece_bytes=said[name]["piece_bytes"]).seconds,
                "times_s": said[name]["times_s"],
                "wrong": said[name]["wrong"],
                "method": said[name]["method"],
            }
        )
    return lines


def registered(rounds: int = 21) -> list[dict[str, Any]]:
    """A line a size."""
    lines = []
    for size in SIZES:
        said = measured(STAR, size, rounds, ["usual", "again"])
        lines.append(
            {
                "registered": said["again"]["method"],
                "fabric": STAR,
                "bytes": size,
                "usual_s": said["usual"]["times_s"],
                "again_s": said["again"]["times_s"],
                "wrong": said["usual"]["wrong"] + said["again"]["wrong"],
            }
        )
    return lines


def mutants(count: int = 3000) -> list[dict[str, Any]]:
    """A line a mistake."""
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in language_mutants.KINDS}
    for outcome in language_mutants.mutants(count, seed=1):
        verdict = "refused" if outcome.refusal is not None else "accepted"
        counts[outcome.kind][verdict if outcome.is_good else "misjudged"] += 1
    return [
        {"mutants": kind, **{verdict: found[verdict] for verdict in ("refused", "accepted", "misjudged")}}
        for kind, found in counts.items()
    ]


def tables(lines: list[dict[str, Any]]) -> str:
    """The page's tables; nothing where nothing has been recorded."""
    if not lines:
        return ""
    made = []
    ordered = [line for line in lines if "order" in line]
    if ordered:
        rows = [
            (
                line["order"],
                f"{line['algbw']:.4g} of {line['bound_algbw']:.4g}",
                format_seconds(line["simulated_s"]),
                format_seconds(median(line["times_s"])),
            )
            for line in ordered
        ]
        head = f"all_reduce of {format_size(ordered[0]['bytes'])} on two boxes of four"
        made.append(markdown((head, "algbw, Mbit/s", "simulated", "measured, emulated links"), rows))
    again = [line for line in lines if "registered" in line]
    if again:
        rows = []
        for line in again:
            usual, same = median(line["usual_s"]), median(line["again_s"])
            size = format_size(line["bytes"])
            rows.append(
                (size, line["registered"], format_seconds(usual), format_seconds(same), f"{same / usual:.3f}")
            )
        heads = ("all_reduce behind a switch of four", "schedule", "by itself", "registered", "ratio")
        made.append(markdown(heads, rows))
    mutated = [line for line in lines if "mutants" in line]
    if mutated:
        rows = [(line["mutants"], line["refused"], line["accepted"], line["misjudged"]) for line in mutated]
        heads = ("mistake", "refused, with a line", "accepted, and right", "misjudged")
        made.append(markdown(heads, rows))
    where = sorted({str(line["hardware"]) for line in lines})
    return "\n".join(made) + f"\nMedians of runs in turns; machine: {'; '.join(where)}.\n"


def main() -> None:
    """Measure, record, and renew the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    chosen = parser.parse_args().only.split(",")
    if {"order", "registered"} & set(chosen):
        acquire_privileges()
    for part in chosen:
        lines = {"order": order, "registered": registered, "mutants": mutants}[part]()
        conclude(OUTPUT, PAGE, "language", lines, tables, kind=part)


if __name__ == "__main__":
    main()
