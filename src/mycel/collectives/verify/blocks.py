"""Verifies schedules of thread blocks (``mycel.collectives.blocks``), chunk by chunk.

Four checks: sends meet receives, first in, first out; nothing waits for ever when a connection holds ``slots``
messages; every two accesses of a rank to a chunk, one of them a write, are ordered however steps are timed; and a
replay with counted contributions ends with what the collective requires.

Time: a step touches memory after the step before it in its block, and the step it waits for, are complete, and,
where it receives, after the step that sends to it has begun; it is complete after that one is. That a connection is
full orders nothing, since nobody promises that it does not hold more.

Steps of a block are ordered, so what must be complete before a step is a vector: how many steps of each block. That
is exact, and costs a maximum of two vectors for each wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mycel.collectives.blocks import (
    READS_SOURCE,
    RECEIVES,
    SENDS,
    WRITES_TARGET,
    BlockPlan,
    Place,
    Step,
)
from mycel.collectives.verify.block_grid import draw_blocks
from mycel.errors import VerificationError

__all__ = ["verify_blocks"]

#: Entries of vectors held at once.
_MAX_ENTRIES = 1 << 26
#: The content of a place that nothing was written to.
_EMPTY = 0


@dataclass(frozen=True, slots=True)
class _Event:
    rank: int
    block: int
    number: int
    step: Step
    line: int  # index of its block among all ranks' blocks


@dataclass(slots=True)
class _Cell:
    content: int
    writer: int = -1
    readers: tuple[int, ...] = ()


def verify_blocks(plan: BlockPlan) -> int:
    """Messages that every connection must hold at least, if the plan is right; raise otherwise.

    Raises:
        VerificationError: the message names rank, block, step and chunk, and ``grid`` draws the blocks there.
    """
    graph = _Graph(plan)
    order, needed = graph.order()
    for in_place in (False, True):
        if plan.in_place if in_place else plan.out_of_place:
            _Replay(graph, order, in_place=in_place).run()
    return needed


class _Graph:
    """All steps, and who waits for whom."""

    def __init__(self, plan: BlockPlan) -> None:
        self.plan = plan
        self.title = f"{plan.collective.name} over {plan.collective.num_ranks} ranks"
        self.events: list[_Event] = []
        self.start: list[list[int]] = []
        self.num_lines = 0
        for rank, mine in enumerate(plan.ranks):
            self.start.append([])
            for number, block in enumerate(mine.blocks):
                self.start[rank].append(len(self.events))
                self.events += [_Event(rank, number, at, s, self.num_lines) for at, s in enumerate(block.steps)]
                self.num_lines += 1
        #: Of each event, those that must be complete before it begins.
        self.before: list[list[int]] = [self._own(index) for index in range(len(self.events))]
        #: Of each event that receives, the one that sends to it; -1 for others.
        self.sender = [-1] * len(self.events)
        self.streams = list(self._meet())

    def fault(self, index: int, what: str) -> VerificationError:
        """The error that a step is to blame for."""
        event = self.events[index]
        where = f"rank {event.rank}, block {event.block}, step {event.number} ({event.step.kind})"
        grid = draw_blocks(self.plan, event.rank, event.block, event.number)
        return VerificationError(f"{self.title} is wrong at {where}: {what}", grid=grid)

    def name(self, index: int) -> str:
        """A step, for messages."""
        event = self.events[index]
        return f"rank {event.rank} block {event.block} step {event.number}"

    def _own(self, index: int) -> list[int]:
        event = self.events[index]
        before = [index - 1] if event.number else []
        if event.step.waits is not None:
            block, number = event.step.waits
            blocks = self.plan.ranks[event.rank].blocks
            if not (0 <= block < len(blocks) and 0 <= number < len(blocks[block].steps)):
                raise self.fault(index, f"waits for block {block} step {number}, which does not exist")
            before.append(self.start[event.rank][block] + number)
        return before

    def _meet(self) -> Iterator[tuple[list[int], list[int]]]:
        """Of each connection, the events that send and those that receive, in order."""
        ends: dict[tuple[int, int, int], tuple[list[int], list[int]]] = {}
        owners: dict[tuple[int, int, int, int], int] = {}
        for rank, mine in enumerate(self.plan.ranks):
            for number, block in enumerate(mine.blocks):
                first = self.start[rank][number]
                for side, (peer, kinds) in enumerate(((block.send, SENDS), (block.recv, RECEIVES))):
                    indices = [first + at for at, step in enumerate(block.steps) if step.kind in kinds]
                    if indices and peer < 0:
                        verb = "receives" if side else "sends"
                        raise self.fault(indices[0], f"{verb}, but its block has no rank to do so with")
                    if peer < 0:
                        continue
                    pair = (peer, rank) if side else (rank, peer)
                    known = owners.setdefault((*pair, block.channel, side), number)
                    if known != number:
                        verb = "receive from" if side else "send to"
                        raise VerificationError(
                            f"{self.title}: rank {rank}: blocks {known} and {number} both {verb} rank {peer} on "
                            f"channel {block.channel}"
                        )
                    ends.setdefault((*pair, block.channel), ([], []))[side].extend(indices)
        for (src, dst, channel), (sends, receives) in ends.items():
            where = f"on channel {channel} from rank {src} to rank {dst}"
            for position, (a, b) in enumerate(zip(sends, receives, strict=False)):
                counts = self.events[a].step.count, self.events[b].step.count
                if counts[0] != counts[1]:
                    raise self.fault(
                        b,
                        f"message {position} {where} has {counts[0]} chunks at {self.name(a)} and {counts[1]} here",
                    )
                self.sender[b] = a
            if len(sends) != len(receives):
                lonely = sends[len(receives)] if len(sends) > len(receives) else receives[len(sends)]
                raise self.fault(lonely, f"{len(sends)} messages are sent and {len(receives)} received {where}")
            yield sends, receives

    def order(self) -> tuple[list[int], int]:
        """An order in which everything may be done, and how many messages a connection must hold for it."""
        for slots in range(1, self.plan.slots + 1):
            before = [list(those) for those in self.before]
            for sends, receives in self.streams:
                for position, (a, b) in enumerate(zip(sends, receives, strict=True)):
                    before[b].append(a)
                    if position >= slots:
                        before[a].append(receives[position - slots])
            order = self._sorted(before)
            if len(order) == len(self.events):
                return order, slots
        raise self._deadlock(before, set(order))

    def _sorted(self, before: list[list[int]]) -> list[int]:
        left = [len(those) for those in before]
        after: list[list[int]] = [[] for _ in before]
        for index, those in enumerate(before):
            for other in those:
                after[other].append(index)
        ready = deque(index for index, count in enumerate(left) if not count)
        order = []
        while ready:
            index = ready.popleft()
            order.append(index)
            for other in after[index]:
                left[other] -= 1
                if not left[other]:
                    ready.append(other)
        return order

    def _deadlock(self, before: list[list[int]], done: set[int]) -> VerificationError:
        at = next(index for index in range(len(before)) if index not in done)
        met: dict[int, int] = {}
        walk: list[int] = []
        while at not in met:
            met[at] = len(walk)
            walk.append(at)
            at = next(other for other in before[at] if other not in done)
        circle = walk[met[at] :]
        shown = [self.name(index) for index in circle[:6]] + (["..."] if len(circle) > 6 else [])
        held = f"a connection holds {self.plan.slots} message{'s' * (self.plan.slots > 1)}"
        return self.fault(circle[0], f"waits for itself, where {held}: {' waits for '.join([*shown, shown[0]])}")


class _Replay:
    """One replay, in place or not: contents, and whether accesses are ordered."""

    def __init__(self, graph: _Graph, order: list[int], *, in_place: bool) -> None:
        self._graph = graph
        self._plan = graph.plan
        self._order = order
        self._in_place = in_place
        self._contents: list[tuple[tuple[tuple[int, int], int], ...]] = [()]
        self._index: dict[tuple[tuple[tuple[int, int], int], ...], int] = {(): _EMPTY}
        self._sums: dict[tuple[int, int], int] = {}
        self._cells: list[dict[tuple[bool, int], _Cell]] = []
        self._messages: dict[int, list[int]] = {}

    def run(self) -> None:
        """Raise if contents or accesses are wrong."""
        width = max(1, _MAX_ENTRIES // max(1, len(self._order)))
        for low in range(0, self._graph.num_lines, width):
            self._pass(low, min(width, self._graph.num_lines - low))
        self._check_end()

    def _pass(self, low: int, width: int) -> None:
        self._cells = [{} for _ in self._plan.ranks]
        graph = self._graph
        begun: list[npt.NDArray[np.int32]] = [_NOTHING] * len(self._order)
        done: list[npt.NDArray[np.int32]] = [_NOTHING] * len(self._order)
        for index in self._order:
            clock = np.zeros(width, dtype=np.int32)
            for other in graph.before[index]:
                np.maximum(clock, done[other], out=clock)
            sender = graph.sender[index]
            if sender >= 0:
                np.maximum(clock, begun[sender], out=clock)
            begun[index] = clock
            self._act(index, clock, low, width)
            event = graph.events[index]
            ended = clock.copy() if sender < 0 else np.maximum(clock, done[sender])
            if low <= event.line < low + width:
                ended[event.line - low] = event.number + 1
            done[index] = ended

    # -- one step -----------------------------------------------------------------------------------------

    def _act(self, index: int, clock: npt.NDArray[np.int32], low: int, width: int) -> None:
        event, step = self._graph.events[index], self._graph.events[index].step
        kind = step.kind
        if kind == "nop":
            return
        source = [self._at(event.rank, step.source, k) for k in range(step.count)] if kind in READS_SOURCE else []
        target = [self._at(event.rank, step.target, k) for k in range(step.count)] if kind in WRITES_TARGET else []
        if kind == "cpy" and source == target:
            return  # in place, what would be copied stands there already
        if source and target and source != target and set(source) & set(target):
            raise self._graph.fault(index, "reads and writes places that overlap")
        reads = [*source, *(target if kind == "re" else ())]
        for key in reads:
            cell = self._cell(event.rank, key)
            self._ordered(index, clock, low, width, key, (cell.writer,))
        found = [self._content(index, key) for key in source]
        if kind in RECEIVES:
            came = self._messages[graph_sender] if (graph_sender := self._graph.sender[index]) >= 0 else []
            value = [self._sum(a, b) for a, b in zip(came, found, strict=True)] if source else came
        elif kind == "re":
            value = [self._sum(self._content(index, key), b) for key, b in zip(target, found, strict=True)]
        else:
            value = found
        for key in reads:
            cell = self._cell(event.rank, key)
            if index not in cell.readers:
                cell.readers = (*cell.readers, index)
        for key, content in zip(target, value, strict=False):
            cell = self._cell(event.rank, key)
            if key[0] and not self._in_place and self._is_input(event.rank, key[1]):
                raise self._graph.fault(index, f"writes {self._say(event.rank, key)}, which is the caller's")
            self._ordered(index, clock, low, width, key, (cell.writer, *cell.readers))
            self._cells[event.rank][key] = _Cell(content, index)
        if kind in SENDS:
            self._messages[index] = value

    def _ordered(
        self, index: int, clock: npt.NDArray[np.int32], low: int, width: int, key: tuple[bool, int], others: Any
    ) -> None:
        """Raise if one of the others, that touched a place earlier in the replay, may still be at it."""
        events = self._graph.events
        for other in others:
            if other < 0 or other == index or not low <= events[other].line < low + width:
                continue
            if clock[events[other].line - low] <= events[other].number:
                place = self._say(events[index].rank, key)
                raise self._graph.fault(
                    index,
                    f"it and {self._graph.name(other)} ({events[other].step.kind}) touch {place} in no fixed order; "
                    "let one wait for the other",
                )

    # -- places -------------------------------------------------------------------------------------------

    def _at(self, rank: int, place: Place, further: int) -> tuple[bool, int]:
        """``(is the caller's memory, position)``: equal where the memory is the same."""
        plan, at = self._plan, place.offset + further
        if place.buffer == "s":
            return False, at
        if not self._in_place:
            return True, at if place.buffer == "i" else at + plan.length(rank, "i")
        share = plan.num_chunks // plan.collective.num_ranks
        own = {"all_gather": "i", "reduce_scatter": "o"}.get(plan.collective.name)
        return True, at + rank * share if place.buffer == own else at

    def _is_input(self, rank: int, position: int) -> bool:
        return position < self._plan.length(rank, "i")

    def _cell(self, rank: int, key: tuple[bool, int]) -> _Cell:
        cell = self._cells[rank].get(key)
        if cell is None:
            cell = self._cells[rank][key] = _Cell(self._initial(rank, key))
        return cell

    def _initial(self, rank: int, key: tuple[bool, int]) -> int:
        plan, position = self._plan, key[1]
        if not key[0]:
            return _EMPTY
        name, share = plan.collective.name, plan.num_chunks // plan.collective.num_ranks
        if self._in_place:
            if name == "all_gather" and not rank * share <= position < (rank + 1) * share:
                return _EMPTY
        elif not self._is_input(rank, position):
            return _EMPTY
        elif name == "all_gather":
            position += rank * share
        return self._number((((rank, position), 1),))

    def _say(self, rank: int, key: tuple[bool, int]) -> str:
        if not key[0]:
            return f"s[{key[1]}]"
        if self._in_place:
            return f"chunk {key[1]} of the array"
        given = self._plan.length(rank, "i")
        return f"i[{key[1]}]" if key[1] < given else f"o[{key[1] - given}]"

    # -- contents -----------------------------------------------------------------------------------------

    def _number(self, content: tuple[tuple[tuple[int, int], int], ...]) -> int:
        known = self._index.setdefault(content, len(self._contents))
        if known == len(self._contents):
            self._contents.append(content)
        return known

    def _sum(self, a: int, b: int) -> int:
        key = (a, b) if a <= b else (b, a)
        if key not in self._sums:
            counts = dict(self._contents[a])
            for origin, count in self._contents[b]:
                counts[origin] = min(counts.get(origin, 0) + count, 1 << 30)
            self._sums[key] = self._number(tuple(sorted(counts.items())))
        return self._sums[key]

    def _content(self, index: int, key: tuple[bool, int]) -> int:
        rank = self._graph.events[index].rank
        content = self._cell(rank, key).content
        if content == _EMPTY:
            raise self._graph.fault(index, f"reads {self._say(rank, key)}, which nothing has been written to")
        return content

    # -- the end ------------------------------------------------------------------------------------------

    def _check_end(self) -> None:
        plan = self._plan
        n, name = plan.collective.num_ranks, plan.collective.name
        share = plan.num_chunks // n
        sums: dict[int, int] = {}
        for rank in range(n):
            for k in range(plan.length(rank, "o")):
                if name == "all_gather":
                    wanted = self._number((((k // share, k), 1),))
                elif name == "all_to_all":
                    wanted = self._number((((k // share, rank * share + k % share), 1),))
                else:
                    at = k + (rank * share if name == "reduce_scatter" else 0)
                    if at not in sums:
                        sums[at] = self._number(tuple(((other, at), 1) for other in range(n)))
                    wanted = sums[at]
                cell = self._cell(rank, self._at(rank, Place("o", k), 0))
                if cell.content != wanted:
                    raise self._wrong_end(rank, k, cell, wanted)

    def _wrong_end(self, rank: int, k: int, cell: _Cell, wanted: int) -> VerificationError:
        how = "in place" if self._in_place else "out of place"
        what = f"o[{k}] ends with {self._describe(cell.content)}; expected {self._describe(wanted)} ({how})"
        if cell.writer >= 0:
            return self._graph.fault(cell.writer, f"this step wrote last, and {what}")
        grid = draw_blocks(self._plan, rank, -1, -1)
        return VerificationError(f"{self._graph.title} is wrong at rank {rank}: {what}", grid=grid)

    def _describe(self, content: int) -> str:
        terms = self._contents[content]
        if not terms:
            return "nothing"
        shown = [f"{f'{count} x ' if count > 1 else ''}rank {r}'s chunk {p}" for (r, p), count in terms[:5]]
        return " + ".join(shown) + (f" + {len(terms) - 5} more" if len(terms) > 5 else "")


_NOTHING: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)
