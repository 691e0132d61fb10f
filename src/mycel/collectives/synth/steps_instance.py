"""Instances of step-synchronous schedules: is there one with so many steps, rounds and chunks? Decided by CP-SAT.

A schedule runs in *steps*; all messages of a step go at once, and what arrives in one can be sent on in the next.
Step s lasts ``r_s`` *rounds*: in a round, a link carries as many chunks as its capacity holds of the greatest common
divisor of all capacities. With C chunks a block and R rounds in all, time is ``steps * latency + R / C * block size /
unit capacity``: few steps for small arrays, few rounds a chunk for large ones.

For each chunk a boolean a (arc, step) says whether it is sent there, one a (rank, step) whether it is there already.
Every rank receives a chunk at most once, so that what is found are trees. Relaxed to fractions of one chunk, the same
constraints are a linear programme whose optimum no number of chunks can beat: that proves a ratio R / C the best one
of all, where trying numbers of chunks one by one never ends.

References:
    Z. Cai, Z. Liu, S. Maleki, M. Musuvathi, T. Mytkowicz, J. Nelson, O. Saarikivi, "Synthesizing Optimal Collective
    Algorithms", PPoPP 2021, section 3 (steps, rounds and chunks, and an encoding for an SMT solver).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import gcd
from typing import TYPE_CHECKING, Literal

import numpy as np

from mycel.collectives.cp_sat import cp_sat, solve
from mycel.collectives.spec import Collective
from mycel.errors import SynthesisError
from mycel.topology.model import Topology

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar
    from scipy.sparse import csr_array

__all__ = ["TOLERANCE", "Arc", "Demand", "Problem", "Send", "find_sends", "least_ratio", "problem_of"]

#: The linear programme is solved in floating point; its optimum is believed to this much.
TOLERANCE = 1e-6
#: Booleans (chunks x arcs x steps) beyond which an instance is refused.
_MOST_BOOLEANS = 250_000
#: Variables beyond which the linear programme is not tried.
_MOST_VARIABLES = 40_000
#: Ways through switches that are considered for one pair of ranks, the shortest, and partial ones that are looked at.
_WAYS_A_PAIR = 4
_MOST_PARTIAL_WAYS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Arc:
    """A way from one rank to another that passes no third.

    Attributes:
        path: topology vertices, ends included.
    """

    src: int
    dst: int
    path: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A part of the array: the rank that has it, and those that need it."""

    group: int
    source: int
    targets: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Chunk ``chunk`` of a demand's group on an arc, in a step counted from 1."""

    group: int
    chunk: int
    arc: Arc
    step: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """What spreads where. Collectives that reduce are given turned round, as spreading on the reversed fabric.

    Attributes:
        topology: links in the direction in which data spreads.
        capacity: of each link in chunks a round.
        unit: capacity of the topology that one chunk a round stands for.
        arcs: between ranks.
        demands: sorted by group.
        num_groups: parts of the array that are cut into chunks, those that nobody sends included.
    """

    topology: Topology
    capacity: dict[tuple[int, int], int]
    unit: int
    arcs: tuple[Arc, ...]
    demands: tuple[Demand, ...]
    num_groups: int

    @cached_property
    def distance(self) -> list[dict[int, int]]:
        """Steps from each rank to each other one."""
        nearest = []
        for source in range(self.topology.num_ranks):
            found, reached = {source: 0}, [source]
            for here in reached:
                for arc in self.arcs:
                    if arc.src == here and arc.dst not in found:
                        found[arc.dst] = found[here] + 1
                        reached.append(arc.dst)
            nearest.append(found)
        return nearest

    @cached_property
    def least_steps(self) -> int:
        """Steps without which some rank cannot be reached."""
        return max((self.distance[d.source][rank] for d in self.demands for rank in d.targets), default=1)

    def usable(self, demand: Demand, steps: int) -> Iterator[tuple[Arc, int]]:
        """Arcs and steps on which a chunk of the demand can be of use."""
        away = self.distance[demand.source]
        for arc in self.arcs:
            if arc.dst == demand.source or arc.src not in away:
                continue
            left = (
                0
                if arc.dst in demand.targets
                else min((self.distance[arc.dst].get(rank, steps) for rank in demand.targets), default=steps)
            )
            for step in range(away[arc.src] + 1, steps - left + 1):
                yield arc, step

    def check_size(self, steps: int, chunks: int) -> None:
        """Refuse what would take for ever.

        Raises:
            SynthesisError: too many booleans.
        """
        booleans = len(self.demands) * len(self.arcs) * steps * chunks
        if booleans > _MOST_BOOLEANS:
            raise SynthesisError(
                f"steps on {self.topology.name}: {chunks} x {len(self.demands)} chunks over {len(self.arcs)} ways "
                f"in {steps} steps are {booleans} choices, and the limit is {_MOST_BOOLEANS}; "
                "forest, tree and flow take any size"
            )


