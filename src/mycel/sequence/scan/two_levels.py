"""Two exchanges inside every node, and between nodes one carry that all ranks of a node send a share of.

What crosses between nodes is one state for each time that the line does so, over all uplinks at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mycel.sequence.scan.courier import Courier
from mycel.sequence.scan.line import Line
from mycel.sequence.scan.maps import Maps, Shape, applied, assembled, composed, framed, unframed
from mycel.sequence.scan.messages import Round

__all__ = ["two_levels", "two_levels_messages"]

Rows = tuple[int, int]


class _Shares:
    """Which rank of a node scans which rows, and stretches of the line that stay inside a node."""

    def __init__(self, line: Line, shape: Shape, nodes: tuple[tuple[int, ...], ...]) -> None:
        self.line, self.shape = line, shape
        self.node_of = {rank: number for number, node in enumerate(nodes) for rank in node}
        self.rows: dict[int, Rows] = {}
        for node in nodes:
            self.rows |= dict(zip(node, shape.cut(len(node)), strict=True))
        self.holders = nodes
        self.stretches: list[range] = []
        for place, owner in enumerate(line.owners):
            here = self.node_of[owner]
            if self.stretches and self.node_of[line.owners[self.stretches[-1].start]] == here:
                self.stretches[-1] = range(self.stretches[-1].start, place + 1)
            else:
                self.stretches.append(range(place, place + 1))

    def members(self, stretch: range) -> tuple[int, ...]:
        """Ranks of the node that a stretch is in."""
        return self.holders[self.node_of[self.line.owners[stretch.start]]]

    def carries(self, number: int) -> list[tuple[int, int, Rows]]:
        """Who sends which rows to whom after a stretch; none where no document goes on."""
        if number + 1 >= len(self.stretches) or not self.line.joined[self.stretches[number + 1].start]:
            return []
        found = []
        for source in self.members(self.stretches[number]):
            for target in self.members(self.stretches[number + 1]):
                low = max(self.rows[source][0], self.rows[target][0])
                high = min(self.rows[source][1], self.rows[target][1])
                if low < high:
                    found.append((source, target, (low, high)))
        return found


def two_levels_messages(line: Line, shape: Shape, num_ranks: int, nodes: tuple[tuple[int, ...], ...]) -> list[Round]:
    """Exchanges inside nodes before and after the carries, which follow each other."""
    shares = _Shares(line, shape, nodes)
    there: dict[tuple[int, int], int] = {}
    back: dict[tuple[int, int], int] = {}
    for place, owner in enumerate(line.owners):
        for holder in nodes[shares.node_of[owner]]:
            rows = shares.rows[holder]
            if holder != owner and line.gives(place):
                there[owner, holder] = there.get((owner, holder), 0) + shape.packed(rows)
            if holder != owner and line.joined[place]:
                back[holder, owner] = back.get((holder, owner), 0) + (rows[1] - rows[0]) * shape.keys
    carried = [
        {(source, target): (high - low) * shape.keys for source, target, (low, high) in shares.carries(number)}
        for number in range(len(shares.stretches))
    ]
    return [Round(numbers=sent) for sent in (there, *carried, back) if sent]


def two_levels(courier: Courier, line: Line, maps: Maps, nodes: tuple[tuple[int, ...], ...]) -> Tensor:
    """States that come in, of shape (runs here, heads, values, keys).

    Args:
        courier: sends.
        line: all runs.
        maps: of the runs here, in order.
        nodes: ranks of each node.
    """
    shape, rank, ranks = maps.shape, courier.rank, range(courier.num_ranks)
    shares = _Shares(line, shape, nodes)
    node, mine, own = shares.node_of[rank], shares.rows[rank], line.of(rank)
    giving = [number for number, place in enumerate(own) if line.gives(place)]
    given = Maps(transition=maps.transition[giving], update=maps.update[giving])
    nothing = maps.update.new_zeros(0)
    got = courier.exchange(
        [given.pack(shares.rows[r]) if shares.node_of[r] == node else nothing for r in ranks],
        [sum(map(line.gives, line.of(r))) * shape.packed(mine) if shares.node_of[r] == node else 0 for r in ranks],
    )
    # With more ranks than rows some have none to scan.
    parts = {r: Maps.unpack(got[r], shape, mine) for r in nodes[node]} if mine[0] < mine[1] else {}
    taken = dict.fromkeys(nodes[node], 0)
    replies: list[list[Tensor]] = [[] for _ in ranks]
    for number, stretch in enumerate(shares.stretches):
        if not parts or rank not in shares.members(stretch):
            continue
        steps: list[Maps | None] = []
        for place in stretch:
            owner = line.owners[place]
            steps.append(parts[owner][taken[owner]] if line.gives(place) else None)
            taken[owner] += line.gives(place)
        state = _through(courier, shares, number, steps, maps.update)
        for place, step in zip(stretch, steps, strict=True):
            if line.joined[place] and state is not None:
                replies[line.owners[place]].append(unframed(state, shape, mine).flatten())
            if step is None:
                state = None
            else:
                state = step.update if line.resets[place] or state is None else step.leaves(state)
    takers = [number for number, place in enumerate(own) if line.joined[place]]
    sizes = [(shares.rows[r][1] - shares.rows[r][0]) * shape.keys * (shares.node_of[r] == node) for r in ranks]
    answers = courier.exchange(
        [torch.cat(reply) if reply else nothing for reply in replies], [len(takers) * size for size in sizes]
    )
    courier.finish()
    found = torch.zeros_like(maps.update)
    if takers:
        rows = [answers[r].view(len(takers), -1) for r in nodes[node] if len(answers[r])]
        found[takers] = assembled(rows, shape)
    return found


def _through(courier: Courier, shares: _Shares, number: int, steps: list[Maps | None], like: Tensor) -> Tensor | None:
    """What comes into a stretch; sends on what leaves it, as early as it can."""
    line, shape, rank = shares.line, shares.shape, courier.rank
    stretch, mine = shares.stretches[number], shares.rows[rank]
    outgoing = [(target, rows) for source, target, rows in shares.carries(number) if source == rank]
    transition: Tensor | None = None  # of the whole stretch; none once a document has begun inside
    update: Tensor | None = None
    if outgoing:
        for place, step in zip(stretch, steps, strict=True):
            if step is None or line.resets[place] or (update is None and place > stretch.start):
                transition, update = None, None if step is None else step.update
            elif update is None:
                transition, update = step.transition, step.update
            else:
                update = step.leaves(update)
                transition = None if transition is None else composed(step.transition, transition, shape.order)
    state: Tensor | None = None
    if line.joined[stretch.start]:
        coming = [
            courier.start_receive(source, (rows[1] - rows[0]) * shape.keys, like)
            for source, target, rows in shares.carries(number - 1)
            if target == rank
        ]
        if transition is None and update is not None:  # it leaves without waiting for what comes in
            _send(courier, outgoing, unframed(update, shape, mine), mine)
            outgoing = []
        found = [pending.wait().view(1, -1, shape.keys) for pending in coming]
        if found:
            state = framed(torch.cat(found, 1), shape, mine)
    if outgoing and update is not None:
        leaving = update
        if transition is not None and state is not None:
            leaving = applied(transition, state, shape.order) + update
        _send(courier, outgoing, unframed(leaving, shape, mine), mine)
    return state


def _send(courier: Courier, outgoing: list[tuple[int, Rows]], rows: Tensor, mine: Rows) -> None:
    for target, (low, high) in outgoing:
        courier.send(target, rows[:, low - mine[0] : high - mine[0]].flatten())
