"""Planning against the number of ranks: what a communicator does before its first calls, without sockets.

Each case is a process of its own, that of one rank. It makes the fabric, and for each collective what the first call
does: schedules (made and verified), the choice between them, the proof of the chosen one's programs, and this rank's
program. Compiled code is read (or compiled) on small fabrics first, which is not counted. Processor seconds by part,
memory beyond what was there before, transfers and steps; JSON lines go to ``--output``.

    python benchmarks/scale.py                                  # 16 to 1,024 ranks, 8 a node, nothing known of them
    python benchmarks/scale.py --ranks 4096 --collectives all_reduce
    python benchmarks/scale.py --ranks 60 --uneven              # the last node has half of the ranks
    python benchmarks/scale.py --topology dgx_a100:nodes=16     # a described fabric
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mycel.collectives.cost import choose
from mycel.collectives.lower import RankTemplate
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import COLLECTIVES, ROOTED, CollectiveName
from mycel.errors import CommunicationError
from mycel.runtime.calls import Call
from mycel.runtime.forms import Form, Workspace
from mycel.runtime.planner import Planner, sends_directly, verified_schedules
from mycel.runtime.prepared import Line, Prepared, asking
from mycel.runtime.proof import Proofs
from mycel.topology.builders import hosts
from mycel.topology.load import load_topology
from mycel.topology.model import Topology
from record import RECORDED, append, markdown, stamp

RANKS = (16, 64, 256, 1024)
PER_NODE = 8
USUAL: tuple[CollectiveName, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
#: Elements of 4 bytes that each rank's part of the array has.
ELEMENTS = 4096
ELEMENT_BYTES = 4
PARTS = ("schedules", "choice", "proof", "program")
LIMIT_S = 900
OUTPUT = RECORDED / "scale.jsonl"

T = TypeVar("T")


class Clock:
    """Processor seconds of this process by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, part: str, work: Callable[[], T]) -> T:
        """What the work gives; its time is added to the part's."""
        before = time.process_time()
        try:
            return work()
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.process_time() - before


