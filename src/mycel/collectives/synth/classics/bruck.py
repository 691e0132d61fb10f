"""Bruck's all_gather and all_to_all: ceil(log2 N) steps for any number of ranks.

all_gather: in step k every rank sends the blocks it has to the rank 2^k before it; in the last step only those still
missing. all_to_all: a block that must go d ranks further does so by the powers of two in d, the smallest first; each
is sent log2 N / 2 times on average, which pays for few messages with many bytes.

References:
    J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby, "Efficient algorithms for all-to-all communications in
    multiport message-passing systems", IEEE Trans. Parallel and Distributed Systems 8(11), 1997, sections 3
    (index, which is all_to_all) and 4 (concatenation, which is all_gather).
"""

from __future__ import annotations

from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth.classics.strands import Edge, Strand, check_served, from_strands
from mycel.topology.model import Topology

__all__ = ["SERVES", "synthesize"]

SERVES: tuple[CollectiveName, ...] = ("all_gather", "all_to_all")


def synthesize(topology: Topology, collective: Collective) -> Schedule:
    """Each block to the ranks 1, 2, 4 ... before those that have it, or along the binary digits of its way.

    Raises:
        SynthesisError: another collective, or partners without a path that passes no other rank.
    """
    check_served(topology, collective, "bruck", SERVES)
    n = collective.num_ranks
    if collective.name == "all_to_all":
        strands = [Strand(block=block, down=_by_digits(*divmod(block, n), n)) for block in range(n * n)]
    else:
        strands = [Strand(block=owner, down=_to_all(owner, n)) for owner in range(n)]
    return from_strands(topology, collective, "bruck", strands)


def _to_all(owner: int, num_ranks: int) -> tuple[Edge, ...]:
    """Who has the owner's block after each step, and from whom."""
    edges: list[Edge] = []
    distance = 1
    while distance < num_ranks:
        edges += [
            ((owner - i) % num_ranks, (owner - i - distance) % num_ranks)
            for i in range(distance)
            if i + distance < num_ranks
        ]
        distance *= 2
    return tuple(edges)


def _by_digits(src: int, dst: int, num_ranks: int) -> tuple[Edge, ...]:
    """The way from one rank to another by the powers of two in their distance."""
    edges: list[Edge] = []
    left = (dst - src) % num_ranks
    while left:
        power = left & -left
        here = edges[-1][1] if edges else src
        edges.append((here, (here + power) % num_ranks))
        left -= power
    return tuple(edges)
