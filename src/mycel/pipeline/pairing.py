"""What is taken paired with what is given back, so that the ways between them are the longest in all.

A transport problem, solved by successive longest augmenting ways: a placement has few blocks on a device, and numbers
stay whole.

References:
    R. K. Ahuja, T. L. Magnanti, J. B. Orlin, "Network Flows", 1993, section 9.7 (successive shortest paths).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

__all__ = ["longest_pairing"]


def longest_pairing(
    supply: Mapping[int, int], demand: Mapping[int, int], length: Mapping[tuple[int, int], int]
) -> int | None:
    """The largest sum of amounts times lengths over all ways to meet the demand from the supply.

    Args:
        supply: amount of each source.
        demand: amount of each sink; as much as the supply in all.
        length: of each pair that may be used.

    Returns:
        The sum; ``None`` where the pairs do not suffice.

    Examples:
        >>> longest_pairing({0: 2, 1: 1}, {8: 1, 9: 2}, {(0, 8): 5, (0, 9): 7, (1, 8): 1, (1, 9): 4})
        16
    """
    left, open_ = dict(supply), dict(demand)
    flow = dict.fromkeys(length, 0)
    while any(left.values()):
        # Bellman and Ford: the longest way from any source with something left, over pairs forwards and used pairs
        # backwards. Sources and sinks are told apart by what they are.
        far: dict[tuple[str, int], int] = {("source", i): 0 for i in left if left[i]}
        came: dict[tuple[str, int], tuple[str, int]] = {}
        changed = True
        while changed:
            changed = False
            for (i, j), cost in length.items():
                a, b = ("source", i), ("sink", j)
                if a in far and far[a] + cost > far.get(b, -1 << 62):
                    far[b], came[b], changed = far[a] + cost, a, True
                if flow[i, j] and b in far and far[b] - cost > far.get(a, -1 << 62):
                    far[a], came[a], changed = far[b] - cost, b, True
        ends = [j for j in open_ if open_[j] and ("sink", j) in far]
        if not ends:
            return None
        end = max(ends, key=lambda j: far["sink", j])
        way = [("sink", end)]
        while way[-1] in came:
            way.append(came[way[-1]])
        way.reverse()
        amount = min(left[way[0][1]], open_[end])
        steps = [(kind, (i, j) if kind == "source" else (j, i)) for (kind, i), (_, j) in pairwise(way)]
        for kind, pair in steps:
            amount = amount if kind == "source" else min(amount, flow[pair])
        for kind, pair in steps:
            flow[pair] += amount if kind == "source" else -amount
        left[way[0][1]] -= amount
        open_[end] -= amount
    return sum(amount * length[pair] for pair, amount in flow.items())
