"""Balanced paths: one path for every pair of an all_to_all of hundreds of ranks, so that no link is much busier.

Where the programme of ``mycel.collectives.flow_bound`` is too large, each block goes whole along one path. At first
that is the shortest way, of those the widest; where what the busiest links carry proves it optimal, that is all. Else
the paths of one rank at a time are taken away and looked for anew, in parts, along the ways that are cheapest where a
link costs more the busier it is, which does what multiplicative weights do for flows that may be divided. After two
rounds over all ranks only paths over links that are too busy move, few at a time; the best round is kept. Weights are
powers of whole loads, which every machine calculates alike.

References:
    B. Awerbuch, Y. Azar, S. Plotkin, O. Waarts, "Competitive routing of virtual circuits with unknown duration",
    SODA 1994 (paths in turn, by prices that grow with the load).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mycel.collectives.cheapest_ways import find_leaves, search_ways
from mycel.collectives.columns import Columns, starts
from mycel.collectives.concurrent_flow import flow_costs, proven_time
from mycel.collectives.maxflow import BoolArray, FlowGraph, IntArray
from mycel.collectives.routes import Routes
from mycel.collectives.schedule import Chunk, Schedule
from mycel.collectives.spec import Collective
from mycel.collectives.synth.nodes import exchange
from mycel.compiled import compiled_at_once
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

__all__ = ["is_proved", "synthesize"]

Floats = npt.NDArray[np.float64]
Hops = npt.NDArray[np.int32]

#: Transfers that a schedule may have, and numbers in the table of all paths: 1 GB each.
_MOST_TRANSFERS = 12_000_000
_LARGEST_TABLE = 1 << 28
#: Parts in which a rank's paths are looked for, and searches times links in all (at most some 20 s).
_PARTS, _WORK = 16, 400_000_000
#: How many times the links of the longest shortest way a path may have.
_LONGEST = 2
#: What passing a link costs, beside one that is as busy as the busiest.
_COST_OF_HOP = 0.02
#: What links that are as busy as the busiest cost at first in all of a path, beside one link.
_SHARE_OF_LOAD = 0.4
#: Rounds in which all paths are looked for anew. Then only those over links that are busier than a limit, a part less
#: than the best so far; where so many rounds do not come below it, half of that part, down to the least, by paths
#: looked for in twice as many parts as before.
_FULL_ROUNDS, _STEP, _LEAST_STEP, _MOST_FAILURES, _FEW_PARTS = 2, 0.01, 0.0003, 5, 8


def synthesize(topology: Topology, collective: Collective, *, method: str = "flow") -> Schedule:
    """A schedule in which every block goes whole along one path.

    Args:
        topology: the fabric.
        collective: an all_to_all over all of its ranks.
        method: name to put on it.

    Raises:
        SynthesisError: more transfers than a schedule is made of here.
    """
    n = topology.num_ranks
    demands = np.array(collective.block_weights, dtype=np.int64).reshape(n, n)
    sources, targets = np.nonzero((demands > 0) & ~np.eye(n, dtype=np.bool_))
    if (alike := exchange(topology, collective, method, Routes(topology))) is not None and is_proved(alike):
        return alike
    hops, lengths = _find_paths(topology, collective, demands)
    kept = hops[sources * n + targets], lengths[sources * n + targets]
    columns = _as_columns(topology, sources, targets, *kept, _chunk_numbers(demands)[sources, targets])
    stops = np.cumsum(demands.reshape(-1)[demands.reshape(-1) > 0]).tolist()
    return Schedule.of_columns(
        collective=collective,
        topology=topology,
        method=method,
        num_units=collective.total_weight,
        chunks=tuple(Chunk(start=start, stop=stop) for start, stop in pairwise([0, *stops])),
        columns=columns,
    )


def _chunk_numbers(demands: IntArray) -> IntArray:
    """The chunk of each block, where those that hold nothing have none."""
    numbers: IntArray = (np.cumsum(demands.reshape(-1) > 0) - 1).reshape(demands.shape)
    return numbers


# -- paths --------------------------------------------------------------------------------------------------------


def _find_paths(topology: Topology, collective: Collective, demands: IntArray) -> tuple[Hops, IntArray]:
    """Links of the path of every pair, shape ``[pairs, longest]``, and how many these are."""
    graph, n = FlowGraph.of(topology), topology.num_ranks
    capacity = np.array([link.capacity for link in topology.links], dtype=np.float64)
    relays = np.isin(graph.head, graph.ranks)
    # Of equally short ways the widest: what narrow links add is less than one link's cost in all.
    costs = flow_costs(topology) + 0.5 * (1 - capacity / capacity.max()) / graph.num_vertices
    order = np.argsort(graph.tail, kind="stable")
    begin = np.searchsorted(graph.tail[order], np.arange(graph.num_vertices + 1))
    ends = begin, order, graph.tail, graph.head, find_leaves(graph.tail, graph.head, graph.num_vertices)
    wanted = demands.copy()
    np.fill_diagonal(wanted, 0)
    longest, transfers = _measure(*ends, costs, graph.ranks, wanted, relays)
    width = _LONGEST * longest + 2
    if transfers > _MOST_TRANSFERS or n * n * width > _LARGEST_TABLE:
        raise SynthesisError(
            f"{collective.name} on {topology.name}: {transfers} transfers along the shortest ways are too many for "
            f"one schedule (at most {_MOST_TRANSFERS}); `mycel bound` says what can be reached"
        )
    hops, lengths = _settle(*ends, costs, capacity, graph.ranks, wanted, 0, 1, width)
    load = np.zeros(len(topology.links), dtype=np.int64)
    _add_loads(load, hops, lengths, wanted.reshape(-1))
    if _is_optimal(topology, load.tolist(), wanted):
        return hops, lengths
    searches = max(_PARTS * n, _WORK // len(topology.links))
    settled = _settle(*ends, costs, capacity, graph.ranks, wanted, searches, _PARTS, width)
    after = np.zeros_like(load)
    _add_loads(after, *settled, wanted.reshape(-1))
    return settled if (after / capacity).max() < (load / capacity).max() else (hops, lengths)


def is_proved(schedule: Schedule) -> bool:
    """Whether the links that an all_to_all keeps busy longest prove that no schedule is over sooner."""
    topology, collective, n = schedule.topology, schedule.collective, schedule.topology.num_ranks
    units = [schedule.link_load.get((link.src, link.dst), 0) for link in topology.links]
    scale = schedule.num_units // collective.total_weight
    return _is_optimal(topology, units, scale * np.array(collective.block_weights, dtype=np.int64).reshape(n, n))


def _is_optimal(topology: Topology, load: Sequence[int], demands: IntArray) -> bool:
    """Whether the links that are busy longest prove that nothing is over sooner than with this load."""
    times = [Fraction(units, link.capacity) for units, link in zip(load, topology.links, strict=True)]
    slowest = max(times)
    busiest = np.array([time == slowest for time in times], dtype=np.int64)
    wanted = demands * (1 - np.eye(len(demands), dtype=np.int64))
    return proven_time(topology, np.arange(topology.num_ranks), wanted, busiest) == slowest


@compiled_at_once
def _measure(
    begin: IntArray,
    order: IntArray,
    tail: IntArray,
    head: IntArray,
    is_leaf: BoolArray,
    costs: Floats,
    ranks: IntArray,
    wanted: IntArray,
    relays: BoolArray,
) -> tuple[int, int]:
    """Links of the longest of all pairs' shortest ways, and transfers along all of them."""
    far, last = np.empty(len(begin) - 1, dtype=np.float64), np.empty(len(begin) - 1, dtype=np.int64)
    longest, transfers = 0, 0
    for s in range(len(ranks)):
        search_ways(begin, order, head, is_leaf, costs, ranks[s], far, last)
        for d in range(len(ranks)):
            v, length = ranks[d], 0
            while wanted[s, d] > 0 and v != ranks[s]:
                transfers += relays[last[v]]
                v = tail[last[v]]
                length += 1
            longest = max(longest, length)
    return longest, transfers


