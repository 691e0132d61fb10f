"""The program verifier against an exhaustive simulation of tiny programs, right ones and mutants.

The oracle of the oracle walks through every set of completed instructions that the execution model of
``mycel.collectives.program`` can reach, with unlimited buffers. What may run, runs: starting late would only hide
overlaps. Programs are right if they also end without any buffer, nowhere two running instructions touch an element
at once (unless both read), no empty element is read, and every end state is the required one. The verifier must
agree, both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mycel.collectives.program import Buffer, Channel, Instruction, Op, Program
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.verify import verify_programs
from mycel.errors import ScheduleError, VerificationError

IN, OUT, SCRATCH = Buffer.INPUT, Buffer.OUTPUT, Buffer.SCRATCH


def relaxed(max_examples: int) -> settings:
    return settings(max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Case:
    """All ranks' instructions before they become programs, so that mutants are easy to make."""

    collective: Collective
    num_elements: int
    scratch: int
    channels: tuple[tuple[Channel, ...], ...]
    code: tuple[tuple[Instruction, ...], ...]

    def programs(self) -> list[Program]:
        return [
            Program.from_instructions(
                code,
                collective=self.collective,
                rank=rank,
                num_elements=self.num_elements,
                scratch_elements=self.scratch,
                channels=self.channels[rank],
            )
            for rank, code in enumerate(self.code)
        ]


# -- right programs, written by hand ------------------------------------------------------------------------


class Writer:
    """Collects one rank's instructions; channel 0 goes to the next rank, channel 1 comes from the one before."""

    def __init__(self) -> None:
        self.code: list[Instruction] = []

    def __call__(self, op: Op, buffer: Buffer, offset: int, count: int, *needs: int | None, **rest: object) -> int:
        channel = {Op.SEND: 0, Op.COPY: -1}.get(op, 1)
        kept = tuple(sorted({n for n in needs if n is not None}))
        self.code.append(
            Instruction(op=op, channel=channel, buffer=buffer, offset=offset, count=count, needs=kept, **rest)  # type: ignore[arg-type]
        )
        return len(self.code) - 1


def ring_channels(n: int) -> tuple[tuple[Channel, ...], ...]:
    hop = [Channel(src=r, dst=(r + 1) % n, path=(r, (r + 1) % n)) for r in range(n)]
    return tuple((hop[r], hop[r - 1]) for r in range(n))


def _case(
    name: CollectiveName, n: int, num_elements: int, write: Callable[[Writer, int], None], scratch: int = 0
) -> Case:
    code = []
    for rank in range(n):
        writer = Writer()
        write(writer, rank)
        code.append(tuple(writer.code))
    root = {"broadcast": 0, "reduce": n - 1}.get(name)
    collective = Collective(name=name, num_ranks=n, root=root)
    return Case(collective, num_elements, scratch, ring_channels(n), tuple(code))


def ring_all_reduce(n: int, pieces: int, size: int) -> Case:
    """Reduce-scatter, then all-gather, in place; every wait that either needs is local and spelled out."""

    def write(emit: Writer, rank: int) -> None:
        last: dict[tuple[int, int], int] = {}
        sent: dict[tuple[int, int], int] = {}
        for step in range(2 * n - 2):
            adds = step < n - 1
            for piece in range(pieces):
                chunk = (rank - step) % n if adds else (rank + 1 - (step - n + 1)) % n
                at = (chunk * pieces + piece) * size
                sent[chunk, piece] = emit(Op.SEND, OUT, at, size, last.get((chunk, piece)))
                chunk = (chunk - 1) % n
                at = (chunk * pieces + piece) * size
                if adds:
                    here = {"operand_buffer": OUT, "operand_offset": at, "final": step == n - 2}
                    last[chunk, piece] = emit(Op.RECV_REDUCE, OUT, at, size, **here)
                else:
                    last[chunk, piece] = emit(Op.RECV, OUT, at, size, sent[chunk, piece])

    return _case("all_reduce", n, n * pieces * size, write)


