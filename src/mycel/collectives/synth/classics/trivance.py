"""Trivance: partners on both sides, three times as far in every step, so that log3 N steps reach everybody.

In step s a rank exchanges with the ranks 3^s before it and behind it, and adds both. For many bytes a third of what
is left goes to each side, and all_gather takes the steps back; for few, whole arrays are exchanged
(``trivance_latency``), and ranks form their sums in different orders, as with Swing. The number of ranks is a power
of three: what is published of others is not built here.

References:
    A. Jürß, V. Addanki, S. Schmid, "Trivance: Latency-Optimal AllReduce by Shortcutting Multiport Networks",
    arXiv 2602.17254, 2026 (latency-optimal and bandwidth-optimal on a ring).
"""

from __future__ import annotations

from functools import partial

from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth.classics.exchanges import Exchange, from_exchanges
from mycel.collectives.synth.classics.strands import check_served, from_trees, spread
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

__all__ = ["SERVES", "SERVES_LATENCY", "synthesize", "synthesize_latency"]

SERVES: tuple[CollectiveName, ...] = ("all_gather", "reduce_scatter", "all_reduce")
SERVES_LATENCY: tuple[CollectiveName, ...] = ("all_reduce",)


def synthesize(topology: Topology, collective: Collective) -> Schedule:
    """A share a rank: its sum comes together from ever nearer on both sides, and goes out again.

    Raises:
        SynthesisError: another collective, a number of ranks that is no power of three, or partners without a path
            that passes no other rank.
    """
    check_served(topology, collective, "trivance", SERVES)
    n = collective.num_ranks
    steps = [partial(_partners, distance, n) for distance in reversed(_distances(topology, "trivance"))]
    return from_trees(topology, collective, "trivance", [spread(owner, steps) for owner in range(n)])


def synthesize_latency(topology: Topology, collective: Collective) -> Schedule:
    """Whole arrays, exchanged with both partners of each step.

    Raises:
        SynthesisError: as for ``synthesize``.
    """
    check_served(topology, collective, "trivance_latency", SERVES_LATENCY)
    n = collective.num_ranks
    rounds = [
        [(rank, other) for rank in range(n) for other in _partners(distance, n, rank)]
        for distance in _distances(topology, "trivance_latency")
    ]
    return from_exchanges(topology, collective, "trivance_latency", [Exchange(rounds=rounds)])


def _distances(topology: Topology, method: str) -> list[int]:
    """1, 3, 9 ... below the number of ranks."""
    distances, reached = [], 1
    while reached < topology.num_ranks:
        distances.append(reached)
        reached *= 3
    if reached != topology.num_ranks:
        raise SynthesisError(
            f"{method} on {topology.name}: needs a power of three of ranks; there are {topology.num_ranks}"
        )
    return distances


def _partners(distance: int, num_ranks: int, rank: int) -> tuple[int, int]:
    return (rank - distance) % num_ranks, (rank + distance) % num_ranks
