"""Mutants of everything the planner makes, and whether the verifier sees them: a table by kind and by method.

Schedules of every method for every collective it serves on small fabrics, the programs they are lowered to, and
their MSCCL XML, each with one thing changed. What the verifier accepts must be equivalent, and what it refuses must
be wrong, as a plain judge of its own finds (``judge.py``: all pairs of accesses, and numbers). Exit 1 if they differ
once. Mutants that are malformed, such as an offset outside its buffer, are refused when they are made, before anybody
verifies them, and counted apart.

    python benchmarks/mutants.py                      # 40,000 mutants, of which 20,000 and more are wrong
    python benchmarks/mutants.py --count 1200 --seed 7
    python benchmarks/mutants.py --partners --count 20000   # where partners add each other's sums
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from xml.etree import ElementTree as ET

sys.path.insert(0, str(Path(__file__).resolve().parent))

from judge import judge_programs, judge_schedule, judge_xml
from mycel.collectives.export import export
from mycel.collectives.imports.msccl_xml import parse
from mycel.collectives.lower import lower
from mycel.collectives.program import Buffer, Instruction, Op, Program
from mycel.collectives.schedule import Schedule, Transfer
from mycel.collectives.spec import COLLECTIVES, ROOTED, Collective, permutation
from mycel.collectives.synth import BY_SIZE, NAMED_ONLY, WHERE_THEY_FIT, candidates_for, synthesize
from mycel.collectives.synth.classics import classics_for
from mycel.collectives.verify import verify_programs, verify_schedule
from mycel.collectives.verify.blocks import verify_blocks
from mycel.errors import MycelError, ScheduleError, SynthesisError
from mycel.topology.builders import full_mesh, ring, star, two_boxes
from mycel.topology.change import compute_in_switch
from mycel.topology.model import Topology

FABRICS: tuple[Topology, ...] = (
    star(num_ranks=3),
    two_boxes(num_ranks=4),
    ring(num_ranks=4),
    full_mesh(num_ranks=4),
    star(num_ranks=5),
    star(num_ranks=4, computes=True),
    compute_in_switch(two_boxes(num_ranks=6, between="150 Mbit/s"), "*"),
)
#: Larger ones, where only schedules in which partners add each other's sums are changed.
PARTNERS: tuple[Topology, ...] = (full_mesh(num_ranks=8), star(num_ranks=9), two_boxes(num_ranks=10))
XML = ("all_gather", "reduce_scatter", "all_reduce")
#: ``(fabric, collective, method, level)``.
Subject = tuple[int, str, str, str]
#: ``(method, level, kind, outcome)``.
Row = tuple[str, str, str, str]


def subjects() -> list[Subject]:
    """Every method, collective and level; where a method finds no schedule on a fabric is found out later."""
    return [
        (where, name, method, level)
        for where in range(len(FABRICS))
        for name in COLLECTIVES
        for method in (
            *candidates_for(name),
            *(m for m, served in (NAMED_ONLY | BY_SIZE).items() if name in served),
            *classics_for(name),
        )
        for level in ("schedule", "program", *(("xml",) if name in XML else ()))
    ]


def subjects_with_partners() -> list[Subject]:
    """Those in which partners add each other's sums, of all_reduce, which alone has any; on larger fabrics too."""
    methods = [*(m for m in candidates_for("all_reduce") if m in WHERE_THEY_FIT), *classics_for("all_reduce")]
    return [
        (where, "all_reduce", method, level)
        for where in range(len(FABRICS + PARTNERS))
        for method in methods
        if (found := made(where, "all_reduce", method)) is not None and found.has_places
        for level in ("schedule", "program", "xml")
    ]


# -- schedules ------------------------------------------------------------------------------------------------


def _path(topology: Topology, src: int, dst: int) -> tuple[int, ...] | None:
    """A shortest path between two nodes that passes no rank."""
    start, goal = topology.compute_vertices[src], topology.compute_vertices[dst]
    reached: dict[int, tuple[int, ...]] = {start: (start,)}
    for vertex in (queue := [start]):
        for a, b in topology.capacity:
            if a == vertex and b not in reached and (b == goal or topology.vertices[b].kind == "switch"):
                reached[b] = (*reached[vertex], b)
                queue.append(b)
    return reached.get(goal)


