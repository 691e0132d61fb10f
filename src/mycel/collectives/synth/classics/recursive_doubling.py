"""Recursive doubling and halving: partners at distance 1, 2, 4 ... exchange all they have, log2 N steps.

all_gather doubles what every rank has, reduce_scatter halves it, and all_reduce does the one after the other
(Rabenseifner's algorithm). Seen from one block, both are a binomial tree in which partners differ in one bit.

References:
    R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", Int. J.
    High Performance Computing Applications 19(1), 2005, sections 4.1, 4.3 and 4.5.
"""

from __future__ import annotations

from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth.classics.strands import Edge, Strand, check_served, from_strands, mirrored
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

__all__ = ["SERVES", "synthesize"]

SERVES: tuple[CollectiveName, ...] = ("all_gather", "reduce_scatter", "all_reduce")


def synthesize(topology: Topology, collective: Collective) -> Schedule:
    """Blocks by doubling, partial sums by halving.

    Raises:
        SynthesisError: another collective, a number of ranks that is no power of two, or partners without a path
            that passes no other rank.
    """
    check_served(topology, collective, "recursive_doubling", SERVES)
    n = collective.num_ranks
    if n & (n - 1):
        raise SynthesisError(
            f"recursive_doubling needs a power of two of ranks, and {topology.name} has {n}; "
            "ring and bruck take any number"
        )
    strands = []
    for owner in range(n):
        edges = _doubling(n, owner)
        strands.append(
            Strand(
                block=owner if collective.num_blocks > 1 else 0,
                up=mirrored(edges) if collective.reduces else (),
                down=() if collective.name == "reduce_scatter" else edges,
            )
        )
    return from_strands(topology, collective, "recursive_doubling", strands)


def _doubling(num_ranks: int, owner: int) -> tuple[Edge, ...]:
    """Who has the owner's block after each step, and from whom."""
    edges, distance = [], 1
    while distance < num_ranks:
        edges += [(owner ^ i, owner ^ i ^ distance) for i in range(distance)]
        distance *= 2
    return tuple(edges)
