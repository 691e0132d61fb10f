"""From statements to transfers: chunks that no statement divides, and what each transfer waits for.

A program's order says what every statement reads: what the statements before it, or before its step, have left at
its source. A transfer waits for those that made it, which have come to its source. That is all that a rank can wait
for (``mycel.collectives.lower``). What a statement overwrites may have been read, or written, by others before; that
these are over must follow from what it waits for, or it is a race: then the sum is formed apart, in a place of its
own, where the collective and the kind of statement allow that (decision 0093), and else the program is refused, with
both statements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, groupby, pairwise
from math import lcm
from typing import NoReturn

from mycel.collectives.columns import Transfer
from mycel.collectives.language.statement import Statement
from mycel.collectives.ordering import level_order, renumbered
from mycel.collectives.schedule import Chunk, Schedule
from mycel.collectives.spec import Collective
from mycel.errors import VerificationError
from mycel.topology.model import Topology

__all__ = ["schedule_of"]


def schedule_of(
    statements: Sequence[Statement], topology: Topology, collective: Collective, method: str
) -> tuple[Schedule, tuple[Statement, ...]]:
    """The schedule that statements say, and the statement of each of its transfers.

    Args:
        statements: in their order.
        topology: the fabric.
        collective: what they are to do.
        method: name to put on it.

    Raises:
        VerificationError: two statements race, and no order of theirs can be kept by ranks.
        ScheduleError: the schedule is malformed.
    """
    chunks, num_units, touched = _cut(statements, collective)
    numbered: list[tuple[int, int, Transfer]] = []  # statement, then number in its chunk
    found: dict[tuple[int, int], int] = {}
    per_chunk = [_Chunk(number, collective, statements).transfers(mine) for number, mine in enumerate(touched)]
    for chunk, transfers in enumerate(per_chunk):
        numbered += [(touched[chunk][i], chunk, t) for i, t in enumerate(transfers)]
        found |= {(chunk, i): touched[chunk][i] for i in range(len(transfers))}
    numbered.sort(key=lambda row: row[:2])
    place = {(chunk, statement): number for number, (statement, chunk, _) in enumerate(numbered)}
    transfers = [
        Transfer(
            chunk=chunk,
            src=t.src,
            dst=t.dst,
            reduce=t.reduce,
            path=t.path,
            after=tuple(sorted(place[chunk, found[chunk, i]] for i in t.after)),
            places=t.places,
        )
        for _, chunk, t in numbered
    ]
    n = collective.num_ranks
    if any(any(t.places) for t in transfers):
        order = _kept_order(transfers)
    else:  # of a level, ranks begin with different partners, as ``classics.strands`` does
        order = level_order(transfers, lambda t: ((t.dst - t.src) % n, t.src))
    schedule = Schedule(
        collective=collective,
        topology=topology,
        method=method,
        num_units=num_units,
        chunks=chunks,
        transfers=renumbered(transfers, order),
    )
    return schedule, tuple(statements[numbered[i][0]] for i in order)


def _cut(statements: Sequence[Statement], collective: Collective) -> tuple[tuple[Chunk, ...], int, list[list[int]]]:
    """Chunks, units of the array, and the statements that move each chunk."""
    edges: list[set[Fraction]] = [{Fraction(0), Fraction(1)} for _ in range(collective.num_blocks)]
    for s in statements:
        edges[s.block] |= {s.start, s.stop}
    units = lcm(*(edge.denominator for block in edges for edge in block))
    chunks: list[Chunk] = []
    first: list[dict[Fraction, int]] = []  # of each block, the chunk that starts at an edge
    weights = collective.block_weights
    for start, weight, cuts in zip(accumulate(weights, initial=0), weights, edges, strict=False):
        rising = sorted(cuts)
        first.append({edge: len(chunks) + (i if weight else 0) for i, edge in enumerate(rising)})
        for low, high in pairwise(rising) if weight else ():
            begin, end = (int((start + weight * edge) * units) for edge in (low, high))
            chunks.append(Chunk(start=begin, stop=end))
    touched: list[list[int]] = [[] for _ in chunks]
    for number, s in enumerate(statements):
        for chunk in range(first[s.block][s.start], first[s.block][s.stop]):
            touched[chunk].append(number)
    return tuple(chunks), units * collective.total_weight, touched


def _kept_order(transfers: Sequence[Transfer]) -> list[int]:
    """Those that can go first before others, where a rank's sums are formed in the order in which they were said."""
    levels: list[int] = []
    last: dict[tuple[int, int], int] = {}
    for t in transfers:
        before = [levels[i] for i in t.after]
        if t.reduce and (t.chunk, t.dst) in last:
            before.append(last[t.chunk, t.dst])
        levels.append(1 + max(before, default=-1))
        if t.reduce:
            last[t.chunk, t.dst] = levels[-1]
    return sorted(range(len(transfers)), key=lambda i: levels[i])  # stable