@compiled_at_once
def _add_loads(load: IntArray, hops: Hops, lengths: IntArray, units: IntArray) -> None:
    for pair in range(len(units)):
        for i in range(lengths[pair]):
            load[hops[pair, i]] += units[pair]


@compiled_at_once
def _settle(
    begin: IntArray,
    order: IntArray,
    tail: IntArray,
    head: IntArray,
    is_leaf: BoolArray,
    costs: Floats,
    capacity: Floats,
    ranks: IntArray,
    wanted: IntArray,
    searches: int,
    parts: int,
    width: int,
) -> tuple[Hops, IntArray]:
    """Shortest paths, and then those of one rank at a time anew, past what is busy; the best round's.

    At first all of them; then as many of those over links that are busier than a limit as have to leave them.
    """
    n = len(ranks)
    hops, lengths = np.zeros((n * n, width), dtype=np.int32), np.zeros(n * n, dtype=np.int64)
    best_hops, best_lengths, best = hops, lengths, np.inf
    load = np.zeros(len(head), dtype=np.int64)
    wide = capacity / capacity.max()
    weights = costs.copy()
    moved = np.empty(n, dtype=np.int64)
    far, last = np.empty(len(begin) - 1, dtype=np.float64), np.empty(len(begin) - 1, dtype=np.int64)
    turn, left, failures, few, step, limit = 0, searches, 0, _FEW_PARTS, _STEP, 0.0
    while True:
        is_full = turn <= _FULL_ROUNDS
        pieces = 1 if turn == 0 else parts if is_full else few
        doublings = 4 if is_full else 5
        for s in range(n):
            top = (load / wide).max() if is_full else limit
            for part in range(pieces):
                count = 0
                for d in range((s + part) % pieces, n, pieces):
                    meets = is_full and wanted[s, d] > 0
                    for i in range(lengths[s * n + d]):
                        arc = hops[s * n + d, i]
                        meets = meets or load[arc] / wide[arc] > limit
                    if meets:
                        moved[count] = d
                        count += 1
                        for i in range(lengths[s * n + d]):
                            load[hops[s * n + d, i]] -= wanted[s, d]
                if count == 0:
                    continue
                if turn:
                    for arc in range(len(head)):
                        busy = load[arc] / wide[arc] / top
                        for _ in range(doublings):
                            busy *= busy
                        weights[arc] = (costs[arc] * _COST_OF_HOP + busy) / wide[arc]
                elif searches and top > 0:  # of shortest ways those that carry least so far
                    for arc in range(len(head)):
                        weights[arc] = costs[arc] + load[arc] / wide[arc] / top * (_SHARE_OF_LOAD / width)
                search_ways(begin, order, head, is_leaf, weights, ranks[s], far, last)
                left -= 1
                for k in range(count):
                    d = moved[k]
                    length, v = 0, ranks[d]
                    while v != ranks[s]:
                        length += 1
                        v = tail[last[v]]
                    if length <= width:  # else it stays as it is
                        lengths[s * n + d] = length
                        v = ranks[d]
                        while v != ranks[s]:
                            length -= 1
                            hops[s * n + d, length] = last[v]
                            v = tail[last[v]]
                    for i in range(lengths[s * n + d]):
                        load[hops[s * n + d, i]] += wanted[s, d]
        time = (load / wide).max()
        if time < best:
            best_hops, best_lengths, best = (hops.copy(), lengths.copy(), time) if searches else (hops, lengths, time)
        if not is_full:
            failures = 0 if time <= limit else failures + 1
            if failures > _MOST_FAILURES:
                failures, few, step = 0, min(2 * few, n), step / 2
        if turn >= _FULL_ROUNDS:
            limit = best * (1 - step) if failures == 0 else limit
        if left <= 0 or step < _LEAST_STEP:
            return best_hops, best_lengths
        turn += 1