def _moved(schedule: Schedule, t: Transfer, src: int, dst: int) -> Transfer | None:
    path = _path(schedule.topology, src, dst) if src != dst else None
    return None if path is None else replace(t, src=src, dst=dst, path=path)


def schedule_mutant(schedule: Schedule, kind: str, chance: random.Random) -> Schedule | None:
    """The schedule with one change, or ``None`` where the drawn one cannot be made."""
    ts = list(schedule.transfers)
    i = chance.randrange(len(ts))
    t, n = ts[i], schedule.num_compute_vertices
    if kind == "drop":
        kept = [(k, x) for k, x in enumerate(ts) if k != i]
        heirs = [({*x.after, *t.after} - {i} if i in x.after else set(x.after), x) for _, x in kept]
        ts = [replace(x, after=tuple(sorted(k - (k > i) for k in after))) for after, x in heirs]
    elif kind == "repeat":
        later = [replace(x, after=(*(k + (k > i) for k in x.after), i + 1)) for x in ts[i + 1 :]]
        ts = [*ts[: i + 1], replace(t, after=(*t.after, i)), *later]
    elif kind == "forget a wait":
        if not t.after:
            return None
        lost = chance.randrange(len(t.after))
        ts[i] = replace(t, after=t.after[:lost] + t.after[lost + 1 :])
    elif kind == "add a wait":
        if not i:
            return None
        ts[i] = replace(t, after=tuple(sorted({*t.after, chance.randrange(i)})))
    elif kind == "reduce for copy":
        ts[i] = replace(t, reduce=not t.reduce)
    elif kind == "other chunk":
        ts[i] = replace(t, chunk=chance.randrange(len(schedule.chunks)))
    elif kind in PLACE_KINDS:
        if not schedule.has_places:
            return None
        most = 1 + max(max(x.places) for x in ts)
        read, written = t.places
        other = chance.randrange(most + 1)
        ts[i] = replace(t, places=(other, written) if kind == "other place read" else (read, other))
    elif kind == "swap":
        j = chance.randrange(len(ts))
        low, high = sorted((i, j))
        place = {low: high, high: low}
        ts[low], ts[high] = ts[high], ts[low]
        ts = [replace(x, after=tuple(sorted(place.get(k, k) for k in x.after))) for x in ts]
    else:
        ends = {
            "turn": (t.dst, t.src),
            "other source": (chance.randrange(n), t.dst),
            "other destination": (t.src, chance.randrange(n)),
        }[kind]
        moved = _moved(schedule, t, *ends)
        if moved is None:
            return None
        ts[i] = moved
    return replace(schedule, transfers=tuple(ts))


#: Changes that only schedules have in which partners add each other's sums.
PLACE_KINDS = ("other place read", "other place written", "swap")
SCHEDULE_KINDS = (
    "drop",
    "repeat",
    "forget a wait",
    "add a wait",
    "reduce for copy",
    "other chunk",
    "turn",
    "other source",
    "other destination",
    *PLACE_KINDS,
)

# -- programs -------------------------------------------------------------------------------------------------

PROGRAM_KINDS = (
    "drop a message",
    "drop an end",
    "drop a copy",
    "forget a need",
    "add a need",
    "other offset",
    "other operand",
    "other count",
    "other buffer",
    "other channel",
    "swap",
    "reduce for receive",
    "final",
)


def _without(code: list[Instruction], lost: int) -> list[Instruction]:
    kept = [i for index, i in enumerate(code) if index != lost]
    return [replace(i, needs=tuple(n - (n > lost) for n in i.needs if n != lost)) for i in kept]


def _rebuilt(program: Program, code: list[Instruction]) -> Program:
    return Program.from_instructions(
        code,
        collective=program.collective,
        rank=program.rank,
        num_elements=program.num_elements,
        scratch_elements=program.scratch_elements,
        channels=program.channels,
    )


