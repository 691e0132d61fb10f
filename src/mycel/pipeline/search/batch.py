"""A whole batch of any size: repetends unrolled, then put in better order window by window; small ones proved.

Small batches are solved whole. For others the steady state is found first, unrolled as soon as everything can start,
and improved window by window; repetends of several micro-batches compete. The bound is what the solver proved of the
whole batch, or what load, lifetime and chain say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from mycel.arguments import whole_number
from mycel.errors import SynthesisError
from mycel.pipeline.bounds import Binding, makespan_bound, period_bound
from mycel.pipeline.placement import Placement
from mycel.pipeline.search.ends import improve
from mycel.pipeline.search.modulo import Repetend, find_repetend
from mycel.pipeline.search.progress import Progress, Told
from mycel.pipeline.search.solving import Clock
from mycel.pipeline.search.steady import find_steady
from mycel.pipeline.search.whole import find_whole
from mycel.pipeline.timed import Timed, earliest

__all__ = ["Batch", "find_batch"]

#: Blocks of a batch up to which it is solved whole, and the same for few micro-batches, of which proofs are shorter.
_MOST_WHOLE, _MOST_WHOLE_OF_FEW, _FEW = 84, 120, 6
#: Micro-batches of repetends that are unrolled.
_MOST_TOGETHER = 3
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
    """

    timed: Timed
    bound: int
    binding: Binding
    interrupted: bool = False

    @property
    def is_least(self) -> bool:
        """Whether no schedule is shorter."""
        return self.timed.makespan <= self.bound


def find_batch(
    placement: Placement, num_micro_batches: int, *, time_limit_s: float = 30.0, told: Told | None = None
) -> Batch:
    """The shortest schedule of a batch that time allows, and what is proved of it.

    Args:
        placement: blocks, devices and caps.
        num_micro_batches: of the batch.
        time_limit_s: for all of it.
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
        >>> found = find_batch(two, 4)
        >>> found.timed.makespan, found.is_least
        (20, True)
    """
    count = whole_number(num_micro_batches, "micro-batches", least=1)
    clock = Clock(time_limit_s)
    binding = makespan_bound(placement, count)
    least = ceil(binding.value)
    is_small = _is_small(placement, count)
    best: Timed | None = None

    def tell(doing: str, bound: int = least) -> None:
        if told is not None:
            made = None if best is None else Fraction(best.makespan)
            told(Progress(doing=doing, best=made, bound=Fraction(bound)))

    try:
        made = [earliest(placement, repetend.rows(count)) for repetend in _repetends(placement, count, clock, tell)]
        made.sort(key=lambda timed: timed.makespan)
        best = made[0]
        for number, timed in enumerate(made[:1] if is_small else made):
            if best.makespan <= least or clock.left_s <= 0:
                break
            tell("windows of an unrolled repetend")
            share = clock.within(clock.left_s / (8 if is_small else max(1, len(made) - number)))
            shorter = improve(timed, clock=share, least=least, told=lambda makespan: tell(f"windows, {makespan}"))
            best = min(best, shorter, key=lambda timed: timed.makespan)
    except SynthesisError:
        if not is_small:
            raise
    except KeyboardInterrupt:
        if best is None:
            raise
        clock.stop()
    bound = least
    if is_small and clock.left_s > 0 and (best is None or best.makespan > least):
        tell("the whole batch")
        whole = find_whole(
            placement, count, clock=clock, known=best, told=lambda made, bound: tell(f"whole, {made}", bound)
        )
        best, bound = whole.timed or best, whole.bound
        if best is None and not whole.is_feasible:
            raise SynthesisError(
                f"placement {placement.name}: no order of {count} micro-batches keeps all caps; raise them"
            )
    if best is None:
        if clock.interrupted:
            raise KeyboardInterrupt("no order was found yet")
        raise SynthesisError(f"placement {placement.name}: no order was found in {time_limit_s:g} s; allow more time")
    return Batch(timed=best, bound=min(bound, best.makespan), binding=binding, interrupted=clock.interrupted)


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