# -- transfers ----------------------------------------------------------------------------------------------------


def _as_columns(
    topology: Topology, sources: IntArray, targets: IntArray, hops: Hops, lengths: IntArray, chunks: IntArray
) -> Columns:
    """A transfer for each way between ranks on the paths, first hops first; in one step each rank goes round."""
    n = topology.num_ranks
    graph = FlowGraph.of(topology)
    rank_of = np.full(graph.num_vertices, -1, dtype=np.int64)
    rank_of[graph.ranks] = np.arange(n)
    pair, begin, way, paths = _cut_at_ranks(hops, lengths, graph.tail, graph.head, rank_of)
    turn = np.lexsort((sources, (targets - sources) % n))
    count = np.diff(begin)[turn]
    order = np.concatenate([begin[turn[count > hop]] + hop for hop in range(count.max(initial=0))])
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    waits = np.arange(len(order)) >= len(turn)  # all but the first ways
    first = np.array([path[0] for path in paths])
    end = np.array([path[-1] for path in paths])
    return Columns(
        chunk=chunks[pair[order]],
        src=rank_of[first[way[order]]],
        dst=rank_of[end[way[order]]],
        reduce=np.zeros(len(order), dtype=np.bool_),
        path=way[order],
        paths=paths,
        after_start=starts(waits.astype(np.int64)),
        after=place[order[waits] - 1],  # a path's ways stood side by side
    )


def _cut_at_ranks(
    hops: Hops, lengths: IntArray, tail: IntArray, head: IntArray, rank_of: IntArray
) -> tuple[IntArray, IntArray, IntArray, tuple[tuple[int, ...], ...]]:
    """Ways between ranks, pair by pair.

    Returns:
        The pair of each way; where each pair's ways begin; the number of each way in the paths that follow; these.
    """
    links = hops[np.arange(hops.shape[1]) < lengths[:, None]].astype(np.int64)
    last = np.flatnonzero(rank_of[head[links]] >= 0)
    first = np.concatenate([[0], last[:-1] + 1])
    pair = np.repeat(np.arange(len(lengths)), lengths)[last]
    # The same number for the same links, in the order in which they are first met.
    key, length = links[first], last - first + 1
    for hop in range(1, int(length.max())):
        following = np.where(length > hop, links[np.minimum(first + hop, last)] + 1, 0)
        key = np.unique(key * (len(head) + 1) + following, return_inverse=True)[1].reshape(-1)
    met = np.full(int(key.max()) + 1, len(key))
    met[key[::-1]] = np.arange(len(key))[::-1]
    order = np.argsort(met)[: np.count_nonzero(met < len(key))]
    number = np.empty(len(met), dtype=np.int64)
    number[order] = np.arange(len(order))
    parts = (links[first[way] : last[way] + 1] for way in met[order].tolist())
    paths = tuple((int(tail[part[0]]), *head[part].tolist()) for part in parts)
    return pair, starts(np.bincount(pair, minlength=len(lengths))), number[key], paths
