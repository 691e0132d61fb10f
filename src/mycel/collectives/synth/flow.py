"""Flow: all_to_all, gather and scatter at the rate of the optimal flow (large messages).

The flow of each source is taken apart into paths. Every block is cut into parts, one a path, in proportion; a part
goes along its path from rank to rank, and a rank on the way keeps it only until it has sent it on. Each link then
carries exactly what the flow says, so that the schedule's bandwidth is the optimum wherever the flow is exact
(``mycel.collectives.flow_bound``).

References:
    L. R. Ford, D. R. Fulkerson, "Flows in Networks", 1962, chapter I (taking flows apart into paths).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise
from math import gcd

import numpy as np

from mycel.collectives.flow_bound import Floats, FlowOptimum, is_large, solve_flow
from mycel.collectives.ordering import in_level_order
from mycel.collectives.routes import Routes
from mycel.collectives.schedule import Chunk, Schedule, Transfer
from mycel.collectives.spec import Collective, check_ranks
from mycel.collectives.synth import balanced_paths, skewed
from mycel.collectives.synth.nodes import NODES_FROM, exchange
from mycel.topology.model import Topology

__all__ = ["Part", "ends_of_blocks", "parts_of_flow", "schedule_of_parts", "synthesize"]

#: Units of a block of weight 1 where the flow has no small common denominator.
_ROUNDED_UNITS = 5040
#: What is left of a flow in floating point, and means nothing.
_DUST = 1e-7

#: Units, and the vertices that they pass.
Part = tuple[int, tuple[int, ...]]


def synthesize(topology: Topology, collective: Collective) -> Schedule:
    """A schedule whose links carry the optimal flow.

    Args:
        topology: the fabric.
        collective: an all_to_all, gather or scatter over all of its ranks.

    Raises:
        UsageError: the collective is over another number of ranks.
        SynthesisError: the programme cannot be solved, or more transfers than one schedule is made of.
    """
    check_ranks(topology, collective)
    if topology.num_ranks >= NODES_FROM and len(topology.links) == 2 * (len(topology.vertices) - 1):
        return _along_only_ways(topology, collective)
    if is_large(topology, collective):
        return _one_path_a_pair(topology, collective)
    parts, unit = parts_of_flow(topology, collective)
    return schedule_of_parts(topology, collective, "flow", parts, unit)


def parts_of_flow(topology: Topology, collective: Collective) -> tuple[dict[tuple[int, int], list[Part]], int]:
    """The optimal flow taken apart: of each pair of ranks the parts of its block, and units of a block of weight 1.

    Args:
        topology: the fabric.
        collective: an all_to_all, gather or scatter, not too large for the programme.

    Raises:
        SynthesisError: the programme cannot be solved.
    """
    best = solve_flow(topology, collective)
    parts: dict[tuple[int, int], list[Part]] = {}
    for source, demand, flow in zip(best.sources, best.demands.tolist(), best.flows, strict=True):
        for far, found in _take_apart(best, source, demand, flow.copy()).items():
            pair = (far, source) if collective.name == "gather" else (source, far)
            turn = -1 if collective.name == "gather" else 1
            parts[pair] = [(units, path[::turn]) for units, path in found]
    num_units = best.num_units or _ROUNDED_UNITS
    common = gcd(num_units, *(units for found in parts.values() for units, _ in found))
    parts = {pair: [(units // common, path) for units, path in found] for pair, found in parts.items()}
    return parts, num_units // common


def _one_path_a_pair(topology: Topology, collective: Collective) -> Schedule:
    """What is planned beyond the programme's size: by boxes if that is proved optimal, else the better of two."""
    made = None
    if collective.weights is not None and skewed.serves(topology):
        made = skewed.synthesize(topology, collective)
        if balanced_paths.is_proved(made):
            return made
    paths = balanced_paths.synthesize(topology, collective)
    return paths if made is None or paths.algbw >= made.algbw else made


def _along_only_ways(topology: Topology, collective: Collective) -> Schedule:
    """The optimal flow where there is nothing to choose: cables that form a tree leave one way from rank to rank."""
    routes = Routes(topology)
    if collective.name == "all_to_all":
        alike = exchange(topology, collective, "flow", routes)
        if alike is not None:
            return alike
    pairs = zip(collective.block_weights, ends_of_blocks(collective), strict=True)
    parts = {(src, dst): [(w, routes.vertices(src, dst))] for w, (src, dst) in pairs if w and src != dst}
    return schedule_of_parts(topology, collective, "flow", parts, 1)


