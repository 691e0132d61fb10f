"""Two-step all_to_all (2DH): first to the rank of the own node that has the receiver's place, then between nodes.

Between nodes, ranks send only to those with their own place: N / L partners instead of N for nodes of L ranks, each
with L blocks. On fabrics where such ranks share a switch of their own (rails), nothing else crosses.

References:
    C. Hwang, W. Cui, Y. Xiong, and others, "Tutel: Adaptive Mixture-of-Experts at Scale", MLSys 2023
    (two-dimensional hierarchical all-to-all).
"""

from __future__ import annotations

from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth.classics.hierarchical import equal_nodes
from mycel.collectives.synth.classics.strands import Edge, Strand, check_served, from_strands
from mycel.topology.model import Topology

__all__ = ["SERVES", "synthesize"]

SERVES: tuple[CollectiveName, ...] = ("all_to_all",)


def synthesize(topology: Topology, collective: Collective) -> Schedule:
    """Every block inside its node, then between nodes; in one step where one of the two is enough.

    Raises:
        SynthesisError: another collective, no equal nodes, or partners without a path that passes no other rank.
    """
    check_served(topology, collective, "two_step", SERVES)
    nodes = equal_nodes(topology, "two_step")
    home = {rank: (node, place) for node, ranks in enumerate(nodes) for place, rank in enumerate(ranks)}
    n = collective.num_ranks
    strands = []
    for block in range(n * n):
        src, dst = divmod(block, n)
        relay = nodes[home[src][0]][home[dst][1]]
        edges: list[Edge] = [(a, b) for a, b in ((src, relay), (relay, dst)) if a != b]
        strands.append(Strand(block=block, down=tuple(edges)))
    return from_strands(topology, collective, "two_step", strands)
