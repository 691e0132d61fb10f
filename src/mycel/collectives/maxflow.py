"""Max-flow to every rank at once: does each rank receive what it must, and which cut says no.

The question behind every bound and forest is one: with a source that feeds rank ``r`` through an arc of capacity
``demand[r]``, is the maximum flow from the source to *each* rank at least the total demand? A rank that passes is
contracted into the source, because a cut that fails some other rank cannot contain it; flows to later ranks then
stay local, and the residual network is kept from one rank to the next.

The kernels are compiled by numba at their first call (then cached on disk) and work on int64 arrays; bounds of small
fabrics are found before numba would be imported, by the same kernels interpreted.

References:
    Y. Dinitz, "Algorithm for solution of a problem of maximum flow in networks with power estimation", Soviet
    Math. Doklady 11, 1970. J. Edmonds, "Edge-disjoint branchings", in Combinatorial Algorithms, 1973 (why flow to
    each rank is what a packing of spanning trees needs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mycel.compiled import compiled, interpreted_while_small
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

__all__ = [
    "BoolArray",
    "FlowGraph",
    "IntArray",
    "as_int64",
    "build_rows",
    "flow_on_arcs",
    "push_flow",
    "shortfalls",
    "violated_sets",
]

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

#: Sums of scaled capacities must stay below this, with room for one more addition in int64.
_LARGEST = 1 << 61


def as_int64(values: Sequence[int]) -> IntArray:
    """Integers of any size as an int64 array, refusing what flow sums could overflow.

    Raises:
        SynthesisError: the values add up to 2^61 or more.
    """
    total = sum(values)
    if total >= _LARGEST:
        raise SynthesisError(
            f"scaled capacities add up to {total}, which 64-bit flows cannot count exactly; "
            "give the capacities in a coarser unit, or round them so that they share a divisor"
        )
    return np.array(values, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlowGraph:
    """A fabric's graph as arrays, without its capacities.

    Attributes:
        num_vertices: ranks and switches.
        ranks: vertex index of each rank; shape ``[num_ranks]``.
        tail: vertex each arc leaves; shape ``[num_arcs]``.
        head: vertex each arc reaches; shape ``[num_arcs]``.
    """

    num_vertices: int
    ranks: IntArray
    tail: IntArray
    head: IntArray

    @classmethod
    def of(cls, topology: Topology, *, is_reversed: bool = False) -> FlowGraph:
        """The graph of a topology, arcs in the order of its links, on request turned round."""
        src = np.array([link.src for link in topology.links], dtype=np.int64)
        dst = np.array([link.dst for link in topology.links], dtype=np.int64)
        return cls(
            num_vertices=len(topology.vertices),
            ranks=np.array(topology.ranks, dtype=np.int64),
            tail=dst if is_reversed else src,
            head=src if is_reversed else dst,
        )

    def check(self, capacity: IntArray, demand: IntArray) -> tuple[IntArray, BoolArray]:
        """What every rank lacks of the total demand, and why.

        Args:
            capacity: of each arc; shape ``[num_arcs]``.
            demand: what the source feeds into each rank; shape ``[num_ranks]``.

        Returns:
            ``deficit``, shape ``[num_ranks]``: total demand minus maximum flow, zero where the rank is served; and
            ``side``, shape ``[num_ranks, num_vertices]``: for a rank with a deficit, the smallest set of vertices
            around it whose incoming capacity (source included) falls short by that deficit.
        """
        tail, head, full = self.with_source(capacity, demand)
        return shortfalls(self.num_vertices + 1, tail, head, full, self.num_vertices, self.ranks, int(demand.sum()))

    def with_source(self, capacity: IntArray, demand: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Tails, heads and capacities with the source (vertex ``num_vertices``) and its arcs put last."""
        tail = np.concatenate([self.tail, np.full(len(self.ranks), self.num_vertices, dtype=np.int64)])
        return tail, np.concatenate([self.head, self.ranks]), np.concatenate([capacity, demand])


