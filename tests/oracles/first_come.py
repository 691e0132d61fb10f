"""Traces played as ASTRA-sim's analytical backend is documented to: first come, first served, store and forward.

Every node whose dependencies are over starts at once, in the order of the nodes. A message waits at each link of its
path for those that came before it, occupies the link for its bytes, arrives a latency later, and goes on whole. A
send, and the receive that meets it, are over when it has arrived. Sums and copies take no time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from mycel.collectives.schedule import Schedule

SEND, RECEIVE = 5, 6


def play(schedule: Schedule, ranks: Sequence[Sequence[tuple[int, tuple[int, ...], dict[str, int]]]]) -> float:
    """Seconds until every node is over.

    Args:
        schedule: for the paths; each pair of ranks must have one only.
        ranks: of each rank its nodes: type, what it waits for, attributes.
    """
    topology, rate = schedule.topology, float(schedule.topology.bytes_per_second_per_unit or 1e9)
    paths = {(t.src, t.dst): t.path for t in schedule.transfers}
    assert len(paths) == len({(t.src, t.dst, t.path) for t in schedule.transfers})
    waits = {(r, n): len(deps) for r, nodes in enumerate(ranks) for n, (_, deps, _) in enumerate(nodes)}
    follow: dict[tuple[int, int], list[tuple[int, int]]] = {}
    receive: dict[tuple[int, int, int], tuple[int, int]] = {}
    for r, nodes in enumerate(ranks):
        for n, (kind, deps, values) in enumerate(nodes):
            for dep in deps:
                follow.setdefault((r, dep), []).append((r, n))
            if kind == RECEIVE:
                receive[values["comm_src"], values["comm_dst"], values["comm_tag"]] = (r, n)
                waits[r, n] += 1  # its message
    free: dict[tuple[int, int], float] = {}
    count, last = 0, 0.0
    #: Time, order, and a node that is over (kind 0) or a message that has come to a hop of its path (kind 1).
    events: list[tuple[float, int, int, Any]] = []

    def start(now: float, key: tuple[int, int]) -> None:
        nonlocal count
        kind, _, values = ranks[key[0]][key[1]]
        count += 1
        heapq.heappush(events, (now, count, 1, (key, 0, values)) if kind == SEND else (now, count, 0, key))

    for key, number in sorted(waits.items()):
        if number == 0:
            start(0.0, key)
    over = 0
    while events:
        now, _, what, item = heapq.heappop(events)
        if what == 1:
            key, hop, values = item
            path = list(pairwise(paths[values["comm_src"], values["comm_dst"]]))
            if hop < len(path):
                link = path[hop]
                done = max(now, free.get(link, 0.0)) + values["comm_size"] / (topology.capacity[link] * rate)
                free[link] = done
                count += 1
                heapq.heappush(events, (done + topology.latency_s[link], count, 1, (key, hop + 1, values)))
                continue
            waiting = receive[values["comm_src"], values["comm_dst"], values["comm_tag"]]
            waits[waiting] -= 1
            if waits[waiting] == 0:
                start(now, waiting)
            item = key
        over, last = over + 1, now
        for key in follow.get(item, ()):
            waits[key] -= 1
            if waits[key] == 0:
                start(now, key)
    assert over == len(waits), "nodes wait for ever"
    return last
