"""Lowered programs, run instruction by instruction in any order they allow, compute what the collective promises.

The runner here knows nothing of schedules: it keeps numbers in numpy arrays and a queue a channel, and picks at
random what to do next among all that the execution model of ``mycel.collectives.program`` allows. It is the
verifier's opposite: concrete values in one order, where the verifier has symbols and all orders. Mutants must fail
at the verifier. Blocks are equal, in proportion to weights, or of any length.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from functools import cache
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mycel.collectives.lower import lower
from mycel.collectives.program import Buffer, Channel, Op, Program
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import COLLECTIVES, POINTED, ROOTED, UNEVEN, Collective
from mycel.collectives.synth import methods_for, synthesize
from mycel.collectives.verify import verify_programs
from mycel.errors import ScheduleError, VerificationError
from mycel.topology.builders import full_mesh, hosts, loopback, ring, star, torus, two_boxes
from mycel.topology.model import Topology

FABRICS: tuple[Topology, ...] = (
    two_boxes(num_ranks=4),
    two_boxes(num_ranks=5, shared_uplink=True),
    ring(num_ranks=3),
    ring(num_ranks=6),
    torus(dims=(2, 3)),
    full_mesh(num_ranks=4),
    star(num_ranks=7),
    loopback(num_ranks=2),
    hosts(["a", "b", "a", "c", "a"]),
)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@cache
def schedule(where: int, name: str, method: str, root: int, is_weighted: bool = False) -> Schedule:
    topology = FABRICS[where]
    n = topology.num_ranks
    rooted = root % n if name in ROOTED else None
    weights = tuple((3 * i + root) % 4 for i in range(n * n if name == "all_to_all" else n)) if is_weighted else None
    return synthesize(topology, Collective(name=name, num_ranks=n, root=rooted, weights=weights), method=method)


@st.composite
def lowered(draw: st.DrawFn, least: int = 0) -> tuple[Program, ...]:
    name, method = draw(st.sampled_from([(name, method) for name in COLLECTIVES for method in methods_for(name)]))
    made = schedule(
        draw(st.integers(0, len(FABRICS) - 1)),
        name,
        method,
        draw(st.integers(0, 6)),
        name in UNEVEN and draw(st.booleans()),
    )
    elements = draw(st.integers(least, 40)) * made.collective.total_weight
    lengths = None
    if name in UNEVEN and draw(st.booleans()):
        choice = random.Random(draw(st.integers(0, 2**32 - 1)))
        weights = made.collective.block_weights
        lengths = [choice.choice((0, 1, 2, 11)) if weight else 0 for weight in weights]
        elements = sum(lengths)
        assume(elements >= least)
    return tuple(lower(made, elements, piece_elements=draw(st.integers(1, 17)), block_elements=lengths))


# -- running programs on numbers ------------------------------------------------------------------------------


class Rank:
    """One rank's buffers and what it has still to do."""

    def __init__(self, program: Program, contribution: np.ndarray) -> None:
        self.program = program
        name, block = program.collective.name, program.length(Buffer.OUTPUT)
        self.buffers = {b: np.full(program.length(b), -(10**9), dtype=np.int64) for b in Buffer}
        if name in ("all_gather", "reduce_scatter", *POINTED):
            self.buffers[Buffer.INPUT][:] = contribution
        elif name != "broadcast" or program.rank == program.collective.root:
            self.buffers[Buffer.OUTPUT][:block] = contribution
        self.done = [False] * len(program.columns)
        self.queues = [
            deque(i for i, row in enumerate(program.instructions) if row.channel == channel)
            for channel in range(len(program.channels))
        ]
        self.copies = [i for i, row in enumerate(program.instructions) if row.op is Op.COPY]

    def startable(self) -> list[int]:
        heads = [queue[0] for queue in self.queues if queue]
        waiting = [*heads, *(i for i in self.copies if not self.done[i])]
        return [i for i in waiting if all(self.done[n] for n in self.program.instructions[i].needs)]

    def finish(self, index: int) -> None:
        self.done[index] = True
        channel = self.program.instructions[index].channel
        if channel >= 0:
            self.queues[channel].popleft()


