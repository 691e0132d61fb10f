"""Bruck's all_gather: ceil(log2 N) steps for any number of ranks.

In step k every rank sends the blocks it has to the rank 2^k before it; in the last step only those still missing.

References:
    J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby, "Efficient algorithms for all-to-all communications in
    multiport message-passing systems", IEEE Trans. Parallel and Distributed Systems 8(11), 1997, section 4
    (concatenation).
"""

from __future__ import annotations

from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth.classics.strands import Edge, Strand, check_served, from_strands
from mycel.topology.model import Topology

__all__ = ["SERVES", "synthesize"]

SERVES: tuple[CollectiveName, ...] = ("all_gather",)


def synthesize(topology: Topology, collective: Collective) -> Schedule:
    """Each block to the ranks 1, 2, 4 ... before those that have it.

    Raises:
        SynthesisError: another collective, or partners without a path that passes no other rank.
    """
    check_served(topology, collective, "bruck", SERVES)
    n = collective.num_ranks
    strands = []
    for owner in range(n):
        edges: list[Edge] = []
        distance = 1
        while distance < n:
            edges += [((owner - i) % n, (owner - i - distance) % n) for i in range(distance) if i + distance < n]
            distance *= 2
        strands.append(Strand(block=owner, down=tuple(edges)))
    return from_strands(topology, collective, "bruck", strands)
