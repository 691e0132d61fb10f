"""A whole batch of any size: repetends unrolled, then put in better order window by window; small ones proved.

Batches of which there are few states are solved by looking at all of them, small ones whole by the solver. For others
the steady state is found first, unrolled as soon as everything can start, and improved window by window; repetends of
several micro-batches compete. The bound is what was proved of the whole batch, or what load, lifetime and chain say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from mycel.arguments import whole_number
from mycel.brief import brief
from mycel.errors import SynthesisError, UsageError
from mycel.pipeline.bounds import Binding, makespan_bound, period_bound
from mycel.pipeline.placement import Placement
from mycel.pipeline.search.by_states import find_by_states, has_few_states, has_some_states
from mycel.pipeline.search.ends import improve
from mycel.pipeline.search.modulo import Repetend, find_repetend
from mycel.pipeline.search.progress import Progress, Told
from mycel.pipeline.search.solving import Clock
from mycel.pipeline.search.steady import find_steady
from mycel.pipeline.search.whole import Whole, find_whole
from mycel.pipeline.timed import Timed, earliest

__all__ = ["Batch", "find_batch"]

#: Blocks of a batch up to which it is solved whole, and the same for few micro-batches, of which proofs are shorter.
_MOST_WHOLE, _MOST_WHOLE_OF_FEW, _FEW = 84, 120, 6
#: Blocks of a batch of any size.
_MOST_BLOCKS = 50_000
#: Micro-batches of repetends that are unrolled.
_MOST_TOGETHER = 8
#: Seconds for making a repetend begin early, at most.
_TIGHTEN_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A schedule of a whole batch and how good it is.

    Attributes:
        timed: the best that was found.
        bound: that no schedule's makespan is below.
        binding: the largest of the bounds on load, lifetime and chain.
        interrupted: whether Ctrl-C ended the search.

    Examples:
        >>> from mycel.pipeline.placement import Block, Dependency, Placement
        >>> ends = [(f"F{d}", 1, 1) for d in (0, 1)] + [(f"B{d}", 3, -1) for d in (1, 0)]
        >>> blocks = tuple(Block(name=n, devices=(int(n[1]),), time=t, memory=m) for n, t, m in ends)
        >>> waits = tuple(Dependency(before=i, after=i + 1) for i in range(3))
        >>> two = Placement(name="two", num_devices=2, blocks=blocks, dependencies=waits, cap=(2, 1))
        >>> found = find_batch(two, 3)
        >>> found.timed.makespan, found.bound, found.timed.peak
        (16, 16, (2, 1))
    """

    timed: Timed
    bound: int
    binding: Binding
    interrupted: bool = False

    __repr__ = brief

    @property
    def is_least(self) -> bool:
        """Whether no schedule is shorter."""
        return self.timed.makespan <= self.bound


