"""The verifier of schedules as plain Python over objects: a list of counts a place, a set of transfers a transfer.

It says what the compiled verifier must say, to the letter. The exhaustive simulation in
``tests/property/test_verify_mutants_schedules.py`` says whether either is right.
"""

from __future__ import annotations

from itertools import pairwise

from mycel.collectives.schedule import Schedule

MANY = 1 << 30


def refusal(schedule: Schedule) -> str | None:
    """What is wrong with a schedule; ``None`` if nothing is."""
    members: list[list[int]] = [[] for _ in schedule.chunks]
    for index, transfer in enumerate(schedule.transfers):
        members[transfer.chunk].append(index)
    for chunk, indices in enumerate(members):
        wrong = _content(schedule, chunk, indices)
        if wrong:
            return wrong
    for chunks in _tied(schedule):
        wrong = _order(schedule, sorted(i for chunk in chunks for i in members[chunk]))
        if wrong:
            return wrong
    return None


def _content(schedule: Schedule, chunk: int, members: list[int]) -> str | None:
    collective, n, block = schedule.collective, schedule.collective.num_ranks, schedule.block_of(chunk)
    held = [[0] * n for _ in range(schedule.num_compute_vertices)]
    for rank in range(n):
        for owner in collective.initial(rank, block):
            held[rank][owner] = 1
    filled = [any(row) for row in held]
    last: dict[int, int] = {}
    for index in members:
        t = schedule.transfers[index]
        if not filled[t.src]:
            return _at(schedule, chunk, t.src, f"{_name(schedule, index)} reads it while it is empty")
        if t.reduce and not collective.reduces:
            problem = f"{_name(schedule, index)} adds, but {collective.name} combines nothing"
            return _at(schedule, chunk, t.dst, problem)
        if t.reduce and not filled[t.dst] and t.dst < n:
            return _at(schedule, chunk, t.dst, f"{_name(schedule, index)} adds to it while it is empty")
        there = held[t.dst] if t.reduce else [0] * n
        held[t.dst] = [min(a + b, MANY) for a, b in zip(there, held[t.src], strict=True)]
        filled[t.dst], last[t.dst] = True, index
    for rank in range(n):
        required = collective.required(rank, block)
        problem = "" if required is None else _counts(held[rank], required)
        if problem:
            history = "it is never written"
            if rank in last:
                t = schedule.transfers[last[rank]]
                history = f"last write: transfer {last[rank]}, step {schedule.levels[last[rank]]}, {t.src} -> {t.dst}"
            return _at(schedule, chunk, rank, f"{problem}; {history}")
    return None


def _counts(counts: list[int], required: frozenset[int]) -> str:
    missing = [r for r in sorted(required) if not counts[r]]
    foreign = [r for r, count in enumerate(counts) if count and r not in required]
    parts = [f"{_whose(missing)} missing"] if missing else []
    parts += [
        f"{_whose([r])} counted {'twice' if counts[r] == 2 else f'{counts[r]} times'}"
        for r in sorted(required)
        if counts[r] > 1
    ]
    return ", ".join([*parts, *([f"{_whose(foreign)} there and should not be"] if foreign else [])])


def _whose(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"contribution of rank {ranks[0]} is"
    return f"contributions of ranks {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''} are"


def _tied(schedule: Schedule) -> list[list[int]]:
    sets = [{chunk} for chunk in range(len(schedule.chunks))]
    for t in schedule.transfers:
        for earlier in t.after:
            one, two = (next(s for s in sets if c in s) for c in (t.chunk, schedule.transfers[earlier].chunk))
            if one is not two:
                sets.remove(two)
                one |= two
    return sorted(map(sorted, sets))


def _order(schedule: Schedule, members: list[int]) -> str | None:
    before: dict[int, set[int]] = {}  # everything complete when a transfer begins
    places: dict[tuple[int, int], list[tuple[str, list[int]]]] = {}
    for index in members:
        t = schedule.transfers[index]
        before[index] = {i for earlier in t.after for i in (earlier, *before[earlier])}
        for node, kind in ((t.src, "reads"), (t.dst, "adds to" if t.reduce else "overwrites")):
            runs = places.setdefault((node, t.chunk), [])
            if not runs or runs[-1][0] != kind or kind == "overwrites":
                runs.append((kind, []))
            runs[-1][1].append(index)
    for (node, chunk), runs in places.items():
        for (kind, first), (kind_now, now) in pairwise(runs):
            for index in now:
                for missing in sorted(set(first) - before[index]):
                    return _at(
                        schedule,
                        chunk,
                        node,
                        f"{_name(schedule, missing)} {kind} it and {_name(schedule, index)} {kind_now} it in no "
                        f"fixed order; let transfer {index} come after {missing}",
                    )
    return None


def _name(schedule: Schedule, index: int) -> str:
    t = schedule.transfers[index]
    return f"transfer {index} (step {schedule.levels[index]}, {t.src} -> {t.dst})"


def _at(schedule: Schedule, chunk: int, node: int, problem: str) -> str:
    n = schedule.collective.num_ranks
    label = schedule.topology.label(schedule.topology.compute_vertices[node])
    where = f"rank {node}" if node < n else f"switch {label} ({node})"
    return f"{schedule.collective.name} over {n} ranks is wrong at {where}, chunk {chunk}: {problem}"