def schedule_of_parts(
    topology: Topology,
    collective: Collective,
    method: str,
    parts: dict[tuple[int, int], list[Part]],
    unit: int,
) -> Schedule:
    """The schedule in which every block goes in parts along paths.

    Args:
        topology: the fabric.
        collective: an all_to_all, gather or scatter.
        method: what to call the schedule's maker.
        parts: of the block from a rank to another, by that pair; their units add up to the block's.
        unit: units of a block of weight 1.
    """
    n = collective.num_ranks
    chunks: list[Chunk] = []
    transfers: list[Transfer] = []
    reached = 0
    for weight, (source, target) in zip(collective.block_weights, ends_of_blocks(collective), strict=True):
        if source == target and weight:
            chunks.append(Chunk(start=reached, stop=reached + weight * unit))
            reached = chunks[-1].stop
        for units, path in parts.get((source, target), ()):
            transfers += _along(topology, path, len(chunks), len(transfers))
            chunks.append(Chunk(start=reached, stop=reached + units))
            reached += units
    return Schedule(
        collective=collective,
        topology=topology,
        method=method,
        num_units=collective.total_weight * unit,
        chunks=tuple(chunks),
        # In one step each rank goes round the others from its own place, so that nobody is everyone's first.
        transfers=in_level_order(transfers, lambda t: ((t.dst - t.src) % n, t.src)),
    )


def ends_of_blocks(collective: Collective) -> list[tuple[int, int]]:
    """Of each block, which rank has it before and which needs it."""
    n, root = collective.num_ranks, collective.root
    if root is None:
        return [divmod(block, n) for block in range(n * n)]
    return [(rank, root) if collective.name == "gather" else (root, rank) for rank in range(n)]


def _along(topology: Topology, path: tuple[int, ...], chunk: int, number: int) -> list[Transfer]:
    """A transfer for each way between ranks on a path; ``number`` is the first one's."""
    stops = [i for i, vertex in enumerate(path) if vertex in topology.rank_of]
    return [
        Transfer(
            chunk=chunk,
            src=topology.rank_of[path[a]],
            dst=topology.rank_of[path[b]],
            reduce=False,
            path=path[a : b + 1],
            after=(number + hop - 1,) if hop else (),
        )
        for hop, (a, b) in enumerate(pairwise(stops))
    ]


def _take_apart(best: FlowOptimum, source: int, demand: list[int], flow: Floats) -> dict[int, list[Part]]:
    """Paths from a source to every rank that gets something, with its units in all; ``flow`` is used up."""
    fabric, start = best.fabric, best.fabric.ranks[source]
    incoming: list[list[int]] = [[] for _ in fabric.vertices]
    for number, link in enumerate(fabric.links):
        if link.dst != start:
            incoming[link.dst].append(number)
    out: dict[int, list[Part]] = {}
    for rank, vertex in enumerate(fabric.ranks):
        if not demand[rank]:
            continue
        left = float(demand[rank] * (best.num_units or 1))
        found: list[tuple[float, tuple[int, ...]]] = []
        while left > _DUST:
            path = _widest(fabric, incoming, flow, start, vertex)
            if path is None:
                break
            width = min(left, float(flow[path].min()))
            flow[path] -= width
            left -= width
            found.append((width, (start, *(fabric.links[number].dst for number in path))))
        out[rank] = _in_units(found, best.num_units, demand[rank] * _ROUNDED_UNITS)
    return out


def _widest(fabric: Topology, incoming: list[list[int]], flow: Floats, start: int, end: int) -> list[int] | None:
    """Links of the path whose smallest flow is largest, fewest links first among equals; backwards from its end."""
    heap: list[tuple[float, int, int, int]] = [(-float("inf"), 0, end, -1)]
    follows: dict[int, int] = {}
    while heap:
        width, length, vertex, link = heapq.heappop(heap)
        if vertex in follows:
            continue
        follows[vertex] = link
        if vertex == start:
            path: list[int] = []
            while vertex != end:
                path.append(follows[vertex])
                vertex = fabric.links[path[-1]].dst
            return path
        for number in incoming[vertex]:
            if flow[number] > _DUST and fabric.links[number].src not in follows:
                wide = max(width, -float(flow[number]))
                heapq.heappush(heap, (wide, length + 1, fabric.links[number].src, number))
    return None


def _in_units(found: Sequence[tuple[float, tuple[int, ...]]], num_units: int, rounded: int) -> list[Part]:
    """Whole units: as they are, or, where the flow is a fraction, rounded to add up (largest remainder)."""
    if num_units:
        return [(round(width), path) for width, path in found]
    shares = np.array([width for width, _ in found])
    shares *= rounded / shares.sum()
    units = np.floor(shares).astype(int)
    for most in np.argsort(units - shares, kind="stable")[: rounded - int(units.sum())]:
        units[most] += 1
    return [(int(count), path) for count, (_, path) in zip(units, found, strict=True) if count]
