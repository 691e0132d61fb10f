"""Writes programs of all ranks from moves and sums of spans, given in an order in which they may be done.

Every element is followed with its symbolic content, so that what holds nothing is left out, and a sum is marked final
where it is complete. An instruction needs the last one that wrote what it reads, and those that have used what it
overwrites.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mycel.collectives.program import Buffer, Channel, Instruction, Op, Program
from mycel.collectives.spec import Collective
from mycel.collectives.verify.interpreter import paired
from mycel.collectives.verify.memory import EMPTY, Contents, Memory, Piece
from mycel.collectives.verify.program import blocks_in

__all__ = ["Place", "Writer"]

#: A rank, the letter of a buffer and an element in it.
Place = tuple[int, str, int]
_BUFFERS = {"i": Buffer.INPUT, "o": Buffer.OUTPUT, "s": Buffer.SCRATCH}
_IN_PLACE = ("all_reduce", "broadcast", "reduce")
#: Longest scratch that is followed; no array is longer.
_ENDLESS = 1 << 62


class Writer:
    """Programs of all ranks in the making.

    Args:
        collective: what they carry out; blocks of equal length, or of weights.
        num_elements: of the whole array.
        channels: of each rank; one at most from any rank to any other.
        piece_elements: longest message; ``None``: as they come.
    """

    def __init__(
        self,
        collective: Collective,
        num_elements: int,
        *,
        channels: Sequence[Sequence[Channel]],
        piece_elements: int | None = None,
    ) -> None:
        self.collective, self.num_elements = collective, num_elements
        self._piece = piece_elements
        n = collective.num_ranks
        self._contents = Contents()
        self._complete = tuple((rank, 0, 1) for rank in range(n))
        self._rows: list[list[Instruction]] = [[] for _ in range(n)]
        self._channels = [tuple(mine) for mine in channels]
        self._number = [{(each.src, each.dst): at for at, each in enumerate(mine)} for mine in channels]
        self._scratch = [0] * n
        self._memory = [self._begin(rank) for rank in range(n)]

    def _begin(self, rank: int) -> dict[str, Memory]:
        c = self.collective
        empty = Program.from_instructions(
            (), collective=c, rank=rank, num_elements=self.num_elements, scratch_elements=0, channels=()
        )
        memory = {letter: Memory(letter, empty.length(buffer)) for letter, buffer in _BUFFERS.items()}
        memory["s"] = Memory("s", _ENDLESS)
        letter = "o" if c.name in _IN_PLACE else "i"
        sizes, at = empty.block_sizes.tolist(), 0
        for block in blocks_in(c, rank, _BUFFERS[letter]):
            first, size = sum(sizes[:block]), sizes[block]
            if size and c.initial(rank, block):
                memory[letter].fill(at, at + size, self._contents.own(rank), first - at)
            at += size
        return memory

    def reserve(self, rank: int, count: int) -> int:
        """The first of so many elements of a rank's scratch that are nobody's yet."""
        first = self._scratch[rank]
        self._scratch[rank] += count
        return first

    def copy(self, rank: int, source: tuple[str, int], target: tuple[str, int], count: int) -> None:
        """Within a rank."""
        self.move((rank, *source), (rank, *target), count)

    def move(self, source: Place, target: Place, count: int) -> None:
        """``count`` elements, as far as there is something in them."""
        if source == target:
            return
        for first, stop in self._held([source], count):
            self._one(source, target, first, stop)

    def add(self, sources: list[Place], target: Place, count: int) -> None:
        """The sum of all sources, at least two, formed at the target's rank, where it is put.

        Args:
            sources: one of them at least on the target's rank.
            target: apart from all sources, or one of them.
        """
        for first, stop in self._held(sources, count):
            self._sum(list(sources), target, first, stop)

    def programs(self) -> list[Program]:
        """One a rank."""
        return [
            Program.from_instructions(
                rows,
                collective=self.collective,
                rank=rank,
                num_elements=self.num_elements,
                scratch_elements=self._scratch[rank],
                channels=self._channels[rank],
            )
            for rank, rows in enumerate(self._rows)
        ]

    # -- instructions -------------------------------------------------------------------------------------

    def _held(self, sources: list[Place], count: int) -> Iterator[tuple[int, int]]:
        """Runs of elements, counted from the first, in which all sources hold something, in pieces."""
        empty: list[tuple[int, int]] = []
        for rank, letter, start in sources:
            pieces = self._memory[rank][letter].pieces(start, start + count)
            empty += [(p.start - start, p.stop - start) for p in pieces if p.content == EMPTY]
        runs, at = [], 0
        for first, stop in sorted(empty):
            if first > at:
                runs.append((at, first))
            at = max(at, stop)
        if at < count:
            runs.append((at, count))
        length = self._piece or count
        for first, stop in runs:
            for start in range(first, stop, length):
                yield start, min(start + length, stop)

    def _sum(self, sources: list[Place], target: Place, first: int, stop: int) -> None:
        rank = target[0]
        if target in sources:
            sources.remove(target)
        else:
            local = next(source for source in sources if source[0] == rank)
            sources.remove(local)
            remote = next((source for source in sources if source[0] != rank), None)
            if remote is None:
                self._one(local, target, first, stop)
            else:
                sources.remove(remote)
                self._one(remote, target, first, stop, operand=local)
        for source in sources:
            self._one(source, target, first, stop, operand=target)

    def _one(self, source: Place, target: Place, first: int, stop: int, operand: Place | None = None) -> None:
        """``target = source``, or with an operand ``target = operand (+) source``."""
        (src, letter, at), (dst, there, to) = source, target
        at, to, count = at + first, to + first, stop - first
        value = self._memory[src][letter].pieces(at, at + count)
        if operand is not None:
            own = operand[2] + first
            held = self._memory[dst][operand[1]].pieces(own, own + count)
            value = _sum([p.moved(-at) for p in value], [p.moved(-own) for p in held], self._contents)
        else:
            value = [p.moved(-at) for p in value]
        for begin, end, final in self._runs(value, is_sum=operand is not None):
            span = (begin, end - begin)
            part = [Piece(max(p.start, begin), min(p.stop, end), p.content, p.shift) for p in value
                    if p.start < end and p.stop > begin]  # fmt: skip
            if src == dst:
                op = Op.COPY if operand is None else Op.REDUCE
                self._row(dst, op, -1, (there, to + span[0]), span[1], (letter, at + span[0]), final, part)
                continue
            self._row(src, Op.SEND, self._number[src][src, dst], (letter, at + span[0]), span[1], None, False, [])
            op = Op.RECV if operand is None else Op.RECV_REDUCE
            reads = None if operand is None else (operand[1], operand[2] + first + span[0])
            self._row(dst, op, self._number[dst][src, dst], (there, to + span[0]), span[1], reads, final, part)

    def _runs(self, value: list[Piece], *, is_sum: bool) -> Iterator[tuple[int, int, bool]]:
        """First element, end, and whether the sum is complete there."""
        begin = value[0].start
        for k, piece in enumerate(value):
            final = self._is_final(piece, is_sum)
            if k + 1 == len(value) or self._is_final(value[k + 1], is_sum) != final:
                yield begin, piece.stop, final
                begin = piece.stop

    def _is_final(self, piece: Piece, is_sum: bool) -> bool:
        return is_sum and self._contents[piece.content].terms == self._complete

    def _row(
        self,
        rank: int,
        op: Op,
        channel: int,
        place: tuple[str, int],
        count: int,
        operand: tuple[str, int] | None,
        final: bool,
        value: list[Piece],
    ) -> None:
        number, memory = len(self._rows[rank]), self._memory[rank]
        for each in memory.values():
            each.turns.clear()
        letter, at = place
        if op in (Op.SEND, Op.REDUCE):
            memory[letter].read(at, at + count, number)
        if operand is not None:
            memory[operand[0]].read(operand[1], operand[1] + count, number)
        if op != Op.SEND:
            memory[letter].write([piece.moved(at) for piece in value], number)
        needs = {other for each in memory.values() for turn in each.turns for other in turn.before}
        source = operand or ("i", 0)
        self._rows[rank].append(
            Instruction(
                op=op,
                channel=channel,
                buffer=_BUFFERS[letter],
                offset=at,
                count=count,
                operand_buffer=_BUFFERS[source[0]],
                operand_offset=source[1],
                final=final,
                needs=tuple(sorted(needs - {number})),
            )
        )


def _sum(left: list[Piece], right: list[Piece], contents: Contents) -> list[Piece]:
    """Two values of one length, added."""
    return [contents.add(a, b) for a, b in paired(left, right)]
