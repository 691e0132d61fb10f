"""What TACCL's paper claims, beside what comes out here: routing, what ordering loses, the lead over a ring.

    python benchmarks/claims/taccl.py                     # about four minutes on two quiet cores; lines and a table
    python benchmarks/claims/taccl.py --time-limit 10     # less search a sketch
    python benchmarks/claims/taccl.py --only ndv2_x1

The sketches are those of ``examples/sketches``, four of them written after the public examples; chunks are of 1 MB
(10^6 bytes), as there. The paper's greedy ordering is written here from its description and orders the same routes;
every ordering is timed by the same replay under the alpha-beta model. No GPU and no Gurobi were used, so that run
times on GPUs and the authors' solver times are not reproduced. Lines replace those of the last run in
``benchmarks/recorded/claims/taccl.jsonl``.

References:
    A. Shah et al., "TACCL: Guiding Collective Algorithm Synthesis using Communication Sketches", NSDI 2023, sections
    5 and 7.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mycel.bench.measurement import describe_hardware
from mycel.collectives.replay import replay
from mycel.collectives.schedule import Chunk, Schedule, Transfer
from mycel.collectives.simulate import simulate
from mycel.collectives.spec import Collective
from mycel.collectives.synth import synthesize
from mycel.collectives.synth.sketch import TIME_LIMIT_S, Sketch, plan_sketch, read_sketch
from mycel.collectives.synth.sketch.demands import demands_of
from mycel.collectives.synth.sketch.network import build_network
from mycel.collectives.synth.sketch.plan import CHUNK_BYTES
from mycel.collectives.synth.sketch.routing import find_orbits, route
from mycel.collectives.verify import verify_schedule
from mycel.topology.load import load_topology
from mycel.topology.model import Topology
from record import RECORDED, ROOT, append, markdown, read, stamp, write_section

OUTPUT = RECORDED / "claims" / "taccl.jsonl"
PAGE = ROOT / "docs" / "concepts" / "sketches.md"
SKETCHES = ROOT / "examples" / "sketches"
#: Sketch and its fabric.
CASES = {
    "ndv2_x1": "ndv2.json",
    "ndv2_x2": "ndv2.json*2",
    "dgx2_x1": "dgx2.json",
    "dgx2_x2": "dgx2.json*2",
    "ndv2_x10": "ndv2.json*10",
}
#: Larger ones are planned, and not compared with other methods.
MOST_RANKS = 32
#: Final time may be this much above the routing bound.
ALLOWED = 0.15
#: Longest messages to try in the simulation.
PIECES = (1 << 14, 1 << 16, 1 << 18, CHUNK_BYTES)


def greedy(topology: Topology, collective: Collective, sketch: Sketch, time_limit_s: float) -> Schedule:
    """The routes in the paper's greedy order: a chunk's next hop at a time, never taken back.

    With switches, the hop with the longest way still to go is next, in a tie what can start first. Without, what can
    start first is next, in a tie the chunk of the sender's own node, then the longest way. A last tie goes to the
    chunk that has come the shortest way.
    """
    network = build_network(topology, sketch)
    demands = demands_of(collective, sketch.pieces)
    chunk = float(CHUNK_BYTES)
    found = route(network, demands, find_orbits(network, demands), chunk, time_limit_s=time_limit_s)
    took = [link.alpha_s + chunk / link.rate for link in network.links]
    legs = [(d, x) for d, links in enumerate(found.routes) for x in links]
    into = {(d, network.links[x].dst): number for number, (d, x) in enumerate(legs)}
    before = [into.get((d, network.links[x].src)) for d, x in legs]
    ahead = [took[x] for _, x in legs]
    behind = [0.0] * len(legs)
    for number in range(len(legs)):  # routes go outwards
        if (earlier := before[number]) is not None:
            behind[number] = behind[earlier] + took[legs[earlier][1]]
    for number in reversed(range(len(legs))):
        if (earlier := before[number]) is not None:
            ahead[earlier] = max(ahead[earlier], took[legs[earlier][1]] + ahead[number])
    free = [0.0] * len(network.resources)
    arrived: dict[int, float] = {}
    pending = {number for number in range(len(legs)) if before[number] is None}
    order = []

    def soonest(number: int) -> float:
        earlier = before[number]
        ready = 0.0 if earlier is None else arrived[earlier]
        return max([ready, *(free[r] for r, _ in network.links[legs[number][1]].resources)])

    def urgency(number: int) -> tuple[float, ...]:
        d, x = legs[number]
        if sketch.groups:
            return -ahead[number], soonest(number), behind[number], number
        foreign = demands[d].src // network.node_size != network.links[x].src // network.node_size
        return soonest(number), foreign, -ahead[number], behind[number], number

    while pending:
        number = min(pending, key=urgency)
        link = network.links[legs[number][1]]
        start = soonest(number)
        for r, rate in link.resources:
            free[r] = start + link.alpha_s + chunk / rate
        arrived[number] = start + took[legs[number][1]]
        order.append(number)
        pending.discard(number)
        pending |= {later for later in range(len(legs)) if before[later] == number}
    place = {number: position for position, number in enumerate(order)}
    units = collective.num_blocks * sketch.pieces
    return Schedule(
        collective=collective,
        topology=topology,
        method="sketch",
        num_units=units,
        chunks=tuple(Chunk(start=unit, stop=unit + 1) for unit in range(units)),
        transfers=tuple(
            Transfer(
                chunk=demands[legs[number][0]].chunk,
                src=network.links[legs[number][1]].src,
                dst=network.links[legs[number][1]].dst,
                reduce=False,
                path=network.links[legs[number][1]].path,
                after=() if (earlier := before[number]) is None else (place[earlier],),
            )
            for number in order
        ),
    )


def simulated(schedule: Schedule, num_bytes: int) -> float:
    """Seconds in the event simulation, with the better of the message lengths and no cost of the sender's own."""
    return min(simulate(schedule, num_bytes, piece_bytes=piece, overhead_s=0.0).seconds for piece in PIECES)


