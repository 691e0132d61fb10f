"""The fault matrix: every fault in every collective, and whether all survivors say the same, right thing in time.

    python -m tests.faults [--cluster star4] [--faults kill stop ...] [--collectives all_reduce ...] [--json FILE]

A cell is one collective, called over and over on the ranks of an emulated cluster, and one fault in the middle:

``kill``, ``stop``  a rank is killed (``kill -9``), or stopped for good
``children``, ``orphan``  killed, while a process it has forked lives on: one of Python's, or one made past Python
``new_group``       killed, while the others make a new group
``power``           a machine goes dark: nothing comes from it any more, not even that it has gone
``half``, ``down``  packets over a link are dropped, in one direction or in both
``slow``, ``store``  a rank is late by half the time-out; the process that holds the store is killed: no error
``handler``, ``swap``  ranks meet in a signal handler in the middle of a call; the storage of a tensor under way is
                    exchanged by its owner: no error
``mismatch``  a rank calls another collective, size, type, operation or root (late, too), or in another order

``send_recv`` is no collective: all ranks exchange messages with the one that the fault hits. Faults of links are left
out there, for a message that waits for a link names its ranks. Two ranks that miss it at the same moment each say so
of a message of their own.

``--cluster processes`` has no links that could break: its ranks are processes of one machine, which share memory.

A cell is right when every survivor raises the same error, of the right kind, that names the rank or the link, not
later than the time-out after its call; when a second call fails at once with the same cause; and when no process is
left. A rank that the fault cuts off from all others is not asked to agree with them, but to name the same link.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from mycel.emulate.launch import Run, start
from mycel.topology.builders import loopback
from mycel.topology.load import load_topology
from mycel.topology.model import Topology

__all__ = ["COLLECTIVES", "FAULTS", "Cell", "Matrix", "Outcome", "cells", "main"]

HERE = Path(__file__).resolve().parent
CLUSTERS = HERE.parents[1] / "examples" / "clusters"
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "all_to_all_split",
    "gather",
    "scatter",
    "barrier",
    "send_recv",
)
FAULTS = (
    "kill",
    "stop",
    "half",
    "down",
    "slow",
    "store",
    "mismatch",
    "power",
    "children",
    "orphan",
    "new_group",
    "handler",
    "swap",
)
#: Faults that messages name in other words than collectives, or do not know.
NOT_OF_MESSAGES = ("half", "down", "handler")
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
ERRORS = {
    "kill": "PeerLostError",
    "stop": "CollectiveTimeoutError",
    "half": "CollectiveTimeoutError",
    "down": "CollectiveTimeoutError",
    "slow": "none",
    "store": "none",
    "mismatch": "MismatchError",
    "power": "PeerLostError",
    "children": "PeerLostError",
    "orphan": "PeerLostError",
    "new_group": "PeerLostError",
    "handler": "none",
    "swap": "none",
}
TIMEOUT_S = 5.0
#: Of faults that must be noticed long before it, and within how long.
FAR_S = 1800.0
NOTICED_S = {"power": 10.0, "children": 3.0, "orphan": 3.0, "new_group": 3.0}
#: Ranks on this machine's loopback, instead of an emulated cluster, and faults that take links.
PROCESSES, NUM_PROCESSES = "processes", 4
LINK_FAULTS = ("half", "down", "power")
KILLS = ("kill", "children", "orphan", "new_group")
#: How a call begins its words that finds the group failed.
EARLIER = "the process group failed earlier: "
#: For a busy machine's wake-up, and to be at once.
LATE_S, SOON_S = 1.0, 1.0
#: For everything else, imports of torch included, before the matrix gives up.
PATIENCE_S = 90.0
_FIRST_PORT = 29600


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One fault in one collective; ``variant`` says which mismatch, or what else than a call the others are at."""

    fault: str
    collective: str
    variant: str = ""
    victim: int = 2

    @property
    def label(self) -> str:
        """For the table."""
        return f"{self.fault} {self.variant}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a cell; ``complaints`` is empty where it is right."""

    cell: Cell
    complaints: tuple[str, ...]
    message: str
    seconds: float


