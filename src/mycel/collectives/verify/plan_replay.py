"""Replays a plan of plain operations with symbolic contents; see ``plan`` for the model of time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce

from mycel.collectives.verify.interpreter import Interpreter, Span, unordered
from mycel.collectives.verify.memory import EMPTY, Memory, Piece
from mycel.collectives.verify.plan_counters import Counting, Put, ThreadBlock
from mycel.collectives.verify.plan_data import PACKETS, PUTS, SIGNALS, SUMS, TO_ALL, WAITS, Chunks, End, ForeignPlan
from mycel.collectives.verify.plan_data import Operation as Op
from mycel.collectives.verify.plan_grid import draw_operations
from mycel.collectives.verify.plan_operations import BUFFERS
from mycel.collectives.verify.schedule import describe_counts
from mycel.errors import VerificationError

__all__ = ["Replay"]

#: What stands for an event: rank, thread block, operation, run. Before a run begins the block is -1, after it -2.
_Place = tuple[int, int, int, int]


class Replay:
    """One symbolic run of a plan, or several after each other where what one leaves behind matters to the next.

    Args:
        plan: with plain operations alone; see ``plan_units``.
        is_sequence: only find an order in which all can be done; a plan that has been verified.

    Attributes:
        done: that order: ranks and operations.
        senders: after a run of a ``sendrecv``, of each rank the one whose input it got.
    """

    def __init__(self, plan: ForeignPlan, *, is_sequence: bool = False) -> None:
        self.plan, self.is_sequence = plan, is_sequence
        n = plan.collective.num_ranks
        self.title = plan.title
        self.interpreter = Interpreter(self._blame, self._say)
        self.done: list[tuple[int, Op]] = []
        self.senders: list[int] = []
        self.waits: list[tuple[int, ...]] = []
        self.places: list[_Place] = []
        everything = [op for blocks in plan.blocks for block in blocks for op in block]
        #: Ranks in whose scratch packets stand, which is nobody else's between runs.
        self.packet_ranks = {span.rank for op in everything for span in (*op.sources, *op.targets) if span.is_packet}
        self.num_runs = 1
        if self.packet_ranks and not is_sequence:
            self.num_runs = 3 if plan.has_two_scratches else 2
        halves = range(2 if plan.has_two_scratches else 1)
        self.scratch = [[Memory("scratch", plan.chunks[r]["s"]) for r in range(n)] for _ in halves]
        #: Of each packet, the number of the run that put it there last, from 1.
        self.flags = [[Memory("flags", plan.chunks[r]["s"]) for r in range(n)] for _ in halves]
        self.whole = [
            {letter: Memory(BUFFERS[letter], plan.chunks[r][letter]) for letter in ("i", "o")} for r in range(n)
        ]
        self.ended = [-1] * n

    def run(self) -> None:
        """Carry everything out and check it; raises ``VerificationError``."""
        for number in range(self.num_runs):
            self._start(number)
            self._run_blocks()
            self._check_counters()
            self.senders = []
            for rank in range(self.plan.collective.num_ranks):
                self._check_output(rank)
            if self.plan.is_sendrecv:
                self._check_senders()
            for rank in range(self.plan.collective.num_ranks):
                self._end(rank)
        if not self.is_sequence:
            self._check_order()

    # -- before and after ---------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        """Begin a run: counters anew, and all memory but packets is its rank's."""
        self.number = number
        self.half = number % len(self.scratch)
        self.blocks = [
            [ThreadBlock(rank, block, ops) for block, ops in enumerate(blocks)]
            for rank, blocks in enumerate(self.plan.blocks)
        ]
        self.signals: dict[End, Counting] = {}
        self.semaphores = [[Counting(value) for value in values] for values in self.plan.semaphores]
        self.moving: dict[End, list[Put]] = {}
        self.unflushed: dict[End, list[Put]] = {}
        self.last_signal: dict[tuple[End, int, int], int] = {}
        self.arrived: dict[tuple[int, int], list[ThreadBlock]] = {}
        self.barriers: dict[tuple[int, int], set[int]] = {}
        self._count()
        self.begun: list[int] = []
        self.buffers = [self._begin(rank) for rank in range(self.plan.collective.num_ranks)]

    def _count(self) -> None:
        """Who raises and lowers what; only one block may wait for a thing, or nobody knows who gets it."""
        lowering: dict[object, ThreadBlock] = {}
        for block in self._all_blocks():
            for at, op in enumerate(block.operations):
                key = (block.rank, block.number)
                for end in op.ends:
                    if end not in self.plan.peers:
                        raise self._wrong(block, at, f"uses {end.kind} channel {end.number}, which has no other end")
                    if op.name in SIGNALS:
                        counting = self.signals.setdefault(self.plan.peers[end], Counting())
                        counting.expected[key] += 1
                if op.name == "sem_release":
                    for number in op.semaphores:
                        self.semaphores[block.rank][number].expected[key] += 1
                if op.name == "barrier":
                    self.barriers.setdefault((block.rank, op.barrier), set()).add(block.number)
                names: list[object] = list(op.ends) if op.name in WAITS else []
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

    def _all_blocks(self) -> Iterator[ThreadBlock]:
        return (block for blocks in self.blocks for block in blocks)

    def _begin(self, rank: int) -> dict[str, tuple[Memory, int]]:
        """The rank's memory with what the caller put there; all of it is the caller's until the rank has begun."""
        plan, chunks, name = self.plan, self.plan.chunks[rank], self.plan.collective.name
        memories = {**self.whole[rank], "s": self.scratch[self.half][rank]}
        buffers = {letter: (memory, 0) for letter, memory in memories.items()}
        if plan.in_place and name == "all_gather":
            buffers["i"] = (memories["o"], rank * chunks["i"])
        elif plan.in_place:
            buffers["o"] = (memories["i"], rank * chunks["o"] if name == "reduce_scatter" else 0)
        event = self._event((self.ended[rank],) if self.ended[rank] >= 0 else (), (rank, -1, -1, self.number))
        own = self.interpreter.contents.own(rank)
        given, at = buffers["i"]
        parts = [Piece(first + at, stop + at, own, base - at) for first, stop, base in self._parts(rank, "i")]
        for memory in self._of_caller(rank, buffers):
            memory.write(_with_gaps(parts if memory is given else [], memory.length), event)
        self.begun.append(event)
        for block in self.blocks[rank]:
            block.barrier = event
        return buffers

    def _of_caller(self, rank: int, buffers: Mapping[str, tuple[Memory, int]]) -> list[Memory]:
        """The memories that are the rank's caller's between runs: all but packets."""
        used = {letter: memory for letter, (memory, _) in buffers.items()}
        if rank in self.packet_ranks:
            del used["s"]
        return [memory for memory in {id(memory): memory for memory in used.values()}.values() if memory.length]

    def _parts(self, rank: int, buffer: str) -> list[tuple[int, int, int]]:
        """Blocks of the array in a rank's input or output: first chunk, end, and the distance to the array's."""
        c = self.plan.collective
        n, length = c.num_ranks, self.plan.chunks[rank][buffer]
        mine: Sequence[int] = {
            "all_gather": (rank,) if buffer == "i" else range(n),
            "reduce_scatter": (rank,) if buffer == "o" else range(n),
            "all_to_all": range(rank * n, rank * n + n) if buffer == "i" else range(rank, n * n, n),
        }.get(c.name, (0,))
        if self.plan.is_sendrecv:
            mine = (0,)
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
                terms = self.interpreter.contents[piece.content].terms
                if self.plan.is_sendrecv:
                    if start + offset == piece.start and len(terms) == 1:
                        self.senders.append(terms[0][0])
                    required = frozenset(self.senders[rank:] or [rank])
                for whose, distance, count in terms:
                    if piece.shift + distance != base - offset:
                        problem = f"chunk {piece.start + piece.shift + distance} of rank {whose} stands there"
                    counts[whose] = count
                problem = problem or describe_counts(counts, required)
                if problem:
                    self._wrong_output(rank, memory.writer(piece.start), piece, offset, problem)

    def _wrong_output(self, rank: int, writer: int, piece: Piece, offset: int, problem: str) -> None:
        known = self.places[writer][1] >= 0
        last = f"last write: {self._name(writer)}" if known else "it is never written"
        where = f"output[{piece.start - offset}:{piece.stop - offset}]"
        raise VerificationError(
            f"{self.title} is wrong at rank {rank}, {where}: {problem}; {last}", grid=self._grid(writer)
        )

    def _check_senders(self) -> None:
        """Every rank must have got another's input, and no two the same."""
        for rank, sender in enumerate(self.senders):
            if sender == rank or self.senders.count(sender) > 1:
                others = [str(r) for r, s in enumerate(self.senders) if s == sender]
                raise VerificationError(
                    f"{self.title} is wrong: rank {', '.join(others)} ends with the input of rank {sender}; every "
                    "rank is to get one other's, and every rank's is to arrive once"
                )

    def _end(self, rank: int) -> None:
        """The rank has finished: its memory is the caller's, who may do anything with it."""
        waits = [e for block in self.blocks[rank] for e in (block.barrier, *block.since)]
        event = self._event(waits or (self.begun[rank],), (rank, -2, -2, self.number))
        self.ended[rank] = event
        for memory in self._of_caller(rank, self.buffers[rank]):
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

    def _event(self, waits: Sequence[int], place: _Place) -> int:
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
                waited = what.get(op.name, f"a signal from rank {peers}")
                if missing := self._missing(op):
                    waited = f"packets in {self._say(missing)}, which nobody puts there"
                raise self._wrong(block, block.at, f"waits for ever for {waited}")

    def _step(self, block: ThreadBlock, op: Op) -> bool:
        """Carry out an operation if it may be; whether it was."""
        place = (block.rank, block.number, block.at, self.number)
        if op.name == "nop":
            block.meet(self._event((block.barrier, *block.since), place))
        elif op.name == "barrier":
            return self._barrier(block, op)
        elif op.name in (*WAITS, "sem_acquire"):
            counters = (
                [self.semaphores[block.rank][number] for number in op.semaphores]
                if op.name == "sem_acquire"
                else [self.signals.setdefault(end, Counting()) for end in op.ends]
            )
            if not all(counting.may_lower() for counting in counters):
                return False
            known = [event for counting in counters for event in counting.lower()]
            # Whoever it was that signalled, and how, its rank has begun.
            begun = [self.begun[self.plan.peers[end].rank] for end in op.ends]
            block.since.append(self._event([block.barrier, *begun, *(known if op.name != "rlxwait" else ())], place))
        elif op.name == "sem_release":
            event = self._event((block.barrier,), place)
            block.since.append(event)
            for number in op.semaphores:
                self.semaphores[block.rank][number].raise_by(block, event)
        elif op.name in ("signal", "rlxsignal"):
            event = self._event((block.barrier,), place)
            block.since.append(event)
            for thread, end in enumerate(op.ends):
                self._signal(block, end, thread, event, relaxed=op.name == "rlxsignal")
        elif op.name == "flush":
            self._flush(block, op, place)
        elif self._missing(op):
            return False
        elif op.targets[0].size:  # of a group's blocks, one may have no part
            self.done.append((block.rank, op))
            if op.kind == "port":
                self._put(block, op, place)
            elif op.name in PACKETS:
                self._move_packets(block, op, place)
            else:
                event = self._event((block.barrier,), place)
                block.since.append(event)
                self._move(op, event)
        block.at += 1
        return True

    def _barrier(self, block: ThreadBlock, op: Op) -> bool:
        """All blocks pass in the step of the last one to come."""
        here = self.arrived.setdefault((block.rank, op.barrier), [])
        if block not in here:
            here.append(block)
        if len(here) < op.num_blocks:
            return False
        waits = [event for each in here for event in (each.barrier, *each.since)]
        event = self._event(waits, (block.rank, block.number, block.at, self.number))
        for each in here:
            each.meet(event)
            each.at += 1
        here.clear()
        return True

    def _signal(self, block: ThreadBlock, end: End, thread: int, event: int, *, relaxed: bool = False) -> None:
        """Tell the other end; through a port, after everything that this thread knows to be in it."""
        counting = self.signals[self.plan.peers[end]]
        if relaxed:
            counting.raise_by(block, -1)
            return
        if end.kind == "port":
            moving = self.moving.setdefault(end, [])
            before = [put.event for put in moving if put.precedes(block, thread)]
            self.moving[end] = [put for put in moving if not put.precedes(block, thread)]
            key = (end, block.rank, block.number)
            before += [self.last_signal[key]] if key in self.last_signal else []
            event = self._event([event, *before], (block.rank, block.number, block.at, self.number))
            self.last_signal[key] = event
        counting.raise_by(block, event)

    def _put(self, block: ThreadBlock, op: Op, place: _Place) -> None:
        """Hand data to ports, which move it later."""
        if op.name in PACKETS:  # all threads look whether the packets are there, and meet before they are handed over
            for unit in _units(op):
                for source in unit.sources[:1]:
                    event = self._event((block.barrier, self._writer(source)), place)
                    self.interpreter.read(self._span(source), event)
                    block.since.append(event)
            block.meet(self._event((block.barrier, *block.since), place))
        issue = self._event((block.barrier,), place)
        block.since.append(issue)
        for thread, (end, target) in enumerate(zip(op.ends, op.targets, strict=True)):
            source = op.sources[0] if op.name in TO_ALL else op.sources[thread]
            peer = self.plan.peers[end].rank
            if peer != target.rank:
                raise self._wrong(block, block.at, f"puts to rank {target.rank} on a channel to rank {peer}")
            once = replace(op, sources=(source,), targets=(target,))
            for unit in _units(once) if target.is_packet else (once,):
                event = self._event((issue,), place)
                put = Put(event, (block.rank, block.number), block.barriers, thread)
                self.moving.setdefault(end, []).append(put)
                self.unflushed.setdefault(end, []).append(put)
                self._write(unit.targets[0], self.interpreter.read(self._span(unit.sources[0]), event), event)
            if op.name in PUTS[1:]:
                self._signal(block, end, thread, issue)
        if op.name == "pwsf":
            self._flush(block, op, place)

    def _flush(self, block: ThreadBlock, op: Op, place: _Place) -> None:
        done: list[int] = []
        for thread, end in enumerate(op.ends):
            done += [put.event for put in self.unflushed.get(end, ()) if put.precedes(block, thread)]
        block.since.append(self._event((block.barrier, *done), place))

    # -- data ---------------------------------------------------------------------------------------------

    def _move(self, op: Op, event: int) -> None:
        """Plain data: one event, as its elements are spread over threads anyhow."""
        run = self.interpreter
        sources, targets = ([self._span(chunks) for chunks in side] for side in (op.sources, op.targets))
        if op.name in SUMS:
            self._check_sum(event)
            for target in targets:
                run.apart(sources, target, event)
            value = reduce(run.add, [run.read(source, event) for source in sources])
            for target in targets:
                run.write(target, value, event)
            return
        for number, target in enumerate(targets):
            source = sources[0] if op.name in TO_ALL else sources[number]
            run.apart([source], target, event)
            if not source.coincides(target):  # in place: onto itself
                run.write(target, run.read(source, event), event)

    def _move_packets(self, block: ThreadBlock, op: Op, place: _Place) -> None:
        """Packets, element by element: whoever finds one knows that it was written, and what was read for it, read.

        It does not know more of the same operation than that. So each element is read in an event of its own, and
        each of its targets written in another.
        """
        run = self.interpreter
        for unit in (op,) if self.is_sequence else _units(op):
            pairs = [(unit.sources, unit.targets)]
            if op.name not in (*SUMS, *TO_ALL):
                pairs = [((a,), (b,)) for a, b in zip(unit.sources, unit.targets, strict=True)]
            for sources, targets in pairs:
                writers = [] if self.is_sequence else [self._writer(source) for source in sources if source.is_packet]
                event = self._event((block.barrier, *writers), place)
                if op.name in SUMS:
                    self._check_sum(event)
                block.since.append(event)
                value = reduce(run.add, [run.read(self._span(source), event) for source in sources])
                for target in targets:
                    if self._span(target).coincides(self._span(sources[0])) and len(sources) == 1:
                        continue
                    written = event
                    if len(targets) > 1:
                        written = self._event((event,), place)
                        block.since.append(written)
                    self._write(target, value, written)

    def _check_sum(self, event: int) -> None:
        if not self.plan.collective.reduces:
            name = self.title.partition(" ")[0]
            raise self._blame(event, f"reduces, but {name} combines nothing")

    def _write(self, target: Chunks, value: list[Piece], event: int) -> None:
        """Write data, and flags where it is packets."""
        if target.is_packet:
            flags = self.flags[self.half][target.rank]
            first, stop = target.index, target.index + target.size
            if any(piece.content == self.number + 1 for piece in flags.pieces(first, stop)):
                raise self._blame(
                    event,
                    f"puts packets to {self._say(self._span(target))} where this run has put some; their flag is the "
                    "run's number, so nobody could tell them apart",
                )
            flags.fill(first, stop, self.number + 1, 0)
        self.interpreter.write(self._span(target), value, event)

    def _missing(self, op: Op) -> Span | None:
        """Packets that an operation reads and that nobody has put there yet."""
        if op.name in PACKETS:
            for source in op.sources:
                if source.is_packet and source.size:
                    flags = self.flags[self.half][source.rank]
                    for piece in flags.pieces(source.index, source.index + source.size):
                        if piece.content != self.number + 1:
                            return Span(self.scratch[self.half][source.rank], piece.start, piece.stop - piece.start)
        return None

    def _writer(self, packet: Chunks) -> int:
        span = self._span(packet)
        return span.memory.writer(span.start)

    def _span(self, chunks: Chunks) -> Span:
        memory, start = self.buffers[chunks.rank][chunks.buffer]
        return Span(memory, start + chunks.index, chunks.size)

    # -- order and messages -------------------------------------------------------------------------------

    def _check_order(self) -> None:
        memories = [memory for half in self.scratch for memory in half]
        memories += [memory for buffers in self.whole for memory in buffers.values()]
        found = unordered((memory for memory in memories if memory.length), self.waits)
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
        ranks = range(self.plan.collective.num_ranks)
        return next(r for r in ranks if memory in self.whole[r].values() or any(memory is h[r] for h in self.scratch))

    def _name(self, event: int) -> str:
        rank, number, at, run = self.places[event]
        when = f" of run {run + 1}" if self.num_runs > 1 else ""
        if number < 0:
            return f"rank {rank}'s caller {'before it begins' if number == -1 else 'after it has ended'}{when}"
        return f"rank {rank}, thread block {number}, {self.plan.blocks[rank][number][at].label}{when}"

    def _blame(self, event: int, problem: str) -> VerificationError:
        rank, number, at, _ = self.places[event]
        return self._wrong(self.blocks[rank][number], at, problem)

    def _wrong(self, block: ThreadBlock, at: int, problem: str) -> VerificationError:
        where = f"rank {block.rank}, thread block {block.number}, {block.operations[at].label}"
        grid = draw_operations(self.plan, block.rank, block.number, at)
        return VerificationError(f"{self.title} is wrong at {where}: it {problem}", grid=grid)

    def _grid(self, event: int) -> str:
        rank, number, at, _ = self.places[event]
        return draw_operations(self.plan, rank, number, at) if number >= 0 else ""


def _units(op: Op) -> Iterator[Op]:
    """The same operation on each unit by itself."""
    for k in range(op.targets[0].size):
        sources, targets = (
            tuple(replace(span, index=span.index + k, size=1) for span in side) for side in (op.sources, op.targets)
        )
        yield replace(op, sources=sources, targets=targets)


def _with_gaps(parts: Sequence[Piece], length: int) -> list[Piece]:
    """Pieces that fill a memory, with nothing between those given."""
    made: list[Piece] = []
    at = 0
    for piece in parts:
        if at < piece.start:
            made.append(Piece(at, piece.start, EMPTY, 0))
        made.append(piece)
        at = piece.stop
    if at < length:
        made.append(Piece(at, length, EMPTY, 0))
    return made
