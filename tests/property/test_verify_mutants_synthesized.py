"""Mutants of what the planner makes: schedules of every method, and the programs they are lowered to.

Which mutants are wrong is known without the verifier. Synthesized transfers are trees in which each is needed once,
so losing, turning or repeating one is wrong. Whether a wait can be spared is decided by a plain graph search over
starts and completions, pair by pair, where the verifier uses bitsets and turns.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import networkx as nx
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mycel.collectives.lower import lower
from mycel.collectives.program import Buffer, Instruction, Op, Program
from mycel.collectives.schedule import Schedule, Transfer
from mycel.collectives.spec import COLLECTIVES, ROOTED, UNEVEN, Collective
from mycel.collectives.synth import methods_for, synthesize
from mycel.collectives.synth.classics import CLASSICS, classics_for
from mycel.collectives.verify import verify_link_loads, verify_programs, verify_schedule
from mycel.errors import SynthesisError, VerificationError
from mycel.topology.builders import full_mesh, ring, star, torus, two_boxes
from mycel.topology.change import compute_in_switch
from mycel.topology.model import Topology

FABRICS: tuple[Topology, ...] = (
    star(num_ranks=3),
    two_boxes(num_ranks=4),
    ring(num_ranks=5),
    torus(dims=(2, 3)),
    full_mesh(num_ranks=4),
    star(num_ranks=4, computes=True),
    compute_in_switch(two_boxes(num_ranks=6, between="150 Mbit/s"), "*"),
)
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@cache
def made(where: int, name: str, method: str, is_uneven: bool) -> Schedule | None:
    """Nothing where a classic does not go: partners without a path, or no boxes."""
    n, root = FABRICS[where].num_ranks, 1 if name in ROOTED else None
    weights = tuple((2 * i + 3) % 5 for i in range(n * n if name == "all_to_all" else n)) if is_uneven else None
    try:
        return synthesize(FABRICS[where], Collective(name=name, num_ranks=n, root=root, weights=weights), method)
    except SynthesisError:
        if method in CLASSICS:
            return None
        raise


schedules = st.builds(
    lambda where, served: made(where, *served),
    st.integers(0, len(FABRICS) - 1),
    st.sampled_from(
        [
            (name, method, is_uneven)
            for name in COLLECTIVES
            for method in (*methods_for(name), "steps", *classics_for(name))
            for is_uneven in (False, True)
            if not is_uneven or (name in UNEVEN and method != "steps")
        ]
    ),
).filter(bool)


@st.composite
def lowered(draw: st.DrawFn) -> tuple[Program, ...]:
    schedule = draw(schedules)
    elements = draw(st.integers(1, 12)) * schedule.collective.total_weight
    return tuple(lower(schedule, elements, piece_elements=draw(st.integers(1, 6))))


# -- schedules ------------------------------------------------------------------------------------------------


def with_transfers(schedule: Schedule, transfers: list[Transfer]) -> Schedule:
    return replace(schedule, transfers=tuple(transfers))


def without(schedule: Schedule, lost: int) -> Schedule:
    kept = [t for i, t in enumerate(schedule.transfers) if i != lost]
    heirs = schedule.transfers[lost].after
    renewed = []
    for t in kept:
        after = {*t.after, *heirs} - {lost} if lost in t.after else set(t.after)
        renewed.append(replace(t, after=tuple(sorted(i - (i > lost) for i in after))))
    return with_transfers(schedule, renewed)


def in_no_fixed_order(schedule: Schedule) -> bool:
    """Whether two transfers that touch a place, not both reading and not both adding, are unordered."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(schedule.transfers)))
    graph.add_edges_from((i, k) for k, t in enumerate(schedule.transfers) for i in t.after)
    later = {k: nx.descendants(graph, k) for k in graph}
    touched: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for k, t in enumerate(schedule.transfers):
        touched.setdefault((t.chunk, t.src), []).append((k, "read"))
        touched.setdefault((t.chunk, t.dst), []).append((k, "add" if t.reduce else "write"))
    return any(
        not (kind_a == kind_b and kind_a != "write") and b not in later[a] and a not in later[b]
        for accesses in touched.values()
        for (a, kind_a), (b, kind_b) in combinations(accesses, 2)
    )