def measure(name: str, time_limit_s: float) -> dict[str, Any]:
    """The line of one sketch."""
    topology, sketch = load_topology(f"{SKETCHES / CASES[name]}"), read_sketch(SKETCHES / f"{name}.json")
    collective = Collective(name="all_gather", num_ranks=topology.num_ranks)
    began = time.perf_counter()
    plan = plan_sketch(topology, collective, sketch, time_limit_s=time_limit_s)
    verify_schedule(plan.schedule)
    seconds = time.perf_counter() - began
    size = plan.num_bytes
    line = {
        "sketch": name,
        "collective": "all_gather",
        "ranks": topology.num_ranks,
        "bytes": size,
        "routing_bound_us": plan.bound_s * 1e6,
        "routing_optimal": plan.routing_is_optimal,
        "variables": plan.num_variables,
        "final_us": plan.seconds * 1e6,
        "gap": plan.gap,
        "routing_s": plan.routing_seconds,
        "ordering_s": plan.ordering_seconds,
        "total_s": seconds,
        "verified": True,
    }
    if topology.num_ranks > MOST_RANKS:
        return line
    order = greedy(topology, collective, sketch, time_limit_s)
    verify_schedule(order)
    ring = synthesize(topology, collective, method="ring")
    forest = synthesize(topology, collective, method="forest")
    return line | {
        "greedy_us": replay(order, size).seconds * 1e6,
        "ring_us": replay(ring, size).seconds * 1e6,
        "simulated_sketch_us": simulated(plan.schedule, size) * 1e6,
        "simulated_ring_us": simulated(ring, size) * 1e6,
        "simulated_forest_us": simulated(forest, size) * 1e6,
    }


