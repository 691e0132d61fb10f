"""The best plan of a step by CP-SAT, with its proof; starts from a plan and is stopped at any time.

Every group that could be at work in a micro-batch is a slot. A sequence is in one slot, sequences of one length are
counted instead of told apart, and a slot that is used takes its ranks away from others. Costs are rounded down, so
what the solver proves of them holds for the exact ones.

What shortens proofs: all rank-time together is at most that of the micro-batch; slots that are alike are in order of
their tokens, micro-batches in order of their times; a sequence is on no slot where it alone takes longer than the
step that is known has left for its micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mycel.collectives.cp_sat import cp_sat
from mycel.pipeline.search.solving import Clock
from mycel.planning.grouping.configurations import with_ranks
from mycel.planning.grouping.instance import Candidate, SequenceInstance
from mycel.planning.grouping.plan import PlannedGroup, SequencePlan
from mycel.planning.grouping.times import micro_batch_times, total_us

__all__ = ["Exact"]

#: Parts into which the known time is cut; costs are whole numbers of them. With 2^27 CP-SAT 9.15 ends some models of
#: five sequences without a proof, which it has in 60 ms with these.
_PARTS = 1 << 24
#: Variables of a model beyond which it is not begun: building alone takes too long.
MOST_VARIABLES = 120_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    micro_batch: int
    candidate: Candidate
    twin: int  # slots with the same number are alike


@dataclass(frozen=True, kw_only=True)
class Exact:
    """A model of a step.

    Attributes:
        instance: what is planned.
        known: a plan to improve on, where there is one.
        bound_us: that no plan is below.
        only: groups that may be at work, and how many of each, all at once; whichever fit if not given.
    """

    instance: SequenceInstance
    known: SequencePlan | None
    bound_us: float
    only: tuple[tuple[Candidate, int], ...] | None = None

    @cached_property
    def unit_us(self) -> float:
        """Microseconds of 1 of the model."""
        return self.most_us / _PARTS

    @cached_property
    def most_us(self) -> float:
        """Microseconds that are not to be passed: the known plan's, or what any plan takes at most."""
        if self.known is not None:
            return self.known.total_us
        instance = self.instance
        alone = (max(instance.cost(k, c) for c in instance.candidates) for k in range(len(instance.lengths)))
        return instance.max_micro_batches * instance.us_per_step + sum(alone)

    @cached_property
    def items(self) -> tuple[tuple[int, int], ...]:
        """Different lengths and how many sequences have each, the longest first."""
        return tuple(sorted(Counter(self.instance.lengths).items(), reverse=True))

    @cached_property
    def slots(self) -> tuple[_Slot, ...]:
        """Groups that could be at work."""
        instance, found = self.instance, []
        if self.only is not None:
            kinds = list(dict.fromkeys((c.size, c.comm_us_per_token) for c, _ in self.only))
            for candidate, many in self.only:
                kind = kinds.index((candidate.size, candidate.comm_us_per_token))
                found += [_Slot(micro_batch=0, candidate=candidate, twin=kind)] * many
            return tuple(found)
        twins = _twins(instance)
        for micro_batch in range(instance.max_micro_batches):
            for index, candidate in enumerate(instance.candidates):
                many = 1 if instance.has_named_ranks else instance.num_ranks // candidate.size
                found += [_Slot(micro_batch=micro_batch, candidate=candidate, twin=twins[index])] * many
        return tuple(found)

    @property
    def num_variables(self) -> int:
        """About how large the model is."""
        return len(self.items) * len(self.slots)

    def solve(self, clock: Clock, most_s: float = float("inf")) -> tuple[SequencePlan | None, float, bool]:
        """The best plan found, a bound, and whether there may be a plan at all.

        Args:
            clock: the time there is.
            most_s: at most so much of it.
        """
        cp = cp_sat("planning sequences exactly")
        model = cp.CpModel()
        here, used = self._build(model)
        if self.known is not None and self.only is None:
            self._hint(model, here, used, self.known)
        answer, solver = clock.solve(model, most_s=most_s)
        bound = self.bound_us
        if answer == "none":
            # The model of all groups has the known plan: only without one there is none. Of some groups none is
            # better, up to what rounding down takes away.
            least = self.most_us * (1 - len(self.instance.lengths) / _PARTS)
            return self.known, bound if self.known is None else max(bound, least), self.known is not None
        if _has_begun(solver):
            bound = max(bound, solver.best_objective_bound * self.unit_us)
        if answer == "late":
            return self.known, bound, True
        groups = self._groups(solver, here)
        time = total_us(self.instance, groups)
        if self.known is not None and time >= self.known.total_us:
            return self.known, min(bound, self.known.total_us), True
        bound = min(bound, time)
        return SequencePlan(groups=groups, total_us=time, lower_bound_us=bound, source="exact"), bound, True

    def _build(self, model: Any) -> tuple[dict[tuple[int, int], Any], list[Any]]:
        instance, unit = self.instance, self.unit_us
        beta = int(instance.us_per_step / unit)
        count = instance.max_micro_batches if self.only is None else 1
        times = [model.new_int_var(0, _PARTS, f"time {m}") for m in range(count)]
        active = [model.new_bool_var(f"active {m}") for m in range(count)]
        used = [model.new_bool_var(f"used {s}") for s in range(len(self.slots))]
        costs = self._costs()
        # What a group may work: the known step without what the other micro-batches take at least.
        most = _PARTS - beta + 1
        here: dict[tuple[int, int], Any] = {}
        for s, slot in enumerate(self.slots):
            for i, (tokens, many) in enumerate(self.items):
                fits = slot.candidate.size * instance.capacity_tokens // tokens
                cost = costs[i, slot.candidate]
                many = min(many, fits, most // max(cost, 1))
                if many > 0:
                    here[i, s] = model.new_int_var(0, many, f"of {i} in {s}")
        for i, (_, many) in enumerate(self.items):
            model.add(sum(here[i, s] for s in range(len(self.slots)) if (i, s) in here) == many)
        loads, tokens_in = [], []
        for s, slot in enumerate(self.slots):
            mine = [(i, here[i, s]) for i in range(len(self.items)) if (i, s) in here]
            load = sum(costs[i, slot.candidate] * var for i, var in mine)
            held = sum(self.items[i][0] * var for i, var in mine)
            loads.append(load)
            tokens_in.append(held)
            model.add(held <= slot.candidate.size * instance.capacity_tokens * used[s])
            model.add(load + beta * used[s] <= times[slot.micro_batch])
            model.add_implication(used[s], active[slot.micro_batch])
        self._share_ranks(model, used)
        for m in range(count):
            mine_s = [s for s, slot in enumerate(self.slots) if slot.micro_batch == m]
            area = sum(self.slots[s].candidate.size * loads[s] for s in mine_s)
            model.add(area + instance.num_ranks * beta * active[m] <= instance.num_ranks * times[m])
            if m:
                model.add(times[m] <= times[m - 1])
        for a, b in _neighbours(self.slots):
            model.add(tokens_in[a] >= tokens_in[b])
        if count == 1:
            model.add(active[0] == 1)
        total = sum(times)
        model.add(total >= int(self.bound_us / unit))
        model.add(total <= (_PARTS if self.only is None else _PARTS - len(self.instance.lengths)))
        model.minimize(total)
        return here, used

    def _costs(self) -> dict[tuple[int, Candidate], int]:
        instance = self.instance
        return {
            (i, c): int(instance._cost(tokens, c.size, c.comm_us_per_token) / self.unit_us)
            for i, (tokens, _) in enumerate(self.items)
            for c in instance.candidates
        }

    def _share_ranks(self, model: Any, used: list[Any]) -> None:
        """Groups at work at a time take different ranks."""
        instance = self.instance
        if self.only is not None:
            return
        for m in range(instance.max_micro_batches):
            mine = [(s, slot.candidate) for s, slot in enumerate(self.slots) if slot.micro_batch == m]
            if not instance.has_named_ranks:
                model.add(sum(c.size * used[s] for s, c in mine) <= instance.num_ranks)
                continue
            for rank in range(instance.num_ranks):
                having = [used[s] for s, c in mine if rank in (c.ranks or ())]
                if len(having) > 1:
                    model.add_at_most_one(having)

    def _hint(self, model: Any, here: dict[tuple[int, int], Any], used: list[Any], known: SequencePlan) -> None:
        """The known plan as a place to start from: groups to slots of theirs, the fullest first."""
        instance = self.instance
        place = {tokens: i for i, (tokens, _) in enumerate(self.items)}
        values: Counter[tuple[int, int]] = Counter()
        taken: set[int] = set()
        times = micro_batch_times(instance, known.groups)
        order = sorted(times, key=lambda m: -times[m])
        fullest = sorted(known.groups, key=lambda g: -sum(instance.lengths[k] for k in g.sequences))
        for group in fullest:
            for s, slot in enumerate(self.slots):
                same = (slot.candidate.ranks is not None and set(slot.candidate.ranks) == set(group.ranks)) or (
                    slot.candidate.ranks is None and slot.candidate.size == len(group.ranks)
                )
                if same and s not in taken and slot.micro_batch == order.index(group.micro_batch):
                    taken.add(s)
                    values.update((place[instance.lengths[k]], s) for k in group.sequences)
                    break
        for key, var in here.items():
            model.add_hint(var, values[key])
        for s, var in enumerate(used):
            model.add_hint(var, int(s in taken))

    def _groups(self, solver: Any, here: dict[tuple[int, int], Any]) -> tuple[PlannedGroup, ...]:
        left: dict[int, list[int]] = {}
        for index, tokens in enumerate(self.instance.lengths):
            left.setdefault(tokens, []).append(index)
        found: dict[int, list[int]] = {}
        for (i, s), var in here.items():
            for _ in range(int(solver.value(var))):
                found.setdefault(s, []).append(left[self.items[i][0]].pop())
        kinds = self.instance.kinds
        groups: list[PlannedGroup] = []
        for number, m in enumerate(sorted({self.slots[s].micro_batch for s in found})):
            mine = {s: which for s, which in found.items() if self.slots[s].micro_batch == m}
            slots = []
            for s, which in mine.items():
                candidate = self.slots[s].candidate
                slots.append((kinds.index((candidate.size, float(candidate.comm_us_per_token))), which))
            named = [self.slots[s].candidate for s in mine]
            groups += with_ranks(self.instance, kinds, slots, named, number)
        return tuple(groups)


def _has_begun(solver: Any) -> bool:
    """Whether a search began at all, so that there is a bound to ask for."""
    try:
        return bool(solver.wall_time > 0)
    except RuntimeError:
        return False


def _twins(instance: SequenceInstance) -> list[int]:
    """A number for each candidate, the same for those that can stand for each other."""
    if not instance.has_named_ranks:
        return list(range(len(instance.candidates)))
    sets = [frozenset(c.ranks or ()) for c in instance.candidates]
    numbers: dict[Any, int] = {}
    found: list[int] = []
    for index, candidate in enumerate(instance.candidates):
        # Twins share no rank; whatever else has a rank of one has one of the other.
        key: Any = index
        for other in range(index):
            same = instance.candidates[other]
            if (same.size, same.comm_us_per_token) != (candidate.size, candidate.comm_us_per_token):
                continue
            if sets[other] & sets[index]:
                continue
            if all(
                bool(each & sets[other]) == bool(each & sets[index])
                for number, each in enumerate(sets)
                if number not in (other, index)
            ):
                key = found[other]
                break
        found.append(numbers.setdefault(key, key))
    return found


def _neighbours(slots: Sequence[_Slot]) -> Iterator[tuple[int, int]]:
    """Pairs of slots that follow each other among those that are alike."""
    last: dict[tuple[int, int], int] = {}
    for s, slot in enumerate(slots):
        key = (slot.micro_batch, slot.twin)
        if key in last:
            yield last[key], s
        last[key] = s
