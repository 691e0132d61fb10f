"""Binomial tree: log2 N steps from one rank to all, or from all to one; all_reduce is one after the other.

scatter and gather send every block along the tree's way from the root or to it.

References:
    R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", Int. J.
    High Performance Computing Applications 19(1), 2005, sections 4.2 and 4.4.
"""

from __future__ import annotations

from collections.abc import Sequence

from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth.classics.strands import Edge, Strand, check_served, from_strands, mirrored
from mycel.topology.model import Topology

__all__ = ["SERVES", "along_tree", "binomial", "synthesize"]

SERVES: tuple[CollectiveName, ...] = ("all_reduce", "broadcast", "reduce", "gather", "scatter")


def binomial(num_ranks: int, root: int) -> tuple[Edge, ...]:
    """Edges of a binomial tree, nearest to the root first; a rank's number relative to the root loses its lowest bit.

    Examples:
        >>> binomial(4, 1)
        ((1, 3), (1, 2), (3, 0))
    """
    step = 1 << (num_ranks - 1).bit_length() >> 1
    edges = []
    while step:
        edges += [
            ((root + rank) % num_ranks, (root + rank + step) % num_ranks)
            for rank in range(0, num_ranks - step, 2 * step)
        ]
        step >>= 1
    return tuple(edges)


def synthesize(topology: Topology, collective: Collective) -> Schedule:
    """The array up a binomial tree, down it, or both; or each block along its way in the tree.

    Raises:
        SynthesisError: another collective, or partners without a path that passes no other rank.
    """
    check_served(topology, collective, "binomial_tree", SERVES)
    return along_tree(topology, collective, "binomial_tree", binomial(collective.num_ranks, collective.root or 0))


def along_tree(topology: Topology, collective: Collective, method: str, edges: Sequence[Edge]) -> Schedule:
    """The schedule that moves everything along one tree.

    Args:
        topology: the fabric.
        collective: what to move; between all ranks and the root of the tree.
        method: name to put on it.
        edges: from the root, each after that into its source.

    Raises:
        SynthesisError: partners without a path that passes no other rank.
    """
    if collective.name in ("gather", "scatter"):
        ways = _ways(edges)
        if collective.name == "gather":
            ways = {rank: mirrored(way) for rank, way in ways.items()}
        blocks = [Strand(block=rank, down=ways.get(rank, ())) for rank in range(collective.num_ranks)]
        return from_strands(topology, collective, method, blocks)
    strand = Strand(
        block=0,
        up=mirrored(edges) if collective.reduces else (),
        down=() if collective.name == "reduce" else tuple(edges),
    )
    return from_strands(topology, collective, method, [strand])


def _ways(edges: Sequence[Edge]) -> dict[int, tuple[Edge, ...]]:
    """The way from the root to every other rank; the nearest edges come first."""
    ways: dict[int, tuple[Edge, ...]] = {}
    for src, dst in edges:
        ways[dst] = (*ways.get(src, ()), (src, dst))
    return ways