def ring_all_gather(n: int, pieces: int, size: int) -> Case:
    block = pieces * size

    def write(emit: Writer, rank: int) -> None:
        emit(Op.COPY, OUT, rank * block, block, operand_buffer=IN, operand_offset=0)
        last: dict[tuple[int, int], int] = {}
        for step in range(n - 1):
            for piece in range(pieces):
                chunk = (rank - step) % n
                if step == 0:
                    emit(Op.SEND, IN, piece * size, size)
                else:
                    emit(Op.SEND, OUT, chunk * block + piece * size, size, last[chunk, piece])
                chunk = (chunk - 1) % n
                last[chunk, piece] = emit(Op.RECV, OUT, chunk * block + piece * size, size)

    return _case("all_gather", n, n * block, write)


def ring_reduce_scatter(n: int, pieces: int, size: int, *, slots: int = 2) -> Case:
    """Partial sums stand in SCRATCH, in slots that take turns.

    With one slot, a rank cannot receive the next sum before it has sent the last one, and neither can its
    neighbour: without buffers, all wait for each other round the ring.
    """
    block = pieces * size

    def write(emit: Writer, rank: int) -> None:
        added: dict[int, int] = {}
        reader: dict[int, int] = {}
        for step in range(n - 1):
            for piece in range(pieces):
                chunk = (rank - 1 - step) % n
                if step == 0:
                    emit(Op.SEND, IN, chunk * block + piece * size, size)
                else:
                    slot = ((step - 1) % slots * pieces + piece) * size
                    reader[slot] = emit(Op.SEND, SCRATCH, slot, size, added[piece])
                chunk = (chunk - 1) % n
                rest = {"operand_buffer": IN, "operand_offset": chunk * block + piece * size}
                if step == n - 2:
                    emit(Op.RECV_REDUCE, OUT, piece * size, size, final=True, **rest)
                else:
                    slot = (step % slots * pieces + piece) * size
                    added[piece] = emit(Op.RECV_REDUCE, SCRATCH, slot, size, reader.get(slot), **rest)

    return _case("reduce_scatter", n, n * block, write, scratch=slots * block)


def chain(name: CollectiveName, n: int, pieces: int, size: int) -> Case:
    """Broadcast from rank 0 along the chain, or reduce along it into the last rank."""

    def write(emit: Writer, rank: int) -> None:
        for piece in range(pieces):
            got = None
            at = piece * size
            if rank and name == "reduce":
                here = {"operand_buffer": OUT, "operand_offset": at, "final": rank == n - 1}
                got = emit(Op.RECV_REDUCE, OUT, at, size, **here)
            elif rank:
                got = emit(Op.RECV, OUT, at, size)
            if rank < n - 1:
                emit(Op.SEND, OUT, at, size, got)

    return _case(name, n, pieces * size, write)


def staged_broadcast() -> Case:
    """Rank 0 stages two elements, one after the other, in one element of SCRATCH, for two receivers."""
    out = [Channel(src=0, dst=r, path=(0, r)) for r in (1, 2)]
    root: list[Instruction] = []
    for element in range(2):
        sent = tuple(range(1, len(root)))
        first = len(root)
        source = {"operand_buffer": OUT, "operand_offset": element}
        root.append(Instruction(op=Op.COPY, channel=-1, buffer=SCRATCH, offset=0, count=1, needs=sent, **source))
        root += [
            Instruction(op=Op.SEND, channel=channel, buffer=SCRATCH, offset=0, count=1, needs=(first,))
            for channel in range(2)
        ]
    leaf = tuple(Instruction(op=Op.RECV, channel=0, buffer=OUT, offset=e, count=1) for e in range(2))
    collective = Collective(name="broadcast", num_ranks=3, root=0)
    return Case(collective, 2, 1, (tuple(out), (out[0],), (out[1],)), (tuple(root), leaf, leaf))


def answered_reduce() -> Case:
    """Rank 0 tells rank 1 what it has; rank 1 answers with its own, which rank 0 adds where it sent from."""

    def write(emit: Writer, rank: int) -> None:
        if rank == 1:
            sent = emit(Op.SEND, OUT, 0, 2)
            emit(Op.RECV_REDUCE, OUT, 0, 2, sent, operand_buffer=OUT, operand_offset=0, final=True)
        else:
            asked = emit(Op.RECV, SCRATCH, 0, 2)
            emit(Op.SEND, OUT, 0, 2, asked)

    return _case("reduce", 2, 2, write, scratch=2)


