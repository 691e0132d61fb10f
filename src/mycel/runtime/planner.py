"""The planner: a group's verified schedules, the choice between them, and its prepared programs.

It knows neither sockets nor devices: both engines stand on it, each with its own model of time and its own form of a
prepared program.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Generic, NamedTuple, Protocol, TypeVar

from mycel.collectives.cost import Choice
from mycel.collectives.flow_bound import is_large
from mycel.collectives.lower import RankTemplate
from mycel.collectives.plan_programs import PlanPart
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth import WHERE_THEY_FIT, candidates_for, synthesize
from mycel.collectives.synth.classics import CLASSICS, classics_for
from mycel.collectives.verify import sums_agree, verify_schedule
from mycel.errors import SynthesisError
from mycel.runtime.calls import Call
from mycel.runtime.prepared import PREPARED, Held
from mycel.runtime.registered import Registry
from mycel.runtime.underway import planning
from mycel.topology.model import Topology
from mycel.units import format_seconds, format_size

__all__ = ["Planner", "sends_directly", "sends_parts_directly", "verified_schedules"]

_log = logging.getLogger(__name__)

#: Of digests, in names of schedules.
_DIGITS = 8

P = TypeVar("P", bound=Held)

#: Of our own methods, those for which there are fabrics without a schedule.
_MAY_NOT_FIT = ("flow", *WHERE_THEY_FIT)
#: Calls that may come back, of a group, to be looked at then.
_MOST_UNPROVED = 256
#: Longest message of a plan: long ones go on to the next rank before they have come whole.
_PLAN_PIECE_BYTES = 1 << 18


class Prove(Protocol):
    """See ``Proofs.require``."""

    def __call__(self, schedule: Schedule, call: Call, pieces: int, *, comes_back: bool) -> bool:
        """Whether all is said about a call; ``False``: it is to be asked again if it comes back."""


class Planner(Generic[P]):
    """Plans one rank's calls. Every rank comes to the same choices, for they have the same schedules.

    Args:
        rank: whose programs.
        make: verified schedules of a collective by method, the same on every rank; asked once for each collective.
        choose: which of them, in pieces of which size, serves so many bytes (of the whole array).
        prove: returns if programs of a schedule are right for a call in pieces of so many elements; ``False``: it is
            to be asked again if the call comes back.
        make_weighted: as ``make``, of a collective and the weights of its blocks; ``None``: no call has any.

    Attributes:
        registered: schedules that serve calls in place of the others, or beside them; the same on every rank.
    """

    def __init__(
        self,
        rank: int,
        make: Callable[[CollectiveName, int | None], Mapping[str, Schedule]],
        choose: Callable[[Mapping[str, Schedule], int], Choice],
        prove: Prove,
        make_weighted: Callable[[CollectiveName, tuple[int, ...]], Mapping[str, Schedule]] | None = None,
    ) -> None:
        self._rank = rank
        self._make, self._choose, self._prove = make, choose, prove
        self._make_weighted = make_weighted
        self._schedules: dict[tuple[str, int | None], Mapping[str, Schedule]] = {}
        self._plans: dict[tuple[str, int | None, str], RankTemplate] = {}
        self._choices: dict[tuple[str, int | None, int, tuple[str, ...]], Choice] = {}
        self.registered = Registry()
        #: Of collectives with weights: schedules by the names that they are known by here, and choices by size.
        self._made_for: dict[tuple[str, str], dict[str, Schedule]] = {}
        self._weighted: dict[tuple[str, str, int], Choice] = {}
        self._parts: dict[str, PlanPart] = {}
        #: What was called once, and is to be proved when it comes back.
        self._unproved: dict[Hashable, bool] = {}
        self._owner = PREPARED.new_owner()

    def schedules(self, name: CollectiveName, root: int | None = None) -> Mapping[str, Schedule]:
        """Verified schedules of a collective, by method; made at first use."""
        key = (name, root)
        if key not in self._schedules:
            self._schedules[key] = self._make(name, root)
        return self._schedules[key]

    def choice(self, name: CollectiveName, root: int | None, num_bytes: int, *, is_even: bool = True) -> Choice:
        """Which schedule and piece size serve a collective of ``num_bytes`` (of the whole array) best.

        Lengths up to an eighth apart share a choice: calls of ever new lengths do not each pay for one, and there are
        at most eight for each power of two. Where a plan is registered for them, it serves those whose blocks are of
        one length.
        """
        if is_even and (method := self.registered.serving_plan(name, root, num_bytes)) is not None:
            return Choice(method=method, piece_bytes=_PLAN_PIECE_BYTES, seconds=0.0)
        serving = self.registered.serving(name, root, num_bytes)
        num_bytes = _rounded_up(num_bytes)
        key = (name, root, num_bytes, tuple(serving))
        if key not in self._choices:
            candidates = {method: schedule for method, (schedule, is_always) in serving.items() if is_always}
            if not candidates:
                offered = {method: schedule for method, (schedule, _) in serving.items()}
                candidates = {**self.schedules(name, root), **offered}
            self._choices[key] = self._choose(candidates, num_bytes)
            if self._rank == 0 and _log.isEnabledFor(logging.INFO):
                chosen = self._choices[key]
                sizes = format_size(num_bytes), format_size(chosen.piece_bytes), format_seconds(chosen.seconds)
                _log.info(
                    "%s of up to %s: %s, in pieces of %s, %s by the model", name, sizes[0], chosen.method, *sizes[1:]
                )
        return self._choices[key]

    def choice_for(self, call: Call) -> Choice:
        """``choice`` for a call."""
        num_bytes, is_even = call.num_elements * call.item_bytes, call.block_elements is None
        if call.weights is not None:
            return self.weighted_choice(call.name, call.weights, num_bytes)
        return self.choice(call.name, call.root, num_bytes, is_even=is_even)

    def weighted_choice(self, name: CollectiveName, weights: tuple[int, ...], num_bytes: int) -> Choice:
        """Which schedule and piece size serve a collective whose blocks have these weights best.

        Args:
            name: of one without a root.
            weights: as for ``Collective``, the same on all ranks.
            num_bytes: of all blocks together.
        """
        num_bytes = _rounded_up(num_bytes)
        digest = hashlib.sha256(repr((name, weights)).encode()).hexdigest()[:_DIGITS]
        key = (name, digest, num_bytes)
        if key not in self._weighted:
            if (name, digest) not in self._made_for:
                assert self._make_weighted is not None  # whoever issues such calls has said how they are planned
                made = self._make_weighted(name, weights)
                self._made_for[name, digest] = {
                    self.registered.keep(method, digest, schedule): schedule for method, schedule in made.items()
                }
            self._weighted[key] = self._choose(self._made_for[name, digest], num_bytes)
        return self._weighted[key]

    def plan(self, name: CollectiveName, root: int | None, method: str) -> RankTemplate:
        """This rank's part of a schedule, whatever the length."""
        key = (name, root, method)
        if key not in self._plans:
            schedule = self.registered.schedule(method) or self.schedules(name, root)[method]
            self._plans[key] = _template(_Same(schedule), self._rank)
        return self._plans[key]

    def part(self, method: str) -> PlanPart | None:
        """This rank's part of a registered plan; ``None`` where the method is a schedule."""
        if (template := self.registered.plan(method)) is None:
            return None
        if (found := self._parts.get(method)) is None or found.template is not template:
            found = self._parts[method] = PlanPart(template=template, rank=self._rank)
        return found

    def prepared_part(self, part: PlanPart, call: Call, choice: Choice, lay_out: Callable[[PlanPart, int], P]) -> P:
        """A call's program as its engine reads it, of a plan; it is verified with all others' when it is made.

        Args:
            part: this rank's.
            call, choice, lay_out: as for ``prepared``.
        """
        key = (choice.method, choice.piece_bytes, call.num_elements, call.item_bytes)
        found: P | None = PREPARED.get(self._owner, key)
        if found is None:
            found = lay_out(part, max(1, choice.piece_bytes // call.item_bytes))
            PREPARED.put(self._owner, key, found)
        return found

    def prepared(self, call: Call, choice: Choice, lay_out: Callable[[RankTemplate, int], P]) -> P:
        """A call's program as its engine reads it.

        Args:
            call: what is to run.
            choice: over which schedule, in pieces of which size.
            lay_out: makes it, for the call's lengths, of a plan and the elements of a piece.
        """
        sizes = (call.num_elements, call.item_bytes, call.block_elements, call.knows_all)
        key = (call.name, call.root, choice.method, choice.piece_bytes, *sizes)
        found: P | None = PREPARED.get(self._owner, key)
        if found is None:
            plan = self.plan(call.name, call.root, choice.method)
            elements = max(1, choice.piece_bytes // call.item_bytes)
            if not self._prove(plan.schedule, call, elements, comes_back=False):
                self._await(key)
            found = lay_out(plan, elements)
            PREPARED.put(self._owner, key, found)
        elif self._unproved and self._unproved.pop(key, False):
            plan = self.plan(call.name, call.root, choice.method)
            self._prove(plan.schedule, call, max(1, choice.piece_bytes // call.item_bytes), comes_back=True)
        return found

    def _await(self, key: Hashable) -> None:
        """Remember what to prove when it comes back; of what has not come back for long, nothing."""
        self._unproved[key] = True
        if len(self._unproved) > _MOST_UNPROVED:
            self._unproved.pop(next(iter(self._unproved)), None)

    def forget(self) -> None:
        """Begin anew: the fabric is another one, or nobody calls any more."""
        self._unproved.clear()
        PREPARED.forget(self._owner)
        self._schedules.clear()
        self._plans.clear()
        self._parts.clear()
        self._choices.clear()
        self._made_for.clear()
        self._weighted.clear()
        self.registered.forget()


def verified_schedules(
    topology: Topology,
    name: CollectiveName,
    root: int | None,
    methods: Sequence[str] | None = None,
    weights: tuple[int, ...] | None = None,
) -> dict[str, Schedule]:
    """Schedules of a collective by method, each verified; made once for all groups over a fabric.

    Args:
        topology: the fabric between the group's ranks.
        name, root: the collective.
        methods: to choose from, where any of them serves the collective; ``None``: the usual ones.
        weights: of its blocks; ``None``: they are equal.

    Raises:
        SynthesisError: none fits the fabric.
    """
    with planning(f"{name} over {topology.name}"):
        return dict(_verified(topology, name, root, tuple(methods or ()), weights))


# A mesh has many groups over a few fabrics, and each asks for half a dozen collectives.
@lru_cache(maxsize=128)
def _verified(
    topology: Topology,
    name: CollectiveName,
    root: int | None,
    methods: tuple[str, ...],
    weights: tuple[int, ...] | None,
) -> dict[str, Schedule]:
    usual = candidates_for(name)
    candidates = tuple(m for m in methods if m in (*usual, *classics_for(name))) or usual
    collective = Collective(name=name, num_ranks=topology.num_ranks, root=root, weights=weights)
    made: dict[str, Schedule] = {}
    refused: SynthesisError | None = None
    for method in candidates:
        if method == "flow" and is_large(topology, collective) and method != candidates[-1]:
            continue  # every rank would look for paths of its own, for half a minute; others serve at once
        try:
            schedule = synthesize(topology, collective, method=method)
        except SynthesisError as error:
            # Too large a fabric to optimise over, or one that a method does not fit: so on every rank.
            if method not in _MAY_NOT_FIT and method not in CLASSICS:
                raise
            refused = error
            continue
        verify_schedule(schedule)
        if schedule.has_places and not sums_agree(schedule):
            if method != candidates[-1] or made:
                continue
            raise SynthesisError(
                f"{method} on {topology.name}: ranks would form their sums in different orders, and the bits of "
                "floating-point results would differ from rank to rank; exchange gives the same to all"
            )
        made[method] = schedule
    if "permute" in made:  # the same paths in a better order, which the cost model does not see
        made = {method: schedule for method, schedule in made.items() if method not in ("flow", "skewed")}
    if refused is not None and not made:  # those that were asked for: what usually serves has a schedule everywhere
        raise refused
    return made


def sends_directly(made: Mapping[str, Schedule]) -> bool:
    """Whether ranks send the parts of an uneven all_to_all themselves: about as fast then as by way of others.

    If so a rank needs to know what it gives and gets, but not the lengths of the blocks between others.

    Args:
        made: schedules of all_to_all, by method.
    """
    direct, flow = made.get("direct"), made.get("flow")
    if direct is None:
        return False
    # Of ranks that are alike, rank 0's transfers speak for all: if its blocks go straight, so do those of others.
    columns = direct.columns if direct.orbit is None else direct.orbit.columns
    blocks = [direct.block_of(chunk) for chunk in columns.chunk.tolist()]
    ends = [divmod(block, direct.collective.num_ranks) for block in blocks]
    alone = ends == list(zip(columns.src.tolist(), columns.dst.tolist(), strict=True))
    return alone and (flow is None or direct.algbw >= Fraction(4, 5) * flow.algbw)


class _Same(NamedTuple):
    """A schedule as a key: itself and no other, so that it need not be compared."""

    schedule: Schedule

    def __hash__(self) -> int:
        return id(self.schedule)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.schedule is self.schedule


@lru_cache(maxsize=256)
def _template(of: _Same, rank: int) -> RankTemplate:
    return RankTemplate(of.schedule, rank)


def sends_parts_directly(made: Mapping[str, Schedule]) -> bool:
    """Whether a gather or scatter goes straight between the root and each rank, and nothing else would be faster.

    If so only the root needs to know how long all parts are.

    Args:
        made: schedules of the collective for one root, by method.
    """
    direct, flow = made.get("direct"), made.get("flow")
    if direct is None or (flow is not None and direct.algbw < flow.algbw):
        return False
    root = direct.collective.root
    return all({t.src, t.dst} == {direct.block_of(t.chunk), root} for t in direct.transfers)


def _rounded_up(num_bytes: int) -> int:
    """The least number from here that has four significant bits.

    Examples:
        >>> [_rounded_up(n) for n in (0, 15, 17, 1 << 20, (1 << 20) + 1)]
        [0, 15, 18, 1048576, 1179648]
    """
    shift = max(0, num_bytes.bit_length() - 4)
    return -(-num_bytes >> shift) << shift