def run(programs: tuple[Program, ...], contributions: list[np.ndarray], choice: random.Random) -> list[np.ndarray]:
    """OUTPUT of every rank after a run in a random order; fails where it gets stuck."""
    ranks = [Rank(p, c) for p, c in zip(programs, contributions, strict=True)]
    wires: dict[Channel, deque[np.ndarray]] = {c: deque() for p in programs for c in p.channels}
    while not all(all(rank.done) for rank in ranks):
        possible = []
        for rank in ranks:
            for index in rank.startable():
                row = rank.program.instructions[index]
                if row.op in (Op.SEND, Op.COPY) or wires[rank.program.channels[row.channel]]:
                    possible.append((rank, index))
        assert possible, "nothing can go on"
        rank, index = choice.choice(possible)
        row = rank.program.instructions[index]
        here = rank.buffers[row.buffer][row.offset : row.offset + row.count]
        if row.op is Op.SEND:
            wires[rank.program.channels[row.channel]].append(here.copy())
        elif row.op is Op.COPY:
            here[:] = rank.buffers[row.operand_buffer][row.operand_offset : row.operand_offset + row.count]
        else:
            came = wires[rank.program.channels[row.channel]].popleft()
            assert len(came) == row.count
            if row.op is Op.RECV_REDUCE:
                came = came + rank.buffers[row.operand_buffer][row.operand_offset : row.operand_offset + row.count]
            here[:] = came
        rank.finish(index)
    return [rank.buffers[Buffer.OUTPUT] for rank in ranks]


def contributions_of(programs: tuple[Program, ...], seed: int) -> list[np.ndarray]:
    random_numbers = np.random.default_rng(seed)
    given_ = programs[0].collective.name in ("all_gather", *POINTED)
    sizes = [p.length(Buffer.INPUT) if given_ else p.num_elements for p in programs]
    return [random_numbers.integers(-1000, 1000, size) for size in sizes]


