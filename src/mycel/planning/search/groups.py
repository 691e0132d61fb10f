"""How fast the groups of one stage exchange bytes, while those of all other stages do the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from mycel.cost import bytes_per_second
from mycel.planning.cluster import Cluster
from mycel.planning.step.links import Rates
from mycel.planning.step.points import Numbers, Points
from mycel.planning.step.wires import message_rate, ring_rate
from mycel.topology.model import Topology

__all__ = ["InnerPipeline", "PlaceLinks", "WidestLinks", "boundary_seconds", "widest_rank"]

Group = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceLinks:
    """The wires of every place of a pipeline, as ``Links`` of the cost model, one row a place.

    Attributes:
        cluster: whose they are.
        places: ranks of each, in the order of the mesh.
    """

    cluster: Cluster
    places: tuple[Group, ...]

    def ring(self, size: Numbers, stride: Numbers, link: float, network: float) -> Numbers:
        """See ``Links``: of each place the slowest group of so many ranks, so far apart in the order of its ranks."""
        count, step = int(size[0]), int(stride[0])
        if count < 2:
            return np.full(len(self.places), np.inf)
        if self.cluster.topology is None:
            return self._by_rates(count, step, link, network)
        topology = self.cluster.topology
        groups = [_groups(ranks, count, step) for ranks in self.places]
        found = []
        for place, mine in enumerate(groups):
            beside = tuple(g for other, theirs in enumerate(groups) if other != place for g in theirs)
            efficiency = link if all(map(self._is_inside, mine)) else network
            found.append(ring_rate(topology, mine, beside) * efficiency)
        return np.array(found)

    def hop(self, stride: Numbers, size: Numbers, link: float, network: float) -> Numbers:
        """See ``Links``: from the first place to the last one, which share a tied embedding."""
        if len(self.places) == 1:
            return np.full(1, np.inf)
        pairs = tuple(zip(self.places[0], self.places[-1], strict=True))
        is_inside = all(map(self._is_inside, pairs))
        if self.cluster.topology is not None:
            rate = message_rate(self.cluster.topology, pairs) * (link if is_inside else network)
        else:
            rates = self.cluster.machine.rates
            rate = (rates.link_gbps * link if is_inside else rates.network_gbps * network) * 1e9
        return np.full(len(self.places), rate)

    def _is_inside(self, group: Group) -> bool:
        nodes = self.cluster.nodes
        return all(nodes[rank] == nodes[group[0]] for rank in group)

    def _by_rates(self, size: int, stride: int, link: float, network: float) -> Numbers:
        """Of nodes that are alike: inside, or across at as many cards as a group has ranks in a node."""
        rates = self.cluster.machine.rates
        ranks = np.array(self.places)  # places x ranks of each
        node = (ranks // rates.ranks_per_node).reshape(len(self.places), -1, size, stride)
        node = np.sort(node.swapaxes(2, 3).reshape(len(self.places), -1, size), axis=2)
        is_new = np.concatenate([np.ones((*node.shape[:2], 1), dtype=bool), np.diff(node, axis=2) > 0], axis=2)
        runs = np.cumsum(is_new, axis=2) - 1
        count = np.zeros(node.shape, dtype=int)
        i, j, _ = np.indices(node.shape, sparse=True)
        np.add.at(count, (np.broadcast_to(i, node.shape), np.broadcast_to(j, node.shape), runs), 1)
        near = np.where(count > 0, count, size).min(axis=(1, 2))
        inside = rates.link_gbps * 1e9 * link
        across = np.minimum(inside, near * rates.network_gbps * 1e9 * network)
        rate: Numbers = np.where(near >= size, inside, across)
        return rate


@dataclass(frozen=True, slots=True, kw_only=True)
class WidestLinks:
    """Rates that no placement of a job's groups on a topology exceeds, as ``Links`` of the cost model.

    Attributes:
        topology: whose they are.
    """

    topology: Topology

    def ring(self, size: Numbers, stride: Numbers, link: float, network: float) -> Numbers:
        """See ``Links``."""
        return np.full(len(size), widest_rank(self.topology) * max(link, network))

    def hop(self, stride: Numbers, size: Numbers, link: float, network: float) -> Numbers:
        """See ``Links``."""
        return np.full(len(size), np.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerPipeline:
    """Nodes that are alike, where the pipeline is inside of all other directions but tensor parallelism.

    Attributes:
        rates: of the nodes.
        points: jobs, one row each.
    """

    rates: Rates
    points: Points

    def ring(self, size: Numbers, stride: Numbers, link: float, network: float) -> Numbers:
        """See ``Links``."""
        is_tensor = (self.points.tp > 1) & (stride == 1)
        return self.rates.ring(size, np.where(is_tensor, stride, stride * self.points.pp), link, network)

    def hop(self, stride: Numbers, size: Numbers, link: float, network: float) -> Numbers:
        """See ``Links``."""
        return self.rates.hop(self.points.tp, size, link, network)


def widest_rank(topology: Topology) -> float:
    """Bytes a second that reach the rank with the most of links."""
    into: Counter[int] = Counter()
    for link in topology.links:
        into[link.dst] += link.capacity
    return max(into[vertex] for vertex in topology.ranks) * bytes_per_second(topology)


def boundary_seconds(
    cluster: Cluster, sender: Group, receiver: Group, num_bytes: float, efficiencies: tuple[float, float]
) -> tuple[float, float]:
    """Seconds of the messages between two stages, of all ranks at once: of the slowest, and of one of it alone.

    Args:
        cluster: whose ranks they are.
        sender: ranks of a stage, in the order of the mesh.
        receiver: of the next one; the first sends to the first.
        num_bytes: of one message.
        efficiencies: of links inside a node, and of the network, in such messages.
    """
    pairs = tuple(zip(sender, receiver, strict=True))
    inside = [cluster.nodes[a] == cluster.nodes[b] for a, b in pairs]
    if cluster.topology is None:
        rates = cluster.machine.rates
        gbps = rates.link_gbps * efficiencies[0] if all(inside) else rates.network_gbps * efficiencies[1]
        return num_bytes / (gbps * 1e9), num_bytes / (gbps * 1e9)
    alone = [message_rate(cluster.topology, (pair,)) for pair in pairs]
    worst = int(np.argmin(alone))
    factor = efficiencies[0] if inside[worst] else efficiencies[1]
    together = message_rate(cluster.topology, pairs)
    return num_bytes / (together * factor), num_bytes / (alone[worst] * factor)


def _groups(ranks: Group, size: int, stride: int) -> tuple[Group, ...]:
    return tuple(
        tuple(ranks[first + offset + k * stride] for k in range(size))
        for first in range(0, len(ranks) - size * stride + 1, size * stride)
        for offset in range(stride)
    )
