"""An order as a graph: computations, the ranks that carry them out, what each takes, and what waits for what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mycel.arguments import real_number, whole_number
from mycel.brief import brief
from mycel.collectives.schedule import Schedule
from mycel.collectives.simulate import simulate
from mycel.errors import ScheduleError, UsageError
from mycel.pipeline.needs import Result, needs_of, result_of
from mycel.pipeline.order import Action, Kind, Order
from mycel.pipeline.placement import Placement
from mycel.pipeline.stages import Stages

__all__ = ["Exchange", "Flow", "Times"]

#: Seconds of every action: by kind (``F``) or stage and kind (``3F``), shared blocks by name; or a function.
Times = Mapping[str, float] | Callable[[Action], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A collective that an action carries out, as tensor parallelism does.

    Attributes:
        schedule: of the collective, over a fabric of its own ranks.
        num_bytes: of its array.
        times: how often an action carries it out.

    Examples:
        Two all_reduces of 16 MiB between two tensor-parallel ranks, in every forward:

        >>> import mycel
        >>> pair = mycel.synthesize(mycel.load_topology("star:ranks=2,bandwidth=1 GB/s"), "all_reduce")
        >>> exchange = Exchange(schedule=pair, num_bytes=1 << 24, times=2)
        >>> round(exchange.seconds, 3)
        0.038
    """

    schedule: Schedule
    num_bytes: int
    times: int = 1

    __repr__ = brief

    @property
    def seconds(self) -> float:
        """What an action takes longer."""
        return self.times * simulate(self.schedule, self.num_bytes).seconds


