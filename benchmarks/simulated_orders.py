"""Orders simulated against orders measured: how far off the simulator is, and whether their sequence is right.

    python benchmarks/simulated_orders.py [--tables]    # four minutes; 4 ranks; replaces its lines and the table

Known and searched orders on three emulated fabrics, with activations of several sizes. Lines of the claims about
pipelines are counted too. Computation is paced; the simulator knows modelled times, bytes and links, and nothing of
what was measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "claims"))

from tessel import chain

from mycel.pipeline.known import gpipe, interleaved, looped_bfs, one_f_one_b
from mycel.pipeline.order import Order
from mycel.pipeline.search import find_batch
from mycel.pipeline.stages import order_of
from mycel.topology.builders import star, two_boxes
from mycel.topology.model import Topology
from paced import Case, measure
from record import RECORDED, ROOT, conclude, markdown, read, write_section

OUTPUT = RECORDED / "simulated_orders.jsonl"
PAGE = ROOT / "docs" / "concepts" / "pipeline_claims.md"
CLAIMS = ("megatron", "tessel", "skippipe", "oneflow")
RANKS, MICRO_BATCHES, FORWARD_S, BACKWARD_S, ROUNDS, SEARCH_S = 4, 8, 0.04, 0.08, 3, 10.0
#: Two orders differ whose times are so far apart; a sequence of others is a matter of chance.
APART = 1.10


def fabrics() -> dict[str, Topology]:
    """Fast, slow, and two nodes with a slow way between them."""
    return {
        "star of 400 Mbit/s": star(num_ranks=RANKS, bandwidth="400 Mbit/s"),
        "star of 50 Mbit/s": star(num_ranks=RANKS, bandwidth="50 Mbit/s"),
        "two nodes, 50 Mbit/s between": two_boxes(num_ranks=RANKS),
    }


def orders() -> dict[str, tuple[Order, int]]:
    """Orders and how many stages a rank they have."""
    eager = find_batch(chain("eager", (4, 8), 8, delay=3), MICRO_BATCHES, time_limit_s=SEARCH_S).timed
    tight = find_batch(chain("tight", (4, 8), 2, delay=3), MICRO_BATCHES, time_limit_s=SEARCH_S).timed
    return {
        "GPipe": (gpipe(RANKS, MICRO_BATCHES), 1),
        "1F1B": (one_f_one_b(RANKS, MICRO_BATCHES), 1),
        "interleaved": (interleaved(RANKS, MICRO_BATCHES, 2), 2),
        "looped BFS": (looped_bfs(RANKS, MICRO_BATCHES, 2), 2),
        "searched, 8 in flight": (order_of(eager), 1),
        "searched, 2 in flight": (order_of(tight), 1),
    }


def cases() -> list[Case]:
    return [
        Case(
            name=f"{name}, {num_bytes >> 10} KiB",
            order=order.to_json(),
            times={"F": FORWARD_S / chunks, "B": BACKWARD_S / chunks},
            num_bytes=num_bytes,
        )
        for name, (order, chunks) in orders().items()
        for num_bytes in (16 << 10, 192 << 10)
    ]


def everything() -> list[dict[str, Any]]:
    """Lines with a measured and a simulated time, of this benchmark and of the claims."""
    lines = read(OUTPUT)
    for claim in CLAIMS:
        lines += [{**line, "from": claim} for line in read(RECORDED / "claims" / f"{claim}.jsonl")]
    return [line for line in lines if "simulated_s" in line]


def in_sequence(lines: list[dict[str, Any]]) -> tuple[int, int]:
    """Of pairs of one run that differ, how many the simulator puts in the right sequence, and how many there are."""
    right = total = 0
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        runs.setdefault((line["from"], line.get("fabric", "")), []).append(line)
    for group in runs.values():
        for one, other in combinations(group, 2):
            a, b = median(one["seconds"]), median(other["seconds"])
            if max(a, b) > APART * min(a, b):
                total += 1
                right += (a < b) == (one["simulated_s"] < other["simulated_s"])
    return right, total


def table(_: list[dict[str, Any]]) -> str:
    lines = everything()
    rows = []
    parts: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        parts.setdefault(line.get("fabric", f"claim: {line['from']}"), []).append(line)
    for name, part in [*parts.items(), ("all", lines)]:
        errors = sorted(line["simulated_s"] / median(line["seconds"]) - 1 for line in part)
        right, total = in_sequence(part)
        rows.append(
            (
                name,
                len(part),
                f"{100 * median(abs(error) for error in errors):.1f} %",
                f"{100 * errors[0]:+.1f} to {100 * errors[-1]:+.1f} %",
                f"{right} of {total}",
            )
        )
    return markdown(("runs on", "runs", "median error", "errors", "pairs in the right sequence"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="write the table of the recorded lines, run nothing")
    if parser.parse_args(arguments).tables:
        write_section(PAGE, "simulated_orders", table([]))
        return
    heard = []
    for name, topology in fabrics().items():
        heard += [{**line, "from": "here", "fabric": name} for line in measure(topology, cases(), rounds=ROUNDS)]
    conclude(OUTPUT, PAGE, "simulated_orders", heard, table)


if __name__ == "__main__":
    main()