@QUICK
@given(schedule=schedules)
def test_synthesized_schedules_are_right_and_reach_their_rate(schedule: Schedule) -> None:
    verify_schedule(schedule)
    verify_link_loads(schedule, schedule.algbw)
    assert not in_no_fixed_order(schedule)


@pytest.mark.parametrize("kind", ["drop", "repeat", "turn", "flip"])
@QUICK
@given(schedule=schedules, seed=st.integers(0, 2**32 - 1))
def test_a_transfer_lost_repeated_turned_or_flipped(kind: str, schedule: Schedule, seed: int) -> None:
    ts = list(schedule.transfers)
    i = random.Random(seed).randrange(len(ts))
    t = ts[i]
    if kind == "drop":
        wrong = without(schedule, i)
    elif kind == "repeat":
        assume(t.reduce)  # repeating a copy brings the same again
        # Right behind the first; everything later waits for both.
        later = [replace(x, after=(*(k + (k > i) for k in x.after), i + 1)) for x in ts[i + 1 :]]
        wrong = with_transfers(schedule, [*ts[: i + 1], replace(t, after=(*t.after, i)), *later])
    elif kind == "turn":
        back = (*t.path[:1], *t.path[1:-1], *t.path[-1:])[::-1]
        assume(all(hop in schedule.topology.capacity for hop in pairwise(back)))
        ts[i] = replace(t, src=t.dst, dst=t.src, path=back)
        wrong = with_transfers(schedule, ts)
    else:
        # What comes first to a switch starts the sum there, added or not: a second one tells the difference.
        place = [x for k, x in enumerate(ts) if k != i and (x.dst, x.chunk) == (t.dst, t.chunk)]
        assume(t.dst < schedule.collective.num_ranks or any(x.reduce for x in place))
        ts[i] = replace(t, reduce=not t.reduce)
        wrong = with_transfers(schedule, ts)
    with pytest.raises(VerificationError, match=r"is wrong at (rank|switch)"):
        verify_schedule(wrong)


@QUICK
@given(schedule=schedules, seed=st.integers(0, 2**32 - 1))
def test_a_forgotten_wait(schedule: Schedule, seed: int) -> None:
    choice = random.Random(seed)
    waiting = [i for i, t in enumerate(schedule.transfers) if t.after]
    assume(waiting)
    i = choice.choice(waiting)
    after = list(schedule.transfers[i].after)
    del after[choice.randrange(len(after))]
    ts = list(schedule.transfers)
    ts[i] = replace(ts[i], after=tuple(after))
    hasty = with_transfers(schedule, ts)
    if in_no_fixed_order(hasty):
        with pytest.raises(VerificationError, match="in no fixed order"):
            verify_schedule(hasty)
    else:
        verify_schedule(hasty)


# -- programs -------------------------------------------------------------------------------------------------


def rebuilt(program: Program, code: list[Instruction]) -> Program:
    return Program.from_instructions(
        code,
        collective=program.collective,
        rank=program.rank,
        num_elements=program.num_elements,
        scratch_elements=program.scratch_elements,
        channels=program.channels,
    )


def accesses(instruction: Instruction) -> Iterator[tuple[Buffer, range, bool]]:
    """``(buffer, elements, is_write)``."""
    i = instruction
    yield i.buffer, range(i.offset, i.offset + i.count), i.op is not Op.SEND
    if i.op in (Op.RECV_REDUCE, Op.COPY):
        yield i.operand_buffer, range(i.operand_offset, i.operand_offset + i.count), False


def overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


