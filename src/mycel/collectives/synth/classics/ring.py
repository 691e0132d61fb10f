"""Ring: every block goes once round a cycle of all ranks; the bidirectional form sends half of it the other way.

A rank sends to one neighbour only, N-1 times (all_gather, reduce_scatter) or 2(N-1) times (all_reduce): optimal in
bytes on a fabric where all ranks have equal links into one switch, and linear in latency.

References:
    P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel and
    Distributed Computing 69(2), 2009, section 3.
"""

from __future__ import annotations

from itertools import pairwise

from mycel.collectives.routes import shortest_routes
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth.classics.strands import Edge, Strand, check_served, from_strands
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

__all__ = ["SERVES", "find_cycle", "synthesize", "synthesize_bidirectional"]

SERVES: tuple[CollectiveName, ...] = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")
#: Ranks tried at most in the search for a cycle, which takes exponential time on the worst fabrics.
_SEARCH_LIMIT = 200_000


def synthesize(topology: Topology, collective: Collective) -> Schedule:
    """Every block once round one cycle.

    Raises:
        SynthesisError: no cycle of all ranks was found in which neighbours have a path that passes no other rank.
    """
    check_served(topology, collective, "ring", SERVES)
    return _along(topology, collective, "ring", both_ways=False)


def synthesize_bidirectional(topology: Topology, collective: Collective) -> Schedule:
    """Half of every block round a cycle, half the other way.

    Raises:
        SynthesisError: as for the ring; neighbours must reach each other in both directions.
    """
    check_served(topology, collective, "bidirectional_ring", SERVES)
    return _along(topology, collective, "bidirectional_ring", both_ways=True)


def _along(topology: Topology, collective: Collective, method: str, *, both_ways: bool) -> Schedule:
    cycle = find_cycle(topology, method, both_ways=both_ways)
    cycles = [cycle, cycle[::-1]] if both_ways else [cycle]
    # all_reduce's array is one block, of which each rank is the end of one share.
    owners = [collective.root] if collective.root is not None else list(range(collective.num_ranks))
    strands = []
    for owner in owners:
        for way in cycles:
            at = way.index(owner)
            turn = way[at:] + way[:at]
            up: tuple[Edge, ...] = tuple(pairwise([*turn[1:], owner])) if collective.reduces else ()
            down: tuple[Edge, ...] = () if collective.name in ("reduce_scatter", "reduce") else tuple(pairwise(turn))
            strands.append(Strand(block=owner if collective.num_blocks > 1 else 0, up=up, down=down))
    return from_strands(topology, collective, method, strands)


def find_cycle(topology: Topology, method: str = "ring", *, both_ways: bool = False) -> list[int]:
    """A cycle through all ranks: in the order of ranks where neighbours have paths, else the first one found.

    Args:
        topology: the fabric.
        method: for messages.
        both_ways: neighbours must have a path in both directions.

    Raises:
        SynthesisError: none was found.
    """
    n = topology.num_ranks
    reached = [shortest_routes(topology, rank, relays=False) for rank in range(n)]
    neighbours = [
        [b for b in sorted(reached[a], key=lambda b: (b - a) % n) if not both_ways or a in reached[b]]
        for a in range(n)
    ]
    cycle, used = [0], {0}
    choices = [iter(neighbours[0])]
    for _ in range(_SEARCH_LIMIT):
        if not choices or (len(cycle) == n and 0 in neighbours[cycle[-1]]):
            break
        following = next((b for b in choices[-1] if b not in used), None) if len(cycle) < n else None
        if following is None:
            choices.pop()
            used.discard(cycle.pop())
        else:
            cycle.append(following)
            used.add(following)
            choices.append(iter(neighbours[following]))
    if len(cycle) < n or 0 not in neighbours[cycle[-1]]:
        raise SynthesisError(
            f"{method} on {topology.name}: found no cycle of all {n} ranks in which every neighbour is reached "
            "without passing another rank; forest and tree need none"
        )
    return cycle
