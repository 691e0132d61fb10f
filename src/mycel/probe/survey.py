"""The plan of a probe, carried out by rank 0: what is measured in which order, within time and traffic."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from mycel.errors import UsageError
from mycel.probe.fit import Estimate, Fit, explained, fit
from mycel.probe.found import Found, build, describe
from mycel.probe.observations import Observation, Pair, Record, observe
from mycel.probe.patterns import between, from_one, rounds, saturating, shift, to_one
from mycel.probe.structure import Route, Structure, candidates, fast_groups

__all__ = ["Limits", "Ranks", "Survey"]

#: Until which part of the time each stage may go on; what is left is for checking.
_LONE, _PORTS, _MORE = 0.5, 0.75, 0.88
#: Flows of one pattern between ranks of one machine, for each of its cores.
_FLOWS_PER_CORE = 2
#: Up to so many ranks, pairs of which nothing is known are measured one after the other.
_FEW_RANKS = 12
#: A structure must explain so much more of the flows to be taken instead of a simpler one.
_BETTER = 0.03
#: Payload of one flow in one pattern, at most: 50 ms at 40 Gbit/s.
_FLOW_BYTES = 1 << 28
#: The same within one machine, where flows are fast and their rate matters least.
_INSIDE_BYTES = 1 << 27
#: Payload of a flow that should be counted, and how much longer than asked for a pattern may be counted for that.
_FLOW_COUNTED, _LONGER = 2 << 20, 2.0
#: So many patterns, of which the structure does not explain a flow, are measured once more.
_AGAIN = 12
#: A link is to be filled so often, or so often where the figures are further apart than so.
_TIMES, _TIMES_UNSTEADY, _UNSTEADY = 2, 4, 0.05
#: Seconds beyond its own time that a step may take before the probe is given up.
_PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much a probe may use.

    Attributes:
        seconds: from when all ranks are there.
        max_bytes: payload sent by all ranks together.
        join_s: for all ranks to come.
        warm_s: of each pattern that do not count: first bytes may pass a shaper's bucket, windows open.
        window_s: of each pattern that count.
        hops: ask routers by packets of small time to live.

    Raises:
        UsageError: no time, or no bytes.

    Examples:
        >>> small = Limits(seconds=10, max_bytes=100_000_000)
        >>> small.window_s + small.warm_s < small.seconds / 30  # time for some thirty patterns
        True
    """

    seconds: float = 60.0
    max_bytes: int = 8 << 30
    join_s: float = 60.0
    warm_s: float = 0.1
    window_s: float = 0.2
    hops: bool = True

    def __post_init__(self) -> None:
        for name in ("seconds", "max_bytes", "join_s", "window_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"probe: {name} must be positive, got {getattr(self, name)!r}")


class Ranks(Protocol):
    """All ranks, as rank 0 reaches them: ``mycel.probe.control.Hub``, or something in its place in tests."""

    def ask(
        self, commands: Mapping[int, Mapping[str, Any]], timeout_s: float, what: str
    ) -> dict[int, dict[str, Any]]:
        """Give ranks a command each and return their answers."""


class _SpentError(Exception):
    """Time or traffic is used up."""


class Survey:
    """Rank 0's plan.

    Args:
        ranks: all of them, rank 0 included.
        size: world size.
        limits: of time and traffic.
        progress: told what is being done.
    """

    def __init__(self, ranks: Ranks, size: int, limits: Limits, progress: Callable[[str], None]) -> None:
        self._hub, self._size, self._limits, self._progress = ranks, size, limits, progress
        self._began = time.monotonic()
        self._seen: list[Observation] = []
        self._notes: list[str] = []
        self._number = 0
        self._sent = 0
        self._longest_s = 0.0
        self._rate_alone: dict[Pair, float] = {}
        self._machines: list[str] = []
        self._excused: frozenset[Pair] = frozenset()

    def run(self, name: str) -> Found:
        """Measure, infer, check.

        Args:
            name: of the topology.

        Raises:
            CommunicationError: a rank is gone, silent, or reports a failure.
            UsageError: nothing could be measured.
        """
        machines, at_once = self._meet()
        self._machines = machines
        if len(set(machines)) > 1:
            pairs = {(a, b) for a in range(self._size) for b in range(self._size)}
            self._excused = frozenset((a, b) for a, b in pairs if machines[a] == machines[b])
        routes = self._trace() if self._limits.hops else {}
        latency_s = self._ping()
        provisional = self._provisional(machines, routes)
        alone = self._alone(provisional, at_once)
        self._ports(alone, known=provisional is not None)
        if not self._seen:
            raise UsageError(
                f"probe: nothing was measured in {self._limits.seconds:g} s and "
                f"{self._limits.max_bytes} bytes; allow more"
            )
        choices = candidates(machines, routes, alone)
        best = self._more(choices, at_once)
        checks = self._check(best)
        topology, links = build(name, best, machines, latency_s)
        agreeing = [explained(best, observation) for observation in checks]
        return Found(
            topology=topology,
            links=links,
            reason=best.structure.reason,
            explained=best.explained,
            foretold=(sum(a[0] for a in agreeing), sum(a[1] for a in agreeing)),
            largest_load=max((a[2] for a in agreeing), default=0.0),
            findings=describe(topology, {name for name in machines if machines.count(name) > 1}),
            notes=tuple(self._notes),
            seconds=time.monotonic() - self._began,
            num_bytes=self._sent,
            num_patterns=self._number,
        )

    # -- who is there -----------------------------------------------------------------------------------------

    def _ask(self, command: dict[str, Any], seconds: float, what: str) -> dict[int, dict[str, Any]]:
        return self._hub.ask(dict.fromkeys(range(self._size), command), seconds + _PATIENCE_S, what)

    def _meet(self) -> tuple[list[str], int]:
        """Machine of each rank, and how many flows may run at once while pairs are measured alone."""
        self._peers = self._ask({"do": "introduce"}, 0.0, "the introduction")
        known_machines = {p["machine"] for p in self._peers.values()}
        for rank, peer in self._peers.items():
            if len(known_machines) > 1 and peer["address"].startswith("127."):
                raise UsageError(
                    f"probe: rank {rank} would be reached at {peer['address']}, which means another machine on each "
                    f"machine; let MASTER_ADDR be an address of the network, or set MYCEL_ADDRESS on {peer['name']}"
                )
        self._ask({"do": "peers", "peers": self._peers}, 0.0, "the introduction")
        order = list(dict.fromkeys(self._peers[rank]["machine"] for rank in range(self._size)))
        hosts = [next(p["name"] for p in self._peers.values() if p["machine"] == machine) for machine in order]
        names = [name if hosts.count(name) == 1 else str(number) for number, name in enumerate(hosts)]
        machines = [names[order.index(self._peers[rank]["machine"])] for rank in range(self._size)]
        cores = {p["name"]: int(p["cores"]) for p in self._peers.values()}
        return machines, max(1, min(self._size // 2, _FLOWS_PER_CORE * sum(cores.values())))

    def _trace(self) -> dict[Pair, Route]:
        self._progress("asking routers")
        seconds = min(10.0, 0.2 * self._limits.seconds)
        answers = self._ask({"do": "trace", "seconds": seconds}, seconds, "the search for routers")
        owner = {address: rank for rank, p in self._peers.items() for address in (p["address"], *p["addresses"])}
        for address in {a for p in self._peers.values() for a in p["addresses"]}:
            if sum(address in p["addresses"] for p in self._peers.values()) > 1:
                owner.pop(address, None)  # ranks of one machine share its addresses
        owner |= {p["address"]: rank for rank, p in reversed(self._peers.items())}
        routes: dict[Pair, Route] = {}
        for rank, answer in answers.items():
            for peer, way in answer["ways"].items():
                routes[rank, int(peer)] = tuple(owner.get(hop, hop) if hop else None for hop in way)
        missing = self._size * (self._size - 1) - len(routes)
        if missing:
            self._notes.append(f"no small packet came back for {missing} pairs of ranks: is UDP filtered?")
        silent = sum(None in way for way in routes.values())
        if silent:
            self._notes.append(f"on the way of {silent} pairs some router did not answer")
        return routes

    def _ping(self) -> dict[Pair, float]:
        """Latency of each pair, measured by one rank after the other so that they do not disturb each other."""
        self._progress("latency")
        count = max(5, min(30, 400 // self._size))
        out: dict[Pair, float] = {}
        for rank in range(self._size):
            command = {"do": "ping", "count": count, "timeout_s": 0.2}
            seconds = 0.2 * count * self._size
            answer = self._hub.ask({rank: command}, seconds + _PATIENCE_S, "the measurement of latency")[rank]
            out |= {(rank, int(peer)): float(seconds) for peer, seconds in answer["seconds"].items()}
        return out

    # -- traffic ----------------------------------------------------------------------------------------------

    def _measure(self, pattern: str, pairs: Sequence[Pair], *, until: float) -> Observation | None:
        """One pattern; ``None`` where nothing could be counted.

        Raises:
            _SpentError: its time, as a part of the whole, or the traffic is used up.
        """
        limits = self._limits
        started = time.monotonic()
        if started - self._began + self._longest_s > until * limits.seconds:
            raise _SpentError("time")
        inside = all(self._machines[a] == self._machines[b] for a, b in pairs)
        cap = min(_INSIDE_BYTES if inside else _FLOW_BYTES, (limits.max_bytes - self._sent) // len(pairs))
        if cap < 1 << 16:
            raise _SpentError("traffic")
        self._progress(pattern)
        self._number += 1
        window_s = self._window_s(pairs)
        number, taking_part = self._number, sorted({rank for pair in pairs for rank in pair})
        self._hub.ask(
            {
                rank: {
                    "do": "connect",
                    "number": number,
                    "to": [dst for src, dst in pairs if src == rank],
                    "from": [src for src, dst in pairs if dst == rank],
                    "seconds": _PATIENCE_S / 2,
                }
                for rank in taking_part
            },
            _PATIENCE_S,
            f"'{pattern}'",
        )
        seconds = limits.warm_s + window_s + 0.03
        command = {"do": "send", "seconds": seconds, "cap": cap, "drain": _PATIENCE_S / 2}
        answers = self._hub.ask(dict.fromkeys(taking_part, command), seconds + _PATIENCE_S, f"'{pattern}'")
        records = {
            (int(src), dst): Record(samples=tuple((t, n) for t, n in flow["samples"]), segment=flow["segment"])
            for dst, answer in answers.items()
            for src, flow in answer["flows"].items()
        }
        if not all(answer["complete"] for answer in answers.values()):
            self._notes.append(f"a flow of '{pattern}' did not end in time and may have disturbed what came next")
        self._sent += sum(record.samples[-1][1] for record in records.values())
        self._longest_s = max(self._longest_s, time.monotonic() - started)
        seen = observe(pattern, records, warm_s=limits.warm_s, window_s=window_s)
        if seen is None:  # all was over before the buckets were empty: the links are fast, or nothing came
            seen = observe(pattern, records, warm_s=0.0, window_s=window_s)
        return seen

    def _window_s(self, pairs: Sequence[Pair]) -> float:
        """Longer where flows will be slow: what kernels hand on at once must be little of what is counted."""
        slowest = min((self._rate_alone.get(pair, float("inf")) for pair in pairs), default=float("inf"))
        wanted = _FLOW_COUNTED * len(pairs) / max(slowest, 1.0)
        return min(max(self._limits.window_s, wanted), _LONGER * self._limits.window_s)

    def _apart(self, pairs: Sequence[Pair]) -> list[Sequence[Pair]]:
        """Flows between machines, then flows inside machines; those would be over when these have hardly begun."""
        across = [(a, b) for a, b in pairs if self._machines[a] != self._machines[b]]
        inside = [(a, b) for a, b in pairs if self._machines[a] == self._machines[b]]
        return [part for part in (across, inside) if part]

    def _add(self, pattern: str, pairs: Sequence[Pair], *, until: float) -> Observation | None:
        seen = self._measure(pattern, pairs, until=until)
        if seen is not None:
            self._seen.append(seen)
        return seen

    def _provisional(self, machines: Sequence[str], routes: dict[Pair, Route]) -> Structure | None:
        """What may be taken for granted about shared links while pairs are measured alone."""
        traced = [s for s in candidates(machines, routes, {}) if s.name.startswith("hops")]
        across = [way for (a, b), way in routes.items() if machines[a] != machines[b]]
        if traced and all(across):
            return traced[0]
        if traced and any(isinstance(hop, int) for way in across for hop in way):
            return traced[0]
        if self._size <= _FEW_RANKS:
            return None
        return candidates(machines, {}, {})[0]

    def _alone(self, structure: Structure | None, at_once: int) -> dict[Pair, float]:
        alone: dict[Pair, float] = {}
        planned = [part for pairs in rounds(structure, self._size, at_once=at_once) for part in self._apart(pairs)]
        for number, pairs in enumerate(planned):
            try:
                seen = self._add(f"pairs alone, {number + 1} of {len(planned)}", pairs, until=_LONE)
            except _SpentError as why:
                self._notes.append(f"{why} was up after {number} of {len(planned)} rounds of single pairs")
                break
            alone |= seen.rates if seen is not None else {}
        self._rate_alone = {pair: rate for pair, rate in alone.items() if rate > 0}
        return alone

    def _ports(self, alone: dict[Pair, float], *, known: bool) -> None:
        """One to many and many to one; where no structure is known, also between groups."""
        planned: list[tuple[str, Sequence[Pair]]] = []
        if not known:
            groups = fast_groups(alone, self._size)
            if 1 < len(groups) < self._size and len(groups) <= _FEW_RANKS:
                planned += [
                    (f"ranks {a[0]}.. to ranks {b[0]}..", between(a, b)) for a in groups for b in groups if a != b
                ]
        if self._size > 2:
            for rank in range(self._size):
                planned += [(f"rank {rank} to all", part) for part in self._apart(from_one(rank, self._size))]
                planned += [(f"all to rank {rank}", part) for part in self._apart(to_one(rank, self._size))]
        for number, (pattern, pairs) in enumerate(planned):
            try:
                self._add(pattern, pairs, until=_PORTS)
            except _SpentError as why:
                self._notes.append(f"{why} was up after {number} of {len(planned)} patterns of one to many")
                return

    def _best(self, choices: Sequence[Structure]) -> Fit:
        """The fit of the first candidate, or of one that explains clearly more."""
        best = fit(choices[0], self._seen, excused=self._excused)
        for structure in choices[1:]:
            other = fit(structure, self._seen, excused=self._excused)
            if other.explained > best.explained + _BETTER:
                best = other
        return best

    def _more(self, choices: Sequence[Structure], at_once: int) -> Fit:
        """Measures once more what is not explained, fills links that need it; returns the best fit."""
        try:
            self._again(choices)
            return self._fill(choices, at_once)
        except _SpentError as why:
            self._notes.append(f"{why} was up before every link had been filled twice")
            return self._best(choices)

    def _again(self, choices: Sequence[Structure]) -> None:
        """A busy machine makes flows slower, never faster: of two measurements that with more traffic counts."""
        best = self._best(choices)
        doubtful = []
        for position, seen in enumerate(self._seen):
            count, flows, _ = explained(best, seen)
            if count < flows and not self._excused & set(seen.rates):
                doubtful.append((count / flows, position))
        for _, position in sorted(doubtful)[:_AGAIN]:
            before = self._seen[position]
            again = self._measure(f"{before.pattern}, again", list(before.rates), until=_MORE)
            if again is not None and sum(again.rates.values()) > sum(before.rates.values()):
                self._seen[position] = again

    def _fill(self, choices: Sequence[Structure], at_once: int) -> Fit:
        tries: dict[tuple[tuple[int, int], ...], int] = {}
        while True:
            best = self._best(choices)
            lacking = [
                estimate.section
                for estimate in best.estimates
                if _is_lacking(estimate, tries.get(estimate.section.links, 0))
            ]
            if not lacking:
                return best
            section = min(lacking, key=lambda section: tries.get(section.links, 0))
            tries[section.links] = tries.get(section.links, 0) + 1
            pairs = self._apart(saturating(best.structure, section, best.rates, at_once=max(2 * at_once, 4)))[0]
            self._add(f"filling link {section.links[0][0]} -> {section.links[0][1]}", pairs, until=_MORE)

    def _check(self, best: Fit) -> list[Observation]:
        """Patterns that no capacity was made from."""
        steps = dict.fromkeys(step for step in (1, self._size // 2, self._size - 1) if 0 < step < self._size)
        seen: list[Observation] = []
        for step in steps:
            pattern, pairs = f"all at once, {step} further", self._apart(shift(self._size, step))[0]
            with suppress(_SpentError):
                found = self._measure(pattern, pairs, until=1.0)
                if found is None:
                    continue
                seen.append(found)
                count, flows, _ = explained(best, found)
                if count < flows:  # see _again
                    again = self._measure(f"{pattern}, again", pairs, until=1.0)
                    if again is not None and explained(best, again)[0] > count:
                        seen[-1] = again
        return seen


def _is_lacking(estimate: Estimate, tries: int) -> bool:
    """Whether a section should be filled again."""
    wanted = _TIMES_UNSTEADY if estimate.spread > _UNSTEADY else _TIMES
    return len(estimate.evidence) < wanted and tries < wanted
