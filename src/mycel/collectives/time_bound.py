"""Time bound: the least seconds that a collective of a size can take, from latency and bandwidth together.

The model is that of ``mycel.collectives.simulate``: a message takes its bytes' time on every link of its path, and
costs what the classes of these links say; at least what the class of the last one says. In it no schedule is quicker
than

- *bandwidth*: the size over the collective's bound, and then the latency of a last message;
- *distance*: the way from any rank to any other whose contribution it needs, with what each message costs;
- *both*: of what a rank must get (or give), part comes from ranks that are some messages away. It cannot enter the
  rank's links before it has come to one that sends to it directly, and it takes its time on those links from then on;
- *work*: a rank works at one message at a time. What one rank has comes to all others no sooner than by the best
  broadcast of that kind, and as a message holds parts of one block, some ranks work at as many as there are blocks.

Sums cannot be told apart by where they come from once they are formed, so the third is for collectives that move
every block as it is, and for reduce_scatter, which is all_gather backwards in time. What holds for all_reduce is as
true as its bound of bandwidth, which is one for schedules along trees (``mycel.collectives.bound``).

References:
    R. Karp, A. Sahay, E. Santos, K. E. Schauser, "Optimal broadcast and summation in the LogP model", SPAA 1993
    (section 3: whoever has the message sends it on without a pause).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from mycel.collectives.bound import bound
from mycel.collectives.spec import Collective
from mycel.cost import LinkCosts, bytes_per_second, link_costs
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

__all__ = ["TimeBound", "bound_seconds"]

#: Ranks from which ways are followed; of more, those at equal steps. Fewer ways give a lower bound, and a true one.
_MOST_SOURCES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBound:
    """What the size does not change; ``seconds`` gives the bound of a size.

    Attributes:
        distance_s: of the farthest two ranks of which one needs what the other has.
        last_s: latency of the quickest message that there is.
        bytes_per_second: of the bound of bandwidth; infinite where that is not known.
        waits: pairs of seconds, and seconds a byte of the array: what is at least so far away, and its part of the
            array over the capacity of the links by which it comes.
        working_s: until ranks that work at one message at a time are through with all that there must be.
    """

    distance_s: float
    last_s: float
    bytes_per_second: float
    waits: tuple[tuple[float, float], ...]
    working_s: float = 0.0

    def seconds(self, num_bytes: int) -> float:
        """Least time for an array of ``num_bytes`` (all_to_all: for a rank's part of it)."""
        flows = max((start + num_bytes * per_byte for start, per_byte in self.waits), default=0.0)
        moving = max(num_bytes / self.bytes_per_second, flows) + self.last_s
        return max(self.distance_s, self.working_s, moving)


def bound_seconds(
    topology: Topology, collective: Collective, *, links: str | None = None, overhead_s: float | None = None
) -> TimeBound:
    """The least time of a collective, for any size.

    Args:
        topology: the fabric.
        collective: what moves, over all of its ranks.
        links: class of all links, instead of those of the topology, as for ``mycel.cost.link_costs``.
        overhead_s: of a message, beyond the latency of its links, instead of what classes say.

    Examples:
        >>> from mycel.topology import load_topology
        >>> fabric = load_topology("ring:ranks=8,bandwidth=1 GB/s,latency=1us")
        >>> least = bound_seconds(fabric, Collective(name="all_gather", num_ranks=8), overhead_s=1e-6)
        >>> [round(1e6 * least.seconds(size), 1) for size in (1 << 10, 1 << 20)]  # four messages; 7/16 of a MB
        [8.1, 460.8]
    """
    n = collective.num_ranks
    step = -(-n // _MOST_SOURCES)
    if collective.root is not None and collective.name in ("broadcast", "scatter"):
        sources = range(collective.root, collective.root + 1)
    else:
        sources = range(0, n, step)
    costs = link_costs(topology, links=links, overhead_s=overhead_s)
    reached = {source: _distances(topology, source, costs) for source in sources}
    ends = range(n) if collective.root is None or collective.name in ("broadcast", "scatter") else (collective.root,)
    away = max(reached[s][d] for s in sources for d in ends)
    try:
        rate = float(bound(topology, collective).algbw) * bytes_per_second(topology)
    except SynthesisError:  # a flow that is too large to optimise
        rate = float("inf")
    waits: set[tuple[float, float]] = set()
    num_direct = n * (n - 1)
    if collective.name in ("all_gather", "reduce_scatter") and collective.weights is None and step == 1:
        direct = [_distances(topology, source, costs, direct=True) for source in range(n)]
        num_direct = sum(seconds < float("inf") for row in direct for seconds in row) - n
        waits = _waits(topology, reached, direct, backwards=collective.name == "reduce_scatter")
    work_s, delay_s, alike = _least_message(topology, costs)
    last = 2 * work_s + delay_s
    if len(sources) == n and alike:  # the nearest two ranks need no third
        last = min(seconds for s in sources for d, seconds in enumerate(reached[s]) if d != s)
    if collective.weights is not None:  # some ranks may have, or need, nothing
        away = last
    return TimeBound(
        distance_s=away,
        last_s=last,
        bytes_per_second=rate,
        waits=tuple(sorted(waits)),
        working_s=_working(topology, collective, work_s, delay_s, num_direct),
    )


def _distances(topology: Topology, source: int, costs: LinkCosts, *, direct: bool = False) -> list[float]:
    """Least time of messages from a rank to every rank, with what each costs, both ends' work included; itself 0.

    Args:
        topology: the fabric.
        source: a rank.
        costs: of messages.
        direct: by a single message each; infinite where there is none.
    """
    outgoing: dict[int, list[tuple[int, float]]] = {}
    for link in topology.links:
        ends = link.dst in topology.rank_of or topology.vertices[link.dst].computes
        arrives, work_s = costs.arriving(link)
        outgoing.setdefault(link.src, []).append((link.dst, link.latency_s + (arrives + 2 * work_s if ends else 0.0)))
    start = topology.ranks[source]
    heap, best = [(0.0, start)], dict[int, float]()
    while heap:
        seconds, here = heapq.heappop(heap)
        if here in best:
            continue
        best[here] = seconds
        if direct and here != start and here in topology.rank_of:
            continue
        for far, more in outgoing.get(here, ()):
            if far not in best:
                heapq.heappush(heap, (seconds + more, far))
    return [best.get(vertex, float("inf")) for vertex in topology.ranks]


def _least_message(topology: Topology, costs: LinkCosts) -> tuple[float, float, bool]:
    """At least a message's work at either end and its latency, and whether all work for messages is alike.

    A message leaves a rank by one link and comes to one by another, or the same.
    """
    ranks = topology.rank_of
    leaving = min(link.latency_s for link in topology.links if link.src in ranks)
    coming = min(link.latency_s for link in topology.links if link.dst in ranks)
    ends = {*ranks, *topology.compute_vertices}
    arriving = [costs.arriving(link) for link in topology.links if link.dst in ends]
    works = {work_s for _, work_s in arriving}
    return min(works), min(arrives for arrives, _ in arriving) + max(leaving, coming), len(works) == 1


def _working(topology: Topology, collective: Collective, work_s: float, delay_s: float, num_direct: int) -> float:
    """Least time of messages that each take work at both ends, one after the other for a rank, and a latency between.

    Before ``work_s + delay_s`` no rank can work at what came. So where n - 1 blocks come to every rank, all of that
    work lies behind, and so does the work for sending what is not a rank's own, which is all but ``num_direct``
    blocks. Ranks on average have both to do.

    Args:
        topology: the fabric.
        collective: what moves.
        work_s: of a message at either end.
        delay_s: of a message between its ends.
        num_direct: pairs of ranks between which a message can go, or more.
    """
    n = collective.num_ranks
    if not work_s or n == 1 or collective.weights is not None or len(topology.compute_vertices) > n:
        return 0.0
    first_s, others = work_s + delay_s, n - 1
    if collective.name in ("gather", "scatter"):  # all of the root's
        return first_s + others * work_s
    if collective.name == "all_to_all":
        return 2 * others * work_s
    informed_s = _informed(n, work_s, delay_s)
    if collective.num_blocks == 1:
        return informed_s
    return max(informed_s, 2 * others * work_s, first_s + (2 * others - num_direct / n) * work_s)


def _informed(num_ranks: int, work_s: float, delay_s: float) -> float:
    """Until so many ranks know what one knew, if each that knows sends on and on; backwards, until one has all."""
    begins, arrives_s = [0.0], 0.0
    for _ in range(num_ranks - 1):
        begin = heapq.heappop(begins)
        arrives_s = begin + 2 * work_s + delay_s
        heapq.heappush(begins, begin + work_s)
        heapq.heappush(begins, arrives_s)
    return arrives_s


def _waits(
    topology: Topology, reached: dict[int, list[float]], direct: list[list[float]], *, backwards: bool
) -> set[tuple[float, float]]:
    """Of each rank, what cannot come (or, backwards, need not have gone) before some time, over its links."""
    n, unit = topology.num_ranks, bytes_per_second(topology)
    capacity = [0.0] * n
    for link in topology.links:
        end = link.src if backwards else link.dst
        if end in topology.rank_of:
            capacity[topology.rank_of[end]] += link.capacity * unit
    found: set[tuple[float, float]] = set()
    for rank in range(n):
        if backwards:  # what remains for a block once it has left, and come to a neighbour
            near = [u for u in range(n) if u != rank and direct[rank][u] < float("inf")]
            starts = sorted(min(reached[u][far] for u in near) for far in range(n) if far != rank)
        else:
            near = [u for u in range(n) if u != rank and direct[u][rank] < float("inf")]
            starts = sorted(min(reached[far][u] for u in near) for far in range(n) if far != rank)
        for place, start in enumerate(starts):
            if not place or start != starts[place - 1]:
                found.add((start, (n - 1 - place) / n / capacity[rank]))
    return found
