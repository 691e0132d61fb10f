"""From a sketch to a schedule: route, order, and put the result into the common form.

Collectives that reduce are planned backwards: what copies chunks out along trees, turned round in time and on links
turned round, sums them up. all_reduce is both, ordered as one: a chunk is copied out as soon as it is summed up, and
need not wait for the others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mycel.brief import brief
from mycel.collectives.replay import replay
from mycel.collectives.schedule import Chunk, Schedule, Transfer
from mycel.collectives.spec import Collective, check_ranks
from mycel.collectives.synth.sketch import joint, ordering
from mycel.collectives.synth.sketch.demands import Demand, demands_of, num_units_of
from mycel.collectives.synth.sketch.network import Network, Resource, build_network
from mycel.collectives.synth.sketch.ordering import Lane, Message, Problem
from mycel.collectives.synth.sketch.reader import Sketch
from mycel.collectives.synth.sketch.routing import Orbits, Routing, components, find_orbits, route
from mycel.errors import SynthesisError, UsageError
from mycel.topology.model import Topology

__all__ = ["CHUNK_BYTES", "TIME_LIMIT_S", "SketchPlan", "plan_sketch"]

#: Seconds to search if nothing is said.
TIME_LIMIT_S = 40.0
#: Bytes of a chunk where no size is given: public cost tables are in microseconds a MB.
CHUNK_BYTES = 10**6
#: Ordering stops this near to the bound.
_CLOSE = 0.002
#: Routes whose list schedules stay further away than this are looked for again together with an order.
_NEAR = 0.02
#: Parts of the shortest transfer that the clock of the ordering counts.
_RESOLUTION = 1000
#: Share of the time that routing may take.
_ROUTING_SHARE = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class SketchPlan:
    """A schedule, what it takes, and what nothing can take less than. Times are of the alpha-beta model.

    Attributes:
        schedule: the result.
        messages: of each transfer, the number of the message it travels in (see ``replay``).
        ports: links of which one works at a time, where the sketch says so.
        num_bytes: size it was made for.
        bound_s: proved lower bound of routing; of all_reduce, of the two halves one after the other.
        routed_s: what the routes would take if nothing ever waited for a busy link.
        seconds: what the schedule takes, replayed.
        routing_is_optimal: whether ``bound_s`` equals ``routed_s``.
        num_variables: of the routing's integer programme.
        routing_seconds: the search took.
        ordering_seconds: the search took.
    """

    schedule: Schedule
    messages: tuple[int, ...]
    ports: tuple[tuple[tuple[int, int], ...], ...]
    num_bytes: int
    bound_s: float
    routed_s: float
    seconds: float
    routing_is_optimal: bool
    num_variables: int
    routing_seconds: float
    ordering_seconds: float

    __repr__ = brief

    @property
    def gap(self) -> float:
        """By how much the schedule is slower than the bound, relative; 0 where all_reduce beats its halves."""
        return max(0.0, self.seconds / self.bound_s - 1)

    @property
    def num_messages(self) -> int:
        """Messages sent."""
        return len(set(self.messages))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phase:
    """One run of copies along trees, as routed; ``backward``: it is really a run of sums, the other way."""

    network: Network
    demands: tuple[Demand, ...]
    orbits: Orbits
    routing: Routing
    backward: bool


@dataclass(frozen=True, slots=True)
class _Leg:
    """One chunk on one link: what becomes a transfer."""

    phase: int
    demand: int
    link: int


def plan_sketch(
    topology: Topology,
    collective: Collective,
    sketch: Sketch,
    *,
    num_bytes: int | None = None,
    time_limit_s: float = TIME_LIMIT_S,
    seed: int = 0,
) -> SketchPlan:
    """A schedule within a sketch, with its bound.

    Args:
        topology: the fabric.
        collective: what to move.
        sketch: what to use.
        num_bytes: of the whole array (all_to_all: of a rank's part); by default chunks are of ``CHUNK_BYTES``.
        time_limit_s: seconds to search, routing and ordering together.
        seed: of the searches.

    Raises:
        UsageError: sketch, fabric and collective do not fit, or a size or time is not positive.
        SynthesisError: no routing satisfies the sketch, or none was found in time.
    """
    check_ranks(topology, collective)
    if collective.weights is not None:
        raise SynthesisError("method 'sketch' has no uneven blocks; forest and flow have")
    if not 0.1 <= time_limit_s <= 1e6:
        raise UsageError(f"time limit {time_limit_s:g} s; write 0.1 or more")
    if num_bytes is not None and num_bytes < 1:
        raise UsageError(f"size {num_bytes}; at least 1 byte is needed")
    num_units = num_units_of(collective, sketch.pieces)
    if num_bytes is None:
        num_bytes = CHUNK_BYTES * num_units // collective.num_parts
    chunk_bytes = num_bytes * collective.num_parts / num_units
    began = time.monotonic()
    phases = _route(topology, collective, sketch, chunk_bytes, _ROUTING_SHARE * time_limit_s, seed)
    routed = time.monotonic()
    work, messages = _order(phases, chunk_bytes, began + time_limit_s, seed)
    schedule, numbers = work.schedule(topology, collective, num_units, messages)
    ports = work.ports()
    return SketchPlan(
        schedule=schedule,
        messages=numbers,
        ports=ports,
        num_bytes=num_bytes,
        bound_s=sum(phase.routing.bound_s for phase in phases),
        routed_s=sum(phase.routing.found_s for phase in phases),
        seconds=replay(schedule, num_bytes, messages=numbers, ports=ports).seconds,
        routing_is_optimal=all(phase.routing.is_optimal for phase in phases),
        num_variables=max(phase.routing.num_variables for phase in phases),
        routing_seconds=routed - began,
        ordering_seconds=time.monotonic() - routed,
    )


def _route(
    topology: Topology, collective: Collective, sketch: Sketch, chunk_bytes: float, time_limit_s: float, seed: int
) -> tuple[_Phase, ...]:
    demands = demands_of(collective, sketch.pieces)
    ways = [True] if collective.reduces else []
    if not collective.reduces or collective.name == "all_reduce":
        ways.append(False)
    phases: list[_Phase] = []
    for backward in ways:
        fabric = topology.reversed() if backward else topology
        if phases and frozenset(topology.links) == frozenset(topology.reversed().links):
            done = phases[0]  # the same links both ways: the same routes
            phases.append(
                _Phase(
                    network=done.network,
                    demands=demands,
                    orbits=done.orbits,
                    routing=done.routing,
                    backward=backward,
                )
            )
            continue
        network = build_network(fabric, sketch)
        orbits = find_orbits(network, demands)
        routing = route(network, demands, orbits, chunk_bytes, time_limit_s=time_limit_s / len(ways), seed=seed)
        phases.append(_Phase(network=network, demands=demands, orbits=orbits, routing=routing, backward=backward))
    return tuple(phases)


def _order(phases: tuple[_Phase, ...], chunk_bytes: float, until: float, seed: int) -> tuple[_Work, list[Message]]:
    """The phases as one piece of work, and its messages."""
    if len(phases) == 1:
        return _order_phase(phases[0], chunk_bytes, until - time.monotonic(), seed)
    back, forth = phases
    share = (until - time.monotonic()) / 3
    second = _order_phase(forth, chunk_bytes, share, seed)
    if back.routing is forth.routing:
        work = _Work((replace(back, routing=second[0].phases[0].routing),), chunk_bytes)
        first = work, ordering.turned(work.problem, second[1])
    else:
        first = _order_phase(back, chunk_bytes, share, seed)
    both = _Work((*first[0].phases, *second[0].phases), chunk_bytes)
    offset = len(first[0].problem.lane_of)
    order = [m.jobs for m in sorted(first[1], key=lambda m: m.start)]
    order += [tuple(job + offset for job in m.jobs) for m in sorted(second[1], key=lambda m: m.start)]
    problem = both.problem
    if offset + len(second[0].problem.lane_of) == len(problem.lane_of):
        best = ordering.start_all(problem, order)
        best = min(best, ordering.list_schedules(problem), key=lambda found: ordering.finish_of(problem, found))
    else:  # images that do not collide within a half do so across them
        best = ordering.list_schedules(problem)
    left = until - time.monotonic()
    least = ordering.least_time(problem)
    return both, ordering.refine(problem, best, least, time_limit_s=left, close=_CLOSE, seed=seed)


def _order_phase(phase: _Phase, chunk_bytes: float, time_limit_s: float, seed: int) -> tuple[_Work, list[Message]]:
    """One phase in order; routes that cannot be kept up with are looked for again, with the order."""
    until = time.monotonic() + time_limit_s
    work = _Work((phase,), chunk_bytes)
    problem = work.copying
    best = ordering.list_schedules(problem)
    seconds = work.seconds(ordering.finish_of(problem, best))
    if seconds > phase.routing.bound_s * (1 + _NEAR):
        found = joint.search(
            phase.network,
            phase.demands,
            phase.orbits,
            chunk_bytes,
            bound_s=phase.routing.bound_s,
            below_s=seconds,
            close=_CLOSE,
            time_limit_s=time_limit_s / 2,
            seed=seed,
        )
        if found is not None:
            other = _Work((replace(phase, routing=replace(phase.routing, routes=found.routes)),), chunk_bytes)
            order = other.order_of(found.starts)
            for messages in (ordering.start_all(other.copying, order), ordering.list_schedules(other.copying)):
                if other.seconds(ordering.finish_of(other.copying, messages)) < seconds:
                    work, problem, best = other, other.copying, messages
                    seconds = work.seconds(ordering.finish_of(problem, best))
    left, least = until - time.monotonic(), math.floor(phase.routing.bound_s / work.tick_s)
    best = ordering.refine(problem, best, least, time_limit_s=left, close=_CLOSE, seed=seed)
    return work, ordering.turned(work.problem, best) if phase.backward else best


class _Work:
    """The routed phases as one problem of ordering, and its solution as a schedule."""

    def __init__(self, phases: tuple[_Phase, ...], chunk_bytes: float) -> None:
        self.phases, self._chunk_bytes = phases, chunk_bytes
        self._legs = [
            _Leg(p, d, x)
            for p, phase in enumerate(phases)
            for d, links in enumerate(phase.routing.routes)
            for x in links
        ]
        self._keys: dict[Resource, int] = {}
        for phase in phases:
            for r in range(len(phase.network.resources)):
                self._keys.setdefault(self._key(phase, r), len(self._keys))
        self._needs = self._leg_needs()
        shortest = min(
            phase.network.links[leg.link].alpha_s + chunk_bytes / phase.network.links[leg.link].rate
            for leg in self._legs
            for phase in (phases[leg.phase],)
        )
        self.tick_s = shortest / _RESOLUTION
        names = self._orbit_names()
        self._job_of, self.problem = self._as_problem(*names)

    @staticmethod
    def _key(phase: _Phase, resource: int) -> Resource:
        """A resource as the fabric itself has it."""
        key = phase.network.resources[resource]
        if not phase.backward:
            return key
        if len(key) == 2:
            return key[1], key[0]
        return ("in" if key[0] == "out" else "out"), key[1], key[2]

    def _leg_needs(self) -> list[list[int]]:
        """Of each leg, those that must have arrived before."""
        into: dict[tuple[int, int, int], int] = {}
        out: dict[tuple[int, int, int], list[int]] = {}
        for number, leg in enumerate(self._legs):
            link = self.phases[leg.phase].network.links[leg.link]
            into[leg.phase, leg.demand, link.dst] = number
            out.setdefault((leg.phase, leg.demand, link.src), []).append(number)
        needs: list[list[int]] = []
        for leg in self._legs:
            phase = self.phases[leg.phase]
            link = phase.network.links[leg.link]
            if phase.backward:
                needs.append(out.get((leg.phase, leg.demand, link.dst), []))
            elif link.src != phase.demands[leg.demand].src:
                needs.append([into[leg.phase, leg.demand, link.src]])
            else:
                needs.append(out.get((0, leg.demand, link.src), []) if leg.phase else [])
        return needs

    def _orbit_names(self) -> tuple[list[Any], list[Any], list[int]]:
        """Names that legs, lanes and machines share with their images; each its own where images would collide."""
        links = [
            components(len(p.network.links), [links for _, links, _ in p.network.symmetries]) for p in self.phases
        ]
        maps: list[list[int]] = []
        fits = True
        for number in range(len(self.phases[0].network.symmetries)):
            image: dict[int, int] = {}
            for phase in self.phases:
                for r, target in enumerate(phase.network.symmetries[number][2]):
                    here, there = self._keys[self._key(phase, r)], self._keys[self._key(phase, target)]
                    fits &= image.setdefault(here, there) == there
            maps.append([image[key] for key in range(len(self._keys))])
        legs: list[Any] = [
            (leg.phase, self.phases[leg.phase].orbits.of_link(leg.demand, leg.link)) for leg in self._legs
        ]
        machines = components(len(self._keys), maps) if fits else []
        if fits and maps:
            seen: set[tuple[int, Any]] = set()
            for name, leg in zip(legs, self._legs, strict=True):
                for key, _ in self._machines(leg):
                    fits &= (key, name) not in seen
                    seen.add((key, name))
        lanes: list[Any] = [(leg.phase, links[leg.phase][leg.link]) for leg in self._legs]
        if not fits:
            legs, machines = list(range(len(self._legs))), list(range(len(self._keys)))
            lanes = [(leg.phase, leg.link) for leg in self._legs]
        return legs, lanes, machines

    def _machines(self, leg: _Leg) -> list[tuple[int, float]]:
        phase = self.phases[leg.phase]
        resources = phase.network.links[leg.link].resources
        return [(self._keys[self._key(phase, r)], rate) for r, rate in resources]

    def _ticks(self, seconds: float) -> int:
        return math.ceil(seconds / self.tick_s * (1 - 1e-9))

    def _as_problem(self, names: list[Any], lane_names: list[Any], machines: list[int]) -> tuple[list[int], Problem]:
        """Of each leg its job, and the problem; the jobs of the first of each orbit stand for the others."""
        number_of: dict[Any, int] = {}
        first: list[int] = []
        job_of = []
        for leg, name in enumerate(names):
            if name not in number_of:
                number_of[name] = len(first)
                first.append(leg)
            job_of.append(number_of[name])
        used = {machine: i for i, machine in enumerate(sorted(set(machines)))}
        lane_number: dict[Any, int] = {}
        lanes: list[Lane] = []
        lane_of = []
        for leg in first:
            if lane_names[leg] not in lane_number:
                lane_number[lane_names[leg]] = len(lanes)
                link = self.phases[self._legs[leg].phase].network.links[self._legs[leg].link]
                lanes.append(
                    Lane(
                        alpha=self._ticks(link.alpha_s),
                        beta=self._ticks(self._chunk_bytes / link.rate),
                        machines=tuple(
                            (used[machines[key]], self._ticks(self._chunk_bytes / rate))
                            for key, rate in self._machines(self._legs[leg])
                        ),
                    )
                )
            lane_of.append(lane_number[lane_names[leg]])
        return job_of, Problem(
            lanes=tuple(lanes),
            lane_of=tuple(lane_of),
            needs=tuple(tuple(sorted({job_of[need] for need in self._needs[leg]})) for leg in first),
            firsts=self._firsts(job_of, len(first)),
            num_machines=len(used),
        )

    def _firsts(self, job_of: list[int], count: int) -> tuple[tuple[int, ...], ...]:
        """A sender's own chunks go first, where the sketch says so."""
        found: list[set[int]] = [set() for _ in range(count)]
        if self.phases[0].network.sketch.own_first:
            on_link: dict[tuple[int, int], list[int]] = {}
            for number, leg in enumerate(self._legs):
                if self.phases[leg.phase].network.links[leg.link].crosses:
                    on_link.setdefault((leg.phase, leg.link), []).append(number)
            for (p, x), numbers in on_link.items():
                phase = self.phases[p]
                src = phase.network.links[x].src
                own = [i for i in numbers if phase.demands[self._legs[i].demand].src == src]
                for other in numbers:
                    for mine in own:
                        if other not in own:
                            early, late = (other, mine) if phase.backward else (mine, other)
                            found[job_of[late]].add(job_of[early])
        return tuple(tuple(sorted(jobs)) for jobs in found)

    @property
    def copying(self) -> Problem:
        """The problem as one of copies: one of sums turned round in time."""
        return ordering.mirrored(self.problem) if self.phases[0].backward else self.problem

    def seconds(self, ticks: int) -> float:
        """Of so many ticks."""
        return ticks * self.tick_s

    def order_of(self, starts: Mapping[int, int]) -> list[tuple[int, ...]]:
        """Jobs, a message each, by the starts of their orbits."""
        of_link = self.phases[0].orbits.of_link
        when = {job: starts[of_link(leg.demand, leg.link)] for job, leg in zip(self._job_of, self._legs, strict=True)}
        return [(job,) for job in sorted(when, key=lambda job: (when[job], job))]

    def ports(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Links that share a port which the sketch, not the fabric, has."""
        found: dict[Resource, set[tuple[int, int]]] = {}
        for phase in self.phases:
            for link in phase.network.links:
                for r, _ in link.resources:
                    key = self._key(phase, r)
                    if len(key) == 3:
                        hop = (link.path[1], link.path[0]) if phase.backward else (link.path[0], link.path[1])
                        found.setdefault(key, set()).add(hop)
        return tuple(tuple(sorted(hops)) for _, hops in sorted(found.items()))

    def schedule(
        self, topology: Topology, collective: Collective, num_units: int, messages: Sequence[Message]
    ) -> tuple[Schedule, tuple[int, ...]]:
        """The schedule in the order of starts, and of each transfer its message."""
        place = {job: (m.start, number) for number, m in enumerate(messages) for job in m.jobs}
        groups: dict[tuple[int, int, int, int], list[int]] = {}
        for number, leg in enumerate(self._legs):
            start, message = place[self._job_of[number]]
            groups.setdefault((start, message, leg.phase, leg.link), []).append(number)
        at: dict[int, int] = {}
        numbers: list[int] = []
        for message, key in enumerate(sorted(groups)):
            for number in groups[key]:
                at[number] = len(numbers)
                numbers.append(message)
        transfers = []
        for number in sorted(at, key=lambda number: at[number]):
            leg = self._legs[number]
            phase = self.phases[leg.phase]
            link = phase.network.links[leg.link]
            back = phase.backward
            transfers.append(
                Transfer(
                    chunk=phase.demands[leg.demand].chunk,
                    src=link.dst if back else link.src,
                    dst=link.src if back else link.dst,
                    reduce=back,
                    path=link.path[::-1] if back else link.path,
                    after=tuple(sorted(at[need] for need in self._needs[number])),
                )
            )
        schedule = Schedule(
            collective=collective,
            topology=topology,
            method="sketch",
            num_units=num_units,
            chunks=tuple(Chunk(start=unit, stop=unit + 1) for unit in range(num_units)),
            transfers=tuple(transfers),
        )
        return schedule, tuple(numbers)
