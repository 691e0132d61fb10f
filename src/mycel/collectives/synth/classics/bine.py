"""Bine trees: binomial trees in negabinary numbers, whose partners lie to one side and then to the other.

From the root, taken as rank 0, everybody who has something sends in step i to the rank that is
1 - 2 + 4 - ... +- 2^(s-i-1) further, s being log2 N; odd ranks send the other way. Distances are two thirds of those
of a binomial tree, so that less crosses the links between groups of a dragonfly or a fat tree.

Butterflies that double the distance in every step are those of ``swing`` and ``swing_latency``.

References:
    D. De Sensi, S. Pasqualoni, L. Piarulli, T. Bonato, S. Ba, M. Turisini, J. Domke, T. Hoefler, "Bine Trees:
    Enhancing Collective Operations by Optimizing Communication Locality", SC 2025, section 3 (trees that halve the
    distance).
"""

from __future__ import annotations

from functools import partial

from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth.classics.binomial_tree import along_tree
from mycel.collectives.synth.classics.strands import Edge, check_served, spread
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

__all__ = ["SERVES", "bine_tree", "synthesize"]

SERVES: tuple[CollectiveName, ...] = ("broadcast", "reduce", "gather", "scatter")


def bine_tree(num_ranks: int, root: int) -> tuple[Edge, ...]:
    """Edges of the tree that halves distances, those of the first step first.

    Examples:
        >>> bine_tree(8, 0)
        ((0, 3), (0, 7), (3, 4), (0, 1), (3, 2), (7, 6), (4, 5))
    """
    steps = [partial(_partner, exponent, num_ranks) for exponent in range(num_ranks.bit_length() - 1, 0, -1)]
    return tuple(((root + src) % num_ranks, (root + dst) % num_ranks) for src, dst in spread(0, steps))


def synthesize(topology: Topology, collective: Collective) -> Schedule:
    """The array down a Bine tree, or up it; or each block along its way in the tree.

    Raises:
        SynthesisError: another collective, a number of ranks that is no power of two, or partners without a path
            that passes no other rank.
    """
    check_served(topology, collective, "bine", SERVES)
    n = collective.num_ranks
    if n & (n - 1):
        raise SynthesisError(f"bine on {topology.name}: needs a power of two of ranks; there are {n}")
    return along_tree(topology, collective, "bine", bine_tree(n, collective.root or 0))


def _partner(exponent: int, num_ranks: int, rank: int) -> tuple[int]:
    distance = (1 - int((-2) ** exponent)) // 3
    return ((rank + (-distance if rank % 2 else distance)) % num_ranks,)