def lengths_of(program: Program) -> list[int]:
    """Elements of every block, as they were asked for."""
    c = program.collective
    if program.block_elements is not None:
        return list(program.block_elements)
    whole = sum(c.weights) if c.weights else c.num_blocks
    return [program.num_elements * weight // whole for weight in c.weights or [1] * c.num_blocks]


def cut(array: np.ndarray, lengths: list[int]) -> list[np.ndarray]:
    """The array in parts of these lengths."""
    assert len(array) == sum(lengths)
    return np.split(array, list(accumulate(lengths))[:-1])


def promised(programs: tuple[Program, ...], given_: list[np.ndarray]) -> list[np.ndarray | None]:
    """What every rank's OUTPUT must be; ``None``: anything."""
    collective = programs[0].collective
    n, root = collective.num_ranks, collective.root
    lengths = lengths_of(programs[0])
    if collective.name == "all_gather":
        return [np.concatenate(given_)] * n
    if collective.name == "gather":
        return [np.concatenate(given_) if rank == root else None for rank in range(n)]
    if collective.name == "scatter":
        return list(cut(given_[root or 0], lengths))
    if collective.name == "all_to_all":
        rows = [cut(array, lengths[rank * n : (rank + 1) * n]) for rank, array in enumerate(given_)]
        return [np.concatenate([row[rank] for row in rows]) for rank in range(n)]
    if collective.name == "broadcast":
        return [given_[root or 0]] * n
    total = np.sum(given_, axis=0)
    if collective.name == "all_reduce":
        return [total] * n
    if collective.name == "reduce_scatter":
        return list(cut(total, lengths))
    return [total if rank == root else None for rank in range(n)]


@QUICK
@given(programs=lowered(), seed=st.integers(0, 2**32 - 1))
def test_any_order_gives_what_the_collective_promises(programs: tuple[Program, ...], seed: int) -> None:
    given_ = contributions_of(programs, seed)
    outputs = run(programs, given_, random.Random(seed))
    for output, expected in zip(outputs, promised(programs, given_), strict=True):
        if expected is not None:
            np.testing.assert_array_equal(output, expected)


@QUICK
@given(programs=lowered())
def test_the_verifier_agrees(programs: tuple[Program, ...]) -> None:
    verify_programs(programs)


# -- mutants of lowered programs ------------------------------------------------------------------------------


def rewritten(program: Program, columns: np.ndarray, keep: np.ndarray | None = None) -> Program:
    """The program with other columns; ``keep`` says which old rows stay, needs on dropped ones vanish."""
    old = program.instructions
    indices = list(range(len(old))) if keep is None else [int(i) for i in keep]
    place = {row: position for position, row in enumerate(indices)}
    needs = [[place[n] for n in old[row].needs if n in place] for row in indices]
    starts = np.zeros(len(indices) + 1, dtype=np.int64)
    np.cumsum([len(n) for n in needs], out=starts[1:])
    return Program(
        collective=program.collective,
        rank=program.rank,
        num_elements=program.num_elements,
        scratch_elements=program.scratch_elements,
        channels=program.channels,
        columns=columns[indices].copy(),
        need_start=starts,
        need_index=np.array([n for row in needs for n in row], dtype=np.int64),
        block_elements=program.block_elements,
    )


def mutant(programs: tuple[Program, ...], rank: int, kind: str, choice: random.Random) -> tuple[Program, ...] | None:
    """One thing changed at one rank; ``None`` where there is nothing of the kind to change."""
    program = programs[rank]
    columns = program.columns.copy()
    rows = len(columns)
    wire = np.flatnonzero(columns["op"] != Op.COPY)
    arriving = np.flatnonzero(np.isin(columns["op"], (Op.RECV, Op.RECV_REDUCE)))
    changed: Program | None = None
    try:
        if kind == "drop" and len(wire):
            victim = choice.choice(wire.tolist())
            changed = rewritten(program, columns, np.delete(np.arange(rows), victim))
        elif kind == "duplicate" and len(wire):
            victim = choice.choice(wire.tolist())
            changed = rewritten(program, columns, np.insert(np.arange(rows), victim, victim))
        elif kind == "offset" and len(arriving):
            columns["offset"][choice.choice(arriving.tolist())] += choice.choice((-1, 1))
            changed = rewritten(program, columns)
        elif kind == "operand" and (columns["op"] == Op.RECV_REDUCE).any():
            victims = np.flatnonzero(columns["op"] == Op.RECV_REDUCE)
            columns["operand_offset"][choice.choice(victims.tolist())] += choice.choice((-1, 1))
            changed = rewritten(program, columns)
        elif kind == "final" and program.collective.reduces and len(arriving):
            victims = np.flatnonzero(columns["op"] == Op.RECV_REDUCE)
            if len(victims):
                columns["final"][choice.choice(victims.tolist())] ^= 1
                changed = rewritten(program, columns)
        elif kind == "plain" and (columns["op"] == Op.RECV_REDUCE).any():
            victims = np.flatnonzero(columns["op"] == Op.RECV_REDUCE)
            columns["op"][choice.choice(victims.tolist())] = Op.RECV
            changed = rewritten(program, columns)
    except ScheduleError:
        return None  # not even well-formed: rejected before it could be verified
    if changed is None:
        return None
    return (*programs[:rank], changed, *programs[rank + 1 :])


@pytest.mark.parametrize("kind", ["drop", "duplicate", "offset", "operand", "final", "plain"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(programs=lowered(least=1), rank=st.integers(0, 6), seed=st.integers(0, 2**32 - 1))
def test_a_mutant_is_rejected(kind: str, programs: tuple[Program, ...], rank: int, seed: int) -> None:
    wrong = mutant(programs, rank % len(programs), kind, random.Random(seed))
    assume(wrong is not None)
    assert wrong is not None
    with pytest.raises(VerificationError):
        verify_programs(wrong)


@QUICK
@given(
    where=st.integers(0, len(FABRICS) - 1),
    method=st.sampled_from(("flow", "direct")),
    seed=st.integers(0, 2**32 - 1),
    piece=st.integers(1, 5),
)
def test_programs_for_other_lengths_are_rejected(where: int, method: str, seed: int, piece: int) -> None:
    """Every rank gives and gets as much as before, so that all offsets are in range, but not of the same blocks."""
    made, choice = schedule(where, "all_to_all", method, 0), random.Random(seed)
    n = made.collective.num_ranks
    lengths = [choice.randrange(1, 5) for _ in range(n * n)]
    programs = lower(made, sum(lengths), piece_elements=piece, block_elements=lengths)
    (a, b), (c, d) = choice.sample(range(n), 2), choice.sample(range(n), 2)
    for source, target, more in ((a, c, -1), (a, d, 1), (b, c, 1), (b, d, -1)):
        lengths[source * n + target] += more
    with pytest.raises(VerificationError):
        verify_programs([replace(program, block_elements=tuple(lengths)) for program in programs])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(where=st.integers(0, len(FABRICS) - 1), method=st.sampled_from(("forest", "tree")), piece=st.integers(1, 9))
def test_a_broadcast_that_forwards_before_it_has_is_rejected(where: int, method: str, piece: int) -> None:
    programs = tuple(lower(schedule(where, "broadcast", method, 0), 23, piece_elements=piece))
    waiting = [rank for rank, program in enumerate(programs) if len(program.need_index)]
    for rank in waiting[:2]:
        p = programs[rank]
        hasty = Program(
            collective=p.collective,
            rank=rank,
            num_elements=p.num_elements,
            scratch_elements=p.scratch_elements,
            channels=p.channels,
            columns=p.columns.copy(),
            need_start=np.concatenate([p.need_start[:1], np.maximum(p.need_start[1:] - 1, 0)]),
            need_index=p.need_index[1:].copy(),
        )
        with pytest.raises(VerificationError):
            verify_programs((*programs[:rank], hasty, *programs[rank + 1 :]))
