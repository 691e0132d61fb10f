"""Who has a control connection to whom in a group of many ranks: a graph of bounded degree that no single loss parts.

A circulant graph of n places joins each with those 1, 3, 9, 27, ... places away, on both sides: degree and diameter
grow with the logarithm of n, and it stays in one piece without any one of them. Ranks of a machine form one, and
machines form one. Two machines that are joined have two connections or more, and each rank of a machine has some of
its connections: none stands for all. Whoever is lost, one rank or a whole machine, the others can still tell each
other everything.

References:
    F. Boesch, R. Tindell, "Circulants and their connectivities", Journal of Graph Theory 8 (1984).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

__all__ = ["Graph", "control_graph", "distances", "spanning_tree"]

Graph = tuple[tuple[int, ...], ...]


def control_graph(hosts: Sequence[str]) -> Graph:
    """The neighbours of each rank, in ascending order.

    Args:
        hosts: name of each rank's machine, the same on every rank.

    Examples:
        >>> control_graph(["a"] * 4)
        ((1, 3), (0, 2), (1, 3), (0, 2))
        >>> [len(neighbours) for neighbours in control_graph([f"node{rank // 8}" for rank in range(1024)])][:8]
        [6, 6, 6, 6, 6, 6, 6, 6]
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    machines = list(ranks_of.values())
    found: list[set[int]] = [set() for _ in hosts]
    for ranks in machines:
        for step in _steps(len(ranks)):
            for place, rank in enumerate(ranks):
                _join(found, rank, ranks[(place + step) % len(ranks)])
    steps = _steps(len(machines))
    for number, step in enumerate(steps):
        for place, ranks in enumerate(machines):
            others = machines[(place + step) % len(machines)]
            many = max(2, -(-min(len(ranks), len(others)) // len(steps)))
            for turn in range(number * many, (number + 1) * many):
                _join(found, ranks[turn % len(ranks)], others[turn % len(others)])
    return tuple(tuple(sorted(neighbours)) for neighbours in found)


def _steps(num_places: int) -> list[int]:
    """Powers of three up to half the way around: every distance is a sum of few of them, with either sign."""
    steps, step = [], 1
    while 2 * step <= num_places:
        steps.append(step)
        step *= 3
    return steps


def _join(found: list[set[int]], one: int, other: int) -> None:
    found[one].add(other)
    found[other].add(one)


def distances(graph: Sequence[Sequence[int]], start: int) -> list[int]:
    """How many connections lie between a rank and each other one; -1: there is no way.

    Examples:
        >>> distances(control_graph(["a"] * 4), 0)
        [0, 1, 2, 1]
    """
    found = [-1] * len(graph)
    found[start] = 0
    queue = deque([start])
    while queue:
        rank = queue.popleft()
        for neighbour in graph[rank]:
            if found[neighbour] < 0:
                found[neighbour] = found[rank] + 1
                queue.append(neighbour)
    return found


def spanning_tree(graph: Sequence[Sequence[int]], rank: int) -> tuple[int, tuple[int, ...]]:
    """A rank's parent, -1 for none, and its children in the tree of shortest ways from rank 0.

    Examples:
        >>> spanning_tree(control_graph(["a"] * 4), 1)
        (0, (2,))
    """
    away = distances(graph, 0)

    def parent(of: int) -> int:
        return next((each for each in graph[of] if away[each] == away[of] - 1), -1)

    return parent(rank), tuple(each for each in graph[rank] if away[each] == away[rank] + 1 and parent(each) == rank)