def program_mutant(programs: list[Program], kind: str, chance: random.Random) -> list[Program] | None:
    """The programs with one change, or ``None`` where the drawn one cannot be made."""
    changed = list(programs)
    rank = chance.randrange(len(programs))
    code = list(programs[rank].instructions)
    if not code:
        return None
    k = chance.randrange(len(code))
    i = code[k]
    if kind == "drop a message":
        if i.op is not Op.SEND:
            return None
        channel = programs[rank].channels[i.channel]
        turn = sum(x.channel == i.channel for x in code[:k])
        other = programs[channel.dst]
        number = other.channels.index(channel)
        met = [j for j, x in enumerate(other.instructions) if x.channel == number][turn]
        changed[channel.dst] = _rebuilt(other, _without(list(other.instructions), met))
        code = _without(code, k)
    elif kind in ("drop an end", "drop a copy"):
        if (i.op is Op.COPY) != (kind == "drop a copy"):
            return None
        code = _without(code, k)
    elif kind == "swap":
        later = [j for j in range(k + 1, len(code)) if code[j].channel == i.channel >= 0]
        if not later:
            return None
        place = {k: later[0], later[0]: k}
        code[k], code[later[0]] = code[later[0]], code[k]
        code = [replace(x, needs=tuple(place.get(n, n) for n in x.needs)) for x in code]
    else:
        new = _instruction_mutant(programs[rank], i, k, len(code), kind, chance)
        if new is None:
            return None
        code[k] = new
    changed[rank] = _rebuilt(programs[rank], code)
    return changed


def _instruction_mutant(
    program: Program, i: Instruction, k: int, length: int, kind: str, chance: random.Random
) -> Instruction | None:
    shift = chance.choice((-2, -1, 1, 2))
    if kind == "forget a need" and i.needs:
        lost = chance.randrange(len(i.needs))
        return replace(i, needs=i.needs[:lost] + i.needs[lost + 1 :])
    if kind == "add a need" and length > 1:
        return replace(i, needs=tuple(sorted({*i.needs, chance.choice([j for j in range(length) if j != k])})))
    if kind == "other offset":
        return replace(i, offset=i.offset + shift)
    if kind == "other operand" and i.op >= Op.RECV_REDUCE:
        return replace(i, operand_offset=i.operand_offset + shift)
    if kind == "other count":
        return replace(i, count=i.count + chance.choice((-1, 1)))
    if kind == "other buffer":
        return replace(i, buffer=chance.choice([b for b in Buffer if b is not i.buffer]))
    if kind == "other channel" and i.channel >= 0 and len(program.channels) > 1:
        return replace(i, channel=chance.choice([c for c in range(len(program.channels)) if c != i.channel]))
    if kind == "reduce for receive" and i.op in (Op.RECV, Op.RECV_REDUCE):
        other = Op.RECV if i.op is Op.RECV_REDUCE else Op.RECV_REDUCE
        return replace(i, op=other, operand_buffer=i.buffer, operand_offset=i.offset)
    if kind == "final" and i.op in (Op.RECV_REDUCE, Op.REDUCE):
        return replace(i, final=not i.final)
    return None


# -- MSCCL XML ------------------------------------------------------------------------------------------------

XML_KINDS = (
    "drop",
    "forget a wait",
    "other wait",
    "swap",
    "other source",
    "other target",
    "other count",
    "other buffer",
    "other type",
    "other peer",
    "other channel",
    "hasdep",
)


