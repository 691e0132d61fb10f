"""What Tessel claims: orders found by search beat 1F1B where blocks are shared, links are slow or memory is short.

    python benchmarks/claims/tessel.py [--rounds 9]    # nine minutes; 4 ranks; replaces its lines and the table

Four placements, each with a baseline in the same run: a link that takes its time, against torch's 1F1B and against
1F1B by torch's runtime; an embedding on all ranks (M), against 1F1B with the block inserted; memory for three
micro-batches, against the best repetend of one micro-batch, which is all that Tessel searches.

References:
    Lin et al., "Tessel: Boosting Distributed Execution of Large DNN Models via Flexible Schedule Search", HPCA 2024.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mycel.pipeline.known import one_f_one_b
from mycel.pipeline.placement import Block, Dependency, Placement
from mycel.pipeline.search import find_batch, find_steady
from mycel.pipeline.stages import order_of
from mycel.pipeline.timed import Timed, earliest
from mycel.topology.builders import star
from paced import Case, measure, ratio
from record import RECORDED, ROOT, conclude, markdown

OUTPUT = RECORDED / "claims" / "tessel.jsonl"
PAGE = ROOT / "docs" / "concepts" / "pipeline_claims.md"
RANKS, BANDWIDTH_BITS = 4, 50e6
SEARCH_S = 20.0
#: Milliseconds of a unit of time. Where links have no delay, what travels is a small part of a unit.
UNIT_MS, SMALL_BYTES = {"delay": 8.0, "M": 30.0, "cap 3": 25.0}, 16 << 10
#: How long beforehand a shared block may ask for its ranks; the baseline gets what suits it best.
PATIENCE = range(-3, 4)


def chain(name: str, times: tuple[int, int], cap: int, *, delay: int = 0, shared: bool = False) -> Placement:
    """One stage a rank, down and up; with ``shared``, an embedding on all ranks at both ends."""
    forward, backward = times
    ranks = range(RANKS)
    blocks = [Block(name=f"F{r}", devices=(r,), time=forward, memory=1) for r in ranks]
    blocks += [Block(name=f"B{r}", devices=(r,), time=backward, memory=-1) for r in reversed(ranks)]
    if shared:
        everywhere = tuple(ranks)
        blocks.insert(0, Block(name="S0", devices=everywhere, time=1, memory=0))
        blocks.append(Block(name="T0", devices=everywhere, time=1, memory=0))
    waits = []
    for i, (one, other) in enumerate(pairwise(blocks)):
        is_message = one.devices != other.devices and len(one.devices) == len(other.devices) == 1
        waits.append(Dependency(before=i, after=i + 1, delay=delay if is_message else 0))
    return Placement(
        name=name, num_devices=RANKS, blocks=tuple(blocks), dependencies=tuple(waits), cap=(cap,) * RANKS
    )


def _inserted(placement: Placement, count: int, patience: int) -> Timed:
    """1F1B with the shared blocks put in where its first rank needs them, and on the others as soon as it can be."""
    place = {block.name: i for i, block in enumerate(placement.blocks)}
    queues: list[list[tuple[int, int]]] = []
    together: list[tuple[int, int]] = []
    for rank, row in enumerate(one_f_one_b(RANKS, count).rows):
        own = []
        for action in row:
            here = (place[f"{action.kind.value}{action.stage}"], action.micro_batch)
            if rank == 0 and action.kind.value == "F":
                together.append((place["S0"], action.micro_batch))
            own.append(here)
            if rank == 0 and action.kind.value == "B":
                together.append((place["T0"], action.micro_batch))
        queues.append(own)
    ends: dict[tuple[int, int], int] = {}
    free = [0] * RANKS
    rows: list[list[tuple[int, int]]] = [[] for _ in range(RANKS)]
    before: dict[int, list[int]] = {}
    for wait in placement.dependencies:
        before.setdefault(wait.after, []).append(wait.before)

    def ready(block: int, m: int) -> int | None:
        found = [ends.get((other, m)) for other in before.get(block, [])]
        return None if None in found else max(found, default=0)

    while together or any(queues):
        choices = []
        if together and (at := ready(*together[0])) is not None:
            choices.append((max(at, *free) - patience, -1))
        choices += [
            (max(at, free[rank]), rank)
            for rank, queue in enumerate(queues)
            if queue and (at := ready(*queue[0])) is not None
        ]
        begin, who = min(choices)
        begin += patience if who < 0 else 0
        block, m = together.pop(0) if who < 0 else queues[who].pop(0)
        ends[block, m] = begin + placement.blocks[block].time
        for rank in range(RANKS) if who < 0 else (who,):
            rows[rank].append((block, m))
            free[rank] = ends[block, m]
    return earliest(placement, rows)


def inserted(placement: Placement, count: int) -> Timed:
    """The best of these insertions."""
    return min((_inserted(placement, count, patience) for patience in PATIENCE), key=lambda timed: timed.makespan)


def alone(placement: Placement, count: int) -> Timed:
    """The best repetend of one micro-batch, unrolled as soon as everything can start."""
    steady = find_steady(placement, most_micro_batches=1, time_limit_s=SEARCH_S, tighten_s=1.0)
    return earliest(placement, steady.repetend.rows(count))


def found(placement: Placement, count: int) -> Timed:
    """What search finds."""
    return find_batch(placement, count, time_limit_s=SEARCH_S).timed


def one_f_one_b_timed(placement: Placement, count: int) -> Timed:
    """1F1B in a placement's times."""
    place = {block.name: i for i, block in enumerate(placement.blocks)}
    return earliest(
        placement,
        [
            [(place[f"{action.kind.value}{action.stage}"], action.micro_batch) for action in row]
            for row in one_f_one_b(RANKS, count).rows
        ],
    )


