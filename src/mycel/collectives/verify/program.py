"""Verifies all ranks' programs of one collective together, element by element.

Five checks, each of which the next relies on: the programs belong together; sends meet receives (``flow``); nothing
deadlocks, even without buffers (``flow``); replayed in one possible order with symbolic contents (``memory``),
every required element ends with every contribution exactly once, and only then the mean is taken; and every two
accesses of a rank to the same element, one of them a write, are ordered (``order``), so that every other possible
order gives the same result.

The model of time is that of ``mycel.collectives.program``. An instruction touches memory after the instructions it
needs, and its predecessor on its channel, are complete. A send is complete when its bytes are handed over, which is
before its receive is complete, but possibly before that one starts. A ``recv`` writes only what has come in, so it
writes nothing before its send has started; a ``recv_reduce`` may look at its operand, and prepare its destination,
as soon as it starts. Local instructions that need others come one after the other, as on a channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from mycel.collectives.program import Buffer, Op, Program
from mycel.collectives.spec import Collective
from mycel.collectives.verify.flow import Flow, describe, trace_flow
from mycel.collectives.verify.interpreter import Interpreter, Span, Value, paired, unordered
from mycel.collectives.verify.memory import Memory, Piece
from mycel.collectives.verify.schedule import describe_counts
from mycel.errors import VerificationError

__all__ = ["blocks_in", "verify_programs"]

_IN_PLACE = ("all_reduce", "broadcast", "reduce")


def verify_programs(programs: Sequence[Program], *, every_size: bool = False) -> None:
    """Return if the programs together carry out their collective, however they are timed; raise otherwise.

    All_gather is verified twice: with INPUT apart, and with INPUT being the rank's own block of OUTPUT, where a
    copy onto itself does nothing.

    Args:
        programs: one of each rank, in any order, for the same collective and size; and of switches that copy and
            add, which hold nothing before and may hold anything after.
        every_size: ask for more, so that what follows is true of the programs that the same schedule is lowered to
            at any other size, too: accesses must be ordered by needs and messages alone, and needs point backwards
            (``mycel.collectives.proof`` says why that is enough).

    Raises:
        VerificationError: the message names rank, instruction, channel and elements.

    Examples:
        >>> from mycel.collectives.lower import lower
        >>> from mycel.collectives.synth import synthesize
        >>> from mycel.topology import load_topology
        >>> programs = lower(synthesize(load_topology("star:ranks=3"), "all_reduce"), 12, piece_elements=2)
        >>> verify_programs(programs)
        >>> verify_programs([programs[0], programs[0], programs[2]])
        Traceback (most recent call last):
        mycel.errors.VerificationError: all_reduce over 3 ranks: expected one program of each of ranks 0..2, got ...
    """
    if not programs:
        raise VerificationError("no programs to verify")
    collective = programs[0].collective
    title = f"{collective.name} over {collective.num_ranks} ranks"
    ordered = _one_of_each_rank(programs, title)
    flow = trace_flow(ordered, title, every_size=every_size)
    for aliased in (False, True) if collective.name == "all_gather" else (False,):
        _Replay(ordered, flow, title, aliased=aliased).run()


def _one_of_each_rank(programs: Sequence[Program], title: str) -> list[Program]:
    model = programs[0]
    for program in programs:
        for name in ("collective", "num_elements", "block_elements", "version"):
            ours, theirs = getattr(program, name), getattr(model, name)
            if ours != theirs:
                raise VerificationError(
                    f"{title}: rank {program.rank} and rank {model.rank} disagree about {name}: {ours} and {theirs}"
                )
    by_rank = {program.rank: program for program in programs}
    ranks = range(model.collective.num_ranks)
    expected = range(max(len(ranks), len(programs)))
    if sorted(program.rank for program in programs) != list(expected):
        raise VerificationError(
            f"{title}: expected one program of each of ranks 0..{ranks[-1]}, got ranks "
            f"{sorted(program.rank for program in programs)}"
        )
    return [by_rank[rank] for rank in expected]


@dataclass(frozen=True, slots=True)
class _Row:
    """The columns of one instruction, as plain integers."""

    op: int
    buffer: int
    offset: int
    count: int
    operand_buffer: int
    operand_offset: int
    final: int


def _rows(program: Program) -> list[_Row]:
    c = program.columns
    names = ("op", "buffer", "offset", "count", "operand_buffer", "operand_offset", "final")
    return [_Row(*values) for values in zip(*(c[name].tolist() for name in names), strict=True)]


class _Replay:
    """One symbolic run of all programs."""

    def __init__(self, programs: list[Program], flow: Flow, title: str, *, aliased: bool) -> None:
        self.programs = programs
        self.flow = flow
        self.title = f"{title}, INPUT being the rank's own block of OUTPUT," if aliased else title
        self.interpreter = Interpreter(self._wrong, self._say)
        self.rows = [_rows(program) for program in programs]
        #: Of each rank and buffer: the memory, and where the buffer starts in it.
        self.places: list[list[tuple[Memory, int]]] = []
        for program in programs:
            memories = {b: Memory(b.name.lower(), program.length(b)) for b in Buffer}
            places = [(memories[b], 0) for b in Buffer]
            if aliased:
                before, _ = _extents(program)[program.rank]
                places[Buffer.INPUT] = (memories[Buffer.OUTPUT], before)
            self._fill(program, places)
            self.places.append(places)
        self.in_flight: dict[int, Value] = {}

    def run(self) -> None:
        for event, (rank, index) in enumerate(self.flow.nodes):
            self._step(event, rank, index)
        for program in self.programs:
            self._check_output(program)
        self._check_order()

    # -- before and after ---------------------------------------------------------------------------------

    def _fill(self, program: Program, places: list[tuple[Memory, int]]) -> None:
        c, rank = program.collective, program.rank
        source = Buffer.OUTPUT if c.name in _IN_PLACE else Buffer.INPUT
        memory, at = places[source]
        extents = _extents(program)
        for block in blocks_in(c, rank, source):
            first, end = extents[block]
            size = end - first
            if size and c.initial(rank, block):
                memory.fill(at, at + size, self.interpreter.contents.own(rank), first - at)
            at += size

    def _check_output(self, program: Program) -> None:
        c, rank = program.collective, program.rank
        memory, start = self.places[rank][Buffer.OUTPUT]
        extents, stop = _extents(program), start
        for block in blocks_in(c, rank, Buffer.OUTPUT):
            required = c.required(rank, block)
            first, end = extents[block]
            at, stop = stop, stop + end - first
            for piece in memory.pieces(at, stop) if required is not None and at < stop else ():
                problem = self._wrong_content(piece, first - at, required or frozenset(), c)
                if problem:
                    writer = memory.writer(piece.start)
                    last = f"last write: {self._name(writer)}" if writer >= 0 else "it is never written"
                    where = f"output[{piece.start - start}:{piece.stop - start}]"
                    raise VerificationError(f"{self.title} is wrong at rank {rank}, {where}: {problem}; {last}")

    def _wrong_content(self, piece: Piece, base: int, required: frozenset[int], c: Collective) -> str:
        """What is wrong with a piece of OUTPUT whose position ``p`` is to hold array element ``p + base``."""
        content = self.interpreter.contents[piece.content]
        counts = [0] * c.num_ranks
        for rank, distance, count in content.terms:
            if piece.shift + distance != base:
                start, right = piece.start + piece.shift + distance, piece.start + base
                return f"element {start} of rank {rank} stands where element {right} belongs"
            counts[rank] = count
        problem = describe_counts(counts, required)
        if not problem and c.reduces and not content.is_final:
            return "no reduction of it is marked final, so an average would not be divided"
        return problem

    # -- one instruction ----------------------------------------------------------------------------------

    def _step(self, event: int, rank: int, index: int) -> None:
        row = self.rows[rank][index]
        is_sum = row.op in (Op.RECV_REDUCE, Op.REDUCE)
        if row.final and not is_sum:
            raise self._wrong(event, "is marked final, which only a recv_reduce or a reduce can be")
        c = self.programs[rank].collective
        if is_sum and not c.reduces:
            raise self._wrong(event, f"reduces, but {c.name} combines nothing")
        place = self._span(rank, row.buffer, row.offset, row.count)
        if row.op == Op.SEND:
            self.in_flight[event] = self.interpreter.read(place, event)
            return
        value = [] if row.op >= Op.COPY else self.in_flight.pop(self.flow.sender[event])
        if row.op != Op.RECV:
            operand = self._span(rank, row.operand_buffer, row.operand_offset, row.count)
            self.interpreter.apart([operand], place, event)
            if row.op == Op.REDUCE:
                value = self.interpreter.read(place, event)
            if row.op == Op.COPY and operand.coincides(place):
                return
            held = self.interpreter.read(operand, event)
            if row.op == Op.COPY:
                value = held
            else:
                other = "what comes in" if row.op == Op.RECV_REDUCE else "what stands there"
                value = self._reduce(event, held, value, other, final=bool(row.final))
        self.interpreter.write(place, value, event)

    def _span(self, rank: int, buffer: int, offset: int, count: int) -> Span:
        memory, base = self.places[rank][buffer]
        return Span(memory, base + offset, count)

    def _reduce(self, event: int, operand: Value, incoming: Value, other: str, *, final: bool) -> Value:
        n, contents = self.programs[0].collective.num_ranks, self.interpreter.contents
        out: Value = []
        for pair in paired(operand, incoming):
            for piece, what in zip(pair, ("its operand", other), strict=True):
                if contents[piece.content].is_final:
                    raise self._wrong(event, f"adds to {what} after its final reduction")
            total = contents.add(*pair)
            if final:
                terms = contents[total.content].terms
                if terms != tuple((r, 0, 1) for r in range(n)):
                    counts = [sum(count for r, _, count in terms if r == rank) for rank in range(n)]
                    problem = describe_counts(counts, frozenset(range(n)))
                    problem = problem or "contributions of different elements are mixed"
                    raise self._wrong(event, f"is marked final too early: {problem}")
                total = contents.finish(total)
            out.append(total)
        return out

    def _check_order(self) -> None:
        flow = self.flow
        is_recv = [self.rows[rank][index].op == Op.RECV for rank, index in flow.nodes]
        begins_after = [sender if recv else -1 for sender, recv in zip(flow.sender, is_recv, strict=True)]
        memories = (memory for places in self.places for memory, _ in places)
        found = unordered(memories, flow.waits, completes_after=flow.sender, begins_after=begins_after)
        if found:
            (rank, first), (_, second) = flow.nodes[found.first], flow.nodes[found.second]
            raise VerificationError(
                f"{self.title} is wrong at rank {rank}, {found.memory.name}[{found.start}:{found.stop}]: "
                f"{self._name(found.first)} and {self._name(found.second)} touch it in no fixed order; let "
                f"instruction {second} need {first}"
            )

    # -- messages -----------------------------------------------------------------------------------------

    def _name(self, event: int) -> str:
        rank, index = self.flow.nodes[event]
        return describe(self.programs[rank], index)

    def _say(self, span: Span) -> str:
        return f"{span.memory.name}[{span.start}:{span.stop}]"

    def _wrong(self, event: int, problem: str) -> VerificationError:
        return VerificationError(f"{self.title} is wrong: {self._name(event)} {problem}")


def _extents(program: Program) -> list[tuple[int, int]]:
    """First element and end of every block in the whole array."""
    c, lengths = program.collective, program.block_elements
    if lengths is None:
        whole = sum(c.block_weights)
        lengths = tuple(program.num_elements * weight // whole for weight in c.block_weights)
    return list(pairwise(accumulate(lengths, initial=0)))


def blocks_in(c: Collective, rank: int, buffer: Buffer) -> Sequence[int]:
    """Which of the array's blocks stand in INPUT or OUTPUT, one after the other."""
    n, of_input = c.num_ranks, buffer is Buffer.INPUT
    if rank >= n:
        return ()
    if c.name in _IN_PLACE:
        return () if of_input else (0,)
    if c.name == "all_to_all":
        return range(rank * n, rank * n + n) if of_input else range(rank, n * n, n)
    if of_input == (c.name in ("all_gather", "gather")):
        return (rank,)
    return range(n) if c.root is None or c.root == rank else ()
