"""Routes of SkipPipe: which stages each micro-batch visits, in which order, and on which node, by CP-SAT.

Every stage is held by several nodes. A micro-batch visits the first stage and ``k - 1`` of the others, each on one of
its nodes, and goes back the same way; in what order it visits them is free (*swaps*), as is what it leaves out
(*skips*). No stage may be left out by more than a part of all micro-batches, or it would not learn. The longest way
home decides; two micro-batches on one node wait for each other, and that is what choosing routes together avoids
(*collisions*). Without, each takes its own shortest way as if it were alone.

References:
    Blagoev et al., "SkipPipe: Partial and Reordered Pipelining Framework for Training LLMs in Heterogeneous
    Networks", arXiv:2502.19913, section 4 (node graph, conflict-based search; here exact).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations, product
from math import ceil
from typing import Any

from mycel.arguments import whole_number
from mycel.brief import brief
from mycel.collectives.cp_sat import cp_sat
from mycel.errors import SynthesisError, UsageError
from mycel.pipeline.order import Action, Kind, Order
from mycel.pipeline.search.solving import Clock

__all__ = ["Nodes", "Routes", "Visit", "find_routes"]

#: Ways of one micro-batch that are listed one by one, for routes without collision avoidance.
_MOST_WAYS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Who holds which stage, how long work takes there, and messages between them.

    Attributes:
        stage: of each node.
        forward, backward: time units of a micro-batch on each node.
        delay: of a message between two nodes, row by row; 0 on the diagonal.
        in_flight: micro-batches that a node may hold between forward and backward.

    Raises:
        UsageError: as many times or rows as there are not nodes, numbers below 1 (delays below 0), a stage without
            nodes.

    Examples:
        Two stages, of which two nodes hold the second:

        >>> nodes = Nodes(stage=(0, 1, 1), forward=(1, 1, 2), backward=(2, 2, 4), delay=((0, 1, 1),) * 3)
        >>> nodes.num_stages, nodes.of_stage(1)
        (2, (1, 2))
    """

    stage: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    delay: tuple[tuple[int, ...], ...]
    in_flight: int = 3

    __repr__ = brief

    def __post_init__(self) -> None:
        count = len(self.stage)
        for what, given in (("forward", self.forward), ("backward", self.backward), ("delay", self.delay)):
            if len(given) != count:
                raise UsageError(f"{what} of {len(given)} nodes, and there are {count}")
        for node in range(count):
            whole_number(self.stage[node], f"stage of node {node}", least=0)
            whole_number(self.forward[node], f"forward of node {node}", least=1)
            whole_number(self.backward[node], f"backward of node {node}", least=1)
            if len(self.delay[node]) != count:
                raise UsageError(f"delays from node {node} to {len(self.delay[node])} nodes, and there are {count}")
            for other, delay in enumerate(self.delay[node]):
                whole_number(delay, f"delay from node {node} to {other}", least=0)
        whole_number(self.in_flight, "micro-batches in flight a node", least=1)
        missing = set(range(self.num_stages)) - set(self.stage)
        if missing:
            raise UsageError(f"stage {min(missing)} of {self.num_stages} is on no node; every stage needs one")

    @property
    def num_stages(self) -> int:
        """One more than the largest."""
        return 1 + max(self.stage, default=-1)

    def of_stage(self, stage: int) -> tuple[int, ...]:
        """Nodes that hold a stage."""
        return tuple(node for node, held in enumerate(self.stage) if held == stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A micro-batch on a node.

    Attributes:
        node: where.
        forward_start, backward_start: when, in time units.

    Examples:
        >>> Visit(node=2, forward_start=0, backward_start=5).node
        2
    """

    node: int
    forward_start: int
    backward_start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Routes of all micro-batches and when they are where.

    Attributes:
        nodes: who holds what.
        visits: of each micro-batch, in the order of its forwards.
        bound: that no such routes' makespan is below; 0 where nothing is proved.

    Raises:
        SynthesisError: visits that overlap on a node, begin before what they wait for, or are too many in flight.

    Examples:
        >>> chain = Nodes(stage=(0, 1), forward=(1, 1), backward=(2, 2), delay=((0, 0), (0, 0)))
        >>> there = Visit(node=0, forward_start=0, backward_start=4), Visit(node=1, forward_start=1, backward_start=2)
        >>> routes = Routes(nodes=chain, visits=(there,), bound=6)
        >>> routes.makespan, routes.is_least, routes.stages
        (6, True, ((0, 1),))
        >>> print(routes.order().torch_csv(), end="")
        0F0,0B0
        1F0,1B0
    """

    nodes: Nodes
    visits: tuple[tuple[Visit, ...], ...]
    bound: int

    __repr__ = brief

    def __post_init__(self) -> None:
        self._check()

    @property
    def makespan(self) -> int:
        """When the last backward of the first stage has ended."""
        return max(v.backward_start + self.nodes.backward[v.node] for row in self.visits for v in row)

    @property
    def is_least(self) -> bool:
        """Whether nothing shorter exists under the same rules."""
        return self.makespan <= self.bound

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Stages that each micro-batch visits, in order."""
        return tuple(tuple(self.nodes.stage[v.node] for v in row) for row in self.visits)

    def order(self) -> Order:
        """The order for runtimes, where every stage is on one node: a node is a rank.

        Raises:
            UsageError: a stage on several nodes, which orders do not have, or a node that nothing visits.
        """
        nodes = self.nodes
        if len(set(nodes.stage)) < len(nodes.stage):
            raise UsageError("orders have every stage on one rank; these routes choose between several nodes a stage")
        rows: list[list[tuple[int, Action]]] = [[] for _ in nodes.stage]
        for micro_batch, row in enumerate(self.visits):
            for v in row:
                stage = nodes.stage[v.node]
                for kind, start in ((Kind.FORWARD, v.forward_start), (Kind.BACKWARD, v.backward_start)):
                    rows[v.node].append((start, Action(stage=stage, kind=kind, micro_batch=micro_batch)))
        idle = next((node for node, actions in enumerate(rows) if not actions), None)
        if idle is not None:
            raise UsageError(f"no micro-batch visits stage {nodes.stage[idle]}; let fewer leave it out")
        return Order(
            rows=tuple(tuple(action for _, action in sorted(row, key=lambda item: item[0])) for row in rows),
            num_stages=nodes.num_stages,
            num_micro_batches=len(self.visits),
            name="skippipe",
            routes=self.stages,
        )

    def _check(self) -> None:
        """Whatever made them, routes are examined: ways in time, one micro-batch at a time on a node, few held."""
        nodes = self.nodes
        busy: list[list[tuple[int, int, int]]] = [[] for _ in nodes.stage]
        for row in self.visits:
            for v, then in pairwise(row):
                if then.forward_start < v.forward_start + nodes.forward[v.node] + nodes.delay[v.node][then.node]:
                    raise SynthesisError(f"a forward on node {then.node} starts before its input is there")
                if (
                    v.backward_start
                    < then.backward_start + nodes.backward[then.node] + nodes.delay[then.node][v.node]
                ):
                    raise SynthesisError(f"a backward on node {v.node} starts before its gradient is there")
            for v in row:
                busy[v.node].append((v.forward_start, v.forward_start + nodes.forward[v.node], 1))
                busy[v.node].append((v.backward_start, v.backward_start + nodes.backward[v.node], -1))
        for node, times in enumerate(busy):
            held, until = 0, 0
            for start, end, change in sorted(times):
                held += change
                if start < until or held > nodes.in_flight:
                    raise SynthesisError(f"node {node} has too much to do at {start}")
                until = end


def find_routes(
    nodes: Nodes,
    num_micro_batches: int,
    *,
    visited: int,
    most_skips: float = 0.5,
    reorder: bool = True,
    avoid_collisions: bool = True,
    routes: Sequence[Sequence[int]] | None = None,
    time_limit_s: float = 30.0,
) -> Routes:
    """The routes with the shortest makespan.

    Args:
        nodes: who holds which stage.
        num_micro_batches: of the batch.
        visited: stages that each one visits, the first among them.
        most_skips: part of all micro-batches that may leave a stage out.
        reorder: whether stages after the first may be visited in any order, or only in ascending order.
        avoid_collisions: choose all routes together; otherwise each micro-batch takes the shortest way there is for
            it alone, within what may be left out, and nodes serve first who comes first.
        routes: stages of each micro-batch, in order, where these are given and only nodes and times are free.
        time_limit_s: when to be content with the best so far.

    Raises:
        UsageError: more stages visited than there are, or none; too few may be left out for so few to be visited.
        SynthesisError: none were found in time.

    Examples:
        >>> chain = Nodes(stage=(0, 1, 2), forward=(1, 1, 1), backward=(2, 2, 2), delay=((0,) * 3,) * 3)
        >>> found = find_routes(chain, 2, visited=2)
        >>> found.makespan, found.is_least, sorted(found.stages)
        (8, True, [(0, 1), (0, 2)])
    """
    count = whole_number(num_micro_batches, "micro-batches", least=1)
    whole_number(visited, "stages that are visited", least=1, most=nodes.num_stages)
    most = int(most_skips * count + 1e-9)
    skips = count * (nodes.num_stages - visited)
    if routes is None and skips > most * (nodes.num_stages - 1):
        raise UsageError(
            f"{count} micro-batches that leave out {nodes.num_stages - visited} stages each are {skips} skips; with "
            f"at most {most} a stage there are {most * (nodes.num_stages - 1)}: raise most_skips to "
            f"{ceil(skips / (nodes.num_stages - 1)) / count:.2f}"
        )
    clock = Clock(time_limit_s)
    if not avoid_collisions:
        visits = _served(nodes, _alone(nodes, count, visited, most, reorder=reorder, routes=routes))
        return Routes(nodes=nodes, visits=visits, bound=0)
    model = _Model(nodes, count, visited, most, reorder=reorder, routes=routes)
    answer, solver = clock.solve(model.model)
    if answer not in ("optimal", "found"):
        why = "no routes keep these rules" if answer == "none" else f"no routes were found in {time_limit_s:g} s"
        raise SynthesisError(f"{count} micro-batches over {len(nodes.stage)} nodes: {why}")
    return Routes(nodes=nodes, visits=model.visits(solver), bound=ceil(solver.best_objective_bound - 1e-6))


class _Model:
    """Every micro-batch goes round once over some nodes and home; which arcs it takes decides what follows what."""

    def __init__(
        self,
        nodes: Nodes,
        count: int,
        visited: int,
        most_skips: int,
        *,
        reorder: bool,
        routes: Sequence[Sequence[int]] | None,
    ) -> None:
        self.model = model = cp_sat("the search for routes").CpModel()
        self._nodes, self._count = nodes, count
        every = range(len(nodes.stage))
        longest = max((d for row in nodes.delay for d in row), default=0)
        horizon = count * visited * (max(nodes.forward) + max(nodes.backward) + 2 * longest)
        self._there: dict[tuple[int, int], Any] = {}
        self._forward: dict[tuple[int, int], Any] = {}
        self._backward: dict[tuple[int, int], Any] = {}
        makespan = model.new_int_var(0, horizon, "")
        for m in range(count):
            for node in every:
                self._there[m, node] = model.new_bool_var("")
                self._forward[m, node] = model.new_int_var(0, horizon, "")
                self._backward[m, node] = model.new_int_var(0, horizon, "")
                end = self._backward[m, node] + nodes.backward[node]
                model.add(end <= makespan).only_enforce_if(self._there[m, node])
            for stage in range(nodes.num_stages):
                on = [self._there[m, node] for node in nodes.of_stage(stage)]
                if routes is not None:
                    model.add(sum(on) == (stage in routes[m]))
                else:
                    model.add(sum(on) == 1 if stage == 0 else sum(on) <= 1)
            if routes is None:
                model.add(sum(self._there[m, node] for node in every) == visited)
            self._way(m, reorder=reorder, stages=None if routes is None else routes[m])
        for stage in range(1, nodes.num_stages) if routes is None else ():
            seen = sum(self._there[m, node] for m in range(count) for node in nodes.of_stage(stage))
            model.add(seen >= count - most_skips)
        for node in every:
            self._take_turns(node, horizon)
        model.minimize(makespan)

    def _way(self, m: int, *, reorder: bool, stages: Sequence[int] | None) -> None:
        """A circuit from home, which is no node, over the first stage and others; back it goes the same way."""
        nodes, model = self._nodes, self.model
        home = len(nodes.stage)
        follows = None if stages is None else set(pairwise(stages))
        arcs: list[tuple[int, int, Any]] = []
        for a in range(home):
            arcs.append((a, a, ~self._there[m, a]))
            arcs.append((a, home, model.new_bool_var("")))
            if nodes.stage[a] == (0 if stages is None else stages[0]):
                arcs.append((home, a, model.new_bool_var("")))
            for b in range(home):
                early, late = nodes.stage[a], nodes.stage[b]
                may = (
                    (early, late) in follows
                    if follows is not None
                    else late > 0 and (early < late or (reorder and early != late))
                )
                if not may:
                    continue
                taken = model.new_bool_var("")
                arcs.append((a, b, taken))
                gap = nodes.forward[a] + nodes.delay[a][b]
                model.add(self._forward[m, b] >= self._forward[m, a] + gap).only_enforce_if(taken)
                gap = nodes.backward[b] + nodes.delay[b][a]
                model.add(self._backward[m, a] >= self._backward[m, b] + gap).only_enforce_if(taken)
            model.add(self._backward[m, a] >= self._forward[m, a] + nodes.forward[a])
        model.add_circuit(arcs)

    def _take_turns(self, node: int, horizon: int) -> None:
        nodes, model = self._nodes, self.model
        work, uses = [], []
        for m in range(self._count):
            there = self._there[m, node]
            for start, length in (
                (self._forward[m, node], nodes.forward[node]),
                (self._backward[m, node], nodes.backward[node]),
            ):
                work.append(model.new_optional_fixed_size_interval_var(start, length, there, ""))
            held = model.new_int_var(1, 2 * horizon, "")
            end = self._backward[m, node] + nodes.backward[node]
            uses.append(model.new_optional_interval_var(self._forward[m, node], held, end, there, ""))
        model.add_no_overlap(work)
        model.add_cumulative(uses, [1] * len(uses), nodes.in_flight)

    def visits(self, solver: Any) -> tuple[tuple[Visit, ...], ...]:
        """What the solver found."""
        rows = []
        for m in range(self._count):
            found = [
                Visit(
                    node=node,
                    forward_start=solver.value(self._forward[m, node]),
                    backward_start=solver.value(self._backward[m, node]),
                )
                for node in range(len(self._nodes.stage))
                if solver.boolean_value(self._there[m, node])
            ]
            rows.append(tuple(sorted(found, key=lambda v: v.forward_start)))
        return tuple(rows)


def _served(nodes: Nodes, ways: Sequence[Sequence[int]]) -> tuple[tuple[Visit, ...], ...]:
    """Every node serves who came first; a forward waits while the node holds as many micro-batches as it may.

    Raises:
        SynthesisError: nodes that are full wait for each other.
    """
    forward: dict[tuple[int, int], int] = {}
    backward: dict[tuple[int, int], int] = {}
    free, held = [0] * len(nodes.stage), [0] * len(nodes.stage)
    # What may be served: when it came, backwards first where they came together, micro-batch, place on its way.
    waiting: list[tuple[int, int, int, int]] = [(0, 1, m, 0) for m in range(len(ways))]
    freed = [0] * len(nodes.stage)
    while waiting:
        able = []
        for item in waiting:
            came, is_forward, m, at = item
            node = ways[m][at]
            if is_forward and held[node] >= nodes.in_flight:
                continue
            able.append((max(came, free[node], freed[node] if is_forward else 0), *item))
        if not able:
            raise SynthesisError("nodes that hold as many micro-batches as they may wait for each other")
        start, came, is_forward, m, at = min(able)
        waiting.remove((came, is_forward, m, at))
        node = ways[m][at]
        if is_forward:
            forward[m, node] = start
            free[node] = start + nodes.forward[node]
            held[node] += 1
            if at + 1 < len(ways[m]):
                waiting.append((free[node] + nodes.delay[node][ways[m][at + 1]], 1, m, at + 1))
            else:
                waiting.append((free[node], 0, m, at))
        else:
            backward[m, node] = start
            free[node] = freed[node] = start + nodes.backward[node]
            held[node] -= 1
            if at:
                waiting.append((free[node] + nodes.delay[node][ways[m][at - 1]], 0, m, at - 1))
    return tuple(
        tuple(Visit(node=node, forward_start=forward[m, node], backward_start=backward[m, node]) for node in way)
        for m, way in enumerate(ways)
    )


def _alone(
    nodes: Nodes,
    count: int,
    visited: int,
    most_skips: int,
    *,
    reorder: bool,
    routes: Sequence[Sequence[int]] | None,
) -> list[tuple[int, ...]]:
    """For each micro-batch the nodes of its shortest way as if it were alone, within what may still be left out."""
    skipped = dict.fromkeys(range(1, nodes.num_stages), 0)
    chosen: list[tuple[int, ...]] = []
    for m in range(count):
        left = count - m - 1
        best: tuple[int, int, tuple[int, ...]] | None = None
        for number, way in enumerate(
            _ways(nodes, visited, reorder=reorder, stages=None if routes is None else routes[m])
        ):
            out = set(skipped) - {nodes.stage[node] for node in way}
            if routes is None and not _may(skipped, out, left, most_skips, nodes.num_stages - visited):
                continue
            # Of ways that are as long a micro-batch takes what its number says, not always the same.
            key = (_length(nodes, way), (number - m) % 7, way)
            if best is None or key < best:
                best = key
        if best is None:
            raise SynthesisError(f"micro-batch {m} has no way that leaves out what may still be left out")
        chosen.append(best[2])
        for stage in set(skipped) - {nodes.stage[node] for node in best[2]}:
            skipped[stage] += 1
    return chosen


def _may(skipped: Mapping[int, int], out: set[int], left: int, most: int, each: int) -> bool:
    """Whether these may be left out now and enough remains for the micro-batches to come."""
    rest = [min(left, most - times - (stage in out)) for stage, times in skipped.items()]
    return min(rest, default=0) >= 0 and sum(rest) >= left * each


def _ways(nodes: Nodes, visited: int, *, reorder: bool, stages: Sequence[int] | None) -> list[tuple[int, ...]]:
    ways: list[tuple[int, ...]] = []
    if stages is not None:
        orders: list[tuple[int, ...]] = [tuple(stages)]
    else:
        of = permutations if reorder else combinations
        orders = [(0, *rest) for rest in of(range(1, nodes.num_stages), visited - 1)]
    for order in orders:
        for way in product(*(nodes.of_stage(stage) for stage in order)):
            ways.append(way)
            if len(ways) > _MOST_WAYS:
                raise UsageError(
                    f"a micro-batch has more than {_MOST_WAYS} ways; fewer nodes a stage, or avoid_collisions=True"
                )
    return ways


def _length(nodes: Nodes, way: Sequence[int]) -> int:
    work = sum(nodes.forward[node] + nodes.backward[node] for node in way)
    return work + sum(nodes.delay[a][b] + nodes.delay[b][a] for a, b in pairwise(way))