def find_batch(
    placement: Placement,
    num_micro_batches: int,
    *,
    time_limit_s: float = 30.0,
    clock: Clock | None = None,
    told: Told | None = None,
) -> Batch:
    """The shortest schedule of a batch that time allows, and what is proved of it.

    Args:
        placement: blocks, devices and caps.
        num_micro_batches: of the batch.
        time_limit_s: for all of it.
        clock: instead of a limit, where this is a part of a longer search, or work is counted instead of time.
        told: called as the search goes on.

    Raises:
        UsageError: no micro-batches or too many, or no time.
        SynthesisError: no order keeps the caps (proved), or none was found in time.

    Examples:
        >>> from mycel.pipeline.placement import Block, Dependency
        >>> ends = [(f"F{d}", 1, 1) for d in (0, 1)] + [(f"B{d}", 3, -1) for d in (1, 0)]
        >>> blocks = tuple(Block(name=n, devices=(int(n[1]),), time=t, memory=m) for n, t, m in ends)
        >>> waits = tuple(Dependency(before=i, after=i + 1) for i in range(3))
        >>> two = Placement(name="two", num_devices=2, blocks=blocks, dependencies=waits, cap=(2, 1))
        >>> found = find_batch(two, 4)
        >>> found.timed.makespan, found.is_least
        (20, True)
    """
    count = whole_number(num_micro_batches, "micro-batches", least=1)
    if count > (most := _MOST_BLOCKS // len(placement.blocks)):
        raise UsageError(
            f"{count} micro-batches of {len(placement.blocks)} blocks each: at most {most} are put in order; long "
            "batches repeat their steady state, whose period says what one more costs"
        )
    search = _Search(placement, count, clock or Clock(time_limit_s), told)
    try:
        search.run()
    except KeyboardInterrupt:
        search.clock.stop()
    if search.best is None:
        if search.clock.interrupted:
            raise KeyboardInterrupt("no order was found yet")
        raise SynthesisError(
            f"placement {placement.name}: no order was found in {search.clock.gone_s:.3g} s; allow more time"
        )
    return Batch(
        timed=search.best,
        bound=min(search.bound, search.best.makespan),
        binding=search.binding,
        interrupted=search.clock.interrupted,
    )


class _Search:
    """One search: what is known so far, and one way after the other to a better schedule or to a proof.

    Attributes:
        best: the shortest schedule so far.
        bound: what is proved.
        binding: what load, lifetime and chain say.
        clock: of all of it.
    """

    def __init__(self, placement: Placement, count: int, clock: Clock, told: Told | None) -> None:
        self._placement, self._count, self._told = placement, count, told
        self._is_small = _is_small(placement, count)
        self.clock = clock
        self.binding = makespan_bound(placement, count)
        self.bound = ceil(self.binding.value)
        self.best: Timed | None = None

    def run(self) -> None:
        """Search until nothing is left to prove or time is up."""
        if has_few_states(self._placement, self._count):
            self._states(is_first=True)
        if self._is_open:
            self._windows()
        if self._is_open and self._is_small:
            # Where states may do it as well they get half of what is left.
            self._whole(self.clock.left_s / 2 if has_some_states(self._placement, self._count) else float("inf"))
        if self._is_open and has_some_states(self._placement, self._count):
            self._states(is_first=False)

    @property
    def _is_open(self) -> bool:
        return self.clock.left_s > 0 and (self.best is None or self.best.makespan > self.bound)

    def _tell(self, doing: str, bound: int | None = None) -> None:
        if self._told is not None:
            made = None if self.best is None else Fraction(self.best.makespan)
            self._told(Progress(doing=doing, best=made, bound=Fraction(self.bound if bound is None else bound)))

    def _states(self, *, is_first: bool) -> None:
        if is_first:
            self._tell("a repetend")
            with suppress(SynthesisError):  # batches exist where repetends do not
                alone = find_steady(
                    self._placement, most_micro_batches=1, clock=self.clock.within(self.clock.left_s / 4)
                )
                self.best = earliest(self._placement, alone.repetend.rows(self._count))
            if self.best is not None and self._is_open:
                share = self.clock.within(self.clock.left_s / 8)
                self.best = improve(self.best, clock=share, least=self.bound, rounds=0)
        if self._is_open:
            self._tell("all states")
            found = find_by_states(self._placement, self._count, clock=self.clock, least=self.bound, known=self.best)
            if found is not None:
                self._take(found)

    def _windows(self) -> None:
        placement, count, clock = self._placement, self._count, self.clock
        try:
            repetends = _repetends(placement, count, clock, self._tell)
            made = [earliest(placement, repetend.rows(count)) for repetend in repetends]
        except SynthesisError:
            if not self._is_small:
                raise
            return
        made.sort(key=lambda timed: timed.makespan)
        self.best = min(made[0], self.best or made[0], key=lambda timed: timed.makespan)
        for number, timed in enumerate(made[:1] if self._is_small else made):
            if not self._is_open:
                return
            self._tell("windows of an unrolled repetend")
            share = clock.within(clock.left_s / (8 if self._is_small else max(1, len(made) - number)))
            shorter = improve(
                timed, clock=share, least=self.bound, told=lambda makespan: self._tell(f"windows, {makespan}")
            )
            self.best = min(self.best, shorter, key=lambda timed: timed.makespan)

    def _whole(self, most_s: float) -> None:
        self._tell("the whole batch")
        found = find_whole(
            self._placement,
            self._count,
            clock=self.clock,
            known=self.best,
            most_s=most_s,
            told=lambda made, bound: self._tell(f"whole, {made}", bound),
        )
        self._take(found)

    def _take(self, found: Whole) -> None:
        if not found.is_feasible:
            where = f"placement {self._placement.name}"
            raise SynthesisError(f"{where}: no order of {self._count} micro-batches keeps all caps; raise them")
        self.best = found.timed or self.best
        self.bound = max(self.bound, found.bound)


def _is_small(placement: Placement, count: int) -> bool:
    return count * len(placement.blocks) <= (_MOST_WHOLE_OF_FEW if count <= _FEW else _MOST_WHOLE)


def _repetends(placement: Placement, count: int, clock: Clock, tell: Callable[[str], None]) -> Iterator[Repetend]:
    """Repetends worth unrolling.

    What is best in the steady state need not be best at the ends, so others follow: of one micro-batch, as tight as
    possible and as it comes, and one that is a little longer.
    """
    tell("repetends")
    is_small = _is_small(placement, count)
    tighten_s = min(_TIGHTEN_S, clock.left_s / 10)
    alone = find_steady(
        placement, most_micro_batches=1, clock=clock.within(clock.left_s * 0.6), tighten_s=tighten_s
    ).repetend
    yield alone
    if is_small:
        return
    if alone.period > period_bound(placement).value and count > 1:
        most = min(_MOST_TOGETHER, count // 2)
        yield find_steady(
            placement, most_micro_batches=most, clock=clock.within(clock.left_s / 3), tighten_s=tighten_s
        ).repetend
    for time, seconds in ((alone.time, 0.0), (alone.time + 1, tighten_s)):
        tell(f"another repetend, length {time}")
        other = find_repetend(placement, 1, time, clock=clock, most_s=clock.left_s / 12, tighten_s=seconds)
        if not isinstance(other, str):
            yield other