# -- the oracle of the oracle -------------------------------------------------------------------------------

Node = tuple[int, int]


class Exhaustive:
    """Every reachable state of a case; see the module's docstring."""

    def __init__(self, case: Case, *, aliased: bool) -> None:
        self.case, self.aliased = case, aliased
        self.n = case.collective.num_ranks
        self.compute_vertices: list[Node] = [(r, i) for r, code in enumerate(case.code) for i in range(len(code))]
        self.place = {node: k for k, node in enumerate(self.compute_vertices)}
        self.partner: dict[int, int] = {}
        self.waits: list[set[int]] = []
        self.lengths = [[p.length(b) for b in Buffer] for p in case.programs()]

    def is_right(self) -> bool:
        return self._match() and self._ends_without_buffers() and self._every_state_is_right()

    def _instruction(self, k: int) -> Instruction:
        rank, index = self.compute_vertices[k]
        return self.case.code[rank][index]

    def _match(self) -> bool:
        streams: dict[tuple[Channel, bool], list[int]] = {}
        for k, (rank, _) in enumerate(self.compute_vertices):
            i = self._instruction(k)
            waits = {self.place[rank, need] for need in i.needs}
            if i.op is not Op.COPY:
                stream = streams.setdefault((self.case.channels[rank][i.channel], i.op is Op.SEND), [])
                waits |= set(stream[-1:])
                stream.append(k)
            self.waits.append(waits)
        for channel, sends in streams:
            ours, theirs = streams[channel, sends], streams.get((channel, not sends), [])
            if len(ours) != len(theirs):
                return False
            for a, b in zip(ours, theirs, strict=True):
                if self._instruction(a).count != self._instruction(b).count:
                    return False
                self.partner[a] = b
        return True

    def _ends_without_buffers(self) -> bool:
        done: set[int] = set()
        while len(done) < len(self.compute_vertices):
            ready = {k for k in range(len(self.compute_vertices)) if k not in done and self.waits[k] <= done}
            ready = {k for k in ready if self.partner.get(k, k) in ready}
            if not ready:
                return False
            done |= ready
        return True

    # Memory is one flat tuple; an element holds (number, is_final) or None. The number has a digit in base 100
    # for every rank and array element: how often that contribution is in it.

    def _address(self, rank: int, buffer: Buffer, offset: int) -> int:
        if self.aliased and buffer is IN:
            buffer, offset = OUT, rank * self.lengths[rank][IN] + offset
        return sum(map(sum, self.lengths[:rank])) + sum(self.lengths[rank][:buffer]) + offset

    def _term(self, rank: int, element: int) -> int:
        return 100 ** (rank * self.case.num_elements + element)

    def _initial(self) -> list[tuple[int, bool] | None]:
        c = self.case.collective
        memory: list[tuple[int, bool] | None] = [None] * sum(map(sum, self.lengths))
        buffer = IN if c.name in ("all_gather", "reduce_scatter") else OUT
        for rank in range(self.n):
            for offset in range(self.lengths[rank][buffer]):
                element = offset + (rank * self.lengths[rank][buffer] if c.name == "all_gather" else 0)
                if c.initial(rank, element * c.num_blocks // self.case.num_elements):
                    memory[self._address(rank, buffer, offset)] = (self._term(rank, element), False)
        return memory

    def _is_required_end(self, memory: list[tuple[int, bool] | None]) -> bool:
        c = self.case.collective
        for rank in range(self.n):
            for offset in range(self.lengths[rank][OUT]):
                element = offset + (rank * self.lengths[rank][OUT] if c.name == "reduce_scatter" else 0)
                whose = c.required(rank, element * c.num_blocks // self.case.num_elements)
                if whose is not None:
                    expected = (sum(self._term(r, element) for r in whose), c.reduces)
                    if memory[self._address(rank, OUT, offset)] != expected:
                        return False
        return True

    def _ranges(self, k: int) -> tuple[range, range]:
        """Addresses that an instruction reads and writes."""
        rank, i = self.compute_vertices[k][0], self._instruction(k)
        target = self._address(rank, i.buffer, i.offset)
        there = range(target, target + i.count)
        if i.op is Op.SEND:
            return there, range(0)
        if i.op is Op.RECV:
            return range(0), there
        operand = self._address(rank, i.operand_buffer, i.operand_offset)
        if i.op is Op.COPY and operand == target:
            return range(0), range(0)
        return range(operand, operand + i.count), there

    def _every_state_is_right(self) -> bool:
        count = len(self.compute_vertices)
        ranges = [self._ranges(k) for k in range(count)]
        for reads, writes in ranges:
            if set(reads) & set(writes) and reads != writes:
                return False

        def collide(a: int, b: int) -> bool:
            (read_a, write_a), (read_b, write_b) = ranges[a], ranges[b]
            return bool(set(write_a) & set(write_b) or set(write_a) & set(read_b) or set(read_a) & set(write_b))

        enemies = [{b for b in range(count) if b != a and collide(a, b)} for a in range(count)]
        first = (0, tuple(self._initial()), ())
        seen, stack = {first}, [first]
        while stack:
            done, memory, flight = stack.pop()
            running = {k for k in range(count) if not done >> k & 1 and all(done >> w & 1 for w in self.waits[k])}
            touching = {k for k in running if self._has_begun(k, done, running)}
            if any(enemies[k] & touching for k in touching):
                return False
            ended = True
            for k in running:
                if not self._may_complete(k, done):
                    continue
                ended = False
                after = self._carry_out(k, list(memory), dict(flight), ranges[k])
                if after is None:
                    return False
                state = (done | 1 << k, tuple(after[0]), tuple(sorted(after[1].items())))
                if state not in seen:
                    seen.add(state)
                    stack.append(state)
            if ended and not (done + 1 == 1 << count and self._is_required_end(list(memory))):
                return False
        return True

    def _has_begun(self, k: int, done: int, running: set[int]) -> bool:
        sender = self.partner.get(k, -1)
        return self._instruction(k).op is not Op.RECV or sender in running or bool(done >> sender & 1)

    def _may_complete(self, k: int, done: int) -> bool:
        return self._instruction(k).op in (Op.SEND, Op.COPY) or bool(done >> self.partner[k] & 1)

    def _carry_out(self, k, memory, flight, ranges):  # type: ignore[no-untyped-def]
        """Memory and messages after an instruction; ``None`` if it does what must not be done."""
        i = self._instruction(k)
        reads, writes = ranges
        found = [memory[a] for a in reads]
        if None in found or (i.final and i.op is not Op.RECV_REDUCE):
            return None
        if i.op is Op.SEND:
            flight[k] = tuple(found)
        elif i.op is not Op.COPY:
            incoming = flight.pop(self.partner[k])
            if i.op is Op.RECV_REDUCE:
                if not self.case.collective.reduces or any(f for _, f in found) or any(f for _, f in incoming):
                    return None
                found = [(a + b, i.final) for (a, _), (b, _) in zip(found, incoming, strict=True)]
                elements = range(self.case.num_elements)
                complete = {sum(self._term(r, e) for r in range(self.n)) for e in elements}
                if i.final and not {number for number, _ in found} <= complete:
                    return None
            else:
                found = list(incoming)
        for address, value in zip(writes, found, strict=False):
            memory[address] = value
        return memory, flight


def is_right_at_any_time(case: Case) -> bool:
    modes = (False, True) if case.collective.name == "all_gather" else (False,)
    return all(Exhaustive(case, aliased=aliased).is_right() for aliased in modes)


def is_accepted(case: Case) -> bool:
    try:
        verify_programs(case.programs())
    except VerificationError:
        return False
    return True


# -- mutants ------------------------------------------------------------------------------------------------

Mutation = Callable[[list[Instruction], int, int], list[Instruction]]


def _renumber(code: list[Instruction], new_place: dict[int, int]) -> list[Instruction]:
    return [replace(i, needs=tuple(sorted({new_place[n] for n in i.needs if n in new_place}))) for i in code]


def drop(code: list[Instruction], i: int, _: int) -> list[Instruction]:
    places = {old: old - (old > i) for old in range(len(code)) if old != i}
    return _renumber([x for k, x in enumerate(code) if k != i], places)


def duplicate(code: list[Instruction], i: int, _: int) -> list[Instruction]:
    places = {old: old + (old > i) for old in range(len(code))}
    return _renumber([*code[: i + 1], code[i], *code[i + 1 :]], places)


def swap(code: list[Instruction], i: int, k: int) -> list[Instruction]:
    """Instructions i and j change places, needs moving along: another order on their channels."""
    j = k % len(code)
    places = {**{old: old for old in range(len(code))}, i: j, j: i}
    out = list(code)
    out[i], out[j] = out[j], out[i]
    return _renumber(out, places)


def swap_neighbours(code: list[Instruction], i: int, _: int) -> list[Instruction]:
    """Instruction i and the next of its channel change places."""
    later = [k for k in range(i + 1, len(code)) if code[k].channel == code[i].channel]
    return swap(code, i, later[0]) if later else code


def forget_need(code: list[Instruction], i: int, k: int) -> list[Instruction]:
    needs = list(code[i].needs)
    if needs:
        del needs[k % len(needs)]
    return _with_instruction(code, i, needs=tuple(needs))


def add_need(code: list[Instruction], i: int, k: int) -> list[Instruction]:
    return _with_instruction(code, i, needs=tuple(sorted({*code[i].needs, k % len(code)})))


def shift_offset(code: list[Instruction], i: int, k: int) -> list[Instruction]:
    return _with_instruction(code, i, offset=code[i].offset + (1 if k % 2 else -1))


def shift_operand(code: list[Instruction], i: int, k: int) -> list[Instruction]:
    return _with_instruction(code, i, operand_offset=code[i].operand_offset + (1 if k % 2 else -1))


def change_count(code: list[Instruction], i: int, k: int) -> list[Instruction]:
    return _with_instruction(code, i, count=code[i].count + (1 if k % 2 else -1))


def change_buffer(code: list[Instruction], i: int, k: int) -> list[Instruction]:
    return _with_instruction(code, i, buffer=Buffer((code[i].buffer + 1 + k % 2) % 3))


def change_operand(code: list[Instruction], i: int, k: int) -> list[Instruction]:
    return _with_instruction(code, i, operand_buffer=Buffer((code[i].operand_buffer + 1 + k % 2) % 3))


def flip_reduce(code: list[Instruction], i: int, _: int) -> list[Instruction]:
    x = code[i]
    if x.op is Op.RECV:
        return _with_instruction(code, i, op=Op.RECV_REDUCE, operand_buffer=x.buffer, operand_offset=x.offset)
    return _with_instruction(code, i, op=Op.RECV, final=False) if x.op is Op.RECV_REDUCE else code


def flip_final(code: list[Instruction], i: int, _: int) -> list[Instruction]:
    return _with_instruction(code, i, final=not code[i].final)


def _with_instruction(code: list[Instruction], i: int, **changes: object) -> list[Instruction]:
    return [*code[:i], replace(code[i], **changes), *code[i + 1 :]]  # type: ignore[arg-type]


MUTATIONS: list[Mutation] = [
    drop,
    duplicate,
    swap,
    swap_neighbours,
    forget_need,
    add_need,
    shift_offset,
    shift_operand,
    change_count,
    change_buffer,
    change_operand,
    flip_reduce,
    flip_final,
]


def mutated(case: Case, mutate: Mutation, rank: int, i: int, k: int) -> Case | None:
    """The mutant; ``None`` if it is not even well-formed."""
    rank %= len(case.code)
    if not case.code[rank]:
        return None
    code = list(case.code[rank])
    changed = tuple(mutate(code, i % len(code), k))
    mutant = replace(case, code=(*case.code[:rank], changed, *case.code[rank + 1 :]))
    try:
        mutant.programs()
    except ScheduleError:
        return None
    return mutant


# -- tests --------------------------------------------------------------------------------------------------


def _tiny() -> Iterator[Case]:
    yield ring_all_reduce(2, 1, 2)
    yield ring_all_reduce(2, 2, 1)
    yield ring_all_reduce(3, 1, 1)
    yield ring_all_gather(2, 2, 1)
    yield ring_all_gather(3, 1, 2)
    yield ring_reduce_scatter(2, 2, 2)
    yield ring_reduce_scatter(3, 1, 2)
    yield ring_reduce_scatter(4, 1, 1)
    yield staged_broadcast()
    yield answered_reduce()
    for name in ("broadcast", "reduce"):
        yield chain(name, 3, 2, 2)


TINY = list(_tiny())


@pytest.mark.parametrize("case", TINY, ids=lambda c: f"{c.collective.name}-{c.collective.num_ranks}")
def test_right_programs_are_right_to_both(case):
    assert is_right_at_any_time(case)
    verify_programs(case.programs())


def test_one_slot_for_partial_sums_deadlocks_without_buffers():
    case = ring_reduce_scatter(4, 1, 1, slots=1)
    assert not is_right_at_any_time(case)
    with pytest.raises(VerificationError, match=r"deadlock, a cycle of 4 waits .*rank 0 instruction 3 \(recv_reduce"):
        verify_programs(case.programs())


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda m: m.__name__)
def test_each_kind_of_mutant_is_judged_as_the_simulation_judges_it(mutate):
    judged = {True: 0, False: 0}
    for case in TINY[:-1]:
        for rank in range(case.collective.num_ranks):
            for i in range(len(case.code[rank])):
                mutant = mutated(case, mutate, rank, i, i + 1)
                if mutant is not None and mutant.code != case.code:
                    right = is_right_at_any_time(mutant)
                    assert is_accepted(mutant) == right, "\n".join(p.to_text() for p in mutant.programs())
                    judged[right] += 1
    assert judged[False] >= 3  # the mutation does make wrong programs


@relaxed(300)
@given(
    case=st.sampled_from(TINY),
    changes=st.lists(
        st.tuples(st.sampled_from(MUTATIONS), st.integers(0, 3), st.integers(0, 20), st.integers(0, 20)),
        min_size=1,
        max_size=3,
    ),
)
def test_verifier_agrees_with_exhaustive_simulation(case, changes):
    for mutate, rank, i, k in changes:
        case = mutated(case, mutate, rank, i, k) or case
    assert is_accepted(case) == is_right_at_any_time(case)


def partner_of(case: Case, rank: int, i: int) -> tuple[int, int]:
    """The instruction at the other end: same channel, same place in its order."""
    x = case.code[rank][i]
    channel = case.channels[rank][x.channel]
    before = sum(y.channel == x.channel for y in case.code[rank][:i])
    peer = channel.dst if channel.src == rank else channel.src
    number = case.channels[peer].index(channel)
    return peer, [j for j, y in enumerate(case.code[peer]) if y.channel == number][before]


@pytest.mark.parametrize("mutate", [drop, duplicate, swap_neighbours, change_count], ids=lambda m: m.__name__)
def test_mutants_of_both_ends_of_a_message_are_judged_as_the_simulation_judges_them(mutate):
    judged = {True: 0, False: 0}
    for case in TINY:
        for rank in range(case.collective.num_ranks):
            for i, x in enumerate(case.code[rank]):
                if x.op is not Op.SEND:
                    continue
                peer, j = partner_of(case, rank, i)
                for k in (0, 1):
                    mutant = mutated(case, mutate, rank, i, k)
                    mutant = mutated(mutant, mutate, peer, j, k) if mutant is not None else None
                    if mutant is not None:
                        right = is_right_at_any_time(mutant)
                        assert is_accepted(mutant) == right, "\n".join(p.to_text() for p in mutant.programs())
                        judged[right] += 1
    assert judged[mutate is swap_neighbours] >= 3  # two messages may change places if both ends agree
    # No message can be spared but the question in answered_reduce, which is met here twice.
    assert mutate is not drop or judged[True] == 2
