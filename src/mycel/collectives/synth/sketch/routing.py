"""Routing: along which links each chunk goes, so that the time is least while nothing waits for a free link.

An integer programme over (chunk, link): every rank that wants a chunk receives it once, from a rank that has it
before. Two things bound the time: when the last chunk arrives if no link is ever busy, and how long the busiest
resource works. The optimum of that is a lower bound for every schedule of the sketch, since waiting for busy links
only adds time; a message may carry several chunks, so a resource is charged its latency once. Symmetric chunks and
links share one variable.

For all_to_all, gather and scatter a chunk may only pass ranks that lie on a way with the fewest hops, as in the
paper.

References:
    A. Shah et al., "TACCL: Guiding Collective Algorithm Synthesis using Communication Sketches", NSDI 2023,
    section 5.1 (relaxed bandwidth constraints, symmetry).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mycel.collectives.cp_sat import cp_sat, solve
from mycel.collectives.synth.sketch.demands import Demand
from mycel.collectives.synth.sketch.network import Network
from mycel.errors import SynthesisError

__all__ = [
    "MAX_VARIABLES",
    "Orbits",
    "Routing",
    "components",
    "find_orbits",
    "kept_routes",
    "route",
    "usable_links",
]

#: Larger integer programmes than this are refused: two cores do not finish them.
MAX_VARIABLES = 400_000
#: Pairs of a chunk and a link before symmetry, at most.
_MAX_PAIRS = 4_000_000
#: Parts of the shortest transfer that the clock of the programme counts.
_RESOLUTION = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Routes, and what is proved of them.

    Attributes:
        routes: of each demand, its links, each after the one that brings the chunk to where it starts.
        bound_s: no schedule of the sketch takes less, as far as proved.
        found_s: what these routes would take if nothing ever waited.
        is_optimal: whether the two are equal: routing is proven optimal.
        seconds: it took.
        num_variables: of the integer programme, after symmetry.
    """

    routes: tuple[tuple[int, ...], ...]
    bound_s: float
    found_s: float
    is_optimal: bool
    seconds: float
    num_variables: int


class Orbits:
    """What the symmetries of a network make of pairs (demand, link) and (demand, rank), and of resources.

    Args:
        network: with its symmetries.
        demands: what moves.
    """

    def __init__(self, network: Network, demands: Sequence[Demand]) -> None:
        self._demand_images = [_images(demands, ranks) for ranks, _, _ in network.symmetries]
        self._moves = [(links, ranks) for ranks, links, _ in network.symmetries]
        self.is_whole = all(images is not None for images in self._demand_images)
        self.resources = components(len(network.resources), [resources for _, _, resources in network.symmetries])
        self.demands = components(len(demands), [i for i in self._demand_images if i is not None])
        self._links: dict[tuple[int, int], int] = {}
        self._num_links, self._num_ranks = len(network.links), network.num_ranks
        self._of_links = self._join(len(demands), len(network.links), 0)
        self._of_ranks = self._join(len(demands), network.num_ranks, 1)

    def _join(self, num_demands: int, width: int, which: int) -> list[int]:
        """Smallest member of the orbit of each (demand, x), where x is a link or a rank."""
        maps = []
        for images, move in zip(self._demand_images, self._moves, strict=True):
            if images is not None:
                maps.append([image * width + move[which][x] for image in images for x in range(width)])
        return components(num_demands * width, maps)

    def of_link(self, demand: int, link: int) -> int:
        """Name of the orbit of a demand on a link: its smallest member ``demand * num_links + link``."""
        return self._of_links[demand * self._num_links + link]

    def of_rank(self, demand: int, rank: int) -> int:
        """Name of the orbit of a demand at a rank."""
        return self._of_ranks[demand * self._num_ranks + rank]


def find_orbits(network: Network, demands: Sequence[Demand]) -> Orbits:
    """Orbits under the sketch's symmetries.

    Raises:
        SynthesisError: the collective does not have them (those with a root have none), or there is too much to look
            at.
    """
    if len(demands) * len(network.links) > _MAX_PAIRS:
        raise SynthesisError(
            f"{network.sketch.source}: {len(demands)} chunks on {len(network.links)} links are more than a sketch is "
            "for; allow fewer connections, or plan by forest or flow"
        )
    orbits = Orbits(network, demands)
    if not orbits.is_whole:
        raise SynthesisError(
            f"{network.sketch.source}: symmetry_offsets: the collective has a root and no such symmetry; "
            'use a sketch with "symmetry_offsets": []'
        )
    return orbits


