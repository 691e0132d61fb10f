"""Tree: few steps one after the other, for messages so small that latency is all that counts.

All-reduce, broadcast and reduce go through one tree: a star up to eight ranks (everyone -> root -> everyone, two
steps), a binomial tree beyond (2 log2 N steps, no rank with more than log2 N messages). All-gather and
reduce-scatter exchange blocks directly. Paths between ranks that have no link or switch path of their own go
through other ranks, one transfer a hop.

References:
    R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", Int. J.
    High Performance Computing Applications 19(1), 2005, sections 4 and 5 (binomial trees for short messages).
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from mycel.collectives.moves import find_moves
from mycel.collectives.ordering import in_level_order
from mycel.collectives.routes import Routes
from mycel.collectives.schedule import Chunk, Schedule, Transfer
from mycel.collectives.spec import Collective, check_ranks
from mycel.collectives.synth.nodes import NODES_FROM, exchange
from mycel.topology.model import Topology

__all__ = ["STAR_LIMIT", "synthesize"]

#: Up to this many ranks a star beats a binomial tree: its root handles N-1 small messages faster than log2 N
#: messages travel one after the other.
STAR_LIMIT = 8


def synthesize(topology: Topology, collective: Collective) -> Schedule:
    """A schedule with few steps one after the other.

    Args:
        topology: the fabric.
        collective: what to move, over all of the fabric's ranks.

    Raises:
        UsageError: the collective is over another number of ranks.
    """
    n = collective.num_ranks
    check_ranks(topology, collective)
    routes = Routes(topology)
    if collective.num_blocks == n:
        alike = exchange(topology, collective, "tree", routes)
        if alike is not None:
            return alike
        weights = collective.block_weights
        owners = [rank for rank in range(n) if weights[rank]]
        transfers = _exchange(topology, collective, owners, routes)
        ends = list(accumulate(weights))
        chunks = tuple(Chunk(start=ends[rank] - weights[rank], stop=ends[rank]) for rank in owners)
    else:
        root = collective.root if collective.root is not None else _centre(topology, routes)
        transfers = _through_root(topology, collective, root, routes)
        chunks = (Chunk(start=0, stop=1),)
    return Schedule(
        collective=collective,
        topology=topology,
        method="tree",
        num_units=collective.total_weight,
        chunks=chunks,
        # In one step each rank goes round the others from its own place, so that nobody is everyone's first.
        transfers=in_level_order(transfers, lambda t: ((t.dst - t.src) % n, t.src)),
    )


def _centre(topology: Topology, routes: Routes) -> int:
    """The rank nearest to the rest: by worst latency there and back, then by relays, then by capacity."""
    n = topology.num_ranks
    if n >= NODES_FROM and find_moves(topology) is not None:
        return 0  # all are alike

    def cost(rank: int) -> tuple[float, int, int, int]:
        out = routes[rank].values()
        back = [routes[other][rank] for other in range(n) if other != rank]
        both = [*out, *back]
        capacity = sum(k.capacity for k in topology.links if topology.ranks[rank] in (k.src, k.dst))
        return (max(r.latency_s for r in both), sum(r.num_relays for r in both), -capacity, rank)

    return min(range(n), key=cost)


def _tree_edges(topology: Topology, root: int, routes: Routes, *, inward: bool) -> list[tuple[int, ...]]:
    """Physical routes of a tree's edges away from the root, parents first; as data flows outward."""
    n = topology.num_ranks
    order = [root, *(rank for rank in range(n) if rank != root)]
    parents = {order[i]: root if n <= STAR_LIMIT else order[i & (i - 1)] for i in range(1, n)}
    edges = []
    for child, parent in parents.items():
        vertices = routes.vertices(child, parent) if inward else routes.vertices(parent, child)
        edges.append(vertices[::-1] if inward else vertices)
    return edges


def _hops(topology: Topology, root: int, routes: list[tuple[int, ...]]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Edges of a spanning out-tree between ranks from routes that may pass through ranks, parents first."""
    parent: dict[int, tuple[int, tuple[int, ...]]] = {}
    for vertices in routes:
        stops = [i for i, v in enumerate(vertices) if v in topology.rank_of]
        for a, b in pairwise(stops):
            dst = topology.rank_of[vertices[b]]
            if dst != root and dst not in parent:
                parent[dst] = (topology.rank_of[vertices[a]], vertices[a : b + 1])
    hops: list[tuple[int, int, tuple[int, ...]]] = []
    reached, frontier = {root}, [root]
    while frontier:
        src = frontier.pop(0)
        for dst in sorted(d for d, (p, _) in parent.items() if p == src and d not in reached):
            reached.add(dst)
            frontier.append(dst)
            hops.append((src, dst, parent[dst][1]))
    return hops


def _through_root(topology: Topology, collective: Collective, root: int, routes: Routes) -> list[Transfer]:
    transfers: list[Transfer] = []
    into: dict[int, list[int]] = {}
    if collective.reduces:
        for src, dst, path in reversed(_hops(topology, root, _tree_edges(topology, root, routes, inward=True))):
            after = tuple(into.get(dst, ()))
            into.setdefault(src, []).append(len(transfers))
            transfers.append(Transfer(chunk=0, src=dst, dst=src, reduce=True, path=path[::-1], after=after))
    if collective.name != "reduce":
        for src, dst, path in _hops(topology, root, _tree_edges(topology, root, routes, inward=False)):
            after = tuple(into.get(src, ()))
            into[dst] = [len(transfers)]
            transfers.append(Transfer(chunk=0, src=src, dst=dst, reduce=False, path=path, after=after))
    return transfers


def _exchange(topology: Topology, collective: Collective, owners: list[int], routes: Routes) -> list[Transfer]:
    """Direct exchange of the blocks of ``owners``, one chunk each."""
    transfers: list[Transfer] = []
    n = collective.num_ranks
    for chunk, owner in enumerate(owners):
        others = [(owner + shift) % n for shift in range(1, n)]
        into: dict[int, list[int]] = {}
        if collective.name == "all_gather":
            for src, dst, path in _hops(topology, owner, [routes[owner][other].vertices for other in others]):
                after = tuple(into.get(src, ()))
                into[dst] = [len(transfers)]
                transfers.append(Transfer(chunk=chunk, src=src, dst=dst, reduce=False, path=path, after=after))
        else:
            inward = [routes[other][owner].vertices[::-1] for other in others]
            for src, dst, path in reversed(_hops(topology, owner, inward)):
                after = tuple(into.get(dst, ()))
                into.setdefault(src, []).append(len(transfers))
                transfers.append(Transfer(chunk=chunk, src=dst, dst=src, reduce=True, path=path[::-1], after=after))
    return transfers
