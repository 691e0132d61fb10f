"""Whole batches by CP-SAT: every block of every micro-batch has a start, and the makespan is proved to be the least.

The only formulation that needs no idea of what a good schedule looks like. It proves optima of small batches and
improves larger ones from a schedule that is known.

Where each amount that is taken has one block after it that gives back as much, memory is a resource that is in use
from the start of the one to the end of the other, and cumulative constraints reason about it; otherwise it is a
reservoir. Blocks take micro-batches in their order, as in repetends, so no generality is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from mycel.collectives.cp_sat import cp_sat
from mycel.pipeline.bounds import makespan_bound
from mycel.pipeline.placement import Placement
from mycel.pipeline.search.solving import Clock
from mycel.pipeline.timed import Place, Timed

__all__ = ["Whole", "batch_model", "find_whole", "limit_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """What a search for a whole batch gave.

    Attributes:
        timed: the best schedule; ``None`` where none was found in time.
        bound: that no schedule's makespan is below.
        is_feasible: ``False`` where it is proved that there is none.
    """

    timed: Timed | None
    bound: int
    is_feasible: bool = True


def find_whole(
    placement: Placement,
    num_micro_batches: int,
    *,
    clock: Clock,
    known: Timed | None = None,
    most_s: float = float("inf"),
    told: Callable[[int, int], None] | None = None,
) -> Whole:
    """The shortest schedule of a batch, as far as time allows.

    Args:
        placement: blocks, devices and caps.
        num_micro_batches: of the batch.
        clock: for all of the search.
        known: a schedule to improve.
        most_s: seconds for this one.
        told: called with each makespan that is found and the bound at that time.

    Returns:
        The best that was found, or that was known, and what is proved.
    """
    least = ceil(makespan_bound(placement, num_micro_batches).value)
    if known is not None and known.makespan <= least:
        return Whole(timed=known, bound=least)
    most = known.makespan - 1 if known is not None else _one_by_one(placement) * num_micro_batches
    model, starts, makespan = batch_model(placement, num_micro_batches, most)
    model.add(makespan >= least)
    model.minimize(makespan)
    found = None
    if told is not None:

        def found(solution: Any) -> None:
            told(round(solution.objective_value), round(solution.best_objective_bound))

    answer, solver = clock.solve(model, most_s=most_s, found=found)
    if answer == "none":
        return Whole(timed=known, bound=least if known is None else known.makespan, is_feasible=known is not None)
    if answer == "late":
        return Whole(timed=known, bound=_proved(solver, least, known))
    timed = Timed(placement=placement, starts=_read(solver, starts, placement, num_micro_batches))
    return Whole(timed=timed, bound=_proved(solver, least, timed))


def _proved(solver: Any, least: int, best: Timed | None) -> int:
    """The best of two bounds, where the solver got as far as having one."""
    try:
        proved = solver.best_objective_bound
    except RuntimeError:  # time was up before it began
        return least
    bound = max(least, ceil(proved - 1e-6)) if abs(proved) < 1e15 else least
    return bound if best is None else min(bound, best.makespan)


def batch_model(placement: Placement, count: int, most: int) -> tuple[Any, dict[Place, Any], Any]:
    """The model of a batch that takes at most so long, the start of each block in it, and its makespan.

    Args:
        placement: blocks, devices and caps.
        count: micro-batches.
        most: time.
    """
    model = cp_sat("the search for orders").CpModel()
    blocks, longest = placement.blocks, placement.longest
    numbers = range(len(blocks))
    before = [max(far for i in numbers if (far := longest[i][j]) is not None) - blocks[j].time for j in numbers]
    behind = [max(far for j in numbers if (far := longest[i][j]) is not None) for i in numbers]
    starts: dict[Place, Any] = {}
    for i in numbers:
        for m in range(count):
            # Micro-batches come in order, so that a block has at least the same block of all others before and after.
            least, latest = before[i] + m * blocks[i].time, most - behind[i] - (count - 1 - m) * blocks[i].time
            starts[i, m] = model.new_int_var(least, max(least, latest), "")
            if latest < least:
                model.add_bool_or([])
    makespan = model.new_int_var(0, most, "")
    for (i, m), start in starts.items():
        if m:
            model.add(start >= starts[i, m - 1] + blocks[i].time)
        model.add(start + behind[i] <= makespan)
    for d in placement.dependencies:
        for m in range(count):
            model.add(starts[d.after, m] >= starts[d.before, m] + blocks[d.before].time + d.delay)
    for device, mine in enumerate(placement.on):
        model.add_no_overlap(
            model.new_fixed_size_interval_var(starts[i, m], blocks[i].time, "") for i in mine for m in range(count)
        )
        limit_memory(model, placement, device, starts, most)
    return model, starts, makespan


def limit_memory(
    model: Any,
    placement: Placement,
    device: int,
    starts: dict[Place, Any],
    most: int,
    *,
    before: Sequence[Place] = (),
) -> None:
    """Keep a device under its cap.

    Args:
        model: to which constraints are added.
        placement: blocks and caps.
        device: of which.
        starts: of all blocks that the model moves.
        most: when all is over.
        before: blocks that have been done before the model begins.
    """
    blocks, cap = placement.blocks, placement.cap[device]
    if cap is None:
        return
    sizes = {i: blocks[i].memory_on(device) for i in placement.on[device] if blocks[i].memory_on(device)}
    moved = [place for place in starts if place[0] in sizes]
    held = sum(sizes[i] for i, _ in before if i in sizes)
    if held + sum(max(0, sizes[i]) for i, _ in moved) <= cap:
        return
    pairs = _pairs(placement, sizes)
    if pairs is None:
        events = [(starts[place], sizes[place[0]]) for place in moved]
        if held:
            events.append((model.new_constant(-1), held))
        model.add_reservoir_constraint([at for at, _ in events], [size for _, size in events], 0, cap)
        return
    uses, amounts = [], []
    for i, j in pairs:
        taken = {m for k, m in before if k == i} | {m for k, m in moved if k == i}
        for m in sorted(taken - {m for k, m in before if k == j}):
            begin = starts.get((i, m), -1)
            end = starts[j, m] + blocks[j].time if (j, m) in starts else most
            uses.append(model.new_interval_var(begin, model.new_int_var(1, most + 1, ""), end, ""))
            amounts.append(sizes[i])
    model.add_cumulative(uses, amounts, cap)


def _pairs(placement: Placement, sizes: dict[int, int]) -> list[tuple[int, int]] | None:
    """Each block that takes with one behind it that gives back as much, innermost first; ``None`` without a fit."""
    pairs = []
    left = [i for i in placement.sequence if sizes.get(i, 0) < 0]
    for i in reversed([i for i in placement.sequence if sizes.get(i, 0) > 0]):
        j = next((j for j in left if sizes[j] == -sizes[i] and placement.longest[i][j] is not None), None)
        if j is None:
            return None
        left.remove(j)
        pairs.append((i, j))
    return pairs if not left else None


def _one_by_one(placement: Placement) -> int:
    """Time of a micro-batch alone, block by block: what a batch takes at most for each."""
    return sum(block.time for block in placement.blocks) + sum(d.delay for d in placement.dependencies)


def _read(solver: Any, starts: dict[Place, Any], placement: Placement, count: int) -> tuple[tuple[int, ...], ...]:
    rows = [[solver.value(starts[i, m]) for i in range(len(placement.blocks))] for m in range(count)]
    first = min(map(min, rows))
    return tuple(tuple(start - first for start in row) for row in rows)
