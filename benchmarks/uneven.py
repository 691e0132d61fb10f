"""Uneven blocks: what it is worth to plan for their sizes. On paper: link loads, exactly; nothing is run or timed.

Each case compares the bound for the weights with three schedules that carry those sizes: one planned for the weights,
one planned for equal blocks and lowered with the same sizes, and the few-step one (tree, direct). A JSON line a case
goes to ``--output``, a table to standard output.

    python benchmarks/uneven.py                 # all cases, some seconds
    python benchmarks/uneven.py --random 600    # how many random all_to_alls a flow meets exactly
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import mycel
from mycel.collectives.bound import bound
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth import methods_for, synthesize
from mycel.collectives.verify import verify_schedule
from mycel.topology.load import load_topology
from mycel.topology.model import Link, Topology, Vertex

FABRICS = ("two_boxes:ranks=8", "torus:dims=2x4", "ring:ranks=8", "dgx_a100:nodes=2")
COLLECTIVES: tuple[CollectiveName, ...] = ("all_gather", "reduce_scatter", "all_to_all", "scatter")
COLUMNS = ("topology", "collective", "weights", "bound", "for the weights", "for equal blocks", "few steps")


def growing(ranks: int, blocks: int) -> tuple[int, ...]:
    """Rank r has, or gets, r + 1 parts."""
    return tuple(block % ranks + 1 for block in range(blocks))


def one_large(ranks: int, blocks: int) -> tuple[int, ...]:
    """Rank 0 has, or gets, as much as all others together."""
    return tuple(ranks - 1 if block % ranks == 0 else 1 for block in range(blocks))


def busy_experts(ranks: int, blocks: int) -> tuple[int, ...]:
    """As tokens fall to experts: the i-th busiest rank of a random order has or gets 1/i of the busiest one's."""
    order = list(range(1, ranks + 1))
    random.Random(1).shuffle(order)
    return tuple(round(1000 / order[block % ranks]) for block in range(blocks))


WEIGHTS: tuple[Callable[[int, int], tuple[int, ...]], ...] = (growing, one_large, busy_experts)


def rate(schedule: Schedule, wanted: Collective) -> Fraction:
    """Size over time, links being the only limit, if the schedule carries blocks of the wanted sizes."""
    load: dict[tuple[int, int], Fraction] = {}
    starts = schedule.block_starts
    for transfer in schedule.transfers:
        block = schedule.block_of(transfer.chunk)
        part = Fraction(schedule.chunks[transfer.chunk].num_units, starts[block + 1] - starts[block])
        for hop in pairwise(transfer.path):
            load[hop] = load.get(hop, Fraction(0)) + part * wanted.block_weights[block]
    slowest = max(units / schedule.topology.capacity[hop] for hop, units in load.items())
    return wanted.total_weight / slowest / wanted.num_parts


def compare(spec: str, name: CollectiveName, weigh: Callable[[int, int], tuple[int, ...]]) -> dict[str, Any]:
    """One case."""
    fabric = load_topology(spec)
    n = fabric.num_ranks
    root = n - 1 if name == "scatter" else None
    equal = Collective(name=name, num_ranks=n, root=root)
    wanted = Collective(name=name, num_ranks=n, root=root, weights=weigh(n, equal.num_blocks))
    best = bound(fabric, wanted).algbw
    main, few = methods_for(name)[:2]
    made = {"for the weights": (wanted, main), "for equal blocks": (equal, main), "few steps": (wanted, few)}
    record: dict[str, Any] = {"topology": spec, "collective": name, "weights": weigh.__name__}
    record |= {"bound_algbw": float(best), "unit": fabric.unit, "version": mycel.__version__}
    for column, (planned, method) in made.items():
        schedule = synthesize(fabric, planned, method)
        verify_schedule(schedule)
        record[column] = float(rate(schedule, wanted) / best)
    return record


def random_case(choice: random.Random, heaviest: int) -> bool:
    """Whether the flow of an all_to_all with weights up to ``heaviest`` meets the bound on a random fabric."""
    ranks, switches = choice.randint(2, 6), choice.randint(0, 4)
    vertices = [Vertex(kind="rank" if i < ranks else "switch", label=f"v{i}") for i in range(ranks + switches)]
    cycle = choice.sample(range(len(vertices)), len(vertices))
    capacity = {hop: choice.randint(1, 6) for hop in zip(cycle, cycle[1:] + cycle[:1], strict=True)}
    for _ in range(choice.randint(0, 14)):
        capacity[tuple(choice.sample(range(len(vertices)), 2))] = choice.randint(1, 6)
    links = tuple(Link(src=src, dst=dst, capacity=c) for (src, dst), c in capacity.items())
    fabric = Topology(name="random", unit="link", vertices=tuple(vertices), links=links)
    weights = tuple(choice.randint(0, heaviest) for _ in range(ranks**2 - 1))
    wanted = Collective(name="all_to_all", num_ranks=ranks, weights=(0, heaviest, *weights)[: ranks**2])
    return synthesize(fabric, wanted).algbw == bound(fabric, wanted).algbw


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="append JSON lines here")
    parser.add_argument("--random", type=int, default=0, help="so many random cases instead")
    options = parser.parse_args()
    output = options.output
    if options.random:
        choice = random.Random(1)
        met = sum(random_case(choice, (3, 1000, 1_000_000)[i % 3]) for i in range(options.random))
        print(f"{met} of {options.random} random all_to_alls are met exactly")
        return
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    for spec in FABRICS:
        for name in COLLECTIVES:
            for weigh in WEIGHTS:
                record = compare(spec, name, weigh)
                shares = " | ".join(f"{record[column]:.2f}" for column in COLUMNS[4:])
                rated = f"{record['bound_algbw']:.4g} {record['unit']}"
                print(f"| {spec} | {name} | {record['weights']} | {rated} | {shares} |", flush=True)
                if output is not None:
                    with output.open("a", encoding="utf-8") as lines:
                        lines.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
