"""Recursive doubling and halving: partners at distance 1, 2, 4 ... exchange all they have, log2 N steps.

all_gather doubles what every rank has, and reduce_scatter halves it; seen from one block, both are a binomial tree in
which partners differ in one bit. all_reduce exchanges whole arrays: both partners add each other's sum, so that after
log2 N steps every rank has everything, the same bits on all (Rabenseifner's algorithm, which halves and then doubles,
is ``rabenseifner``: fewer bytes, twice the steps).

Where the number of ranks is no power of two, some stand back: of the first ranks, every second one gives what it has
to the rank before it at the start, and gets what it needs from it at the end.

References:
    R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", Int. J.
    High Performance Computing Applications 19(1), 2005, sections 4.1, 4.3 and 4.5.
"""

from __future__ import annotations

from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth.classics.exchanges import Exchange, from_exchanges
from mycel.collectives.synth.classics.strands import Edge, Strand, check_served, from_strands, mirrored
from mycel.topology.model import Topology

__all__ = ["SERVES", "doubling", "stands_back", "synthesize"]

SERVES: tuple[CollectiveName, ...] = ("all_gather", "reduce_scatter", "all_reduce")


def synthesize(topology: Topology, collective: Collective) -> Schedule:
    """Blocks by doubling, partial sums by halving, whole arrays by exchange.

    Raises:
        SynthesisError: another collective, or partners without a path that passes no other rank.
    """
    check_served(topology, collective, "recursive_doubling", SERVES)
    n = collective.num_ranks
    if collective.name == "all_reduce":
        return from_exchanges(topology, collective, "recursive_doubling", [_whole_arrays(n)])
    strands = []
    for owner in range(n):
        edges = doubling(n, owner)
        reduces = collective.reduces
        strands.append(Strand(block=owner, up=mirrored(edges) if reduces else (), down=() if reduces else edges))
    return from_strands(topology, collective, "recursive_doubling", strands)


def _whole_arrays(num_ranks: int) -> Exchange:
    """Everything between partners whose places differ in one bit, the lowest first."""
    ranks = [rank for rank in range(num_ranks) if not stands_back(num_ranks, rank)]
    pairs = [(2 * pair + 1, 2 * pair) for pair in range(_num_pairs(num_ranks))]
    bits = (1 << bit for bit in range(len(ranks).bit_length() - 1))
    return Exchange(
        rounds=[[(ranks[place], ranks[place ^ bit]) for place in range(len(ranks))] for bit in bits],
        first=pairs,
        last=mirrored(pairs),
    )


def _num_pairs(num_ranks: int) -> int:
    """Pairs of ranks, the first ones, of which only the even one takes part."""
    return num_ranks - (1 << (num_ranks.bit_length() - 1))


def stands_back(num_ranks: int, rank: int) -> bool:
    """Whether a rank only gives what it has to the one before it, and gets the result."""
    return rank < 2 * _num_pairs(num_ranks) and rank % 2 == 1


def doubling(num_ranks: int, owner: int) -> tuple[Edge, ...]:
    """Who has the owner's block after each step, and from whom.

    Examples:
        >>> doubling(4, 1)
        ((1, 0), (1, 3), (0, 2))
        >>> doubling(3, 1)
        ((1, 0), (0, 2))
    """
    taking_part = [rank for rank in range(num_ranks) if not stands_back(num_ranks, rank)]
    edges: list[Edge] = []
    first = owner
    if stands_back(num_ranks, owner):
        first = owner - 1
        edges.append((owner, first))
    place, distance = taking_part.index(first), 1
    while distance < len(taking_part):
        edges += [(taking_part[place ^ i], taking_part[place ^ i ^ distance]) for i in range(distance)]
        distance *= 2
    edges += [(2 * pair, 2 * pair + 1) for pair in range(_num_pairs(num_ranks)) if 2 * pair + 1 != owner]
    return tuple(edges)
