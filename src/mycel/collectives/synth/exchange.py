"""Exchange: all_reduce of small messages in ceil(log2 N) rounds, for any number of ranks.

Ranks form groups that all hold their sum; in a round two groups become one, as every member of either adds what a
member of the other sends. It does not matter which, since all of a group hold the same bits: so partners are the
nearest that there are, groups need not be of one size, and nobody stands back. A sum is formed while the one before
it is being sent (``mycel.collectives.schedule``), so that a round costs one message; a tree takes two rounds a level.

All of the array goes along in every round: for more than a few kilobytes, trees and forests take over.

References:
    R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH", Int. J.
    High Performance Computing Applications 19(1), 2005, section 4.5 (recursive doubling, on powers of two).
"""

from __future__ import annotations

from collections.abc import Sequence

from mycel.collectives.routes import Routes
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth.classics.exchanges import Exchange, from_exchanges
from mycel.collectives.synth.classics.strands import Edge, check_served
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

__all__ = ["SERVES", "synthesize"]

SERVES: tuple[CollectiveName, ...] = ("all_reduce",)
#: Ranks beyond which whole arrays are not exchanged: pairs of ranks are looked at, and a tree is what is left.
_MOST_RANKS = 256

_Group = tuple[int, ...]
#: Of a message: latency, links, and minus the least capacity on its way.
_Cost = tuple[float, int, int]


def synthesize(topology: Topology, collective: Collective) -> Schedule:
    """Whole arrays between groups that grow together.

    Raises:
        SynthesisError: another collective, more than 256 ranks, or groups that are left without partners to which
            they have a path that passes no other rank.
    """
    check_served(topology, collective, "exchange", SERVES)
    n = collective.num_ranks
    if n > _MOST_RANKS:
        raise SynthesisError(f"exchange on {topology.name}: for up to {_MOST_RANKS} ranks; there are {n}")
    routes = Routes(topology, relays=False)
    one_way: list[dict[int, _Cost]] = [
        {other: (r.latency_s, r.num_links, r.narrowness) for other, r in routes.alike(rank).items()}
        for rank in range(n)
    ]
    costs = [[max(one_way[a].get(b, _FAR), one_way[b].get(a, _FAR)) for b in range(n)] for a in range(n)]
    groups: list[_Group] = [(rank,) for rank in range(n)]
    rounds: list[list[Edge]] = []
    while len(groups) > 1:
        groups, edges = _merged(groups, costs, topology.name)
        rounds.append(edges)
    return from_exchanges(topology, collective, "exchange", [Exchange(rounds=rounds)])


def _merged(groups: list[_Group], costs: _Costs, name: str) -> tuple[list[_Group], list[Edge]]:
    """Pairs of groups as one each, and what they send each other; of an odd number, one of the largest waits."""
    left = sorted(groups, key=lambda group: (len(group), group))
    made: list[_Group] = []
    edges: list[Edge] = []
    waiting: list[_Group] = [left.pop()] if len(left) % 2 else []
    while left:
        group = left.pop(0)
        ranked = sorted((_least(group, other, costs), len(other), other) for other in left)
        found = next(
            (
                (other, matched)
                for cost, _, other in ranked
                if cost is not _FAR and (matched := _matched(group, other, costs)) is not None
            ),
            None,
        )
        if found is None:
            raise SynthesisError(
                f"exchange on {name}: rank {group[0]} and those it holds the sum of have no partners left to which "
                "there are paths that pass no other rank; forest and tree need none"
            )
        other, matched = found
        left.remove(other)
        made.append(tuple(sorted((*group, *other))))
        edges += matched
    return made + waiting, edges


_FAR: _Cost = (float("inf"), 0, 0)
#: By two ranks: what a message costs in the dearer of both directions.
_Costs = Sequence[Sequence[_Cost]]


def _least(group: _Group, other: _Group, costs: _Costs) -> _Cost:
    """What the nearest two of both groups cost."""
    return min(costs[a][b] for a in group for b in other)


def _matched(group: _Group, other: _Group, costs: _Costs) -> list[Edge] | None:
    """Messages by which all of both groups get the other's sum, the dearest as cheap as may be; ``None`` for none.

    Every member of the larger group has one partner, and every member of the smaller as many as its share.
    """
    few, many = sorted((group, other), key=lambda g: (len(g), g))
    share = -(-len(many) // len(few))
    places = [b for _ in range(share) for b in few]
    known = sorted({cost for a in many for b in few if (cost := costs[a][b]) != _FAR})
    low, high, best = 0, len(known) - 1, None
    while low <= high:
        middle = (low + high) // 2
        found = _assigned(many, places, known[middle], costs)
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle - 1
    if best is None:
        return None
    edges = [(b, a) for a, b in best.items()]
    partner = {b: a for a, b in reversed(best.items())}
    for b in few:  # whoever serves nobody is served by the nearest
        partner.setdefault(b, min(many, key=lambda a: (costs[a][b], a in partner.values(), a)))
        if costs[partner[b]][b] == _FAR:
            return None
    return edges + [(partner[b], b) for b in few]


def _assigned(many: Sequence[int], places: Sequence[int], most: _Cost, costs: _Costs) -> dict[int, int] | None:
    """A place for each of the many that costs no more than ``most``, by augmenting paths; ``None``: there is none."""
    at: dict[int, int] = {}  # who has each place

    def settle(a: int, tried: set[int]) -> bool:
        for place, b in enumerate(places):
            if place in tried or costs[a][b] > most:
                continue
            tried.add(place)
            if place not in at or settle(at[place], tried):
                at[place] = a
                return True
        return False

    if not all(settle(a, set()) for a in many):
        return None
    return {a: places[place] for place, a in sorted(at.items(), key=lambda item: item[1])}