def _images(demands: Sequence[Demand], ranks: Sequence[int]) -> list[int] | None:
    """Where a turn of the ranks takes demands; ``None`` if it takes one to nowhere."""
    at = {(d.src, frozenset(d.dsts), d.twin): number for number, d in enumerate(demands)}
    images = [at.get((ranks[d.src], frozenset(ranks[dst] for dst in d.dsts), d.twin)) for d in demands]
    found = [image for image in images if image is not None]
    return found if len(set(found)) == len(demands) else None


def components(count: int, maps: Sequence[Sequence[int]]) -> list[int]:
    """Smallest member of the orbit of each of ``0 .. count-1`` under permutations."""
    name = [-1] * count
    for start in range(count):
        if name[start] < 0:
            name[start], stack = start, [start]
            while stack:
                here = stack.pop()
                for image in maps:
                    if name[image[here]] < 0:
                        name[image[here]] = start
                        stack.append(image[here])
    return name


def _usable(network: Network, demand: Demand) -> list[int]:
    """Links a demand may use; with one rank to reach, those on a way with the fewest hops."""
    allowed = [
        number
        for number, link in enumerate(network.links)
        if link.dst != demand.src and network.allows(link, demand.src, demand.dsts)
    ]
    if len(demand.dsts) > 1:
        return allowed
    ends = [(network.links[x].src, network.links[x].dst) for x in allowed]
    there = _hops(ends, demand.src)
    onwards = _hops([(dst, src) for src, dst in ends], demand.dsts[0])
    fewest = there.get(demand.dsts[0], 0)
    return [
        x
        for x, (src, dst) in zip(allowed, ends, strict=True)
        if src in there and dst in onwards and there[src] + 1 + onwards[dst] == fewest
    ]


def _hops(ends: Sequence[tuple[int, int]], start: int) -> dict[int, int]:
    """Links on a shortest way from a rank to those it reaches."""
    beside: dict[int, list[int]] = {}
    for src, dst in ends:
        beside.setdefault(src, []).append(dst)
    found, queue = {start: 0}, deque([start])
    while queue:
        here = queue.popleft()
        for far in beside.get(here, ()):
            if far not in found:
                found[far] = found[here] + 1
                queue.append(far)
    return found


def route(
    network: Network,
    demands: Sequence[Demand],
    orbits: Orbits,
    chunk_bytes: float,
    *,
    time_limit_s: float,
    seed: int = 0,
) -> Routing:
    """The fastest routes, and the proof.

    Args:
        network: logical links.
        demands: what moves.
        orbits: of the two.
        chunk_bytes: of a chunk.
        time_limit_s: seconds to search.
        seed: of the search, which has two workers: a run that ends at its time limit may differ from the next.

    Raises:
        SynthesisError: the sketch leaves a rank unreached, the programme is too large, or time ran out.
    """
    began = time.monotonic()
    programme = _RoutingModel(network, demands, orbits, chunk_bytes)
    first = programme.solve(time_limit_s, seed)
    left = time_limit_s - (time.monotonic() - began)
    best = programme.polish(first, min(left, max(2.0, time_limit_s / 6)), seed) if left > 0.1 else first
    tick, (values, least, found, proven) = programme.tick_s, best
    return Routing(
        routes=kept_routes(network, demands, orbits, programme.usable, values),
        bound_s=min(least, found) * tick,
        found_s=found * tick,
        is_optimal=proven,
        seconds=time.monotonic() - began,
        num_variables=len(programme.used),
    )


#: Values of the variables by orbit, proved bound, time found (both in ticks), whether they are proven equal.
_Answer = tuple[dict[int, bool], float, int, bool]