def xml_mutant(algo: ET.Element, kind: str, chance: random.Random) -> ET.Element | None:
    """The file with one change, or ``None`` where the drawn one cannot be made."""
    changed = deepcopy(algo)
    gpu = chance.choice([gpu for gpu in changed if len(gpu)])
    tb = chance.choice(list(gpu))
    if not len(tb):
        return None
    at = chance.randrange(len(tb))
    step = tb[at]
    waits = step.get("depid") != "-1"
    if kind == "drop":
        number = list(gpu).index(tb)
        tb.remove(step)
        for row, other in enumerate(tb):
            other.set("s", str(row))
        for other in gpu.iter("step"):
            if other.get("depid") == str(number) and int(other.attrib["deps"]) > at:
                other.set("deps", str(int(other.attrib["deps"]) - 1))
    elif kind == "forget a wait":
        if not waits:
            return None
        step.attrib |= {"depid": "-1", "deps": "-1"}
    elif kind == "other wait":
        if not waits:
            return None
        step.set("deps", str(int(step.attrib["deps"]) + chance.choice((-1, 1))))
    elif kind == "swap":
        if at + 1 == len(tb):
            return None
        one, two = tb[at], tb[at + 1]
        kept = (one.get("s"), one.get("hasdep")), (two.get("s"), two.get("hasdep"))
        tb[at], tb[at + 1] = two, one
        for element, (number, awaited) in zip(tb[at : at + 2], kept, strict=True):
            element.attrib |= {"s": str(number), "hasdep": str(awaited)}
    elif kind in ("other source", "other target"):
        side = "srcoff" if kind == "other source" else "dstoff"
        step.set(side, str(int(step.attrib[side]) + chance.choice((-1, 1))))
    elif kind == "other count":
        step.set("cnt", str(int(step.attrib["cnt"]) + chance.choice((-1, 1, 71))))
    elif kind == "other buffer":
        side = chance.choice(("srcbuf", "dstbuf"))
        step.set(side, chance.choice([b for b in "ios" if b != step.get(side)]))
    elif kind == "other type":
        kinds = ("s", "r", "rcs", "rrs", "rrc", "rrcs", "cpy", "re", "nop")
        step.set("type", chance.choice([k for k in kinds if k != step.get("type")]))
    elif kind == "other peer":
        side = chance.choice(("send", "recv"))
        ranks = [str(r) for r in range(-1, len(changed)) if str(r) != tb.get(side)]
        tb.set(side, chance.choice(ranks))
    elif kind == "other channel":
        tb.set("chan", str(int(tb.attrib["chan"]) + chance.choice((-1, 1))))
    else:
        step.set("hasdep", "0" if step.get("hasdep") == "1" else "1")
    return changed


# -- running --------------------------------------------------------------------------------------------------


def _refusal(check: Callable[[], object]) -> str | None:
    try:
        check()
    except ScheduleError as error:
        return str(error)
    return None


def _mutants(schedule: Schedule, level: str, chance: random.Random) -> Iterator[tuple[str, str | None, str | None]]:
    """``(kind, refusal, defect)`` for ever: what the verifier says, and what the judge does."""
    kinds = {"schedule": SCHEDULE_KINDS, "program": PROGRAM_KINDS, "xml": XML_KINDS}[level]
    programs: list[Program] = []
    algo = ET.Element("none")
    if level == "program":
        blocks = schedule.collective.num_blocks
        elements = schedule.num_units * (1 if schedule.num_units > 12 else 2) if schedule.num_units % blocks else 0
        programs = list(lower(schedule, elements or 2 * schedule.num_units, piece_elements=3))
        assert judge_programs(programs) is None
    elif level == "xml":
        algo = ET.fromstring(export(schedule, "msccl_xml"))
        assert judge_xml(algo) is None
    else:
        assert judge_schedule(schedule) is None
    while True:
        kind = chance.choice(kinds)
        if level == "schedule":
            try:
                wrong = schedule_mutant(schedule, kind, chance)
            except MycelError as error:
                yield kind, str(error), "malformed"
                continue
            if wrong is not None:
                yield kind, _refusal(lambda s=wrong: verify_schedule(s)), judge_schedule(wrong)  # type: ignore[misc]
        elif level == "program":
            try:
                others = program_mutant(programs, kind, chance)
            except MycelError as error:
                yield kind, str(error), "malformed"
                continue
            if others is not None:
                yield kind, _refusal(lambda p=others: verify_programs(p)), judge_programs(others)  # type: ignore[misc]
        else:
            file = xml_mutant(algo, kind, chance)
            if file is not None:
                text = ET.tostring(file, encoding="unicode")
                yield kind, _refusal(lambda t=text: verify_blocks(parse(t))), judge_xml(file)  # type: ignore[misc]


