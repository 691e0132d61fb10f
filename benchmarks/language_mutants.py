"""Mutants of written collectives, and what the language and an independent judge say of each.

    python benchmarks/language_mutants.py --count 3000

A mutant is a right program of ``examples/collectives.py`` with one mistake: a statement dropped, said twice, sent to
another rank, moved to another place, or made to read before what it waited for is there (its step is joined with the
one before); or a wait of the finished schedule taken away. What is accepted has to be right in ``judge.py``, which
computes with numbers, and its programs have to be proved; what is refused has to name a line of the author's file.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from mycel.collectives.language import Statement, Written
from mycel.collectives.language.written import check, schedule_from, traced
from mycel.collectives.lower import lower
from mycel.collectives.proof import prove_lowering
from mycel.collectives.routes import way_through
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective
from mycel.errors import MycelError
from mycel.topology.load import load_topology
from mycel.topology.model import Topology

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from judge import judge_programs, judge_schedule  # noqa: E402

__all__ = ["KINDS", "Outcome", "mutants", "programs"]

FILE = ROOT / "examples" / "collectives.py"
FABRICS = (
    *(f"star:ranks={n}" for n in (3, 4, 5, 8)),
    "ring:ranks=4",
    *(f"two_boxes:ranks={n}" for n in (4, 8)),
)
KINDS = ("drop", "double", "redirect", "reorder", "join", "unwait")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a mutant.

    Attributes:
        kind: of the mistake.
        program: it was made in, and on which fabric.
        refusal: the language's message; ``None``: it was accepted.
        names_line: whether the message names a line of the author's file.
        defect: what the judge found wrong with what was accepted; ``None``: nothing.
    """

    kind: str
    program: str
    refusal: str | None
    names_line: bool = True
    defect: str | None = None

    @property
    def is_good(self) -> bool:
        """Accepted and right, or refused with the line."""
        return self.defect is None if self.refusal is None else self.names_line


@cache
def programs() -> dict[str, Written]:
    """The written collectives of the file, by name."""
    spec = importlib.util.spec_from_file_location("language_examples", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: value for name, value in vars(module).items() if isinstance(value, Written)}


@cache
def _right(name: str, fabric: str) -> tuple[tuple[Statement, ...], Topology, Collective, Written] | None:
    """A right program's statements; ``None`` where the fabric has none of it."""
    written, topology = programs()[name], load_topology(fabric)
    wanted = Collective(written.serves[0], topology.num_ranks)
    try:
        written.on(topology)
    except MycelError:
        return None
    return traced(written, topology, wanted), topology, wanted, written


def mutants(count: int, seed: int) -> Iterator[Outcome]:
    """So many, of all programs, fabrics and mistakes in turn."""
    chance = random.Random(seed)
    subjects = [(name, fabric) for name in programs() for fabric in FABRICS if _right(name, fabric)]
    chance.shuffle(subjects)
    made = 0
    while made < count:
        name, fabric = subjects[made // len(KINDS) % len(subjects)]
        kind = KINDS[made % len(KINDS)]
        right = _right(name, fabric)
        assert right is not None
        yield _outcome(kind, f"{name} on {fabric}", *right, chance)
        made += 1


def _outcome(
    kind: str,
    program: str,
    statements: Sequence[Statement],
    topology: Topology,
    wanted: Collective,
    written: Written,
    chance: random.Random,
) -> Outcome:
    try:
        if kind == "unwait":
            built = schedule_from(statements, topology, wanted, written.name, written.where)
            schedule = _unwaited(built.schedule, chance)
            check(schedule, built.statements, written.where)
        else:
            changed = _changed(kind, list(statements), topology, chance)
            schedule = schedule_from(changed, topology, wanted, written.name, written.where).schedule
    except MycelError as error:
        names = re.search(rf"{re.escape(str(FILE))}:\d+", str(error)) is not None
        return Outcome(kind=kind, program=program, refusal=str(error), names_line=names)
    defect = judge_schedule(schedule)
    if defect is None:
        try:
            prove_lowering(schedule)
            defect = judge_programs(lower(schedule, 2 * schedule.num_units, piece_elements=1 << 20))
        except MycelError as error:
            defect = f"its programs: {error}"
    return Outcome(kind=kind, program=program, refusal=None, defect=defect)


def _changed(kind: str, said: list[Statement], topology: Topology, chance: random.Random) -> list[Statement]:
    at = chance.randrange(len(said))
    if kind == "drop":
        del said[at]
    elif kind == "double":
        last = max(number for number, s in enumerate(said) if s.step == said[at].step)
        again = replace(said[at], step=said[last].step + 1)  # in a step of its own, right behind
        said = [*said[: last + 1], again, *(replace(s, step=s.step + 2) for s in said[last + 1 :])]
    elif kind == "redirect":
        s, n = said[at], topology.num_ranks
        end = chance.choice(("src", "dst"))
        others = [
            (rank, way)
            for rank in range(n)
            if rank not in (s.src, s.dst)
            for ends in [(rank, s.dst) if end == "src" else (s.src, rank)]
            for way in [way_through(topology, [topology.ranks[r] for r in ends])]
            if way is not None
        ]
        if others:
            rank, way = chance.choice(others)
            said[at] = replace(s, path=way, src=rank) if end == "src" else replace(s, path=way, dst=rank)
        else:
            del said[at]
    elif kind == "reorder":
        to = chance.randrange(len(said))
        moved = said.pop(at)
        said.insert(to, moved)
        said = [replace(s, step=number) for number, s in enumerate(said)]
    else:
        first = chance.randrange(max(1, len(said) - 1))
        low = said[first].step
        following = [s.step for s in said if s.step > low]
        joined = min(following, default=low)
        said = [replace(s, step=low) if s.step == joined else s for s in said]
    return said


def _unwaited(schedule: Schedule, chance: random.Random) -> Schedule:
    waiting = [number for number, t in enumerate(schedule.transfers) if t.after]
    if not waiting:
        return schedule
    at = chance.choice(waiting)
    t = schedule.transfers[at]
    gone = chance.choice(t.after)
    changed = replace(t, after=tuple(other for other in t.after if other != gone))
    return replace(schedule, transfers=(*schedule.transfers[:at], changed, *schedule.transfers[at + 1 :]))


def main() -> int:
    """Runs and prints; 1 if a mutant was accepted and is wrong, or refused without a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    started = time.perf_counter()
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    bad: list[Outcome] = []
    for outcome in mutants(options.count, options.seed):
        counts[outcome.kind]["refused" if outcome.refusal is not None else "accepted"] += 1
        if not outcome.is_good:
            bad.append(outcome)
            print(f"{outcome.program}, {outcome.kind}: {outcome.refusal or outcome.defect}", file=sys.stderr)
    print("| mistake | refused, with the line | accepted, and right |\n|---|---:|---:|")
    for kind, found in counts.items():
        print(f"| {kind} | {found['refused']} | {found['accepted']} |")
    print(f"{options.count} mutants in {time.perf_counter() - started:.0f} s; {len(bad)} judged wrongly")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
