"""A cluster on paper that a probe can measure: routes as the emulator has them, flows that share links max-min.

It shares no code with what infers the fabric. Every flow's rate follows from water filling; routers answer small
packets with one address for each side, as Linux does, or keep silent.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from mycel.emulate.routing import default_next_hops
from mycel.topology.model import Topology

Pair = tuple[int, int]


def max_min(ways: Mapping[Pair, list[Pair]], capacity: Mapping[Pair, float]) -> dict[Pair, float]:
    """Rates of flows: all grow alike until some link is full, whose flows then stay."""
    left, rates, growing = dict(capacity), dict.fromkeys(ways, 0.0), set(ways)
    while growing:
        users: dict[Pair, int] = {}
        for flow in growing:
            for link in ways[flow]:
                users[link] = users.get(link, 0) + 1
        step = min(left[link] / count for link, count in users.items())
        for flow in growing:
            rates[flow] += step
        for link, count in users.items():
            left[link] -= step * count
        growing = {f for f in growing if all(left[link] > 1e-6 * capacity[link] for link in ways[f])}
    return rates


class PaperCluster:
    """Answers commands as all ranks together would.

    Args:
        topology: the truth.
        silent: routers answer nothing, as one Ethernet does.
        noise: rates are off by up to this part.
        machines: of each rank; every rank has its own if not given.
        unsteady: flows within a machine run at any part of their rate, as processors allow.
        seed: of the noise.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        silent: bool = False,
        noise: float = 0.0,
        machines: list[str] | None = None,
        unsteady: bool = False,
        seed: int = 0,
    ) -> None:
        self._topology, self._silent, self._noise = topology, silent, noise
        self._unsteady = unsteady
        self._machines = machines or [f"node{r}" for r in range(topology.num_ranks)]
        self._random = random.Random(seed)
        per_unit = topology.bytes_per_second_per_unit
        assert per_unit is not None
        self._capacity = {ends: float(c * per_unit) for ends, c in topology.capacity.items()}
        self._ways: dict[Pair, list[int]] = {}
        for dst, end in enumerate(topology.ranks):
            hops = default_next_hops(topology, end)
            for src, begin in enumerate(topology.ranks):
                if src != dst:
                    way = [begin]
                    while way[-1] != end:
                        way.append(hops[way[-1]])
                    self._ways[src, dst] = way
        self._pairs: list[Pair] = []
        self.sent = 0.0
        self.patterns: list[list[Pair]] = []

    def links_in_use(self) -> set[Pair]:
        """Links that some pair's packets take."""
        return {hop for way in self._ways.values() for hop in pairwise(way)}

    def ask(
        self, commands: Mapping[int, Mapping[str, Any]], timeout_s: float, what: str
    ) -> dict[int, dict[str, Any]]:
        kind = next(iter(commands.values()))["do"]
        return getattr(self, f"_{kind}")(commands)  # type: ignore[no-any-return]

    def _introduce(self, commands: Mapping[int, Any]) -> dict[int, Any]:
        return {
            r: {
                "machine": self._machines[r],
                "name": self._machines[r],
                "address": f"rank{r}",
                "addresses": [f"rank{r}", f"cable{r}"] if len(set(self._machines)) == len(self._machines) else [],
                "port": 1,
                "echo": 2,
                "cores": 8,
            }
            for r in commands
        }

    def _peers(self, commands: Mapping[int, Any]) -> dict[int, Any]:
        return {r: {} for r in commands}

    def _trace(self, commands: Mapping[int, Any]) -> dict[int, Any]:
        return {
            r: {"ways": {str(dst): self._answers(way) for (src, dst), way in self._ways.items() if src == r}}
            for r in commands
        }

    def _answers(self, way: list[int]) -> list[str]:
        """A rank answers with its one address, a router with that of the side from which the packet came."""
        if self._silent:
            return []
        rank_of = self._topology.rank_of
        return [
            f"rank{rank_of[here]}" if here in rank_of else f"{here} towards {before}"
            for before, here in pairwise(way[:-1])
        ]

    def _ping(self, commands: Mapping[int, Any]) -> dict[int, Any]:
        return {
            r: {"seconds": {str(dst): 1e-5 * (len(way) - 1) for (src, dst), way in self._ways.items() if src == r}}
            for r in commands
        }

    def _connect(self, commands: Mapping[int, Any]) -> dict[int, Any]:
        self._pairs = [(src, dst) for src, command in commands.items() for dst in command["to"]]
        assert {(src, dst) for dst, c in commands.items() for src in c["from"]} == set(self._pairs)
        self.patterns.append(self._pairs)
        return {r: {} for r in commands}

    def _send(self, commands: Mapping[int, Any]) -> dict[int, Any]:
        seconds = next(iter(commands.values()))["seconds"]
        rates = max_min({pair: list(pairwise(self._ways[pair])) for pair in self._pairs}, self._capacity)
        flows: dict[int, dict[str, Any]] = {r: {} for r in commands}
        for (src, dst), rate in rates.items():
            noise = 0.6 if self._unsteady and self._machines[src] == self._machines[dst] else self._noise
            payload = rate * 1448 / 1514 * (1 - noise * self._random.random())
            count = min(int(payload * seconds), next(iter(commands.values()))["cap"])
            self.sent += count
            flows[dst][str(src)] = {"segment": 1448, "samples": [[0.0, 0], [count / payload, count]]}
        return {r: {"flows": flows[r], "complete": True} for r in commands}
