"""What SCCL's public tool reports for the DGX-1, beside what comes out here: the same fronts, and the seconds.

    python benchmarks/claims/sccl.py     # a few seconds; replaces its lines, and the table in docs/concepts/steps.md

The reported lines are those of microsoft/msccl-tools, SYNTHESIS.md (all_gather, strategy pareto-optimal). They name
no machine, so their seconds are of another machine and another day; ours are of one core, after imports, and hold the
linear programme, the search and the verification of every schedule.

References:
    Z. Cai, Z. Liu, S. Maleki, M. Musuvathi, T. Mytkowicz, J. Nelson, O. Saarikivi, "Synthesizing Optimal Collective
    Algorithms", PPoPP 2021.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mycel.bench.measurement import describe_hardware
from mycel.collectives.spec import ROOTED, Collective
from mycel.collectives.synth.steps import Point, front
from mycel.collectives.verify import verify_schedule
from mycel.topology.load import load_topology
from record import RECORDED, ROOT, append, markdown, read, stamp, write_section

OUTPUT = RECORDED / "claims" / "sccl.jsonl"
PAGE = ROOT / "docs" / "concepts" / "steps.md"
FABRIC = "dgx1_v100"
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "gather", "all_to_all")
#: Reported seconds of each question that was solved on the way, by (steps, rounds, chunks) of the front's point.
REPORTED: dict[str, dict[tuple[int, int, int], float]] = {
    "all_gather": {(2, 3, 2): 0.5 + 0.9, (3, 7, 6): 1.1 + 2.9 + 6.5 + 44.0 + 56.1},
}


def lines() -> list[dict[str, Any]]:
    """A line a point of every front."""
    fabric = load_topology(FABRIC)
    front(fabric, Collective(name="all_gather", num_ranks=fabric.num_ranks), chunks=1)  # imports, compilation
    made: list[dict[str, Any]] = []
    for name in COLLECTIVES:
        before = time.perf_counter()

        def note(point: Point, name: str = name) -> None:
            nonlocal before
            verify_schedule(point.schedule)
            now = time.perf_counter()
            made.append(
                {
                    "fabric": fabric.name,
                    "fingerprint": fabric.fingerprint,
                    "collective": name,
                    "steps": point.steps,
                    "rounds": point.rounds,
                    "chunks": point.chunks,
                    "proof": point.proof,
                    "algbw": float(point.schedule.algbw),
                    "seconds": now - before,
                    "reported_s": REPORTED.get(name, {}).get((point.steps, point.rounds, point.chunks)),
                }
            )
            before = now

        root = 0 if name in ROOTED else None
        front(fabric, Collective(name=name, num_ranks=fabric.num_ranks, root=root), found=note)
    common = {**stamp(), "hardware": describe_hardware()}
    return [line | common for line in made]


def table(recorded: Sequence[dict[str, Any]]) -> str:
    """The page's table."""
    words = {"any chunks": "the least", "chunks tried": "the least tried", "not proven": "not proven"}
    rows = [
        (
            line["collective"],
            line["steps"],
            line["rounds"],
            line["chunks"],
            f"{line['algbw']:.6g}",
            words[line["proof"]],
            f"{line['seconds']:.1f} s",
            "" if line["reported_s"] is None else f"{line['reported_s']:.1f} s",
        )
        for line in recorded
    ]
    headings = ("collective", "steps", "rounds", "chunks", "algbw, GB/s", "rounds a chunk are", "here", "reported")
    return markdown(headings, rows) + f"\nHere: {recorded[0]['hardware']}, of which one is used.\n"


def main() -> None:
    """Measure, record, and renew the page."""
    made = lines()
    OUTPUT.unlink(missing_ok=True)
    append(OUTPUT, made)
    write_section(PAGE, "sccl", table(read(OUTPUT)))
    print(table(made))


if __name__ == "__main__":
    main()