def default_fabric(num_ranks: int, per_node: int, *, uneven: bool) -> Topology:
    """What a group without a topology file takes for its fabric; ``uneven``: half of the last node is missing."""
    names = [f"node{rank // per_node}" for rank in range(num_ranks)]
    return hosts(names[: num_ranks - per_node // 2] if uneven else names)


def first_call(fabric: Topology, name: CollectiveName, rank: int) -> dict[str, Any]:
    """What a rank does before its first call of a collective can run."""
    clock = Clock()
    root = 0 if name in ROOTED else None
    proofs = Proofs(rank, lambda kind, message: CommunicationError(f"{kind}: {message}"))
    machines = [number for number, _ in enumerate(fabric.ranks)]

    def prove(schedule: Schedule, call: Call, pieces: int, *, comes_back: bool) -> bool:
        return clock.time("proof", lambda: proofs.require(schedule, call, pieces, comes_back=comes_back))

    planner: Planner[Prepared] = Planner(
        rank,
        lambda name, root: verified_schedules(fabric, name, root),
        partial(choose, machines=machines),
        prove,
    )
    made = clock.time("schedules", lambda: planner.schedules(name, root))
    elements = ELEMENTS * (fabric.num_ranks**2 if name == "all_to_all" else fabric.num_ranks)
    call = Call(name=name, num_elements=elements, item_bytes=ELEMENT_BYTES, output_address=0, root=root)
    choice = clock.time("choice", lambda: planner.choice(name, root, elements * ELEMENT_BYTES))
    clock.time("program", lambda: [planner.plan(name, root, method) for method in made])
    if name == "all_to_all":
        clock.time("choice", lambda: sends_directly(made))
    started = time.process_time()
    planner.prepared(call, choice, partial(_lay_out, elements))
    rest = time.process_time() - started - clock.seconds.get("proof", 0.0)
    clock.seconds["program"] += rest
    return {
        "collective": name,
        "cpu_s": {part: clock.seconds.get(part, 0.0) for part in PARTS},
        "total_s": sum(clock.seconds.values()),
        "method": choice.method,
        "depth": {method: schedule.depth for method, schedule in made.items()},
        "algbw": {method: float(schedule.algbw) for method, schedule in made.items()},
    }


def _lay_out(num_elements: int, plan: RankTemplate, pieces: int) -> Prepared:
    lines, extras = [Line(-1)] * len(plan.channels), np.full(1, -1, dtype=np.int64)
    form = Form(plan, lines, extras, asking(1, -1), Workspace())
    return form.prepare(num_elements, pieces, ELEMENT_BYTES, None)


def measure(spec: str | None, num_ranks: int, per_node: int, uneven: bool, names: list[CollectiveName]) -> None:
    """One case in this process; prints its line."""
    for small in (default_fabric(12, 4, uneven=False), default_fabric(40, 8, uneven=True)):
        for name in names:
            first_call(small, name, small.num_ranks - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    clock = Clock()
    fabric = clock.time(
        "topology", lambda: load_topology(spec) if spec else default_fabric(num_ranks, per_node, uneven=uneven)
    )
    calls = []
    for name in names:
        calls.append(first_call(fabric, name, fabric.num_ranks - 1))
        calls[-1]["more_mib"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    line = {
        "topology": fabric.name,
        "ranks": fabric.num_ranks,
        "per_node": per_node,
        "uneven": uneven,
        "topology_s": clock.seconds["topology"],
        "calls": calls,
        "total_s": clock.seconds["topology"] + sum(call["total_s"] for call in calls),
        "before_mib": before / 1024,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps(line))


def table(lines: list[dict[str, Any]]) -> str:
    """A row a collective: processor seconds by part, and how deep its schedules are."""
    headings = ("topology", "ranks", "first call of", *(f"{part}, s" for part in PARTS), "in all, s", "MiB", "depth")
    rows = []
    for line in lines:
        rows.append((line["topology"], line["ranks"], "(fabric)", *"----", f"{line['topology_s']:.2f}", "-", "-"))
        for call in line["calls"]:
            parts = (f"{call['cpu_s'][part]:.2f}" for part in PARTS)
            depth = ", ".join(f"{method} {steps}" for method, steps in call["depth"].items())
            total, more = f"{call['total_s']:.2f}", f"{call['more_mib']:.0f}"
            rows.append((line["topology"], line["ranks"], call["collective"], *parts, total, more, depth))
    return markdown(headings, rows)


def main() -> None:
    """Run the cases, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--per-node", type=int, default=PER_NODE)
    parser.add_argument("--uneven", action="store_true", help="half of the last node's ranks are missing")
    parser.add_argument("--topology", help="a builder or file, instead of what is assumed of nodes")
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=USUAL)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="wall seconds a case may take")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.in_process:
        measure(asked.topology, asked.ranks[0], asked.per_node, asked.uneven, asked.collectives)
        return
    lines = []
    for ranks in asked.ranks[:1] if asked.topology else asked.ranks:
        words = [sys.executable, __file__, "--in-process", "--ranks", str(ranks), "--per-node", str(asked.per_node)]
        words += ["--uneven"] if asked.uneven else []
        words += ["--topology", asked.topology] if asked.topology else []
        words += ["--collectives", *asked.collectives]
        try:
            run = subprocess.run(words, capture_output=True, text=True, timeout=asked.limit, check=False)
        except subprocess.TimeoutExpired:
            print(f"{ranks} ranks: not done within {asked.limit:.0f} s", file=sys.stderr)
            continue
        if run.returncode:
            print(f"{ranks} ranks: {run.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            continue
        lines.append(json.loads(run.stdout.splitlines()[-1]) | stamp())
    append(asked.output, lines)
    print(table(lines))


if __name__ == "__main__":
    main()
