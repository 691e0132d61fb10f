"""The shortest period: repetends of one micro-batch, then of several, by states or by the solver.

A repetend can be made longer by a gap at the end of each period: nothing comes closer together, no device's order
changes. So the lengths that exist go from some least one upwards. With one micro-batch they are tried from the bound
upwards, as most placements meet it. Where that is above the bound, all states are looked at in which no block is more
than some micro-batches ahead of another, with a lead that grows as long as there are few states: that gives
repetends of any number of micro-batches and a proof at once. Where states are too many, the solver is asked for two
micro-batches and then three, from the longest length that would be an improvement downwards, and a single length
that is ruled out rules out all below it.

A period that meets the bound on load and lifetime, or the least over all states where none was left out, is the least
of any schedule. One above it is the least within a lead, or of repetends with so many micro-batches as were ruled
out; where time runs out over a length, that is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from mycel.arguments import whole_number
from mycel.brief import brief
from mycel.errors import SynthesisError
from mycel.pipeline.bounds import Binding, period_bound
from mycel.pipeline.placement import Placement
from mycel.pipeline.search.cycles import find_circles
from mycel.pipeline.search.modulo import Repetend, find_repetend
from mycel.pipeline.search.progress import Progress, Told
from mycel.pipeline.search.solving import Clock

__all__ = ["MOST_MICRO_BATCHES", "Steady", "find_steady"]

#: Micro-batches that repeat together, at most, unless said otherwise; and those for which the solver is asked.
MOST_MICRO_BATCHES, _MOST_SOLVED = 8, 3
#: The least lead of a block for which states are looked at, and by how much it grows.
_LEAD, _MORE_LEAD = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """A steady state and how good it is.

    Attributes:
        repetend: the best that was found.
        bound: on the period of any schedule.
        ruled_out: no repetend of up to so many micro-batches is shorter; 0 where not even that is proved.
        lead: no schedule is shorter in which blocks start as early as their devices' orders let them and none is more
            micro-batches ahead of another; 0 where that was not looked at.
        interrupted: whether Ctrl-C ended the search.

    Examples:
        >>> from mycel.pipeline.placement import Block, Dependency, Placement
        >>> ends = [(f"F{d}", 1, 1) for d in (0, 1)] + [(f"B{d}", 3, -1) for d in (1, 0)]
        >>> blocks = tuple(Block(name=n, devices=(int(n[1]),), time=t, memory=m) for n, t, m in ends)
        >>> waits = tuple(Dependency(before=i, after=i + 1) for i in range(3))
        >>> two = Placement(name="two", num_devices=2, blocks=blocks, dependencies=waits, cap=(2, 1))
        >>> found = find_steady(two)
        >>> found.is_least, str(found.bound), found.repetend.num_micro_batches
        (True, '4 (load of device 0)', 1)
    """

    repetend: Repetend
    bound: Binding
    ruled_out: int
    lead: int = 0
    interrupted: bool = False

    __repr__ = brief

    @property
    def is_least(self) -> bool:
        """Whether no schedule of any kind has a shorter period."""
        return self.repetend.period <= self.bound.value

    @property
    def proof(self) -> str:
        """For people: among which schedules nothing is shorter."""
        if self.is_least:
            return "the least of any schedule"
        if self.lead:
            return f"the least of schedules in which no block is more than {self.lead} micro-batches ahead of another"
        if self.ruled_out:
            return f"the least of repetends of {'' if self.ruled_out == 1 else 'up to '}{_many(self.ruled_out)}"
        return "not proved"


def find_steady(
    placement: Placement,
    *,
    most_micro_batches: int = MOST_MICRO_BATCHES,
    time_limit_s: float = 60.0,
    clock: Clock | None = None,
    tighten_s: float = 0.0,
    told: Told | None = None,
) -> Steady:
    """The shortest period that time allows, and what is proved of it.

    Args:
        placement: blocks, devices and caps.
        most_micro_batches: that repeat together; more can be shorter where memory binds.
        time_limit_s: for all of it.
        clock: instead of a limit, where this is a part of a longer search.
        tighten_s: seconds for each repetend that is found, to shorten its warm-up and cool-down.
        told: called as the search goes on.

    Raises:
        UsageError: no micro-batches, or no time.
        SynthesisError: no order keeps the caps (proved), or none was found in time.

    Examples:
        >>> from mycel.pipeline.placement import Block, Dependency
        >>> ends = [(f"F{d}", 1, 1) for d in (0, 1)] + [(f"B{d}", 3, -1) for d in (1, 0)]
        >>> blocks = tuple(Block(name=n, devices=(int(n[1]),), time=t, memory=m) for n, t, m in ends)
        >>> waits = tuple(Dependency(before=i, after=i + 1) for i in range(3))
        >>> two = Placement(name="two", num_devices=2, blocks=blocks, dependencies=waits, cap=(2, 1))
        >>> found = find_steady(two)
        >>> str(found.repetend.period), found.proof
        ('4', 'the least of any schedule')
    """
    most_micro_batches = whole_number(most_micro_batches, "micro-batches a repetend", least=1)
    clock = clock or Clock(time_limit_s)
    bound = period_bound(placement)
    best, is_proved = _of_one(placement, bound, clock, tighten_s, told)
    ruled_out, lead = int(is_proved), 0
    if most_micro_batches > 1 and best.period > bound.value and clock.left_s > 0:
        try:
            best, bound, lead = _within_leads(best, bound, most_micro_batches, clock, told)
        except KeyboardInterrupt:
            clock.stop()
        if best.num_micro_batches > 1 and not lead:
            ruled_out = 0  # several micro-batches are shorter, and nothing is proved of them
        elif not lead:
            best, ruled_out = _of_several(best, bound, min(most_micro_batches, _MOST_SOLVED), ruled_out, clock, told)
    return Steady(repetend=best, bound=bound, ruled_out=ruled_out, lead=lead, interrupted=clock.interrupted)


def _of_one(
    placement: Placement, bound: Binding, clock: Clock, tighten_s: float, told: Told | None
) -> tuple[Repetend, bool]:
    """The shortest repetend of one micro-batch, and whether every shorter one was ruled out.

    Lengths go up from the bound, faster and faster, and then halve what is left open, since times may be in any unit.
    """
    least = max(ceil(bound.value), max(block.time for block in placement.blocks))
    longest = sum(block.time for block in placement.blocks) + sum(d.delay for d in placement.dependencies)
    best: Repetend | None = None
    is_proved = True
    below, step = least - 1, 0
    while clock.left_s > 0:
        if best is None:
            time = min(below + 1 + step, longest)
        elif best.time - below > 1:
            time = (below + best.time) // 2
        else:
            return best, is_proved
        _tell(told, f"repetends of one micro-batch, length {time}", best, bound)
        found = find_repetend(placement, 1, time, clock=clock, most_s=clock.left_s * 0.6, tighten_s=tighten_s)
        if not isinstance(found, str):
            best = found
            continue
        is_proved = is_proved and found == "none"
        if time >= longest:
            raise _nothing(placement, clock, is_proved=is_proved)
        below, step = time, 2 * step + 1
    if best is None:
        raise _nothing(placement, clock, is_proved=False)
    return best, False


def _of_several(
    best: Repetend, bound: Binding, most: int, ruled_out: int, clock: Clock, told: Told | None
) -> tuple[Repetend, int]:
    """The same with two micro-batches and more, each from the longest length that would be an improvement."""
    for count in range(2, most + 1):
        below = ceil(count * bound.value) - 1
        time = ceil(count * best.period) - 1
        is_proved = True
        while below < time and clock.left_s > 0:
            _tell(told, f"repetends of {count} micro-batches, length {time}", best, bound)
            share = clock.left_s / (most - count + 2)
            found = find_repetend(best.placement, count, time, clock=clock, most_s=share)
            if not isinstance(found, str):
                best, highest = found, found.time - 1
                # Few lengths are tried one after the other: what is ruled out takes longest.
                time = highest if highest - below <= 8 else (below + highest + 1) // 2
            elif found == "late":
                is_proved = False
                break
            else:
                below, time = time, ceil(count * best.period) - 1
        if clock.left_s <= 0:
            break
        ruled_out = count if is_proved and ruled_out == count - 1 else ruled_out
    return best, ruled_out


def _within_leads(
    best: Repetend, bound: Binding, most_micro_batches: int, clock: Clock, told: Told | None
) -> tuple[Repetend, Binding, int]:
    """The best repetend of all states with a lead that grows, the bound, and the greatest lead that was gone through.

    Whatever has been found stays, where a greater lead has too many states or its repetends too many micro-batches.
    """
    proved = 0
    lead = _LEAD
    while best.period > bound.value:
        _tell(told, f"all states with a lead of {lead}", best, bound)
        found = find_circles(
            best.placement, lead, period=best.period, most_micro_batches=most_micro_batches, clock=clock
        )
        if found is None:
            break
        best = found.repetend or best
        if not found.is_least:
            # What is proved of a smaller lead is no longer of interest, as something shorter is known to exist.
            proved = 0 if found.repetend is not None else proved
            break
        proved = lead
        if found.is_all and best.period > bound.value:
            return best, Binding(value=best.period, kind="states"), proved
        lead += _MORE_LEAD
    return best, bound, proved


def _tell(told: Told | None, doing: str, best: Repetend | None, bound: Binding) -> None:
    if told is not None:
        told(Progress(doing=doing, best=None if best is None else best.period, bound=bound.value))


def _many(count: int) -> str:
    return "one micro-batch" if count == 1 else f"{count} micro-batches"


def _nothing(placement: Placement, clock: Clock, *, is_proved: bool) -> BaseException:
    if is_proved:
        tight = min(
            (cap - need, device)
            for device, (cap, need) in enumerate(zip(placement.cap, placement.need, strict=True))
            if cap is not None
        )[1]
        return SynthesisError(
            f"placement {placement.name}: no order of blocks keeps all caps, not even one micro-batch after the "
            f"other; device {tight} has least to spare: raise its cap of {placement.cap[tight]}"
        )
    if clock.interrupted:
        return KeyboardInterrupt("no repetend was found yet")
    return SynthesisError(
        f"placement {placement.name}: no repetend was found in {clock.gone_s:.1f} s, and none was ruled out; "
        f"allow more time"
    )