@compiled
def build_rows(num_vertices: int, tail: IntArray, head: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Residual adjacency in compressed rows.

    Arc ``i`` becomes residual arcs ``2i`` (forward) and ``2i+1`` (backward).

    Returns:
        ``start``, shape ``[num_vertices + 1]``; ``slot``, residual arcs by the vertex they leave, in arc order;
        ``ends``, the vertex each residual arc reaches.
    """
    num_arcs = len(tail)
    start = np.zeros(num_vertices + 1, dtype=np.int64)
    ends = np.empty(2 * num_arcs, dtype=np.int64)
    for i in range(num_arcs):
        start[tail[i] + 1] += 1
        start[head[i] + 1] += 1
        ends[2 * i] = head[i]
        ends[2 * i + 1] = tail[i]
    for v in range(num_vertices):
        start[v + 1] += start[v]
    place = start[:-1].copy()
    slot = np.empty(2 * num_arcs, dtype=np.int64)
    for i in range(num_arcs):
        slot[place[tail[i]]] = 2 * i
        place[tail[i]] += 1
        slot[place[head[i]]] = 2 * i + 1
        place[head[i]] += 1
    return start, slot, ends


@compiled
def push_flow(
    start: IntArray,
    slot: IntArray,
    ends: IntArray,
    residual: IntArray,
    is_source: BoolArray,
    sink: int,
    limit: int,
    distance: IntArray,
    work: IntArray,
) -> int:
    """Push up to ``limit`` units from the source vertices to ``sink`` through the residual network, in place.

    Dinic's algorithm run from the sink, so that a sink next to a source costs next to nothing.

    Args:
        start, slot, ends: from ``build_rows``.
        residual: capacity left on each residual arc; changed.
        is_source: vertices that supply without limit.
        distance: scratch, shape ``[num_vertices]``; where the flow stays below ``limit``, the non-negative entries
            mark the sink's side of a minimum cut (the smallest such side).
        work: scratch, shape ``[3, num_vertices + 1]``.

    Returns:
        Units pushed.
    """
    pointer, queue, trail = work[0], work[1], work[2]
    num_vertices = len(start) - 1
    flow = 0
    while flow < limit:
        distance[:] = -1
        distance[sink] = 0
        queue[0] = sink
        first, last, found = 0, 1, -1
        while first < last:
            v = queue[first]
            first += 1
            if found >= 0 and distance[v] + 1 > found:
                break
            for place in range(start[v], start[v + 1]):
                arc = slot[place]
                u = ends[arc]
                if distance[u] < 0 and residual[arc ^ 1] > 0:
                    distance[u] = distance[v] + 1
                    if is_source[u]:
                        found = distance[u]
                    else:
                        queue[last] = u
                        last += 1
        if found < 0:
            break
        for v in range(num_vertices):
            pointer[v] = start[v]
        while flow < limit:
            depth = 0
            v = sink
            while v >= 0 and not is_source[v]:
                advanced = False
                while pointer[v] < start[v + 1]:
                    arc = slot[pointer[v]]
                    u = ends[arc]
                    if residual[arc ^ 1] > 0 and distance[u] == distance[v] + 1:
                        trail[depth] = arc
                        depth += 1
                        v = u
                        advanced = True
                        break
                    pointer[v] += 1
                if not advanced:
                    if depth == 0:
                        v = -1
                    else:
                        depth -= 1
                        v = ends[trail[depth] ^ 1]
                        pointer[v] += 1
            if v < 0:
                break
            amount = limit - flow
            for i in range(depth):
                amount = min(amount, residual[trail[i] ^ 1])
            for i in range(depth):
                residual[trail[i] ^ 1] -= amount
                residual[trail[i]] += amount
            flow += amount
    return flow


@compiled
def flow_on_arcs(
    num_vertices: int, tail: IntArray, head: IntArray, capacity: IntArray, source: int, sink: int
) -> IntArray:
    """What each arc carries of a maximum flow along shortest ways; shape ``[num_arcs]``."""
    start, slot, ends = build_rows(num_vertices, tail, head)
    residual = np.zeros(2 * len(tail), dtype=np.int64)
    residual[::2] = capacity
    is_source = np.zeros(num_vertices, dtype=np.bool_)
    is_source[source] = True
    distance = np.empty(num_vertices, dtype=np.int64)
    work = np.empty((3, num_vertices + 1), dtype=np.int64)
    push_flow(start, slot, ends, residual, is_source, sink, capacity.sum(), distance, work)
    return residual[1::2].copy()


def shortfalls(
    num_vertices: int,
    tail: IntArray,
    head: IntArray,
    capacity: IntArray,
    source: int,
    sinks: IntArray,
    target: int,
) -> tuple[IntArray, BoolArray]:
    """By how much the maximum flow from ``source`` to each sink falls short of ``target``.

    A sink that is served joins the source, and the residual network is kept; a sink that is not leaves a flow
    that ends in it, so the network is reset.

    Returns:
        ``deficit``, shape ``[num_sinks]``, and ``side``, shape ``[num_sinks, num_vertices - 1]`` (source left out).
    """
    kernel = interpreted_while_small(_shortfalls, len(tail) * len(sinks))
    return kernel(num_vertices, tail, head, capacity, source, sinks, target)


@compiled
def _shortfalls(
    num_vertices: int,
    tail: IntArray,
    head: IntArray,
    capacity: IntArray,
    source: int,
    sinks: IntArray,
    target: int,
) -> tuple[IntArray, BoolArray]:
    start, slot, ends = build_rows(num_vertices, tail, head)
    num_arcs = len(tail)
    residual = np.zeros(2 * num_arcs, dtype=np.int64)
    for i in range(num_arcs):
        residual[2 * i] = capacity[i]
    is_source = np.zeros(num_vertices, dtype=np.bool_)
    is_source[source] = True
    distance = np.empty(num_vertices, dtype=np.int64)
    work = np.empty((3, num_vertices + 1), dtype=np.int64)
    deficit = np.zeros(len(sinks), dtype=np.int64)
    side = np.zeros((len(sinks), num_vertices - 1), dtype=np.bool_)
    for j in range(len(sinks)):
        flow = push_flow(start, slot, ends, residual, is_source, sinks[j], target, distance, work)
        if flow >= target:
            is_source[sinks[j]] = True
            continue
        deficit[j] = target - flow
        place = 0
        for v in range(num_vertices):
            if v != source:
                side[j, place] = distance[v] >= 0
                place += 1
        for i in range(num_arcs):
            residual[2 * i] = capacity[i]
            residual[2 * i + 1] = 0
    return deficit, side


@compiled
def violated_sets(
    num_vertices: int,
    tail: IntArray,
    head: IntArray,
    capacity: IntArray,
    demand: IntArray,
    sinks: IntArray,
    most: int,
) -> tuple[int, BoolArray]:
    """Sets of vertices that get less than they must, where every vertex ``v`` is fed ``demand[v]`` from outside.

    Like ``shortfalls``, for many sinks of which some fail for the same reason: a sink inside a set found already
    is not looked at, and the search ends with ``most`` sets.

    Returns:
        How many sets, and the sets, shape ``[most, num_vertices]``; none: every sink is served.
    """
    num_arcs = len(tail)
    source = num_vertices
    all_tail = np.empty(num_arcs + num_vertices, dtype=np.int64)
    all_head = np.empty(num_arcs + num_vertices, dtype=np.int64)
    full = np.empty(num_arcs + num_vertices, dtype=np.int64)
    all_tail[:num_arcs] = tail
    all_head[:num_arcs] = head
    full[:num_arcs] = capacity
    target = 0
    for v in range(num_vertices):
        all_tail[num_arcs + v] = source
        all_head[num_arcs + v] = v
        full[num_arcs + v] = demand[v]
        target += demand[v]
    start, slot, ends = build_rows(num_vertices + 1, all_tail, all_head)
    residual = np.zeros(2 * len(full), dtype=np.int64)
    for i in range(len(full)):
        residual[2 * i] = full[i]
    is_source = np.zeros(num_vertices + 1, dtype=np.bool_)
    is_source[source] = True
    distance = np.empty(num_vertices + 1, dtype=np.int64)
    work = np.empty((3, num_vertices + 2), dtype=np.int64)
    sets = np.zeros((most, num_vertices), dtype=np.bool_)
    found = 0
    for sink in sinks:
        known = False
        for j in range(found):
            known = known or sets[j, sink]
        if known:
            continue
        if push_flow(start, slot, ends, residual, is_source, sink, target, distance, work) >= target:
            is_source[sink] = True
            continue
        for v in range(num_vertices):
            sets[found, v] = distance[v] >= 0
        found += 1
        if found == most:
            break
        for i in range(len(full)):
            residual[2 * i] = full[i]
            residual[2 * i + 1] = 0
    return found, sets