class _RoutingModel:
    """The integer programme; its clock ticks ``tick_s``."""

    def __init__(self, network: Network, demands: Sequence[Demand], orbits: Orbits, chunk_bytes: float) -> None:
        cp_model = cp_sat("method sketch")
        self._cp = cp_model
        self._network, self._demands, self._orbits = network, demands, orbits
        self.usable = usable_links(network, demands, orbits)
        self._chosen = [d for d in range(len(demands)) if orbits.demands[d] == d]
        names = {orbits.of_link(d, x) for d in self._chosen for x in self.usable[d]}
        if len(names) > MAX_VARIABLES:
            raise SynthesisError(
                f"{network.sketch.source}: {len(names)} variables; at most {MAX_VARIABLES} are tried: "
                "give symmetry_offsets, or a smaller input_chunkup"
            )
        self._links = network.links
        shortest = min((link.alpha_s + chunk_bytes / link.rate for link in network.links), default=1.0)
        self.tick_s = shortest / _RESOLUTION
        self._alpha = [math.floor(link.alpha_s / self.tick_s) for link in network.links]
        self._beta = [math.floor(chunk_bytes / link.rate / self.tick_s) for link in network.links]
        self._work = [
            [(r, math.floor(chunk_bytes / rate / self.tick_s)) for r, rate in k.resources] for k in self._links
        ]
        self._horizon = sum(self._alpha[x] + self._beta[x] for x in range(len(self._links))) * max(
            1, len(demands) // max(1, len(self._chosen)) + len(self._chosen)
        )
        self.model: Any = cp_model.CpModel()
        self.used: dict[int, Any] = {name: self.model.new_bool_var("") for name in sorted(names)}
        self.time: Any = self.model.new_int_var(0, self._horizon, "")
        self._arrival: dict[int, Any] = {}
        self._paths()
        self._loads()

    def _at(self, demand: int, rank: int) -> Any:
        if rank == self._demands[demand].src:
            return 0
        name = self._orbits.of_rank(demand, rank)
        if name not in self._arrival:
            self._arrival[name] = self.model.new_int_var(0, self._horizon, "")
        return self._arrival[name]

    def _paths(self) -> None:
        model, orbits = self.model, self._orbits
        for d in self._chosen:
            demand = self._demands[d]
            into: dict[int, list[Any]] = {}
            for x in self.usable[d]:
                link, use = self._links[x], self.used[orbits.of_link(d, x)]
                into.setdefault(link.dst, []).append(use)
                took = self._alpha[x] + self._beta[x]
                model.add(self._at(d, link.dst) >= self._at(d, link.src) + took).only_enforce_if(use)
            wanted = set(demand.dsts)
            if missing := wanted - set(
                _hops([(self._links[x].src, self._links[x].dst) for x in self.usable[d]], demand.src)
            ):
                raise SynthesisError(
                    f"{self._network.sketch.source}: rank {min(missing)} cannot receive what rank {demand.src} has: "
                    "the sketch leaves it unreached; add a connection"
                )
            for rank, uses in into.items():
                if rank in wanted:
                    model.add_exactly_one(uses)
                    model.add(self.time >= self._at(d, rank))
                else:
                    model.add_at_most_one(uses)
            for x in self.usable[d]:
                link = self._links[x]
                if link.src != demand.src and link.src not in wanted:
                    model.add_bool_or(into.get(link.src, [])).only_enforce_if(self.used[orbits.of_link(d, x)])

    def _loads(self) -> None:
        """The time covers each resource's work, with the least way to it and the least way on from it."""
        head, tail = self._heads_and_tails()
        terms: dict[int, dict[int, int]] = {}
        least: dict[int, tuple[int, int, int]] = {}
        self._uses_of: list[list[Any]] = []
        for d in range(len(self._demands)):
            for x in self.usable[d]:
                name = self._orbits.of_link(d, x)
                for r, work in self._work[x]:
                    if self._orbits.resources[r] != r:
                        continue
                    row = terms.setdefault(r, {})
                    row[name] = row.get(name, 0) + work
                    before, alpha, after = least.get(r, (1 << 60, 1 << 60, 1 << 60))
                    least[r] = (min(before, head[d, x]), min(alpha, self._alpha[x]), min(after, tail[d, x]))
        self.loads: list[Any] = []
        for r, row in terms.items():
            load = self._cp.LinearExpr.weighted_sum([self.used[name] for name in row], list(row.values()))
            busy = self.model.new_bool_var("")
            for name in row:
                self.model.add_implication(self.used[name], busy)
            self.model.add(self.time >= load + sum(least[r])).only_enforce_if(busy)
            self.loads.append(load)

    def _heads_and_tails(self) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
        """Of each (demand, link), the least time before a chunk can be there, and after it until all have it."""
        head: dict[tuple[int, int], int] = {}
        tail: dict[tuple[int, int], int] = {}
        for d, demand in enumerate(self._demands):
            links = self.usable[d]
            start = self._distances(links, demand.src)
            from_rank: dict[int, dict[int, int]] = {}
            for x in links:
                link = self._links[x]
                head[d, x] = start.get(link.src, 1 << 60)
                # Who can be reached without this link may be served by another; the others wait behind it.
                tail[d, x] = 0
                if link.crosses or len(demand.dsts) == 1:
                    without = self._distances([y for y in links if y != x], demand.src)
                    behind = [dst for dst in demand.dsts if dst not in without]
                    if behind:
                        if link.dst not in from_rank:
                            from_rank[link.dst] = self._distances(links, link.dst)
                        tail[d, x] = max(from_rank[link.dst].get(dst, 0) for dst in behind)
        return head, tail

    def _distances(self, links: Sequence[int], start: int) -> dict[int, int]:
        """Least ticks from a rank to others."""
        beside: dict[int, list[tuple[int, int]]] = {}
        for x in links:
            beside.setdefault(self._links[x].src, []).append((self._links[x].dst, self._alpha[x] + self._beta[x]))
        best, changed = {start: 0}, deque([start])
        while changed:
            here = changed.popleft()
            for far, took in beside.get(here, ()):
                if best[here] + took < best.get(far, 1 << 60):
                    best[far] = best[here] + took
                    changed.append(far)
        return best

    def _solver(self, time_limit_s: float, seed: int) -> Any:
        solver = self._cp.CpSolver()
        solver.parameters.num_workers = 2
        solver.parameters.random_seed = seed
        solver.parameters.max_time_in_seconds = max(time_limit_s, 0.1)
        return solver

    def solve(self, time_limit_s: float, seed: int) -> _Answer:
        """The least time."""
        solver = self._solver(time_limit_s, seed)
        self.model.minimize(self.time)
        status = solve(solver, self.model)
        if status not in (self._cp.OPTIMAL, self._cp.FEASIBLE):
            name = self._network.sketch.source
            if status == self._cp.INFEASIBLE:
                raise SynthesisError(f"{name}: no routing satisfies the sketch; allow more links")
            raise SynthesisError(f"{name}: no routing found in {time_limit_s:.3g} s; give a longer --time-limit")
        values = {name: bool(solver.boolean_value(use)) for name, use in self.used.items()}
        return values, solver.best_objective_bound, int(solver.value(self.time)), status == self._cp.OPTIMAL

    def polish(self, first: _Answer, time_limit_s: float, seed: int) -> _Answer:
        """Among routes of that time, what the sketch prefers, and then early arrivals."""
        values, least, found, proven = first
        model, sketch = self.model, self._network.sketch
        model.add(self.time <= found)
        early = sum(self._arrival.values())
        connections = self._connections() if sketch.inside == "switch" and sketch.policy != "free" else []
        if connections:
            sign = 1 if sketch.policy == "uc-min" else -1
            step = max(1, found * len(self._arrival) // max(1, 4 * len(connections)))
            model.minimize(early + sign * step * sum(connections))
        elif sketch.inside in ("minmax", "maxmin"):
            extreme = model.new_int_var(0, self._horizon, "")
            for load in self.loads:
                model.add(extreme >= load if sketch.inside == "minmax" else extreme <= load)
            model.minimize(early + (1 if sketch.inside == "minmax" else -1) * len(self._arrival) * extreme)
        else:
            model.minimize(early)
        for name, use in self.used.items():
            model.add_hint(use, values[name])
        solver = self._solver(time_limit_s, seed)
        if solve(solver, model) in (self._cp.OPTIMAL, self._cp.FEASIBLE):
            values = {name: bool(solver.boolean_value(use)) for name, use in self.used.items()}
        return values, least, found, proven

    def _connections(self) -> list[Any]:
        """One variable a pair of ranks of a node: whether any chunk goes between them."""
        by_link: dict[int, set[int]] = {}
        for d in range(len(self._demands)):
            for x in self.usable[d]:
                if not self._links[x].crosses:
                    by_link.setdefault(x, set()).add(self._orbits.of_link(d, x))
        found: dict[frozenset[int], Any] = {}
        for names in map(frozenset, by_link.values()):
            if names not in found:
                found[names] = self.model.new_bool_var("")
                self.model.add_max_equality(found[names], [self.used[name] for name in sorted(names)])
        return list(found.values())


def kept_routes(
    network: Network,
    demands: Sequence[Demand],
    orbits: Orbits,
    usable: Sequence[Sequence[int]],
    chosen: Mapping[int, bool],
) -> tuple[tuple[int, ...], ...]:
    """Links of every demand from its source outwards, without those that serve nobody.

    Args:
        network: logical links.
        demands: what moves.
        orbits: of the two.
        usable: links that each demand may use.
        chosen: of each orbit of (demand, link), whether it is used.
    """
    found = []
    for d, demand in enumerate(demands):
        into = {network.links[x].dst: x for x in usable[d] if chosen[orbits.of_link(d, x)]}
        kept: list[int] = []
        for dst in demand.dsts:
            way: list[int] = []
            here = dst
            while here != demand.src and into[here] not in kept:
                way.append(into[here])
                here = network.links[into[here]].src
            kept += way[::-1]
        found.append(tuple(kept))
    return tuple(found)


def usable_links(network: Network, demands: Sequence[Demand], orbits: Orbits) -> list[list[int]]:
    """Links that each demand may use, by the sketch and by hops; the same for all images of a demand."""
    usable = [_usable(network, demand) for demand in demands]
    if not network.symmetries:
        return usable
    able = [set(row) for row in usable]
    blocked = {
        orbits.of_link(d, x) for d in range(len(demands)) for x in range(len(network.links)) if x not in able[d]
    }
    return [[x for x in row if orbits.of_link(d, x) not in blocked] for d, row in enumerate(usable)]
