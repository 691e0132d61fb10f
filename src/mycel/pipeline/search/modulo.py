"""Repetends: schedules that repeat after a few micro-batches, found and ruled out as modulo schedules by CP-SAT.

A repetend of ``u`` micro-batches with period ``P`` has for each block of each of them an *offset* in the period and
a *lag* of whole periods: block ``i`` of micro-batch ``q u + r`` starts at ``offset + P (lag + q)``. All micro-batches
are alike, so no generality is lost where each block takes them in order: sort its start times, and nothing breaks.

On a device the offsets of two blocks are apart, both within the period and across its end. What a device holds as a
block starts follows from lags and the order of offsets: of block ``i``, ``lag_j - lag_i`` more micro-batches have
begun than of block ``j``, or one more where it comes first in the period; sizes add up to nothing over a
micro-batch, so only these differences count.

References:
    Lin et al., "Tessel: Boosting Distributed Execution of Large DNN Models via Flexible Schedule Search", HPCA 2024,
    section IV (repetends, one micro-batch each, enumerated with an SMT solver). B. R. Rau, "Iterative modulo
    scheduling", MICRO 1994 (modulo schedules of loops).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from mycel.brief import brief
from mycel.collectives.cp_sat import cp_sat
from mycel.pipeline.placement import Placement
from mycel.pipeline.search.solving import Clock
from mycel.pipeline.timed import Place

__all__ = ["Repetend", "find_repetend"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetend:
    """A schedule that goes on for ever.

    Attributes:
        placement: what every micro-batch consists of.
        time: after which everything repeats, with as many micro-batches further on as there are starts.
        starts: of each micro-batch of the repetend the start of each block.

    Examples:
        Two blocks on two devices, of which the second is the longer one:

        >>> from mycel.pipeline.placement import Block, Dependency
        >>> halves = (Block(name="F0", devices=(0,), time=1), Block(name="F1", devices=(1,), time=2))
        >>> two = Placement(name="", num_devices=2, blocks=halves, dependencies=(Dependency(before=0, after=1),))
        >>> steady = Repetend(placement=two, time=2, starts=((0, 1),))
        >>> steady.period, steady.start(1, 3), steady.rows(2)
        (Fraction(2, 1), 7, [[(0, 0), (0, 1)], [(1, 0), (1, 1)]])
    """

    placement: Placement
    time: int
    starts: tuple[tuple[int, ...], ...]

    __repr__ = brief

    @property
    def num_micro_batches(self) -> int:
        """How many repeat together."""
        return len(self.starts)

    @property
    def period(self) -> Fraction:
        """Time a micro-batch."""
        return Fraction(self.time, self.num_micro_batches)

    def start(self, block: int, micro_batch: int) -> int:
        """When a block of any micro-batch starts, the later ones included."""
        turn, row = divmod(micro_batch, self.num_micro_batches)
        return self.starts[row][block] + turn * self.time

    def rows(self, num_micro_batches: int) -> list[list[Place]]:
        """Of each device its blocks of so many micro-batches in order."""
        return [
            sorted(((i, m) for i in mine for m in range(num_micro_batches)), key=lambda place: self.start(*place))
            for mine in self.placement.on
        ]

    @property
    def peak(self) -> tuple[int, ...]:
        """The most memory that each device holds in the steady state."""
        peaks = []
        for device, mine in enumerate(self.placement.on):
            sizes = {i: self.placement.blocks[i].memory_on(device) for i in mine}
            taking = [(i, r) for i in mine for r in range(self.num_micro_batches) if sizes[i] > 0]
            peaks.append(max((self._held(sizes, *place) for place in taking), default=0))
        return tuple(peaks)

    def _held(self, sizes: dict[int, int], block: int, row: int) -> int:
        """Memory as a block has started: of each other one all micro-batches that began by then, against its own."""
        now, held = self.starts[row][block], 0
        for i, size in sizes.items():
            for starts in self.starts:
                held += size * ((now - starts[i]) // self.time + 1)
        return held


def find_repetend(
    placement: Placement,
    num_micro_batches: int,
    time: int,
    *,
    clock: Clock,
    most_s: float = float("inf"),
    tighten_s: float = 0.0,
) -> Repetend | Literal["none", "late"]:
    """A repetend of given length, or that there is none.

    Args:
        placement: blocks, devices and caps.
        num_micro_batches: that repeat together.
        time: of the repetend.
        clock: for all of the search.
        most_s: seconds for this question.
        tighten_s: seconds for a further one: that everything begins early, so that warm-up and cool-down are short.

    Returns:
        The repetend; ``"none"`` if it is proved that none exists, ``"late"`` if neither was found in time.
    """
    model, begins, parts = _model(placement, num_micro_batches, time)
    # Relaxations rule out tight memory of one micro-batch; several are asked for where a solution is to be hoped for.
    answer, solver = clock.solve(model, most_s=most_s, is_linear=num_micro_batches == 1)
    if answer in ("none", "late"):
        return "none" if answer == "none" else "late"
    values = {place: solver.value(start) for place, start in begins.items()}
    if tighten_s > 0:
        model.clear_hints()
        for place, (offset, lag) in parts.items():
            model.add_hint(offset, values[place] % time)
            model.add_hint(lag, values[place] // time)
        beginning = model.new_int_var(min(0, min(values.values())) - time, 0, "")
        for start in begins.values():
            model.add(start >= beginning)
        model.minimize(sum(begins.values()) - len(begins) * beginning)
        answer, solver = clock.solve(model, most_s=tighten_s)
        if answer in ("optimal", "found"):
            values = {place: solver.value(start) for place, start in begins.items()}
    first = min(values.values())
    return Repetend(
        placement=placement,
        time=time,
        starts=tuple(
            tuple(values[i, r] - first for i in range(len(placement.blocks))) for r in range(num_micro_batches)
        ),
    )


def _model(placement: Placement, count: int, time: int) -> tuple[Any, dict[Place, Any], dict[Place, tuple[Any, Any]]]:
    """The model, and of each block of each micro-batch its start, and offset and lag."""
    model = cp_sat("the search for orders").CpModel()
    blocks = placement.blocks
    # No schedule needs more: between two blocks that wait for each other a period or two pass, and never more blocks
    # stand in a row than there are. A bound that is too low would rule out what exists. Blocks that do not come after
    # the source may begin before it.
    most_lag = 2 * len(blocks)
    source = placement.sequence[0]
    least_lag = [0 if placement.longest[source][i] is not None else -most_lag for i in range(len(blocks))]
    places = [(i, r) for i in range(len(blocks)) for r in range(count)]
    offset = {place: model.new_int_var(0, time - 1, "") for place in places}
    lag = {place: model.new_int_var(least_lag[place[0]], most_lag, "") for place in places}
    begins = {place: offset[place] + time * lag[place] for place in places}
    model.add(offset[source, 0] == 0)  # of all rotations of a schedule, one
    model.add(lag[source, 0] == 0)
    for i, block in enumerate(blocks):
        for r in range(count - 1):
            model.add(begins[i, r + 1] >= begins[i, r] + block.time)
        model.add(begins[i, 0] + time >= begins[i, count - 1] + block.time)
    for d in placement.dependencies:
        for r in range(count):
            model.add(begins[d.after, r] >= begins[d.before, r] + blocks[d.before].time + d.delay)
    first: dict[tuple[Place, Place], Any] = {}

    def is_first(a: Place, b: Place) -> Any:
        """Whether one comes before the other in the period; on a device one of both does."""
        if (a, b) not in first:
            chosen = model.new_bool_var("")
            first[a, b], first[b, a] = chosen, ~chosen
            for early, late, when in ((a, b, chosen), (b, a, ~chosen)):
                model.add(offset[early] + blocks[early[0]].time <= offset[late]).only_enforce_if(when)
                model.add(offset[late] + blocks[late[0]].time <= offset[early] + time).only_enforce_if(when)
        return first[a, b]

    for device, mine in enumerate(placement.on):
        here = [(i, r) for i in mine for r in range(count)]
        intervals = []
        for number, place in enumerate(here):
            length = blocks[place[0]].time
            intervals.append(model.new_fixed_size_interval_var(offset[place], length, ""))
            intervals.append(model.new_fixed_size_interval_var(offset[place] + time, length, ""))
            for other in here[:number]:
                is_first(other, place)
        model.add_no_overlap(intervals)
        cap = placement.cap[device]
        if cap is None:
            continue
        sizes = {i: blocks[i].memory_on(device) for i in mine if blocks[i].memory_on(device)}
        holding = [place for place in here if place[0] in sizes]
        lags = sum(sizes[place[0]] * lag[place] for place in holding)
        for place in holding:
            if sizes[place[0]] > 0:
                early = sum(sizes[other[0]] * is_first(other, place) for other in holding if other != place)
                model.add(sizes[place[0]] + early - lags <= cap)
    return model, begins, {place: (offset[place], lag[place]) for place in places}
