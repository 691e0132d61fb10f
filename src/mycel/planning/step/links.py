"""How fast groups of ranks exchange bytes: by a machine's link rates, or by what our schedules do on a topology."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mycel.planning.step.points import Numbers

__all__ = ["Links", "Rates"]


class Links(Protocol):
    """What a cost model asks of the wires. Bytes a second at one rank, as if everything were at its best."""

    def ring(self, size: Numbers, stride: Numbers, link: float, network: float) -> Numbers:
        """Rate of a collective, every group of the job at once: bytes that a rank sends a second.

        Args:
            size: ranks of a group.
            stride: distance of its neighbours in the order of ranks.
            link: efficiency of links inside a node.
            network: efficiency of the network.
        """
        ...

    def hop(self, stride: Numbers, size: Numbers, link: float, network: float) -> Numbers:
        """Rate of messages from every rank to the one a stride further, all at once, as in ``ring``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Nodes that are all alike, by two rates.

    A group with several ranks in a node crosses to the next node once for each direction of a ring and shares its
    node's cards with the other groups there: ``r`` ranks of a node give their group ``r`` cards. So one replica a
    node sums gradients at one card's rate and eight at eight cards', up to what the links inside carry.

    Attributes:
        ranks_per_node: of a node.
        link_gbps: 10^9 bytes a second of one rank inside a node, each way.
        network_gbps: likewise, of one rank's share of the node's cards.

    Examples:
        >>> dgx = Rates(ranks_per_node=8, link_gbps=300, network_gbps=25)
        >>> dgx.ring(np.array([8.0, 32.0, 32.0]), np.array([1.0, 8.0, 1.0]), 1.0, 1.0) / 1e9
        array([300.,  25., 200.])
    """

    ranks_per_node: int
    link_gbps: float
    network_gbps: float

    def ring(self, size: Numbers, stride: Numbers, link: float, network: float) -> Numbers:
        """See ``Links``."""
        inside = self.link_gbps * 1e9 * link
        near = np.clip(np.floor(self.ranks_per_node / stride), 1.0, size)
        across = np.minimum(inside, near * self.network_gbps * 1e9 * network)
        rate: Numbers = np.where(near >= size, inside, across)
        return rate

    def hop(self, stride: Numbers, size: Numbers, link: float, network: float) -> Numbers:
        """See ``Links``."""
        is_inside = stride * size <= self.ranks_per_node
        rate: Numbers = np.where(is_inside, self.link_gbps * 1e9 * link, self.network_gbps * 1e9 * network)
        return rate
