"""Verifies MSCCL++ execution plans: runs them with symbolic contents, and asks whether another order could differ.

The model of time is that of a GPU, taken strictly. Operations of a thread block are not ordered by standing one after
the other, since each is shared out over threads: a ``nop`` or ``barrier``, at which all threads of the block meet,
orders what stands before it against what stands after. Between blocks, ``sem_release`` orders against ``sem_acquire``
and ``signal`` against ``wait``; the relaxed forms of the latter say only that the rank has begun. What is put on a
port channel moves later, by itself: it has certainly happened once the peer has waited for the signal after it, or
after a ``flush``.

A rank's memory is nobody else's before the rank has begun and after it has finished: whoever reads or writes it from
outside must know the first, and the rank must wait for the second. So a right plan is also right when it runs twice.

Four checks: nothing waits for ever and no signal is left over; every chunk of the output holds each contribution
exactly once; no operation reads what nothing was written to; and every two accesses to a chunk, one of them a write,
are ordered (``order``), so that every other possible order gives the same result.

References:
    L. Lamport, "Time, clocks, and the ordering of events in a distributed system", CACM 21(7), 1978 (happens-before).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from mycel.collectives.verify.grid import draw_table
from mycel.collectives.verify.interpreter import Interpreter, Span, unordered
from mycel.collectives.verify.memory import EMPTY, Memory, Piece
from mycel.collectives.verify.plan_form import Chunks, End, ForeignPlan, Operation, read_plan
from mycel.collectives.verify.schedule import describe_counts
from mycel.errors import VerificationError

__all__ = ["check_plan", "verify_plan"]

_SIGNALS = ("signal", "rlxsignal", "pws", "pwsf")
_WAITS = ("wait", "rlxwait")
_PUTS = ("put", "pws", "pwsf")
_REDUCTIONS = ("re", "res", "rre", "rres")
_AROUND = 3
_LEGEND = "rank.block; wait<r and signal>r by peer   [..]! here it goes wrong"


def check_plan(data: Any) -> dict[str, Any]:
    """Facts of the plan in a JSON value, which is right.

    Raises:
        ScheduleError: malformed or beyond a limit.
        VerificationError: it computes something wrong, or may.
    """
    plan = read_plan(data)
    verify_plan(plan)
    return {
        "name": plan.name,
        "collective": plan.collective.name,
        "num_ranks": plan.collective.num_ranks,
        "in_place": plan.in_place,
        "num_thread_blocks": max(len(blocks) for blocks in plan.blocks),
        "num_operations": sum(len(block) for blocks in plan.blocks for block in blocks),
        "num_chunks": max(plan.chunks[0]["i"], plan.chunks[0]["o"]),
    }


def verify_plan(plan: ForeignPlan) -> None:
    """Return if the plan carries out its collective, however it is timed; raise otherwise.

    Raises:
        VerificationError: the message names rank, thread block and operation; ``grid`` shows the blocks around.
    """
    _Replay(plan).run()


@dataclass(slots=True)
class _Block:
    """A thread block as it runs: the last barrier of its threads, and what they have done since."""

    rank: int
    number: int
    operations: tuple[Operation, ...]
    at: int = 0
    barrier: int = -1
    barriers: int = 0
    since: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Put:
    """Something on its way through a port channel: from which block, after how many barriers, by which thread."""

    event: int
    block: tuple[int, int]
    barriers: int
    thread: int

    def precedes(self, block: _Block, thread: int) -> bool:
        """Whether it was handed to the channel before what this thread of the block does now."""
        mine = self.block == (block.rank, block.number)
        return mine and (self.barriers < block.barriers or self.thread == thread)


class _Counting:
    """A counter that some blocks raise and one block lowers: which raises are known to have happened after k."""

    def __init__(self, initial: int = 0) -> None:
        self.initial = initial
        self.expected: Counter[tuple[int, int]] = Counter()
        self.raised: dict[tuple[int, int], list[int]] = {}
        self.num_raised = 0
        self.num_lowered = 0

    def may_lower(self) -> bool:
        return self.initial + self.num_raised > self.num_lowered

    def lower(self) -> list[int]:
        """Events that have certainly happened: of each block, those that the others cannot stand in for."""
        self.num_lowered += 1
        total, known = sum(self.expected.values()), []
        for block, events in self.raised.items():
            sure = self.num_lowered - self.initial - (total - self.expected[block])
            known += [event for event in events[:sure] if event >= 0] if sure > 0 else []
        return known


class _Replay:
    """One symbolic run."""

    def __init__(self, plan: ForeignPlan) -> None:
        self.plan = plan
        c = plan.collective
        self.title = f"{c.name} over {c.num_ranks} ranks"
        self.interpreter = Interpreter(self._blame, self._say)
        self.waits: list[tuple[int, ...]] = []
        self.places: list[tuple[int, int, int]] = []  # of each event: rank, block, operation; -1 begins, -2 ends
        self.blocks = [
            [_Block(rank, number, ops) for number, ops in enumerate(blocks)]
            for rank, blocks in enumerate(plan.blocks)
        ]
        self.signals: dict[End, _Counting] = {}
        self.semaphores = [[_Counting(value) for value in values] for values in plan.semaphores]
        self.moving: dict[End, list[_Put]] = {}
        self.unflushed: dict[End, list[_Put]] = {}
        self.last_signal: dict[tuple[End, int, int], int] = {}
        self.arrived: dict[tuple[int, int], list[_Block]] = {}
        self.barriers: dict[tuple[int, int], set[int]] = {}
        self._count()
        self.buffers = [self._begin(rank) for rank in range(c.num_ranks)]

    def run(self) -> None:
        self._run_blocks()
        self._check_counters()
        for rank in range(self.plan.collective.num_ranks):
            self._check_output(rank)
        for rank in range(self.plan.collective.num_ranks):
            self._end(rank)
        self._check_order()

    # -- before and after ---------------------------------------------------------------------------------

    def _count(self) -> None:
        """Who raises and lowers what; only one block may wait for a thing, or nobody knows who gets it."""
        lowering: dict[object, _Block] = {}
        for block in self._all_blocks():
            for at, op in enumerate(block.operations):
                key = (block.rank, block.number)
                for end in op.ends:
                    if end not in self.plan.peers:
                        raise self._wrong(block, at, f"uses {end.kind} channel {end.number}, which has no other end")
                    if op.name in _SIGNALS:
                        counting = self.signals.setdefault(self.plan.peers[end], _Counting())
                        counting.expected[key] += 1
                if op.name == "sem_release":
                    for number in op.semaphores:
                        self.semaphores[block.rank][number].expected[key] += 1
                if op.name == "barrier":
                    self.barriers.setdefault((block.rank, op.barrier), set()).add(block.number)
                names: list[object] = list(op.ends) if op.name in _WAITS else []
                if op.name == "sem_acquire":
                    names += [(block.rank, number) for number in op.semaphores]
                for name in names:
                    other = lowering.setdefault(name, block)
                    if other is not block:
                        problem = f"waits for the same as thread block {other.number}; which of them gets it is open"
                        raise self._wrong(block, at, problem)
        for block in self._all_blocks():
            for at, op in enumerate(block.operations):
                if op.name == "barrier" and len(self.barriers[block.rank, op.barrier]) != op.num_blocks:
                    users = len(self.barriers[block.rank, op.barrier])
                    raise self._wrong(block, at, f"is for {op.num_blocks} thread blocks, but {users} come to it")

    def _all_blocks(self) -> Iterator[_Block]:
        return (block for blocks in self.blocks for block in blocks)

    def _begin(self, rank: int) -> dict[str, tuple[Memory, int]]:
        """The rank's memory with what the caller put there; all of it is the caller's until the rank has begun."""
        plan, chunks, name = self.plan, self.plan.chunks[rank], self.plan.collective.name
        memories = {letter: Memory(word, chunks[letter]) for letter, word in _NAMES.items()}
        buffers = {letter: (memory, 0) for letter, memory in memories.items()}
        if plan.in_place and name == "all_gather":
            buffers["i"] = (memories["o"], rank * chunks["i"])
        elif plan.in_place:
            buffers["o"] = (memories["i"], rank * chunks["o"] if name == "reduce_scatter" else 0)
        event = self._event((), (rank, -1, -1))
        for memory in _memories(buffers):
            memory.write([Piece(0, memory.length, EMPTY, 0)], event)
        own = self.interpreter.contents.own(rank)
        for start, stop, base in self._parts(rank, "i"):
            memory, at = buffers["i"]
            memory.write([Piece(start + at, stop + at, own, base - at)], event)
            memory.turns.clear()
        for block in self.blocks[rank]:
            block.barrier = event
        return buffers

    def _parts(self, rank: int, buffer: str) -> list[tuple[int, int, int]]:
        """Blocks of the array in a rank's input or output: first chunk, end, and the distance to the array's."""
        c = self.plan.collective
        n, length = c.num_ranks, self.plan.chunks[rank][buffer]
        mine = {
            "all_gather": (rank,) if buffer == "i" else range(n),
            "reduce_scatter": (rank,) if buffer == "o" else range(n),
            "all_to_all": range(rank * n, rank * n + n) if buffer == "i" else range(rank, n * n, n),
        }.get(c.name, (0,))
        size = length // len(mine)
        return [(k * size, (k + 1) * size, (block - k) * size) for k, block in enumerate(mine)]

    def _check_output(self, rank: int) -> None:
        c = self.plan.collective
        memory, offset = self.buffers[rank]["o"]
        for start, stop, base in self._parts(rank, "o"):
            block = (start + base) // (stop - start)
            required = c.required(rank, block) or frozenset()
            for piece in memory.pieces(start + offset, stop + offset):
                counts = [0] * c.num_ranks
                problem = ""
                for whose, distance, count in self.interpreter.contents[piece.content].terms:
                    if piece.shift + distance != base - offset:
                        problem = f"chunk {piece.start + piece.shift + distance} of rank {whose} stands there"
                    counts[whose] = count
                problem = problem or describe_counts(counts, required)
                if problem:
                    writer = memory.writer(piece.start)
                    last = (
                        f"last write: {self._name(writer)}" if self.places[writer][1] >= 0 else "it is never written"
                    )
                    where = f"output[{piece.start - offset}:{piece.stop - offset}]"
                    raise VerificationError(
                        f"{self.title} is wrong at rank {rank}, {where}: {problem}; {last}", grid=self._grid(writer)
                    )

    def _end(self, rank: int) -> None:
        """The rank has finished: its memory is the caller's, who may do anything with it."""
        event = self._event([e for block in self.blocks[rank] for e in (block.barrier, *block.since)], (rank, -2, -2))
        for memory in _memories(self.buffers[rank]):
            memory.write([Piece(0, memory.length, EMPTY, 0)], event)

    def _check_counters(self) -> None:
        for end, counting in self.signals.items():
            if counting.num_raised != counting.num_lowered:
                peer = self.plan.peers[end]
                raise VerificationError(
                    f"{self.title} is wrong at rank {end.rank}, {end.kind} channel {end.number}: rank {peer.rank} "
                    f"signals {counting.num_raised} times and {counting.num_lowered} are waited for; the plan's next "
                    "run would take the rest for its own"
                )
        for rank, counters in enumerate(self.semaphores):
            for number, counting in enumerate(counters):
                if counting.num_raised != counting.num_lowered:
                    raise VerificationError(
                        f"{self.title} is wrong at rank {rank}, semaphore {number}: released {counting.num_raised} "
                        f"times and acquired {counting.num_lowered}; the plan's next run would find the rest"
                    )

    # -- running ------------------------------------------------------------------------------------------

    def _event(self, waits: Sequence[int], place: tuple[int, int, int]) -> int:
        self.waits.append(tuple(waits))
        self.places.append(place)
        return len(self.waits) - 1

    def _run_blocks(self) -> None:
        progress = True
        while progress:
            progress = False
            for block in self._all_blocks():
                while block.at < len(block.operations) and self._step(block, block.operations[block.at]):
                    progress = True
        for block in self._all_blocks():
            if block.at < len(block.operations):
                op = block.operations[block.at]
                what = {"barrier": f"other thread blocks at barrier {op.barrier}", "sem_acquire": "a semaphore"}
                peers = ", ".join(str(self.plan.peers[end].rank) for end in op.ends)
                problem = f"waits for ever for {what.get(op.name, f'a signal from rank {peers}')}"
                raise self._wrong(block, block.at, problem)

    def _step(self, block: _Block, op: Operation) -> bool:
        """Carry out an operation if it may be; whether it was."""
        place = (block.rank, block.number, block.at)
        if op.name == "nop":
            self._join_barrier(block, self._event((block.barrier, *block.since), place))
        elif op.name == "barrier":
            return self._barrier(block, op)
        elif op.name in (*_WAITS, "sem_acquire"):
            counters = (
                [self.semaphores[block.rank][number] for number in op.semaphores]
                if op.name == "sem_acquire"
                else [self.signals.setdefault(end, _Counting()) for end in op.ends]
            )
            if not all(counting.may_lower() for counting in counters):
                return False
            known = [event for counting in counters for event in counting.lower()]
            # Whoever it was that signalled, and how, its rank has begun; that was the event of the rank's number.
            begun = [self.plan.peers[end].rank for end in op.ends]
            block.since.append(self._event([block.barrier, *begun, *(known if op.name != "rlxwait" else ())], place))
        elif op.name == "sem_release":
            event = self._event((block.barrier,), place)
            block.since.append(event)
            for number in op.semaphores:
                self._raise(self.semaphores[block.rank][number], block, event)
        elif op.name in ("signal", "rlxsignal"):
            event = self._event((block.barrier,), place)
            block.since.append(event)
            for thread, end in enumerate(op.ends):
                self._signal(block, end, thread, event, relaxed=op.name == "rlxsignal")
        elif op.name == "flush":
            self._flush(block, op, place)
        elif op.kind == "port":
            self._put(block, op, place)
        else:
            event = self._event((block.barrier,), place)
            block.since.append(event)
            self._move(op, event)
        block.at += 1
        return True

    def _join_barrier(self, block: _Block, event: int) -> None:
        block.barrier, block.since = event, []
        block.barriers += 1

    def _barrier(self, block: _Block, op: Operation) -> bool:
        """All blocks pass in the step of the last one to come."""
        here = self.arrived.setdefault((block.rank, op.barrier), [])
        if block not in here:
            here.append(block)
        if len(here) < op.num_blocks:
            return False
        waits = [event for each in here for event in (each.barrier, *each.since)]
        event = self._event(waits, (block.rank, block.number, block.at))
        for each in here:
            self._join_barrier(each, event)
            each.at += 1
        here.clear()
        return True

    def _raise(self, counting: _Counting, block: _Block, event: int) -> None:
        counting.raised.setdefault((block.rank, block.number), []).append(event)
        counting.num_raised += 1

    def _signal(self, block: _Block, end: End, thread: int, event: int, *, relaxed: bool = False) -> None:
        """Tell the other end; through a port, after everything that this thread knows to be in it."""
        counting = self.signals[self.plan.peers[end]]
        if relaxed:
            self._raise(counting, block, -1)
            return
        if end.kind == "port":
            moving = self.moving.setdefault(end, [])
            before = [put.event for put in moving if put.precedes(block, thread)]
            self.moving[end] = [put for put in moving if not put.precedes(block, thread)]
            key = (end, block.rank, block.number)
            before += [self.last_signal[key]] if key in self.last_signal else []
            event = self._event([event, *before], (block.rank, block.number, block.at))
            self.last_signal[key] = event
        self._raise(counting, block, event)

    def _put(self, block: _Block, op: Operation, place: tuple[int, int, int]) -> None:
        issue = self._event((block.barrier,), place)
        block.since.append(issue)
        pairs = zip(op.ends, op.sources, op.targets, strict=True)
        for thread, (end, source, target) in enumerate(pairs):
            peer = self.plan.peers[end].rank
            if peer != target.rank:
                raise self._wrong(block, block.at, f"puts to rank {target.rank} on a channel to rank {peer}")
            event = self._event((issue,), place)
            put = _Put(event, (block.rank, block.number), block.barriers, thread)
            self.moving.setdefault(end, []).append(put)
            self.unflushed.setdefault(end, []).append(put)
            self.interpreter.write(self._span(target), self.interpreter.read(self._span(source), event), event)
            if op.name != "put":
                self._signal(block, end, thread, issue)
        if op.name == "pwsf":
            self._flush(block, op, place)

    def _flush(self, block: _Block, op: Operation, place: tuple[int, int, int]) -> None:
        done: list[int] = []
        for thread, end in enumerate(op.ends):
            done += [put.event for put in self.unflushed.get(end, ()) if put.precedes(block, thread)]
        block.since.append(self._event((block.barrier, *done), place))

    # -- data ---------------------------------------------------------------------------------------------

    def _move(self, op: Operation, event: int) -> None:
        run = self.interpreter
        sources, targets = ([self._span(chunks) for chunks in side] for side in (op.sources, op.targets))
        if op.name not in _REDUCTIONS:
            for source, target in zip(sources, targets, strict=True):
                run.apart([source], target, event)
                if not source.coincides(target):  # in place: onto itself
                    run.write(target, run.read(source, event), event)
            return
        if not self.plan.collective.reduces:
            raise self._blame(event, f"reduces, but {self.plan.collective.name} combines nothing")
        run.apart(sources, targets[0], event)
        total = reduce(run.add, [run.read(source, event) for source in sources])
        for target in targets:
            run.write(target, total, event)

    def _span(self, chunks: Chunks) -> Span:
        memory, start = self.buffers[chunks.rank][chunks.buffer]
        return Span(memory, start + chunks.index, chunks.size)

    # -- order and messages -------------------------------------------------------------------------------

    def _check_order(self) -> None:
        found = unordered((memory for buffers in self.buffers for memory in _memories(buffers)), self.waits)
        if found:
            first, second = found.first, found.second
            raise VerificationError(
                f"{self.title} is wrong at rank {self._owner(found.memory)}, {found.memory.name}"
                f"[{found.start}:{found.stop}]: {self._name(first)} and {self._name(second)} touch it in no fixed "
                "order; a signal, wait, semaphore or nop is missing",
                grid=self._grid(second if self.places[second][1] >= 0 else first),
            )

    def _say(self, span: Span) -> str:
        return f"{span.memory.name}[{span.start}:{span.stop}] of rank {self._owner(span.memory)}"

    def _owner(self, memory: Memory) -> int:
        return next(r for r, buffers in enumerate(self.buffers) if memory in (m for m, _ in buffers.values()))

    def _name(self, event: int) -> str:
        rank, number, at = self.places[event]
        if number < 0:
            return f"rank {rank}'s caller {'before it begins' if number == -1 else 'after it has ended'}"
        op = self.plan.blocks[rank][number][at]
        return f"rank {rank}, thread block {number}, op {at} ({op.name})"

    def _blame(self, event: int, problem: str) -> VerificationError:
        rank, number, at = self.places[event]
        return self._wrong(self.blocks[rank][number], at, problem)

    def _wrong(self, block: _Block, at: int, problem: str) -> VerificationError:
        op = block.operations[at]
        where = f"rank {block.rank}, thread block {block.number}, op {at} ({op.name})"
        grid = self._draw(block.rank, block.number, at)
        return VerificationError(f"{self.title} is wrong at {where}: it {problem}", grid=grid)

    def _grid(self, event: int) -> str:
        rank, number, at = self.places[event]
        return self._draw(rank, number, at) if number >= 0 else ""

    def _draw(self, rank: int, number: int, at: int) -> str:
        """The rank's thread blocks, a row each, and their operations around the bad one."""
        columns = range(max(0, at - _AROUND), at + _AROUND + 1)
        table = [["rank.block", *(f"op {column}" for column in columns)]]
        for block in self.blocks[rank]:
            line = [f"{rank}.{block.number}"]
            for column in columns:
                text = self._cell(block.operations[column]) if column < len(block.operations) else ""
                line.append(f"[{text}]!" if (block.number, column) == (number, at) else text)
            table.append(line)
        return draw_table(table, _LEGEND)

    def _cell(self, op: Operation) -> str:
        peers = [self.plan.peers[end].rank for end in op.ends if end in self.plan.peers]
        peers = peers or [span.rank for span in op.targets if op.name == "put"]
        mark = "<" if op.name in _WAITS else ">"
        return f"{op.name}{mark}{','.join(map(str, peers))}" if peers else op.name


_NAMES = {"i": "input", "o": "output", "s": "scratch"}


def _memories(buffers: Mapping[str, tuple[Memory, int]]) -> list[Memory]:
    """The memories of a rank that hold anything, once each: in place, two buffers share one."""
    return [memory for memory in {id(memory): memory for memory, _ in buffers.values()}.values() if memory.length]
