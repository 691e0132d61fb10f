"""Rabenseifner's all_reduce: sums by recursive halving, then copies by recursive doubling; 2 log2 N steps.

The bytes are the least possible, where recursive doubling of whole arrays sends log2 N / 2 times as many in half of
the steps. Ranks beyond the last power of two stand back, as they do there.

References:
    R. Rabenseifner, "Optimization of collective reduction operations", ICCS 2004, section 4.
    R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", Int. J.
    High Performance Computing Applications 19(1), 2005, section 4.5.
"""

from __future__ import annotations

from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth.classics.recursive_doubling import doubling, stands_back
from mycel.collectives.synth.classics.strands import Strand, check_served, from_strands, mirrored
from mycel.topology.model import Topology

__all__ = ["SERVES", "synthesize"]

SERVES: tuple[CollectiveName, ...] = ("all_reduce",)


def synthesize(topology: Topology, collective: Collective) -> Schedule:
    """A share a rank that takes part, up its tree and down again.

    Raises:
        SynthesisError: another collective, or partners without a path that passes no other rank.
    """
    check_served(topology, collective, "rabenseifner", SERVES)
    n = collective.num_ranks
    trees = [doubling(n, owner) for owner in range(n) if not stands_back(n, owner)]
    strands = [Strand(block=0, up=mirrored(edges), down=edges) for edges in trees]
    return from_strands(topology, collective, "rabenseifner", strands)
