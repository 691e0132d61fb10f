"""Hierarchical: rings inside the nodes, and rings between the ranks that have the same place in each node.

all_reduce is a reduce_scatter inside each node, an all_reduce of each share between nodes, and an all_gather inside:
all interfaces of a node carry a share of what leaves it, and the slow links carry each byte as often as needed only.

References:
    M. Cho, U. Finkler, M. Serrano, D. Kung, H. Hunter, "BlueConnect: decomposing all-reduce for deep learning on
    heterogeneous network hierarchy", IBM J. Research and Development 63(6), 2019, section 3.
"""

from __future__ import annotations

from itertools import pairwise

from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth.classics.strands import Edge, Strand, check_served, from_strands
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

__all__ = ["SERVES", "equal_nodes", "synthesize"]

SERVES: tuple[CollectiveName, ...] = ("all_gather", "reduce_scatter", "all_reduce")


def equal_nodes(topology: Topology, method: str) -> list[list[int]]:
    """Ranks by node, in the order of ranks.

    Args:
        topology: the fabric.
        method: for messages.

    Raises:
        SynthesisError: a rank without a node, fewer than two nodes, or nodes of different size.
    """
    nodes: dict[str, list[int]] = {}
    for rank, vertex in enumerate(topology.ranks):
        node = topology.vertices[vertex].node
        if node is None:
            raise SynthesisError(f"{method} on {topology.name}: rank {rank} has no node")
        nodes.setdefault(node, []).append(rank)
    sizes = {len(ranks) for ranks in nodes.values()}
    if len(nodes) < 2 or len(sizes) > 1:
        found = ", ".join(f"{node!r}: {len(ranks)}" for node, ranks in nodes.items())
        raise SynthesisError(
            f"{method} on {topology.name}: needs two nodes or more with equally many ranks; found {found}"
        )
    return list(nodes.values())


def synthesize(topology: Topology, collective: Collective) -> Schedule:
    """Rings inside nodes and between them.

    Raises:
        SynthesisError: another collective, no equal nodes, or partners without a path that passes no other rank.
    """
    check_served(topology, collective, "hierarchical", SERVES)
    nodes = equal_nodes(topology, "hierarchical")
    strands = []
    for owner in range(collective.num_ranks):
        home = next(number for number, ranks in enumerate(nodes) if owner in ranks)
        place = nodes[home].index(owner)
        inside = [ranks[place:] + ranks[:place] for ranks in nodes]
        between = [ranks[0] for ranks in inside[home:] + inside[:home]]
        up: list[Edge] = []
        down: list[Edge] = []
        if collective.reduces:
            up += [edge for ranks in inside for edge in pairwise([*ranks[1:], ranks[0]])]
            up += pairwise([*between[1:], owner])
        if collective.name != "reduce_scatter":
            down += pairwise(between)
            down += [edge for ranks in inside for edge in pairwise(ranks)]
        strands.append(Strand(block=owner if collective.num_blocks > 1 else 0, up=tuple(up), down=tuple(down)))
    return from_strands(topology, collective, "hierarchical", strands)
