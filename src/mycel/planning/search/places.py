"""Which rank stands at which place of a mesh: every way where ranks are few, and those that follow the wires.

Tensor parallelism needs the fastest links and the pipeline the least of them, so that ranks in the order of nodes,
tensor parallelism innermost and the pipeline outermost, are the first to try. Where networks differ, replicas belong
inside a fast one and the pipeline across, which is the same order once nodes are grouped by network and speed
(Holmes); where nodes are slow inside, the other way round may win. On few ranks all orders are tried but for those
that are the same by symmetry.

References:
    Yang et al., "Holmes: Towards Distributed Training Across Clusters with Heterogeneous NIC Environment",
    arXiv:2312.03549, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

from mycel.planning.cluster import Cluster
from mycel.planning.job import Mesh

__all__ = ["are_all_tried", "places_of"]

#: Ranks up to which every order is tried, and orders that are left of those after symmetry.
_MOST_RANKS = 7
_MOST_ORDERS = 5040


def places_of(cluster: Cluster, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Orders of a cluster's ranks that are worth trying for a mesh, the likeliest first.

    Args:
        cluster: whose ranks they are.
        mesh: tensor parallelism is innermost, the pipeline outermost.
    """
    pp, rows, tp = mesh.pp, mesh.dp * mesh.cp, mesh.tp
    seen: dict[tuple[int, ...], None] = {}
    by_node = cluster.ranks_by_node
    for nodes in _node_orders(cluster):
        ranks = [rank for node in nodes for rank in by_node[node]]
        for order in _arranged(ranks, pp, rows, tp):
            seen.setdefault(order)
    if not cluster.is_uniform and cluster.num_ranks <= _MOST_RANKS:
        twins = _twins(cluster)
        is_row_free = mesh.cp == 1 and mesh.ep == 1
        known = {_canonical(order, twins, pp, rows, tp, is_row_free=is_row_free) for order in seen}
        for order in permutations(range(cluster.num_ranks)):
            key = _canonical(order, twins, pp, rows, tp, is_row_free=is_row_free)
            if key not in known:
                known.add(key)
                seen.setdefault(order)
            if len(known) > _MOST_ORDERS:
                break
    return tuple(seen)


def are_all_tried(cluster: Cluster) -> bool:
    """Whether ``places_of`` leaves out none but for symmetry."""
    return cluster.is_uniform or cluster.num_ranks <= _MOST_RANKS


def _arranged(ranks: Sequence[int], pp: int, rows: int, tp: int) -> Iterator[tuple[int, ...]]:
    """Ranks in a given order with the pipeline outermost, and with the replicas outermost."""
    yield tuple(ranks)
    if pp > 1 and rows > 1:
        yield tuple(
            ranks[(row * pp + stage) * tp + t] for stage in range(pp) for row in range(rows) for t in range(tp)
        )


def _node_orders(cluster: Cluster) -> Iterator[list[str]]:
    """Nodes as they are; the fast ones first, last, and in the middle; and grouped by what reaches them."""
    by_node = cluster.ranks_by_node
    nodes = list(by_node)
    yield nodes
    if cluster.is_uniform or len(nodes) < 2:
        return
    yield nodes[::-1]
    speed = {node: sum(cluster.devices[rank].flops for rank in ranks) for node, ranks in by_node.items()}
    memory = {node: min(cluster.memory_bytes[rank] for rank in ranks) for node, ranks in by_node.items()}
    reach = dict.fromkeys(nodes, 0)
    if cluster.topology is not None:
        ends = [vertex.node or vertex.label for vertex in cluster.topology.vertices]
        for link in cluster.topology.links:
            if ends[link.src] != ends[link.dst] and ends[link.dst] in reach:
                reach[ends[link.dst]] += link.capacity
    for key in (speed, reach, memory):
        if len(set(key.values())) == 1:
            continue
        ordered = sorted(nodes, key=lambda node: -key[node])
        yield ordered
        yield ordered[::-1]
        yield ordered[1::2][::-1] + ordered[::2]


def _twins(cluster: Cluster) -> tuple[int, ...]:
    """Of each rank the first one that could change places with it and nobody would see."""
    topology = cluster.topology
    first = list(range(cluster.num_ranks))
    for rank in range(cluster.num_ranks):
        for other in range(rank):
            if first[other] != other:
                continue
            same = (
                cluster.devices[rank] == cluster.devices[other]
                and cluster.memory_bytes[rank] == cluster.memory_bytes[other]
                and cluster.nodes[rank] == cluster.nodes[other]
            )
            if same and topology is not None:
                a, b = topology.ranks[rank], topology.ranks[other]
                same = _wires(topology.capacity, a, b) == _wires(topology.capacity, b, a) and _wires(
                    topology.latency_s, a, b
                ) == _wires(topology.latency_s, b, a)
            if same:
                first[rank] = other
                break
    return tuple(first)


def _wires(of: dict[tuple[int, int], float] | dict[tuple[int, int], int], vertex: int, twin: int) -> set[object]:
    """Links of a vertex, where its twin has another name."""
    return {
        (is_out, "twin" if other == twin else other, value)
        for (src, dst), value in of.items()
        for is_out, end, other in ((True, src, dst), (False, dst, src))
        if end == vertex
    }


def _canonical(
    order: Sequence[int], twins: tuple[int, ...], pp: int, rows: int, tp: int, *, is_row_free: bool
) -> tuple[tuple[int, ...], ...]:
    """The same for orders that differ by twins, by replicas, or by the same change in all tensor-parallel groups.

    Args:
        order: rank at every place.
        twins: of each rank the first that could take its place.
        pp, rows, tp: of the mesh.
        is_row_free: replicas can change places, as they cannot where they share sequences or experts.
    """
    named = [twins[rank] for rank in order]
    best: tuple[tuple[int, ...], ...] | None = None
    for change in permutations(range(tp)) if rows > 1 or pp == 1 else _sorted_once(named, pp, tp):
        replicas = [
            tuple(named[(stage * rows + row) * tp + t] for stage in range(pp) for t in change) for row in range(rows)
        ]
        key = tuple(sorted(replicas)) if is_row_free else tuple(replicas)
        best = key if best is None or key < best else best
        if rows == pp == 1:
            return (tuple(sorted(named)),)
    assert best is not None
    return best


def _sorted_once(named: Sequence[int], pp: int, tp: int) -> list[tuple[int, ...]]:
    """Of one replica the change that puts its lanes in order."""
    lanes = [tuple(named[stage * tp + t] for stage in range(pp)) for t in range(tp)]
    return [tuple(sorted(range(tp), key=lambda t: lanes[t]))]
