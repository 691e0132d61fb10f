"""Routes and order at once: an exact search in which every chunk may still take every link.

Routing does not see that links are busy, so some of its routes cannot be kept up with, whatever the order. Where an
order of them stays away from the bound and the sketch is small, this search decides both together: an interval for
each (chunk, link), present if the chunk goes there, and no two present at once on one resource. Every chunk is a
message of its own here; ``ordering.refine`` joins them afterwards where that helps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mycel.collectives.cp_sat import cp_sat, solve
from mycel.collectives.synth.sketch.demands import Demand
from mycel.collectives.synth.sketch.network import Network
from mycel.collectives.synth.sketch.routing import Orbits, kept_routes, usable_links

__all__ = ["MAX_INTERVALS", "Found", "search"]

#: Larger searches than this find nothing better in a minute on two cores.
MAX_INTERVALS = 6_000
_RESOLUTION = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Routes that can be kept up with.

    Attributes:
        routes: of each demand, its links, each after the one that brings the chunk to where it starts.
        starts: of each orbit of (demand, link), when it starts, in some unit of time.
    """

    routes: tuple[tuple[int, ...], ...]
    starts: dict[int, int]


def search(
    network: Network,
    demands: Sequence[Demand],
    orbits: Orbits,
    chunk_bytes: float,
    *,
    bound_s: float,
    below_s: float,
    close: float,
    time_limit_s: float,
    seed: int = 0,
) -> Found | None:
    """Routes and starts that take less than ``below_s``, as little as the search finds; ``None`` if it finds none.

    Args:
        network: logical links.
        demands: what moves.
        orbits: of the two.
        chunk_bytes: of a chunk.
        bound_s: nothing takes less.
        below_s: what is known to be possible.
        close: near enough to the bound, relative.
        time_limit_s: seconds to search.
        seed: of the search.
    """
    usable = usable_links(network, demands, orbits)
    names = sorted({orbits.of_link(d, x) for d in range(len(demands)) for x in usable[d]})
    resources = [r for r in range(len(network.resources)) if orbits.resources[r] == r]
    # Under a symmetry an orbit that meets one resource twice would be there twice at the same time.
    meets: dict[int, list[tuple[int, float, float]]] = {r: [] for r in resources}
    clash: set[int] = set()
    for d in range(len(demands)):
        for x in usable[d]:
            name, link = orbits.of_link(d, x), network.links[x]
            for r, rate in link.resources:
                if r in meets:
                    if any(other == name for other, _, _ in meets[r]):
                        clash.add(name)
                    meets[r].append((name, link.alpha_s, rate))
    if sum(map(len, meets.values())) > MAX_INTERVALS:
        return None
    cp_model = cp_sat("method sketch")
    tick_s = min(link.alpha_s + chunk_bytes / link.rate for link in network.links) / _RESOLUTION
    model: Any = cp_model.CpModel()
    horizon = math.ceil(below_s / tick_s)
    use = {name: model.new_bool_var("") for name in names}
    start = {name: model.new_int_var(0, horizon, "") for name in names}
    total = model.new_int_var(math.floor(bound_s / tick_s), horizon, "")
    for name in clash:
        model.add(use[name] == 0)
    arrival: dict[int, Any] = {}
    for d, demand in enumerate(demands):
        if orbits.demands[d] != d:
            continue
        into: dict[int, list[Any]] = {}
        for x in usable[d]:
            link, name = network.links[x], orbits.of_link(d, x)
            for rank in (link.src, link.dst):
                at = orbits.of_rank(d, rank)
                if at not in arrival:
                    arrival[at] = model.new_int_var(0, 0 if rank == demand.src else horizon, "")
            into.setdefault(link.dst, []).append(use[name])
            took = math.ceil((link.alpha_s + chunk_bytes / link.rate) / tick_s)
            model.add(start[name] >= arrival[orbits.of_rank(d, link.src)]).only_enforce_if(use[name])
            model.add(arrival[orbits.of_rank(d, link.dst)] >= start[name] + took).only_enforce_if(use[name])
        for rank, uses in into.items():
            if rank in demand.dsts:
                model.add_exactly_one(uses)
                model.add(total >= arrival[orbits.of_rank(d, rank)])
            else:
                model.add_at_most_one(uses)
        for x in usable[d]:
            link = network.links[x]
            if link.src != demand.src and link.src not in demand.dsts:
                model.add_bool_or(into.get(link.src, [])).only_enforce_if(use[orbits.of_link(d, x)])
    for r in resources:
        sizes = [math.ceil((alpha_s + chunk_bytes / rate) / tick_s) for _, alpha_s, rate in meets[r]]
        intervals = [
            model.new_optional_fixed_size_interval_var(start[name], size, use[name], "")
            for (name, _, _), size in zip(meets[r], sizes, strict=True)
        ]
        model.add_no_overlap(intervals)
        work = cp_model.LinearExpr.weighted_sum([use[name] for name, _, _ in meets[r]], sizes)
        model.add(total >= work)
    if network.sketch.own_first:
        _own_first(model, network, demands, orbits, usable, use, start)
    model.minimize(total)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 2
    solver.parameters.random_seed = seed
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.relative_gap_limit = close
    if solve(solver, model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    chosen = {name: bool(solver.boolean_value(use[name])) for name in names}
    return Found(
        routes=kept_routes(network, demands, orbits, usable, chosen),
        starts={name: int(solver.value(start[name])) for name in names if chosen[name]},
    )


def _own_first(
    model: Any,
    network: Network,
    demands: Sequence[Demand],
    orbits: Orbits,
    usable: Sequence[Sequence[int]],
    use: dict[int, Any],
    start: dict[int, Any],
) -> None:
    on_link: dict[int, list[int]] = {}
    for d in range(len(demands)):
        for x in usable[d]:
            if network.links[x].crosses:
                on_link.setdefault(x, []).append(d)
    for x, those in on_link.items():
        own = [d for d in those if demands[d].src == network.links[x].src]
        for mine in own:
            for other in those:
                if other not in own:
                    a, b = orbits.of_link(mine, x), orbits.of_link(other, x)
                    model.add(start[a] <= start[b]).only_enforce_if(use[a], use[b])