def cases(kind: str) -> list[Case]:
    """Ways that are measured together, the baseline first."""
    unit = UNIT_MS[kind] / 1e3
    made: list[tuple[str, str, str, Timed]] = []
    num_bytes = SMALL_BYTES
    if kind == "delay":
        placement = chain(kind, (5, 10), 8, delay=4)
        num_bytes = int(4 * unit * BANDWIDTH_BITS / 8)
        plain, best = one_f_one_b_timed(placement, 16), found(placement, 16)
        made = [
            ("slow links, 16", "torch's Schedule1F1B", "1F1B", plain),
            ("slow links, 16", "1F1B by torch's runtime", "runtime", plain),
            ("slow links, 16", "searched", "mycel", best),
        ]
    elif kind == "M":
        placement = chain(kind, (1, 3), 6, shared=True)
        for count in (8, 16):
            name = f"M, {count}"
            made.append((name, "1F1B, block inserted", "mycel", inserted(placement, count)))
            made.append((name, "searched", "mycel", found(placement, count)))
    else:
        placement = chain(kind, (1, 3), 3)
        made.append(("memory for 3, 16", "one micro-batch a repetend", "mycel", alone(placement, 16)))
        made.append(("memory for 3, 16", "searched", "mycel", found(placement, 16)))
    times = {block.name: block.time * unit for block in placement.blocks if len(block.devices) > 1}
    times |= {block.name[0]: block.time * unit for block in placement.blocks if len(block.devices) == 1}
    return [
        Case(
            name=what,
            order=order_of(timed).to_json(),
            times=times,
            num_bytes=num_bytes,
            runner=runner,
            more={"kind": kind, "way": way, "units": timed.makespan, "peak": timed.peak},
        )
        for what, way, runner, timed in made
    ]


def table(lines: list[dict[str, Any]]) -> str:
    rows = []
    for line in lines:
        of_same = [other for other in lines if other["case"] == line["case"]]
        searched = of_same[-1]
        units, unit = line["more"]["units"], UNIT_MS[line["more"]["kind"]] / 1e3
        rows.append(
            (
                line["case"],
                line["more"]["way"],
                max(line["more"]["peak"]),
                f"{units * unit:.2f}",
                f"{median(line['seconds']):.2f}",
                f"{units / searched['more']['units']:.2f}",
                f"{ratio(line['seconds'], searched['seconds']):.2f}" if line is not searched else "1.00",
            )
        )
    heads = (
        "placement, micro-batches",
        "way",
        "most micro-batches held",
        "planned s",
        "measured s",
        "planned / searched",
        "measured / searched",
    )
    return markdown(heads, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="steps of each way, in turns")
    options = parser.parse_args(arguments)
    heard: list[dict[str, Any]] = []
    for kind in UNIT_MS:
        topology = star(num_ranks=RANKS, bandwidth=f"{BANDWIDTH_BITS / 1e6:g} Mbit/s")
        lines = measure(topology, cases(kind), rounds=options.rounds)
        for name in {line["case"] for line in lines}:
            losses = [line["losses"] for line in lines if line["case"] == name]
            if any(each != losses[0] for each in losses):
                raise SystemExit(f"{name}: losses differ")
        heard += lines
    conclude(OUTPUT, PAGE, "tessel", heard, table)


if __name__ == "__main__":
    main()