def problem_of(topology: Topology, collective: Collective) -> Problem:
    """The problem of a collective that is not all_reduce.

    Raises:
        SynthesisError: blocks of different size.
    """
    if collective.weights is not None:
        raise SynthesisError("steps counts equal chunks, and these blocks differ in size; forest and flow serve them")
    n = collective.num_ranks
    spread = topology.reversed() if collective.reduces else topology
    everyone = frozenset(range(n))
    demands: list[Demand] = []
    for group in range(collective.num_blocks):
        if collective.name in ("broadcast", "reduce"):
            source, targets = collective.root or 0, everyone
        elif collective.name == "all_to_all":
            source, targets = group // n, frozenset({group % n})
        elif collective.name == "gather":
            source, targets = group, frozenset({collective.root or 0})
        elif collective.name == "scatter":
            source, targets = collective.root or 0, frozenset({group})
        else:
            source, targets = group, everyone
        if targets - {source}:
            demands.append(Demand(group=group, source=source, targets=targets - {source}))
    unit = gcd(*(link.capacity for link in topology.links))
    return Problem(
        topology=spread,
        capacity={hop: capacity // unit for hop, capacity in spread.capacity.items()},
        unit=unit,
        arcs=tuple(arc for rank in range(n) for arc in _ways(spread, rank)),
        demands=tuple(demands),
        num_groups=collective.num_blocks,
    )


def _ways(topology: Topology, src: int) -> list[Arc]:
    """The shortest ways through switches from a rank to each other one, a few each."""
    outgoing: dict[int, list[int]] = {}
    for link in topology.links:
        outgoing.setdefault(link.src, []).append(link.dst)
    found: dict[int, list[Arc]] = {}
    partial: list[tuple[int, ...]] = [(topology.ranks[src],)]
    for way in partial:  # grows while it is read: shortest first
        for vertex in sorted(outgoing.get(way[-1], ())):
            rank = topology.rank_of.get(vertex)
            if vertex in way:
                continue
            if rank is None:
                if len(partial) < _MOST_PARTIAL_WAYS:
                    partial.append((*way, vertex))
            elif len(found.setdefault(rank, [])) < _WAYS_A_PAIR:
                found[rank].append(Arc(src=src, dst=rank, path=(*way, vertex)))
    return [arc for rank in sorted(found) for arc in found[rank]]


def _links(arc: Arc) -> Iterator[tuple[int, int]]:
    yield from zip(arc.path, arc.path[1:], strict=False)


def least_ratio(problem: Problem, steps: int, *, time_limit_s: float) -> Fraction:
    """Rounds a chunk below which no schedule of so many steps can go, whatever its number of chunks; 0 if unknown.

    Why: the mean over the chunks of any schedule is a solution of the linear programme, with rounds in fractions.
    """
    from scipy.optimize import linprog

    keys = [(d, arc, step) for d, demand in enumerate(problem.demands) for arc, step in problem.usable(demand, steps)]
    if not keys or len(keys) > _MOST_VARIABLES:
        return Fraction(0)
    into: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for i, (d, arc, step) in enumerate(keys):
        into.setdefault((d, arc.dst), []).append((step, i))
    upper = _Rows()
    exact = _Rows()
    load: dict[tuple[tuple[int, int], int], list[int]] = {}
    for i, (d, arc, step) in enumerate(keys):
        for hop in _links(arc):
            load.setdefault((hop, step), []).append(i)
        if arc.src != problem.demands[d].source:  # not sent on before it arrived
            upper.add([i, *(j for s, j in into.get((d, arc.src), ()) if s < step)], 1.0, -1.0)
    for (hop, step), users in load.items():
        upper.add([len(keys) + step - 1, *users], -float(problem.capacity[hop]), 1.0)
    bounded = upper.num_rows
    for d, demand in enumerate(problem.demands):
        for rank in range(problem.topology.num_ranks):
            arriving = [i for _, i in into.get((d, rank), ())]
            if rank in demand.targets:
                exact.add(arriving, 1.0, 1.0)
            elif arriving:
                upper.add(arriving, 1.0, 1.0)
    cost = np.zeros(len(keys) + steps)
    cost[len(keys) :] = 1.0
    most = np.zeros(upper.num_rows)
    most[bounded:] = 1.0
    solved = linprog(
        cost,
        A_ub=upper.matrix(len(cost)),
        b_ub=most,
        A_eq=exact.matrix(len(cost)),
        b_eq=np.ones(exact.num_rows),
        method="highs",
        options={"time_limit": max(time_limit_s, 0.01)},
    )
    if solved.status != 0:
        return Fraction(0)
    near = Fraction(float(solved.fun)).limit_denominator(1000)
    close = abs(float(near) - solved.fun) < TOLERANCE
    return near if close else Fraction(float(solved.fun) - TOLERANCE)


class _Rows:
    """Rows of a sparse matrix."""

    def __init__(self) -> None:
        self._row: list[int] = []
        self._column: list[int] = []
        self._value: list[float] = []
        self.num_rows = 0

    def add(self, columns: Sequence[int], first: float, others: float) -> None:
        """A row with one value in its first column and another in the rest."""
        self._row += [self.num_rows] * len(columns)
        self._column += columns
        self._value += [first, *[others] * (len(columns) - 1)] if columns else []
        self.num_rows += 1

    def matrix(self, num_columns: int) -> csr_array:
        from scipy.sparse import csr_array

        return csr_array((self._value, (self._row, self._column)), shape=(self.num_rows, num_columns))


def find_sends(
    problem: Problem, steps: int, rounds: int, chunks: int, *, deadline: float
) -> tuple[Send, ...] | Literal["none", "late"]:
    """Messages of a schedule with exactly so many steps and rounds and chunks a block.

    Returns:
        The messages, sorted by step; ``"none"`` where it is proven that there are none, ``"late"`` where the
        deadline (by ``time.monotonic``) came first. One thread and a fixed seed: the same in every run that ends in
        time.

    Raises:
        SynthesisError: the instance is too large to be tried.
    """
    cp_model = cp_sat("method steps")
    problem.check_size(steps, chunks)
    if steps < problem.least_steps or rounds < steps:
        return "none"
    model = cp_model.CpModel()
    in_step = [model.new_int_var(1, rounds - steps + 1, f"rounds {step + 1}") for step in range(steps)]
    model.add(cp_model.LinearExpr.sum(in_step) == rounds)
    load: dict[tuple[tuple[int, int], int], list[IntVar]] = {}
    variables: list[tuple[Send, IntVar]] = []
    for demand in problem.demands:
        if time.monotonic() >= deadline:
            return "late"
        usable = list(problem.usable(demand, steps))
        for chunk in range(chunks):
            arriving: dict[int, list[list[IntVar]]] = {}
            mine: list[tuple[Send, IntVar]] = []
            for arc, step in usable:
                sent = model.new_bool_var("")
                mine.append((Send(group=demand.group, chunk=chunk, arc=arc, step=step), sent))
                arriving.setdefault(arc.dst, [[] for _ in range(steps + 1)])[step].append(sent)
                for hop in _links(arc):
                    load.setdefault((hop, step), []).append(sent)
            if any(rank not in arriving for rank in demand.targets):
                return "none"
            has = {
                rank: _possession(model, by_step, is_target=rank in demand.targets)
                for rank, by_step in arriving.items()
            }
            for send, sent in mine:
                if send.arc.src == demand.source:
                    continue
                before = has[send.arc.src][send.step - 1] if send.arc.src in has else None
                if before is None:
                    model.add(sent == 0)
                else:
                    model.add_implication(sent, before)
            variables += mine
    for (hop, step), users in load.items():
        model.add(cp_model.LinearExpr.sum(users) <= problem.capacity[hop] * in_step[step - 1])
    left = deadline - time.monotonic()
    if left <= 0:
        return "late"
    solver = cp_model.CpSolver()
    # One worker that takes turns between all search strategies, local search among them, in a fixed order.
    solver.parameters.num_workers = 1
    solver.parameters.interleave_search = True
    solver.parameters.interleave_batch_size = 1
    solver.parameters.random_seed = 1
    solver.parameters.max_time_in_seconds = left
    status = solve(solver, model)
    if status == cp_model.INFEASIBLE:
        return "none"
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return "late"
    chosen = [send for send, sent in variables if solver.boolean_value(sent)]
    return tuple(sorted(_needed(problem, chosen), key=lambda s: (s.step, s.group, s.chunk, s.arc.dst)))


def _possession(model: CpModel, arrivals: list[list[IntVar]], *, is_target: bool) -> list[IntVar | None]:
    """Of each step, from 0, whether a rank has a chunk after it; ``None``: never. It gets a chunk at most once."""
    if is_target:
        model.add_exactly_one(sent for step in arrivals for sent in step)
    has: list[IntVar | None] = []
    before: IntVar | None = None
    for step in arrivals:
        after = before
        if step:
            after = model.new_bool_var("")
            model.add(sum(step) + (0 if before is None else before) == after)
        has.append(after)
        before = after
    return has


def _needed(problem: Problem, sends: Sequence[Send]) -> list[Send]:
    """Those without which some rank would lack something; a relay may have been given what it does not send on."""
    targets = {demand.group: demand.targets for demand in problem.demands}
    sent_on: set[tuple[int, int, int]] = set()
    kept = []
    for send in sorted(sends, key=lambda s: -s.step):
        if send.arc.dst in targets[send.group] or (send.group, send.chunk, send.arc.dst) in sent_on:
            sent_on.add((send.group, send.chunk, send.arc.src))
            kept.append(send)
    return kept