@cache
def made(where: int, name: str, method: str) -> Schedule | None:
    """The method's schedule on a fabric, if it has one."""
    root = 1 if name in ROOTED else None
    fabric = (FABRICS + PARTNERS)[where]
    n = fabric.num_ranks
    uneven = tuple(place % 3 for place in range(n * n)) if method == "skewed" else None
    if method == "permute":
        uneven = permutation([(rank + 1) % n for rank in range(n)]).weights
    collective = Collective(name=name, num_ranks=n, root=root, weights=uneven)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, object] = {}
        if method == "sketch":
            options = {"sketch": Path(folder) / "sketch.json", "time_limit_s": 2.0}
            (Path(folder) / "sketch.json").write_text('{"nnodes": 1, "intranode_sketch": {"strategy": "none"}}')
        try:
            return synthesize(fabric, collective, method, **options)
        except SynthesisError:
            return None


def run_subject(subject: Subject, count: int, seed: int) -> list[Row]:
    """Outcomes of ``count`` mutants; none where the method has no schedule on the fabric."""
    where, name, method, level = subject
    schedule = made(where, name, method)
    if schedule is None or (level == "xml" and schedule.num_compute_vertices > schedule.collective.num_ranks):
        return []
    chance = random.Random(f"{seed} {subject}")
    rows: list[Row] = []
    mutants = _mutants(schedule, level, chance)
    for _ in range(count):
        kind, refusal, defect = next(mutants)
        if refusal is not None and defect is not None:
            outcome = "malformed" if defect == "malformed" else "rejected"
        elif refusal is None and defect is None:
            outcome = "equivalent"
        else:
            outcome = "MISSED" if refusal is None else "REFUSED THOUGH RIGHT"
            print(f"{outcome}: {subject} {kind}: verifier: {refusal}; judge: {defect}", file=sys.stderr)
        rows.append((method, level, kind, outcome))
    return rows


def run(count: int, seed: int, processes: int, *, partners: bool = False) -> list[Row]:
    """Outcomes of at least ``count`` mutants over all subjects that have a schedule."""
    chosen = subjects_with_partners() if partners else subjects()
    each = -(-count // len(chosen)) if partners else -(-count * 10 // (len(chosen) * 8))  # a fifth has no schedule
    if processes == 1:
        return [row for subject in chosen for row in run_subject(subject, each, seed)]
    rows: list[Row] = []
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for part in pool.map(run_subject, chosen, [each] * len(chosen), [seed] * len(chosen), chunksize=9):
            rows += part
    return rows


def table(rows: Iterable[Row], columns: tuple[int, ...]) -> str:
    """Counts of outcomes by some columns of the rows."""
    counts: dict[tuple[str, ...], Counter[str]] = {}
    for row in rows:
        counts.setdefault(tuple(row[c] for c in columns), Counter())[row[3]] += 1
    names = ["method", "level", "change", ""]
    lines = [f"| {' | '.join(names[c] for c in columns)} | mutants | malformed | equivalent | wrong | refused |"]
    lines.append("|" + "---|" * len(columns) + "---:|" * 5)
    for key, outcomes in sorted(counts.items()):
        wrong = outcomes["rejected"] + outcomes["MISSED"]
        share = f"{outcomes['rejected'] / wrong:.2%}" if wrong else "-"
        numbers = (outcomes.total(), outcomes["malformed"], outcomes["equivalent"], wrong)
        lines.append(f"| {' | '.join([*key, *(f'{number:,}' for number in numbers), share])} |")
    return "\n".join(lines)


def main() -> int:
    """Runs and prints; 1 if the verifier and the judge differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--partners", action="store_true", help="only schedules in which partners add each other's sums"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    options = parser.parse_args()
    started = time.perf_counter()
    rows = run(options.count, options.seed, options.processes, partners=options.partners)
    seconds = time.perf_counter() - started
    totals = Counter(row[3] for row in rows)
    bad = totals["MISSED"] + totals["REFUSED THOUGH RIGHT"]
    if options.json:
        print(json.dumps({"mutants": len(rows), "seconds": round(seconds, 1), "seed": options.seed, **totals}))
    else:
        print(table(rows, (1, 2)), table(rows, (0,)), sep="\n\n")
        print(
            f"\n{len(rows):,} mutants in {seconds:.0f} s: {totals['malformed']:,} malformed and refused when made, "
            f"{totals['rejected']:,} wrong and refused, "
            f"{totals['equivalent']:,} equivalent, {totals['MISSED']:,} missed, "
            f"{totals['REFUSED THOUGH RIGHT']:,} refused though right"
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
