"""The best plan of a step in the time there is: greedy first, then at random, then exactly; bounds beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite

from mycel.collectives.cp_sat import cp_sat
from mycel.errors import SynthesisError, UsageError
from mycel.pipeline.search.solving import Clock
from mycel.planning.grouping.batch import Batch, Division
from mycel.planning.grouping.bounds import batch_bound, division_bounds, step_bound
from mycel.planning.grouping.buckets import buckets
from mycel.planning.grouping.check import check_plan
from mycel.planning.grouping.configurations import configurations
from mycel.planning.grouping.divided import Divided
from mycel.planning.grouping.exact import MOST_VARIABLES, Exact
from mycel.planning.grouping.greedy import dual_greedy
from mycel.planning.grouping.instance import SequenceInstance
from mycel.planning.grouping.plan import PROVED, PlannedGroup, SequencePlan
from mycel.planning.grouping.polish import exchange, polish
from mycel.planning.grouping.split import splits
from mycel.planning.grouping.static import static_divisions
from mycel.planning.grouping.times import total_us

__all__ = ["Progress", "greedy_plan", "plan_sequences", "static_plans"]

#: Part of the time for random changes before the exact search, and seconds at most.
_POLISHED, _MOST_POLISHED_S = 0.2, 5.0
#: Part of what is left for the first exact search, and then for random changes again; rounds without end.
_FIRST, _MANY = 0.5, 1 << 30
#: Different lengths of a model that is too large with all of them.
_BUCKETS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a search is.

    Attributes:
        doing: what it does now.
        total_us: of the best plan so far, in microseconds.
        lower_bound_us: that no plan is below.
    """

    doing: str
    total_us: float
    lower_bound_us: float

    def __str__(self) -> str:
        return f"{self.doing}: best {self.total_us:.0f} us, bound {self.lower_bound_us:.0f} us"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """Micro-batches and what they do."""

    parts: list[list[int]]
    divisions: list[Division]

    @property
    def time_us(self) -> float:
        return sum(division.time_us for division in self.divisions)

    def plan(self, instance: SequenceInstance, bound_us: float) -> SequencePlan:
        groups: list[PlannedGroup] = []
        both = zip(self.parts, self.divisions, strict=True)
        for number, (part, division) in enumerate(sorted(both, key=lambda each: (-each[1].time_us, each[0]))):
            groups += Batch.of(instance, part).groups(division, number)
        sources = {division.source for division in self.divisions}
        time = total_us(instance, groups)
        return SequencePlan(
            groups=tuple(groups),
            total_us=time,
            lower_bound_us=min(bound_us, time),
            source=sources.pop() if len(sources) == 1 else "dual greedy",
        )


def greedy_plan(instance: SequenceInstance) -> SequencePlan:
    """A plan in some milliseconds: the same on every rank that asks.

    Args:
        instance: sequences and groups.

    Raises:
        SynthesisError: it finds none; a search with time may.

    Examples:
        >>> from mycel.planning.grouping import Candidate
        >>> two = SequenceInstance(
        ...     num_ranks=2, capacity_tokens=100, us_per_token2=0.0, us_per_token=1.0, us_per_step=10.0,
        ...     lengths=(60, 50), candidates=tuple(Candidate(size=n, comm_us_per_token=n - 1.0) for n in (1, 2)),
        ... )
        >>> plan = greedy_plan(two)
        >>> plan.total_us, [group.ranks for group in plan.groups], plan.proved
        (70.0, [(0,), (1,)], True)
    """
    bound = _bound(instance)
    if not isfinite(bound):
        raise _none(instance)
    step = _greedy(instance)
    if step is None:
        raise SynthesisError(
            f"no plan of {len(instance.lengths)} sequences on {instance.num_ranks} ranks was found at once: give the "
            "search time, more micro-batches or more capacity_tokens"
        )
    return step.plan(instance, bound)


def static_plans(instance: SequenceInstance) -> dict[int, SequencePlan]:
    """For each size of groups the plan in which all have it, where the sequences fit so.

    Args:
        instance: sequences and groups.
    """
    found: dict[int, _Step] = {}
    whole = Batch.of(instance)
    for many in range(1, instance.max_micro_batches + 1):
        for parts in splits(whole, many):
            best: list[dict[int, Division]] = []
            for part in parts:
                mine: dict[int, Division] = {}
                batch = Batch.of(instance, part)
                for division in static_divisions(batch):
                    size = int(batch.sizes[division.counts.nonzero()[0][0]])
                    if size not in mine or division.time_us < mine[size].time_us:
                        mine[size] = division
                best.append(mine)
            for size in set.intersection(*(set(mine) for mine in best)):
                step = _Step(parts=parts, divisions=[mine[size] for mine in best])
                if size not in found or step.time_us < found[size].time_us:
                    found[size] = step
    bound = _bound(instance)
    return {size: found[size].plan(instance, bound) for size in sorted(found)}


