"""Mutants of what the planner makes: schedules of every method, and the programs they are lowered to.

The mutants are those of ``benchmarks/mutants.py``; which of them are wrong is known without the verifier. Synthesized
transfers are trees in which each is needed once, so losing, turning or repeating one is wrong. Whether a wait can be
spared is decided by a plain graph search over starts and completions, pair by pair, where the verifier uses bitsets
and turns.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations
from typing import Any

import networkx as nx
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.oracles.link_loads import verify_link_loads

import mutants
from mycel.collectives.lower import lower
from mycel.collectives.program import Buffer, Instruction, Op, Program
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import COLLECTIVES, ROOTED, UNEVEN, Collective
from mycel.collectives.synth import methods_for, synthesize
from mycel.collectives.synth.classics import CLASSICS, classics_for
from mycel.collectives.verify import verify_programs, verify_schedule
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
EXCHANGES = ("recursive_doubling", "swing_latency", "trivance_latency")
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@cache
def made(where: int, name: str, method: str, is_uneven: bool) -> Schedule | None:
    """Nothing where a classic does not go: partners without a path, or no nodes."""
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
            # Where partners add each other's sums there are no trees: ``test_mutants_share`` has mutants of those.
            for method in (*methods_for(name), "steps", *classics_for(name))
            if method not in EXCHANGES or name != "all_reduce"
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


def mutant_of(make: Callable[[Any, str, random.Random], Any], right: Any, kind: str, seed: int) -> Any:
    """The first of some drawn changes that can be made."""
    chance = random.Random(seed)
    made = next((m for m in (make(right, kind, chance) for _ in range(100)) if m is not None), None)
    assume(made is not None)
    return made


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


@pytest.mark.parametrize("kind", ["drop", "repeat", "turn", "reduce for copy"])
@QUICK
@given(schedule=schedules, seed=st.integers(0, 2**32 - 1))
def test_a_transfer_lost_repeated_turned_or_flipped(kind: str, schedule: Schedule, seed: int) -> None:
    ts = schedule.transfers
    i = random.Random(seed).randrange(len(ts))  # the one that the generator draws first
    t = ts[i]
    if kind == "repeat":
        assume(t.reduce)  # repeating a copy brings the same again
    elif kind == "reduce for copy":
        # What comes first to a switch starts the sum there, added or not: a second one tells the difference.
        place = [x for k, x in enumerate(ts) if k != i and (x.dst, x.chunk) == (t.dst, t.chunk)]
        assume(t.dst < schedule.collective.num_ranks or any(x.reduce for x in place))
    wrong = mutants.schedule_mutant(schedule, kind, random.Random(seed))
    assume(wrong is not None)  # no way back
    with pytest.raises(VerificationError, match=r"is wrong at (rank|switch)"):
        verify_schedule(wrong)


@QUICK
@given(schedule=schedules, seed=st.integers(0, 2**32 - 1))
def test_a_forgotten_wait(schedule: Schedule, seed: int) -> None:
    hasty = mutant_of(mutants.schedule_mutant, schedule, "forget a wait", seed)
    if in_no_fixed_order(hasty):
        with pytest.raises(VerificationError, match="in no fixed order"):
            verify_schedule(hasty)
    else:
        verify_schedule(hasty)


# -- programs -------------------------------------------------------------------------------------------------


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
    hasty = mutant_of(mutants.program_mutant, list(programs), "forget a need", seed)
    if race(hasty):
        with pytest.raises(
            VerificationError,
            match=r"in no fixed order|which nothing has been written to|is wrong at|final too early",
        ):
            verify_programs(hasty)
    else:
        verify_programs(hasty)


@pytest.mark.parametrize("kind", ["swap", "drop a message"])
@QUICK
@given(programs=lowered(), seed=st.integers(0, 2**32 - 1))
def test_messages_in_another_order_at_one_end_or_lost_at_both(
    kind: str, programs: tuple[Program, ...], seed: int
) -> None:
    with pytest.raises(VerificationError):
        verify_programs(mutant_of(mutants.program_mutant, list(programs), kind, seed))
