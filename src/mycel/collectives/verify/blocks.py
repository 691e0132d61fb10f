"""Verifies schedules of thread blocks (``mycel.collectives.blocks``), chunk by chunk.

Four checks: sends meet receives, first in, first out; nothing waits for ever when a connection holds ``slots``
messages; every two accesses of a rank to a chunk, one of them a write, are ordered however steps are timed; and a
replay with counted contributions ends with what the collective requires.

Time: a step touches memory after the step before it in its block, and the step it waits for, are complete, and,
where it receives, after the step that sends to it has begun; it is complete after that one is. That a connection is
full orders nothing, since nobody promises that it does not hold more.

What a step does is the interpreter's part (``interpreter``), as for our own programs. Blocks remain a form of their
own up to there: a step that receives and sends at once is one event, and taken apart would need less of its
connections than it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
from mycel.collectives.verify.interpreter import Interpreter, Span, Value, unordered
from mycel.collectives.verify.memory import Content, Memory, Piece
from mycel.collectives.verify.order import find_circle, sort_events
from mycel.errors import VerificationError

__all__ = ["verify_blocks"]


@dataclass(frozen=True, slots=True)
class _Event:
    rank: int
    block: int
    number: int
    step: Step


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
        for rank, mine in enumerate(plan.ranks):
            self.start.append([])
            for number, block in enumerate(mine.blocks):
                self.start[rank].append(len(self.events))
                self.events += [_Event(rank, number, at, s) for at, s in enumerate(block.steps)]
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
            order = sort_events(before)
            if len(order) == len(self.events):
                return order, slots
        circle = find_circle(before, order)
        shown = [self.name(index) for index in circle[:6]] + (["..."] if len(circle) > 6 else [])
        held = f"a connection holds {self.plan.slots} message{'s' * (self.plan.slots > 1)}"
        raise self.fault(circle[0], f"waits for itself, where {held}: {' waits for '.join([*shown, shown[0]])}")


class _Replay:
    """One replay, in place or not."""

    def __init__(self, graph: _Graph, order: list[int], *, in_place: bool) -> None:
        self._graph, self._plan, self._order, self._in_place = graph, graph.plan, order, in_place
        self._interpreter = Interpreter(lambda event, problem: graph.fault(order[event], problem), self._say)
        self._buffers = [self._begin(rank) for rank in range(len(self._plan.ranks))]
        #: What a step sends, by its place in the order.
        self._messages: dict[int, Value] = {}

    def run(self) -> None:
        """Raise if contents or accesses are wrong."""
        position = [0] * len(self._order)
        for event, index in enumerate(self._order):
            position[index] = event
        sender = [position[s] if (s := self._graph.sender[index]) >= 0 else -1 for index in self._order]
        for event, index in enumerate(self._order):
            step = self._graph.events[index]
            self._act(event, step.rank, step.step, self._messages.pop(sender[event], []))
        waits = [[position[other] for other in self._graph.before[index]] for index in self._order]
        memories = (memory for buffers in self._buffers for memory, _ in buffers.values())
        found = unordered(memories, waits, completes_after=sender, begins_after=sender)
        if found:
            second, first = self._order[found.second], self._order[found.first]
            where = self._say(Span(found.memory, found.start, found.stop - found.start))
            other = f"{self._graph.name(first)} ({self._graph.events[first].step.kind})"
            problem = f"it and {other} touch {where} in no fixed order; let one wait for the other"
            raise self._graph.fault(second, problem)
        for rank in range(len(self._plan.ranks)):
            self._check_end(rank)

    def _begin(self, rank: int) -> dict[str, tuple[Memory, int]]:
        """The rank's buffers, as memories and places in them, with what the caller gives."""
        plan, name, share = self._plan, self._plan.collective.name, self._share
        length = {letter: plan.length(rank, letter) for letter in "ios"}
        given = Memory("array" if self._in_place else "i", plan.num_chunks if self._in_place else length["i"])
        at = {letter: rank * share if length[letter] < given.length else 0 for letter in "io"}
        if self._in_place:
            buffers = {letter: (given, at[letter]) for letter in "io"}
        else:
            buffers = {"i": (given, 0), "o": (Memory("o", length["o"]), 0)}
        start = buffers["i"][1]
        # An all_gather's input is the rank's block of the array.
        base = rank * share if name == "all_gather" else 0
        given.fill(start, start + length["i"], self._interpreter.contents.own(rank), base - start)
        return {**buffers, "s": (Memory("s", length["s"]), 0)}

    @property
    def _share(self) -> int:
        """Chunks of a rank's block."""
        return self._plan.num_chunks // self._plan.collective.num_ranks

    def _act(self, event: int, rank: int, step: Step, value: Value) -> None:
        """Carry out a step; ``value`` is what came in."""
        kind, run = step.kind, self._interpreter
        source = self._span(rank, step.source, step.count) if kind in READS_SOURCE else None
        target = self._span(rank, step.target, step.count) if kind in WRITES_TARGET else None
        if source and target:
            if kind == "cpy" and source.coincides(target):
                return  # in place, what would be copied stands there already
            run.apart([source], target, event)
        if source:
            held = run.read(source, event)
            value = run.add(value, held) if kind in RECEIVES else held
        if target:
            if kind == "re":
                value = run.add(run.read(target, event), value)
            if target.memory.name == "i":
                raise self._graph.fault(self._order[event], f"writes {self._say(target)}, which is the caller's")
            run.write(target, value, event)
        if kind in SENDS:
            self._messages[event] = value

    def _span(self, rank: int, place: Place, count: int) -> Span:
        memory, start = self._buffers[rank][place.buffer]
        return Span(memory, start + place.offset, count)

    def _say(self, span: Span) -> str:
        if span.memory.name == "array":
            return f"chunk {span.start} of the array"
        return f"{span.memory.name}[{span.start}]"

    # -- the end ------------------------------------------------------------------------------------------

    def _check_end(self, rank: int) -> None:
        n, name, share = self._plan.collective.num_ranks, self._plan.collective.name, self._share
        memory, base = self._buffers[rank]["o"]
        everyone, length = tuple((other, 0, 1) for other in range(n)), self._plan.length(rank, "o")
        for start in range(0, length, length if name == "all_reduce" else share):
            terms = everyone if self._plan.collective.reduces else ((start // share, 0, 1),)
            first = {"all_gather": start, "all_reduce": 0}.get(name, rank * share)
            right = self._interpreter.contents.number(Content(terms))
            stop = length if name == "all_reduce" else start + share
            for piece in memory.pieces(base + start, base + stop):
                wanted = Piece(piece.start, piece.stop, right, first - start - base)
                if piece != wanted:
                    raise self._wrong_end(rank, piece.start - base, memory.writer(piece.start), piece, wanted)

    def _wrong_end(self, rank: int, k: int, writer: int, piece: Piece, wanted: Piece) -> VerificationError:
        how = "in place" if self._in_place else "out of place"
        what = f"o[{k}] ends with {self._describe(piece)}; expected {self._describe(wanted)} ({how})"
        if writer >= 0:
            return self._graph.fault(self._order[writer], f"this step wrote last, and {what}")
        grid = draw_blocks(self._plan, rank, -1, -1)
        return VerificationError(f"{self._graph.title} is wrong at rank {rank}: {what}", grid=grid)

    def _describe(self, piece: Piece) -> str:
        terms = self._interpreter.contents[piece.content].terms
        if not terms:
            return "nothing"
        at = piece.start + piece.shift
        shown = [f"{f'{count} x ' if count > 1 else ''}rank {r}'s chunk {at + d}" for r, d, count in terms[:5]]
        return " + ".join(shown) + (f" + {len(terms) - 5} more" if len(terms) > 5 else "")