def race(programs: tuple[Program, ...]) -> bool:
    """Whether two accesses of a rank to an element, one a write, may overlap in time.

    Events of an instruction: it starts, it touches memory, it is complete. INPUT apart from OUTPUT.
    """
    graph = nx.DiGraph()
    streams: dict[object, list[tuple[int, int]]] = {}
    for p in programs:
        latest: dict[int, int] = {}
        for k, i in enumerate(p.instructions):
            me = (p.rank, k)
            nx.add_path(graph, [(me, "start"), (me, "touch"), (me, "done")])
            before = set(i.needs)
            if i.channel >= 0:
                before |= {latest[i.channel]} if i.channel in latest else set()
                latest[i.channel] = k
                streams.setdefault((p.channels[i.channel], i.op is Op.SEND), []).append(me)
            graph.add_edges_from((((p.rank, n), "done"), (me, "start")) for n in before)
    for (channel, sends), ours in streams.items():  # type: ignore[misc]
        for send, receive in zip(ours, streams[channel, False], strict=True) if sends else ():
            graph.add_edge((send, "done"), (receive, "done"))
            if programs[receive[0]].instructions[receive[1]].op is Op.RECV:
                graph.add_edge((send, "start"), (receive, "touch"))
    for p in programs:
        for (a, x), (b, y) in combinations(enumerate(p.instructions), 2):
            clash = any(
                buffer_x is buffer_y and (write_x or write_y) and overlap(range_x, range_y)
                for buffer_x, range_x, write_x in accesses(x)
                for buffer_y, range_y, write_y in accesses(y)
            )
            first, second = (p.rank, a), (p.rank, b)
            if clash and not (
                nx.has_path(graph, (first, "done"), (second, "touch"))
                or nx.has_path(graph, (second, "done"), (first, "touch"))
            ):
                return True
    return False


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs=lowered(), seed=st.integers(0, 2**32 - 1))
def test_a_forgotten_need(programs: tuple[Program, ...], seed: int) -> None:
    choice = random.Random(seed)
    needy = [(p.rank, k) for p in programs for k, i in enumerate(p.instructions) if i.needs]
    assume(needy)
    rank, k = choice.choice(needy)
    code = list(programs[rank].instructions)
    needs = list(code[k].needs)
    del needs[choice.randrange(len(needs))]
    code[k] = replace(code[k], needs=tuple(needs))
    hasty = (*programs[:rank], rebuilt(programs[rank], code), *programs[rank + 1 :])
    if race(hasty):
        with pytest.raises(VerificationError, match=r"in no fixed order|is empty|is wrong at|final too early"):
            verify_programs(hasty)
    else:
        verify_programs(hasty)


@QUICK
@given(programs=lowered(), seed=st.integers(0, 2**32 - 1))
def test_messages_in_another_order_at_one_end(programs: tuple[Program, ...], seed: int) -> None:
    choice = random.Random(seed)
    pairs = []
    for p in programs:
        latest: dict[int, int] = {}
        for k, i in enumerate(p.instructions):
            if i.channel in latest:
                pairs.append((p.rank, latest[i.channel], k))
            if i.channel >= 0:
                latest[i.channel] = k
    assume(pairs)
    rank, a, b = choice.choice(pairs)
    code = list(programs[rank].instructions)
    code[a], code[b] = code[b], code[a]
    place = {a: b, b: a}
    code = [replace(i, needs=tuple(place.get(n, n) for n in i.needs)) for i in code]
    with pytest.raises(VerificationError):
        verify_programs((*programs[:rank], rebuilt(programs[rank], code), *programs[rank + 1 :]))


@QUICK
@given(programs=lowered(), seed=st.integers(0, 2**32 - 1))
def test_a_message_lost_at_both_ends(programs: tuple[Program, ...], seed: int) -> None:
    choice = random.Random(seed)
    rank, k = choice.choice([(p.rank, k) for p in programs for k, i in enumerate(p.instructions) if i.op is Op.SEND])
    sender = programs[rank]
    channel = sender.channels[sender.instructions[k].channel]
    turn = sum(i.channel == sender.instructions[k].channel for i in sender.instructions[:k])
    receiver = programs[channel.dst]
    number = receiver.channels.index(channel)
    j = [j for j, i in enumerate(receiver.instructions) if i.channel == number][turn]
    changed = list(programs)
    for program, lost in ((sender, k), (receiver, j)):
        kept = [i for index, i in enumerate(program.instructions) if index != lost]
        code = [replace(i, needs=tuple(n - (n > lost) for n in i.needs if n != lost)) for i in kept]
        changed[program.rank] = rebuilt(program, code)
    with pytest.raises(VerificationError):
        verify_programs(changed)