@dataclass(slots=True)
class _Held:
    """What a vertex holds of a chunk: transfers by their number in the chunk.

    Attributes:
        place: number of the sum, where the vertex has formed some apart from each other.
        made_of: those that made it what it is.
        writers: all that wrote to this place.
        readers: all that read it.
    """

    place: int = 0
    made_of: list[int] = field(default_factory=list)
    writers: list[int] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)


class _Chunk:
    """The transfers of one chunk, step by step."""

    def __init__(self, number: int, collective: Collective, statements: Sequence[Statement]) -> None:
        self._number, self._collective, self._statements = number, collective, statements
        self._held: dict[int, _Held] = {}
        self._done: list[Transfer] = []
        self._before: list[int] = []  # of each transfer, all that are over before it, as bits
        self._mine: Sequence[int] = ()

    def transfers(self, mine: Sequence[int]) -> list[Transfer]:
        """Those of the statements with these numbers; ``after`` by number in this list."""
        self._mine = mine
        said = self._statements
        for _, step in groupby(range(len(mine)), key=lambda i: said[mine[i]].step):
            self._take([(i, said[mine[i]]) for i in step])
        return self._done

    def _take(self, step: Sequence[tuple[int, Statement]]) -> None:
        """All read, then all write."""
        reads: list[tuple[int, list[int]]] = []
        for _, s in step:
            source = self._held.setdefault(s.src, _Held())
            reads.append((source.place, self._last_of(source.made_of)))
        for i, s in step:
            self._held[s.src].readers.append(i)
        for (i, s), (place, after) in zip(step, reads, strict=True):
            written = self._write(i, s, after)
            bits = 0
            for other in after:
                bits |= self._before[other] | 1 << other
            self._before.append(bits)
            self._done.append(
                Transfer(
                    chunk=self._number,
                    src=s.src,
                    dst=s.dst,
                    reduce=s.adds,
                    path=s.path,
                    after=tuple(sorted(after)),
                    places=(place, written),
                )
            )

    def _last_of(self, numbers: Sequence[int]) -> list[int]:
        """Those of some transfers that no other of them waits for."""
        covered = 0
        for number in numbers:
            covered |= self._before[number]
        return [number for number in numbers if not covered >> number & 1]

    def _write(self, number: int, s: Statement, after: list[int]) -> int:
        """The place that is written; what can be waited for is put into ``after``, and a race is refused."""
        target = self._held.setdefault(s.dst, _Held())
        copies = [i for i in target.writers if not s.adds or not self._said(i).adds]
        open_writers = self._open(number, s, copies, after)
        open_readers = self._open(number, s, target.readers, after)
        if open_writers:
            self._refuse(number, open_writers[0], s.dst, "writes")
        if not s.adds and target.place:
            self._refuse(number, target.made_of[-1], s.dst, "forms a sum apart from what it sends of")
        apart = self._collective.name == "all_reduce" and s.adds and s.dst < self._collective.num_ranks
        if open_readers and not apart:
            self._refuse(number, open_readers[0], s.dst, "reads")
        if open_readers:
            target.place += 1
            target.made_of, target.writers, target.readers = [], [], []
        target.made_of = [*target.made_of, number] if s.adds else [number]
        target.writers.append(number)
        return target.place

    def _open(self, number: int, s: Statement, others: Sequence[int], after: list[int]) -> list[int]:
        """Those of ``others`` that need not be over when a transfer begins, though all are waited for that can be."""
        known = 0
        for i in after:
            known |= self._before[i] | 1 << i
        left = []
        for i in others:
            if i == number or known >> i & 1:
                continue
            other = self._said(i)
            if other.dst == s.src and other.step < s.step:  # what it brings, the source can wait for
                after.append(i)
                known |= self._before[i] | 1 << i
            else:
                left.append(i)
        return left

    def _said(self, number: int) -> Statement:
        return self._statements[self._mine[number]]

    def _refuse(self, number: int, other: int, vertex: int, does: str) -> NoReturn:
        s, before = self._said(number), self._said(other)
        what = "adds to" if s.adds else "overwrites"
        together = "at the same time as" if s.step == before.step else "and nothing makes it wait for"
        raise VerificationError(
            f"{s.quoted} {what} chunk {self._number} at {vertex} {together} {before.quoted}, which {does} it there: "
            f"a rank waits only for what has come to it of the same chunk, and nothing from there comes to {s.src}; "
            f"let {vertex} send what it holds to {s.src} in between, or say that first which {s.src} waits for"
        )