def tables(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown: the sketches, then the claims."""
    compared = [line for line in lines if "greedy_us" in line]
    largest = max(lines, key=lambda line: line["ranks"])
    worst = max(compared, key=lambda line: line["greedy_us"] / line["routing_bound_us"])
    lost = worst["greedy_us"] / worst["routing_bound_us"] - 1
    leads = [line["ring_us"] / line["final_us"] for line in compared]
    rows = [
        (
            f"`{line['sketch']}`",
            f"{line['routing_bound_us']:.1f}" + (", proven" if line["routing_optimal"] else ", best found"),
            f"{line['greedy_us']:.1f} (+{line['greedy_us'] / line['routing_bound_us'] - 1:.0%})"
            if line in compared
            else "",
            f"{line['final_us']:.1f} (+{line['gap']:.1%})",
            f"{line['ring_us']:.1f}" if line in compared else "",
            f"{line['routing_s']:.1f} + {line['ordering_s']:.1f}",
        )
        for line in lines
    ]
    models = markdown(
        ("sketch", "routing bound, us", "greedy order, us", "ours, us", "one ring, us", "seconds: route + order"),
        rows,
    )
    simulations = markdown(
        ("sketch", "ours, us", "forest, us", "one ring, us"),
        [
            (
                f"`{line['sketch']}`",
                *(f"{line[f'simulated_{method}_us']:.0f}" for method in ("sketch", "forest", "ring")),
            )
            for line in compared
        ],
    )
    claims = markdown(
        ("claim or earlier measurement", "here", "reproduced"),
        [
            (
                "the public code's ordering loses up to 87 % against its routing (measured earlier, DGX-2 x2)",
                f"the greedy order loses up to {lost:.0%} on our routes (`{worst['sketch']}`), ours "
                f"{max(line['gap'] for line in lines):.1%}",
                "the loss in kind; its figure belongs to other routes and a cost table of its own",
            ),
            (
                "the public code routes one NDv2 in 10.0 s with Gurobi's free licence (measured earlier)",
                ", ".join(f"{line['routing_s']:.1f} s (`{line['sketch']}`)" for line in lines) + " with CP-SAT",
                "another solver and machine",
            ),
            (
                "up to 6.7 times as fast as NCCL",
                f"{min(leads):.1f} to {max(leads):.1f} times as fast as one ring, alpha-beta model",
                "no: measured on GPUs; NCCL runs several rings at once",
            ),
            (
                "80 GPUs planned in under 3 minutes",
                f"{largest['ranks']} in {largest['total_s']:.0f} s, {largest['gap']:.1%} above the routing bound",
                "yes, of planning",
            ),
            ("17 % faster MoE training", "", "no: measured on GPUs"),
        ],
    )
    return (
        f"Alpha-beta model, all_gather, chunks of 1 MB:\n\n{models}\n"
        f"The same schedules in the event simulation, which shares links and cuts messages into pieces:\n\n"
        f"{simulations}\n{claims}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, records, puts the tables into the docs; 1 where a sketch ends too far from its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, help="seconds to search, a sketch")
    parser.add_argument("--only", choices=CASES, action="append", help="this sketch; may be repeated; no table")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--tables", action="store_true", help="make the tables from the recorded lines only")
    options = parser.parse_args(arguments)
    if options.tables:
        write_section(PAGE, "taccl", tables(read(options.output)))
        return 0
    marks = {**stamp(), "hardware": describe_hardware()}
    lines = []
    for name in options.only or CASES:
        lines.append({**measure(name, options.time_limit), **marks})
        print({key: value for key, value in lines[-1].items() if key != "hardware"}, flush=True)
    if not options.only:
        options.output.unlink(missing_ok=True)
        append(options.output, lines)
        text = tables(lines)
        print(text, end="")
        write_section(PAGE, "taccl", text)
    good = all(line["routing_optimal"] and line["gap"] <= ALLOWED and line["total_s"] < 60 for line in lines)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
