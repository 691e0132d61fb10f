"""The shortest period: repetends of one micro-batch, then of two, and so on.

A repetend can be made longer by a gap at the end of each period: nothing comes closer together, no device's order
changes. So the lengths that exist go from some least one upwards. With one micro-batch they are tried from the bound
upwards, as most placements meet it; with more from the longest that would be an improvement downwards, and a single
length that is ruled out rules out all below it.

A period that meets the bound on load and lifetime is the least of any schedule. One above it is the least of
repetends with so many micro-batches as were ruled out; where time runs out over a length, that is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from mycel.arguments import whole_number
from mycel.errors import SynthesisError
from mycel.pipeline.bounds import Binding, period_bound
from mycel.pipeline.placement import Placement
from mycel.pipeline.search.modulo import Repetend, find_repetend
from mycel.pipeline.search.progress import Progress, Told
from mycel.pipeline.search.solving import Clock

__all__ = ["MOST_MICRO_BATCHES", "Steady", "find_steady"]

#: Micro-batches that repeat together, at most, unless said otherwise.
MOST_MICRO_BATCHES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """A steady state and how good it is.

    Attributes:
        repetend: the best that was found.
        bound: on the period of any schedule.
        ruled_out: no repetend of up to so many micro-batches is shorter; 0 where not even that is proved.
        interrupted: whether Ctrl-C ended the search.
    """

    repetend: Repetend
    bound: Binding
    ruled_out: int
    interrupted: bool = False

    @property
    def is_least(self) -> bool:
        """Whether no schedule of any kind has a shorter period."""
        return self.repetend.period <= self.bound.value

    @property
    def proof(self) -> str:
        """For people: among which schedules nothing is shorter."""
        if self.is_least:
            return "the least of any schedule"
        if self.ruled_out:
            many = "one micro-batch" if self.ruled_out == 1 else f"up to {self.ruled_out} micro-batches"
            return f"the least of repetends of {many}"
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
    best: Repetend | None = None
    ruled_out = 0
    is_proved = True
    alone = sum(block.time for block in placement.blocks) + sum(d.delay for d in placement.dependencies)
    for count in range(1, most_micro_batches + 1):
        shortest = max(ceil(count * bound.value), max(block.time for block in placement.blocks))
        longest = alone if best is None else ceil(count * best.period) - 1
        time = shortest if count == 1 else longest
        while shortest <= time <= longest and clock.left_s > 0:
            if told is not None:
                many = "one micro-batch" if count == 1 else f"{count} micro-batches"
                period = None if best is None else best.period
                told(Progress(doing=f"repetends of {many}, length {time}", best=period, bound=bound.value))
            share = clock.left_s * 0.6 if count == 1 else clock.left_s / (most_micro_batches - count + 2)
            found = find_repetend(placement, count, time, clock=clock, most_s=share, tighten_s=tighten_s)
            if isinstance(found, str):
                is_proved = is_proved and found == "none"
                if count > 1:
                    break
                time += 1
                continue
            best = found
            if count == 1:
                break
            time -= 1
        if best is None:
            raise _nothing(placement, clock, is_proved=is_proved and time > longest)
        is_proved = is_proved and clock.left_s > 0
        if is_proved:
            ruled_out = count
        if best.period <= bound.value or clock.left_s <= 0:
            break
    assert best is not None
    return Steady(repetend=best, bound=bound, ruled_out=ruled_out, interrupted=clock.interrupted)


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
