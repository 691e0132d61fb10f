"""Swing: partners that lie to one side and then to the other, so that they are nearer than powers of two are.

In step s the partner of an even rank r is r + (1 - (-2)^(s+1)) / 3, that of an odd one as far on the other side:
distances 1, 1, 3, 5, 11 ... For many bytes, reduce_scatter sends half of what is left to each of them, and
all_gather takes the steps back; for few, whole arrays are exchanged, in half of the steps (``swing_latency``). Ranks
then form their sums in different orders, so that floating-point results differ in the last bits between ranks; see
``mycel.collectives.verify.agreement``. What is published of tori with several dimensions is not built here.

The butterfly of Bine trees that doubles distances has the same partners.

References:
    D. De Sensi, T. Bonato, D. Saam, T. Hoefler, "Swing: Short-cutting Rings for Higher Bandwidth Allreduce",
    NSDI 2024, section 3.1 (latency-optimal and bandwidth-optimal on one dimension).
"""

from __future__ import annotations

from functools import partial

from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth.classics.exchanges import Exchange, from_exchanges
from mycel.collectives.synth.classics.strands import check_served, from_trees, spread
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

__all__ = ["SERVES", "SERVES_LATENCY", "partner", "synthesize", "synthesize_latency"]

SERVES: tuple[CollectiveName, ...] = ("all_gather", "reduce_scatter", "all_reduce")
SERVES_LATENCY: tuple[CollectiveName, ...] = ("all_reduce",)


def partner(rank: int, step: int, num_ranks: int) -> int:
    """The rank with which a rank exchanges in a step.

    Examples:
        >>> [[partner(rank, step, 8) for step in range(3)] for rank in (0, 1)]
        [[1, 7, 3], [0, 2, 6]]
    """
    distance = (1 - int((-2) ** (step + 1))) // 3
    return (rank + (-distance if rank % 2 else distance)) % num_ranks


def synthesize(topology: Topology, collective: Collective) -> Schedule:
    """A share a rank: its sum comes together step by step, and goes out by the same steps backwards.

    Raises:
        SynthesisError: another collective, an odd number of ranks, or partners without a path that passes no other
            rank.
    """
    check_served(topology, collective, "swing", SERVES)
    n = collective.num_ranks
    steps = [partial(_partners, step, n) for step in reversed(range((n - 1).bit_length()))]
    trees = [spread(owner, steps) for owner in range(n)]
    if n % 2 or any(len(tree) < n - 1 for tree in trees):
        raise SynthesisError(f"swing on {topology.name}: needs an even number of ranks; there are {n}")
    return from_trees(topology, collective, "swing", trees)


def synthesize_latency(topology: Topology, collective: Collective) -> Schedule:
    """Whole arrays, exchanged with one partner after the other.

    Raises:
        SynthesisError: another collective, a number of ranks that is no power of two, or partners without a path
            that passes no other rank.
    """
    check_served(topology, collective, "swing_latency", SERVES_LATENCY)
    n = collective.num_ranks
    if n & (n - 1):
        raise SynthesisError(f"swing_latency on {topology.name}: needs a power of two of ranks; there are {n}")
    rounds = [[(rank, partner(rank, step, n)) for rank in range(n)] for step in range(n.bit_length() - 1)]
    return from_exchanges(topology, collective, "swing_latency", [Exchange(rounds=rounds)])


def _partners(step: int, num_ranks: int, rank: int) -> tuple[int, ...]:
    return (partner(rank, step, num_ranks),)