def plan_sequences(
    instance: SequenceInstance, *, limit_s: float = 60.0, told: Callable[[Progress], None] | None = None
) -> SequencePlan:
    """The best plan that is found in the time, and what none is below; also when Ctrl-C ends it.

    Args:
        instance: sequences and groups.
        limit_s: seconds. 0 takes what the greedy finds, without OR-tools.
        told: is called with progress.

    Raises:
        SynthesisError: there is no plan, or none was found.
        UsageError: a limit below 0, or no OR-tools for a limit above 0.
    """
    if not limit_s >= 0:
        raise UsageError(f"a limit of {limit_s} seconds: at least 0")
    if limit_s == 0:
        return greedy_plan(instance)
    cp_sat("planning sequences with a time limit above 0")
    search = _Search(instance, Clock(limit_s), told or (lambda progress: None))
    plan = search.run()
    check_plan(instance, plan)
    return plan


def _bound(instance: SequenceInstance) -> float:
    whole = Batch.of(instance)
    if instance.max_micro_batches == 1:
        best = batch_bound(whole)
        if configurations(instance).is_whole:
            best = max(best, float(division_bounds(whole).min()) + instance.us_per_step)
        return best
    least = -(-sum(instance.lengths) // (instance.num_ranks * instance.capacity_tokens))
    most = max(least, min(instance.max_micro_batches, len(instance.lengths)))
    return min(step_bound(whole, many) for many in range(least, most + 1))


def _none(instance: SequenceInstance) -> SynthesisError:
    return SynthesisError(
        f"no plan exists: {len(instance.lengths)} sequences do not fit into groups on {instance.num_ranks} ranks of "
        f"{instance.capacity_tokens} tokens in {instance.max_micro_batches} micro-batches: raise one of the three"
    )


def _greedy(instance: SequenceInstance) -> _Step | None:
    """The best of all numbers of micro-batches, of which the first that does not pay ends it."""
    whole = Batch.of(instance)
    best: _Step | None = None
    worse = 0
    for many in range(1, min(instance.max_micro_batches, len(instance.lengths)) + 1):
        if best is not None and (step_bound(whole, many) >= best.time_us or worse >= 2):
            break
        worse += 1
        for parts in splits(whole, many):
            divisions = [dual_greedy(Batch.of(instance, part)) for part in parts]
            step = _Step(parts=parts, divisions=[each for each in divisions if each is not None])
            if len(step.divisions) == len(parts) and (best is None or step.time_us < best.time_us):
                best, worse = step, 0
    return best


class _Search:
    """One search: the best plan and bound so far."""

    def __init__(self, instance: SequenceInstance, clock: Clock, told: Callable[[Progress], None]) -> None:
        self.instance, self.clock, self._told = instance, clock, told
        self.bound = _bound(instance)
        if not isfinite(self.bound):
            raise _none(instance)
        self.plan: SequencePlan | None = None
        self._seed = 0
        self._divided = Divided(instance=instance)

    def run(self) -> SequencePlan:
        """All of it."""
        limit_s = self.clock.left_s
        try:
            self._heuristics(limit_s)
            self._exact(self.clock.within(_FIRST * self.clock.left_s))
            if not self._is_done and self.plan is not None:
                self._improve(self.clock.within(_FIRST * self.clock.left_s), rounds=_MANY)
                self._exact(self.clock)
            if not self._is_done and self.plan is not None:
                self._improve(self.clock, rounds=_MANY)
        except KeyboardInterrupt:
            self.clock.stop()
        if self.plan is None:
            raise SynthesisError(
                f"no plan of {len(self.instance.lengths)} sequences on {self.instance.num_ranks} ranks was found: "
                "give the search more time, more micro-batches or more capacity_tokens"
            )
        bound = min(self.bound, self.plan.total_us)
        return replace(self.plan, lower_bound_us=bound, interrupted=self.clock.interrupted)

    @property
    def _is_done(self) -> bool:
        plan = self.plan
        return self.clock.left_s <= 0 or (plan is not None and plan.total_us - self.bound <= PROVED * plan.total_us)

    def _offer(self, plan: SequencePlan, doing: str) -> None:
        if self.plan is None or plan.total_us < self.plan.total_us:
            self.plan = plan
        self._told(Progress(doing=doing, total_us=self.plan.total_us, lower_bound_us=self.bound))

    def _learn(self, plan: SequencePlan, bound: float) -> None:
        self.bound = max(self.bound, bound)
        self._offer(plan, "exactly")

    def _heuristics(self, limit_s: float) -> None:
        self._step = _greedy(self.instance)
        if self._step is None:
            return
        self._offer(self._step.plan(self.instance, self.bound), "greedy")
        if not self._is_done:
            self._improve(self.clock.within(min(_POLISHED * limit_s, _MOST_POLISHED_S)), rounds=4)

    def _improve(self, clock: Clock, *, rounds: int) -> None:
        """Random changes of the greedy's micro-batches, and of each."""
        step = self._step
        if step is None:
            return
        most = self._seed + rounds
        while clock.left_s > 0 and self._seed < most:
            seed, self._seed = self._seed, self._seed + 1
            before = step.time_us
            parts, divisions = step.parts, step.divisions
            if len(parts) > 1:
                parts, divisions = exchange(self.instance, parts, divisions, clock, tries=200, seed=seed)
            # Later rounds are longer, and none has another's numbers.
            seeds = range(seed * (seed + 1) // 2, (seed + 1) * (seed + 2) // 2)
            polished = []
            for part, division in zip(parts, divisions, strict=True):
                batch = Batch.of(self.instance, part)
                polished.append(polish(batch, division, clock, bound_us=batch_bound(batch), seeds=seeds))
            step = _Step(parts=parts, divisions=polished)
            if step.time_us < before:
                self._step = step
                self._offer(step.plan(self.instance, self.bound), "exchanges")
            if self._is_done or step.time_us <= self.bound * (1 + 1e-7):
                break

    def _exact(self, clock: Clock) -> None:
        """By divisions, or by the model of all groups."""
        if self._is_done:
            return
        if self.plan is not None and self.instance.max_micro_batches == 1 and configurations(self.instance).is_whole:
            self.plan, bound = self._divided.improve(self.plan, clock, self._learn)
            self.bound = max(self.bound, bound)
            if self._is_done or clock.left_s <= 0:
                return
        model = Exact(instance=self._promising(), known=self.plan, bound_us=self.bound)
        if model.num_variables <= MOST_VARIABLES:
            self._told(self._progress("exactly"))
            plan, bound, is_there = model.solve(clock)
            self.bound = max(self.bound, bound)
            if not is_there:
                raise _none(self.instance)
            if plan is not None:
                self._offer(plan, "exactly")
            return
        self._rounded(clock)

    def _promising(self) -> SequenceInstance:
        """The instance, without numbers of micro-batches whose bound the plan already meets."""
        instance, plan = self.instance, self.plan
        if plan is None or instance.max_micro_batches == 1:
            return instance
        whole = Batch.of(instance)
        most = min(instance.max_micro_batches, len(instance.lengths))
        better = [m for m in range(1, most + 1) if step_bound(whole, m) < plan.total_us]
        return replace(instance, max_micro_batches=max([plan.num_micro_batches, *better]))

    def _rounded(self, clock: Clock) -> None:
        """With few different lengths, rounded up: what is found is a plan of the real ones; no bound comes of it."""
        lengths = buckets(self.instance.lengths, _BUCKETS)
        try:
            instance = replace(self.instance, lengths=lengths)
        except UsageError:  # rounded up they are more than the ranks hold
            return
        known = self.plan
        if known is not None:
            known = replace(known, total_us=total_us(instance, known.groups), lower_bound_us=0.0)
        model = Exact(instance=instance, known=known, bound_us=_bound(instance))
        if model.num_variables > MOST_VARIABLES:
            return
        self._told(self._progress("with rounded lengths"))
        plan, _, _ = model.solve(clock, most_s=clock.left_s / 2)
        if plan is not None:
            time = total_us(self.instance, plan.groups)
            self._offer(
                replace(plan, total_us=time, lower_bound_us=min(self.bound, time), source="rounded lengths"),
                "with rounded lengths",
            )

    def _progress(self, doing: str) -> Progress:
        total = float("inf") if self.plan is None else self.plan.total_us
        return Progress(doing=doing, total_us=total, lower_bound_us=self.bound)