def cells(faults: Sequence[str] = FAULTS, collectives: Sequence[str] = COLLECTIVES) -> list[Cell]:
    """The matrix."""
    made = []
    for fault in faults:
        for collective in collectives:
            variants = [""]
            if fault in ("new_group", "swap") and collective != "all_reduce":
                continue
            if collective == "send_recv" and fault in NOT_OF_MESSAGES:
                continue
            if fault == "power" and collective == "all_reduce":
                variants += ["new_group", "between"]
            if fault == "mismatch":
                variants = ["collective", "order"]
                variants += ["size", "type"] if collective != "barrier" else []
                variants += ["operation"] if collective in REDUCING else []
                variants += ["root"] if collective in ROOTED else []
                variants += ["late root"] if collective == "broadcast" else []
                if collective == "send_recv":
                    variants.remove("collective")
            made += [Cell(fault=fault, collective=collective, variant=variant) for variant in variants]
    return made


class Matrix:
    """The ranks of one emulated cluster, and the cells that are run on them."""

    def __init__(
        self, topology: Topology, run: Run, directory: Path, heard: queue.SimpleQueue[dict[str, Any]]
    ) -> None:
        self.topology = topology
        self._run, self._directory, self._heard = run, directory, heard
        self._numbers = count()
        self._await("up", None)
        self._pipes = [(directory / f"cells{rank}").open("w", encoding="utf-8") for rank in range(topology.num_ranks)]

    def close(self) -> None:
        """Have the ranks end."""
        for pipe in self._pipes:
            pipe.close()

    @property
    def broken_link(self) -> tuple[int, int]:
        """The link that breaks: the first of the victim's, or of rank 2's neighbours."""
        vertex = self.topology.ranks[2]
        return next((link.src, link.dst) for link in self.topology.links if link.src == vertex)

    def outcome(self, cell: Cell) -> Outcome:
        """Run a cell."""
        number = next(self._numbers)
        request = {
            **asdict(cell),
            "number": number,
            "timeout_s": FAR_S if cell.fault in NOTICED_S else TIMEOUT_S,
            "store_file": str(self._directory / f"store{number}"),
            "port": _FIRST_PORT + number % 1000,
        }
        for pipe in self._pipes:
            pipe.write(json.dumps(request) + "\n")
            pipe.flush()
        pids = {rank: record["pid"] for rank, record in self._await("pid", number).items()}
        self._await("running", number)
        src, dst = self.broken_link
        ways = [(src, dst)] if cell.fault == "half" else [(src, dst), (dst, src)] if cell.fault == "down" else []
        if cell.fault == "power":
            dark = self.topology.ranks[cell.victim]
            ways = [(link.src, link.dst) for link in self.topology.links if dark in (link.src, link.dst)]
        is_gone = cell.fault in (*KILLS, "stop", "power")
        if is_gone:
            os.kill(pids[cell.victim], signal.SIGKILL if cell.fault in KILLS else signal.SIGSTOP)
        for way in ways:
            self._run.set_link(*way, up=False)
        asked = set(range(self.topology.num_ranks)) - ({cell.victim} if is_gone else set())
        try:
            reports = self._await("first", number, asked)
        finally:
            for way in ways:
                self._run.set_link(*way, up=True)
            if cell.fault in ("stop", "power"):
                os.kill(pids[cell.victim], signal.SIGKILL)
        self._await("over", number)
        left = [rank for rank, pid in pids.items() if _exists(pid)]
        complaints = [*self._complaints(cell, reports), *(f"rank {rank} is left running" for rank in left)]
        firsts = [report["first"] for _, report in sorted(reports.items())]
        return Outcome(
            cell=cell,
            complaints=tuple(complaints),
            message=firsts[0][1],
            seconds=max(first[2] for first in firsts),
        )

    def _complaints(self, cell: Cell, reports: dict[int, dict[str, Any]]) -> Iterator[str]:
        src, dst = (self.topology.label(vertex) for vertex in self.broken_link)
        links = (f"link {src} -> {dst}", f"link {src} - {dst}", f"link {dst} - {src}")
        is_cut_off = cell.fault in ("half", "down") and len(self.topology.switches) == 1
        causes = set()
        for rank, report in sorted(reports.items()):
            kind, message, seconds = report["first"]
            if kind != ERRORS[cell.fault]:
                yield f"rank {rank} raised {kind}: {message}"
                continue
            if kind == "none":
                continue
            if not (is_cut_off and rank == cell.victim):
                causes.add(message.removeprefix(EARLIER))  # a rank that was through learns of it at its next call
            if cell.fault in ("half", "down"):
                if not any(link in message for link in links):
                    yield f"rank {rank} does not name {links[0]}: {message}"
            elif not re.search(rf"\brank {cell.victim}\b", message):
                yield f"rank {rank} does not name rank {cell.victim}: {message}"
            if seconds > NOTICED_S.get(cell.fault, TIMEOUT_S) + LATE_S or (
                cell.variant == "between" and seconds > SOON_S
            ):
                yield f"rank {rank} waited for {seconds:.1f} s"
            kind, again, seconds = report["second"]
            is_same = "failed earlier" in again and message in again
            if "new_group" in (cell.fault, cell.variant):  # the second is the first call of the old group
                is_same = bool(re.search(rf"\brank {cell.victim}\b", again))
            if kind != ERRORS[cell.fault] or not is_same:
                yield f"rank {rank} in its second call: {kind}: {again}"
            if seconds > SOON_S + (LATE_S if cell.fault == "new_group" else 0.0):
                yield f"rank {rank} waited for {seconds:.1f} s in its second call"
        if len(causes) > 1 and cell.collective != "send_recv":
            yield "causes differ: " + " | ".join(sorted(causes))

    def _await(self, key: str, number: int | None, ranks: set[int] | None = None) -> dict[int, dict[str, Any]]:
        """The records with this key, of every rank (or these)."""
        wanted = set(range(self.topology.num_ranks)) if ranks is None else ranks
        found: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + PATIENCE_S
        kept: list[dict[str, Any]] = []
        while set(found) < wanted:
            try:
                record = self._heard.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                missing = sorted(wanted - set(found))
                raise RuntimeError(f"ranks {missing} did not say {key!r} in {PATIENCE_S:g} s") from None
            if key in record and record.get("cell") == number and record["rank"] in wanted:
                found[record["rank"]] = record
            else:
                kept.append(record)
        for record in kept:
            self._heard.put(record)
        return found


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def matrix(cluster: str, elements: int = 1 << 18) -> Iterator[Matrix]:
    """Ranks that wait for cells: on one of the example clusters, or ``PROCESSES`` of this machine.

    Args:
        cluster: its name.
        elements: of float32, that a rank gives or gets in a call.
    """
    is_emulated = cluster != PROCESSES
    topology = load_topology(CLUSTERS / f"{cluster}.yaml") if is_emulated else loopback(num_ranks=NUM_PROCESSES)
    where = topology if is_emulated else topology.num_ranks
    heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def listen(rank: int, line: str) -> None:
        if line.startswith("{"):
            heard.put(json.loads(line))
        elif "Error" in line:
            print(f"[rank{rank}]: {line}", file=sys.stderr)

    with tempfile.TemporaryDirectory(prefix="mycel-faults-") as name:
        directory = Path(name)
        for rank in range(topology.num_ranks):
            os.mkfifo(directory / f"cells{rank}")
        command = [sys.executable, "-W", "ignore", str(HERE / "rank.py"), name]
        env = {"OMP_NUM_THREADS": "1", "FAULTS_ELEMENTS": str(elements)}
        with start(where, command, env=env, output=listen) as run:
            made = Matrix(topology, run, directory, heard)
            try:
                yield made
            finally:
                with suppress(OSError):
                    made.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix, or a part of it; 0 if every cell is right."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", default="star4", help="name of a file in examples/clusters, or 'processes'")
    parser.add_argument("--faults", nargs="+", default=FAULTS, choices=FAULTS)
    parser.add_argument("--collectives", nargs="+", default=COLLECTIVES, choices=COLLECTIVES)
    parser.add_argument("--elements", type=int, default=1 << 18, help="of float32, that a rank gives or gets")
    parser.add_argument("--json", type=Path, help="append a line for each cell")
    asked = parser.parse_args(arguments)
    chosen = cells(asked.faults, asked.collectives)
    if asked.cluster == PROCESSES:
        chosen = [cell for cell in chosen if cell.fault not in LINK_FAULTS]
    wrong = 0
    began = time.monotonic()
    with matrix(asked.cluster, asked.elements) as ranks:
        for cell in chosen:
            outcome = ranks.outcome(cell)
            wrong += bool(outcome.complaints)
            verdict = "WRONG" if outcome.complaints else "right"
            print(f"{cell.label:20} {cell.collective:18} {verdict}  {outcome.seconds:5.2f} s  {outcome.message}")
            for complaint in outcome.complaints:
                print(f"    {complaint}")
            sys.stdout.flush()
            if asked.json:
                record = {
                    "cluster": asked.cluster,
                    "elements": asked.elements,
                    **asdict(cell),
                    "right": not outcome.complaints,
                    "seconds": round(outcome.seconds, 3),
                    "message": outcome.message,
                }
                with asked.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
    took = time.monotonic() - began
    print(f"{asked.cluster}: {len(chosen) - wrong} of {len(chosen)} cells right, in {took:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