class Flow:
    """An order as a graph of computations (nodes), what each takes, and the results between them.

    Attributes:
        nodes: actions with the ranks that carry them out.
        seconds: of each node.
        rows: of each rank its nodes in order.
        after: pairs of nodes of which the second waits for the end of the first.
        delayed: the same with seconds in between.
        sent: results that go from one rank to another: (result, source, destination, node that makes it, nodes that
            need it).
    """

    def __init__(
        self,
        order: Order,
        times: Times | Placement,
        unit_s: float,
        exchanges: Mapping[str, Exchange],
        *,
        is_wired: bool,
    ) -> None:
        self.order = order
        self.placement = times if isinstance(times, Placement) else None
        self.nodes: list[tuple[Action, tuple[int, ...]]] = []
        self.rows: list[list[int]] = []
        self.after: list[tuple[int, int]] = []
        self.delayed: list[tuple[int, int, float]] = []
        self.sent: list[tuple[Result, int, int, int, list[int]]] = []
        self._block_of: dict[tuple[Kind, int, str], int] = {}
        if self.placement is not None:
            stages = Stages(self.placement)
            for i in range(len(self.placement.blocks)):
                action = stages.action(i, 0)
                self._block_of[action.kind, action.stage, action.block] = i
        self._collect()
        extra = {key: exchange.seconds for key, exchange in exchanges.items()}
        self.seconds = [self._seconds(action, times, unit_s, extra) for action, _ in self.nodes]
        self._connect(unit_s, is_wired=is_wired)
        self.reduce_s = extra.get(Kind.REDUCE_GRAD.value, 0.0)

    def _collect(self) -> None:
        shared: dict[tuple[str, int | None], int] = {}
        ranks: dict[int, list[int]] = {}
        for rank, row in enumerate(self.order.rows):
            mine = []
            for action in row:
                if action.kind.is_message or action.kind.is_of_parameters:
                    continue
                key = (action.block, action.micro_batch)
                if action.kind is Kind.SHARED and key in shared:
                    node = shared[key]
                else:
                    node = len(self.nodes)
                    self.nodes.append((action, ()))
                    if action.kind is Kind.SHARED:
                        shared[key] = node
                ranks.setdefault(node, []).append(rank)
                mine.append(node)
            self.rows.append(mine)
        self.nodes = [(action, tuple(ranks[node])) for node, (action, _) in enumerate(self.nodes)]

    def _seconds(self, action: Action, times: Times | Placement, unit_s: float, extra: Mapping[str, float]) -> float:
        if isinstance(times, Placement):
            total = sum(unit_s * times.blocks[self._block(leaf)].time for leaf in action.leaves)
        elif callable(times):
            total = real_number(times(action), f"seconds of {action}", least=0)
        elif action.parts and action.kind.value in times:
            total = real_number(times[action.kind.value], f"seconds of {action}", least=0)
        else:
            total = sum(_said(times, leaf) for leaf in action.leaves)
        for leaf in action.leaves:
            total += extra.get(f"{leaf.stage}{leaf.kind.value}", extra.get(leaf.kind.value, 0.0))
        return total

    def _block(self, leaf: Action) -> int:
        key = (leaf.kind, leaf.stage, leaf.block)
        if key not in self._block_of:
            raise UsageError(f"{leaf}: the placement has no block for it; simulate an order of this placement's")
        return self._block_of[key]

    def _connect(self, unit_s: float, *, is_wired: bool) -> None:
        made = {}
        for node, (action, _) in enumerate(self.nodes):
            for leaf in action.leaves:
                if (result := result_of(leaf)) is not None:
                    made[result] = node
        needs = needs_of(self.order)
        sent: dict[tuple[Result, int], list[int]] = {}
        for node, (action, ranks) in enumerate(self.nodes):
            for leaf in action.leaves:
                for result in needs(leaf):
                    source = made.get(result)
                    if source is None:
                        raise ScheduleError(f"{leaf} needs what no rank makes; check the order first")
                    if source == node:
                        continue
                    delay = self._delay(self.nodes[source][0], leaf) * unit_s
                    makers = self.nodes[source][1]
                    if is_wired and not set(makers) & set(ranks):
                        sent.setdefault((result, ranks[0]), []).append(node)
                    elif delay and not is_wired:
                        self.delayed.append((source, node, delay))
                    else:
                        self.after.append((source, node))
        for row in self.rows:
            self.after += pairwise(row)
        place = {node: at for row in self.rows for at, node in enumerate(row)}
        for (result, destination), nodes in sent.items():
            maker = made[result]
            self.sent.append((result, self.nodes[maker][1][0], destination, maker, nodes))
        # Between two ranks in the sequence in which they are made; on a rank that is the sequence of its row.
        self.sent.sort(key=lambda message: (message[1], message[2], place[message[3]]))

    def _delay(self, maker: Action, leaf: Action) -> int:
        if self.placement is None:
            return 0
        before = {self._block(part) for part in maker.leaves}
        after = self._block(leaf)
        return max(
            (d.delay for d in self.placement.dependencies if d.before in before and d.after == after), default=0
        )

    def limit(self, credits: int | Sequence[int]) -> None:
        """Let no stage have more micro-batches in flight than it has credits for."""
        count = self.order.num_stages
        given = [credits] * count if isinstance(credits, int) else list(credits)
        if len(given) != count:
            raise UsageError(
                f"credits for {len(given)} stages, and there are {count}; give one number, or one a stage"
            )
        forwards: dict[int, list[int]] = {}
        releases: dict[int, list[int]] = {}
        for row in self.rows:
            for node in row:
                for leaf in self.nodes[node][0].leaves:
                    if leaf.kind is Kind.FORWARD:
                        forwards.setdefault(leaf.stage, []).append(node)
                    elif leaf.kind in (Kind.BACKWARD, Kind.WEIGHT):
                        releases.setdefault(leaf.stage, []).append(node)
        for stage, nodes in forwards.items():
            most = whole_number(given[stage], f"credits of stage {stage}", least=1)
            back = releases.get(stage, [])
            for number, node in enumerate(nodes[most:]):
                if number < len(back) and back[number] != node:
                    self.after.append((back[number], node))
            rank = self.nodes[nodes[0]][1][0]
            place = {node: at for at, node in enumerate(self.rows[rank])}
            for number, node in enumerate(nodes[most:]):
                if number < len(back) and place[back[number]] > place[node]:
                    raise ScheduleError(
                        f"stage {stage} has {most} credits, and {self.nodes[node][0]} needs one more: it stands "
                        f"before {self.nodes[back[number]][0]}, which would give one back; give more credits, or "
                        f"another order"
                    )

    def change(self, action: Action, rank: int, held: float | Mapping[int, float]) -> float:
        """What an action takes of a rank's memory, or gives back if negative."""
        total = 0.0
        for leaf in action.leaves:
            if self.placement is not None:
                total += self.placement.blocks[self._block(leaf)].memory_on(rank)
            elif leaf.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT):
                amount = held.get(leaf.stage, 0.0) if isinstance(held, Mapping) else held
                total += amount if leaf.kind is Kind.FORWARD else -amount
        return total


def _said(times: Mapping[str, float], leaf: Action) -> float:
    keys = (leaf.block,) if leaf.block else (f"{leaf.stage}{leaf.kind.value}", leaf.kind.value)
    for key in keys:
        if key in times:
            return real_number(times[key], f"seconds of {key}", least=0)
    raise UsageError(f"no time is given for {leaf}; say {' or '.join(map(repr, keys))}")
