"""The schedule verifier against an exhaustive simulation of tiny schedules, right ones and mutants.

The oracle of the oracle walks through every state that the transfers of a schedule can be in when each may start
once those in its ``after`` are complete, and take its time. A schedule is right if nowhere two transfers touch a
place at once (unless both read, or both add), nothing reads an empty place, and every end state is the required
one. The verifier must agree, both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mycel.collectives.schedule import Chunk, Schedule, Transfer
from mycel.collectives.spec import COLLECTIVES, ROOTED, Collective, CollectiveName
from mycel.collectives.verify import verify_schedule
from mycel.errors import ScheduleError, VerificationError
from mycel.topology.model import Link, Topology, Vertex


def relaxed(max_examples: int) -> settings:
    return settings(max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])


# -- fabrics and right schedules, written without any of the planner's code --------------------------------


def mesh(n: int) -> Topology:
    """A cable from everybody to everybody."""
    vertices = tuple(Vertex(kind="rank", label=f"r{i}") for i in range(n))
    links = tuple(Link(src=a, dst=b, capacity=1) for a in range(n) for b in range(n) if a != b)
    return Topology(name=f"mesh{n}", unit="link", vertices=vertices, links=links)


def star(n: int) -> Topology:
    """Everybody at one switch, which is vertex 0."""
    vertices = (Vertex(kind="switch", label="sw"), *(Vertex(kind="rank", label=f"r{i}") for i in range(n)))
    links = tuple(Link(src=a, dst=b, capacity=1) for i in range(1, n + 1) for a, b in ((0, i), (i, 0)))
    return Topology(name=f"star{n}", unit="link", vertices=vertices, links=links)


def move(
    topology: Topology, chunk: int, src: int, dst: int, *, reduce: bool, after: tuple[int, ...] = ()
) -> Transfer:
    path: tuple[int, ...] = (topology.ranks[src], topology.ranks[dst])
    if topology.switches:
        path = (path[0], topology.switches[0], path[1])
    return Transfer(chunk=chunk, src=src, dst=dst, reduce=reduce, path=path, after=after)


def build(name: CollectiveName, topology: Topology, num_chunks: int, transfers: list[Transfer]) -> Schedule:
    return Schedule(
        collective=Collective(
            name=name, num_ranks=topology.num_ranks, root=0 if name in ("broadcast", "reduce") else None
        ),
        topology=topology,
        method="by_hand",
        num_units=num_chunks,
        chunks=tuple(Chunk(start=i, stop=i + 1) for i in range(num_chunks)),
        transfers=tuple(transfers),
    )


def ring(name: CollectiveName, topology: Topology) -> Schedule:
    """Each chunk once round the ring, added on the way (reduce_scatter), copied (all_gather), or both in turn."""
    n = topology.num_ranks
    transfers: list[Transfer] = []
    adding = n - 1 if name in ("reduce_scatter", "all_reduce") else 0
    copying = n - 1 if name in ("all_gather", "all_reduce") else 0
    for chunk in range(n):
        start = chunk if name != "reduce_scatter" else chunk + 1
        after: tuple[int, ...] = ()
        for step in range(adding + copying):
            src = (start + step) % n
            transfers.append(move(topology, chunk, src, (src + 1) % n, reduce=step < adding, after=after))
            after = (len(transfers) - 1,)
    return build(name, topology, n, transfers)


def tree(name: CollectiveName, topology: Topology) -> Schedule:
    """Up a binary heap of ranks to rank 0 (reduce), down (broadcast), or up and down (all_reduce)."""
    n = topology.num_ranks
    transfers: list[Transfer] = []
    into: dict[int, list[int]] = {r: [] for r in range(n)}
    if name in ("reduce", "all_reduce"):
        for r in range(n - 1, 0, -1):
            transfers.append(move(topology, 0, r, (r - 1) // 2, reduce=True, after=tuple(into[r])))
            into[(r - 1) // 2].append(len(transfers) - 1)
    if name in ("broadcast", "all_reduce"):
        for r in range(1, n):
            # Nothing is overwritten before it was read: the way down begins when the way up is complete.
            transfers.append(move(topology, 0, (r - 1) // 2, r, reduce=False, after=tuple(into[(r - 1) // 2])))
            into[r] = [len(transfers) - 1]
    return build(name, topology, 1, transfers)


def direct(name: CollectiveName, topology: Topology) -> Schedule:
    """Everybody sends to everybody who needs it, all at once (all_gather, reduce_scatter)."""
    n = topology.num_ranks
    pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
    gathers = name == "all_gather"
    return build(name, topology, n, [move(topology, a if gathers else b, a, b, reduce=not gathers) for a, b in pairs])


MAKERS: list[tuple[Callable[[CollectiveName, Topology], Schedule], CollectiveName]] = [
    *((ring, name) for name in ("all_gather", "reduce_scatter", "all_reduce")),
    *((tree, name) for name in ("broadcast", "reduce", "all_reduce")),
    *((direct, name) for name in ("all_gather", "reduce_scatter")),
]  # type: ignore[list-item]


# -- the oracle of the oracle -------------------------------------------------------------------------------

WAITING, RUNNING, COMPLETE = 0, 1, 2


def is_right_in_every_order(schedule: Schedule) -> bool:
    """Walk through every reachable state, chunk contents included. Exponential; for tiny schedules only.

    Chunks that no ``after`` ties together share nothing, so they are walked through one by one.
    """
    groups: list[set[int]] = [{c} for c in range(len(schedule.chunks))]
    for t in schedule.transfers:
        for earlier in t.after:
            ours = next(g for g in groups if t.chunk in g)
            theirs = next(g for g in groups if schedule.transfers[earlier].chunk in g)
            if ours is not theirs:
                groups.remove(theirs)
                ours |= theirs
    return all(_group_is_right(schedule, group) for group in groups)


def _group_is_right(schedule: Schedule, chunks: set[int]) -> bool:
    c, n = schedule.collective, schedule.collective.num_ranks
    members = [i for i, t in enumerate(schedule.transfers) if t.chunk in chunks]
    after = [[members.index(i) for i in schedule.transfers[m].after] for m in members]
    moves = [schedule.transfers[m] for m in members]
    # Contents are numbers in base 100: digit r counts the contributions of rank r; None is empty.
    memory: dict[tuple[int, int], int | None] = {}
    for chunk in chunks:
        for rank in range(n):
            whose = c.initial(rank, schedule.block_of(chunk))
            memory[rank, chunk] = sum(100**r for r in whose) if whose else None
    places = sorted(memory)
    first = (tuple(WAITING for _ in moves), tuple(memory[p] for p in places))
    seen, stack = {first}, [first]
    while stack:
        status, contents = stack.pop()
        held = dict(zip(places, contents, strict=True))
        running = [moves[i] for i, s in enumerate(status) if s == RUNNING]
        if any(_collide(a, b) for k, a in enumerate(running) for b in running[:k]):
            return False
        successors = []
        for i, t in enumerate(moves):
            if status[i] == WAITING and all(status[j] == COMPLETE for j in after[i]):
                successors.append(((*status[:i], RUNNING, *status[i + 1 :]), contents))
            elif status[i] == RUNNING:
                value, target = held[t.src, t.chunk], held[t.dst, t.chunk]
                if value is None or (t.reduce and (target is None or not c.reduces)):
                    return False
                changed = {**held, (t.dst, t.chunk): value + (target or 0) if t.reduce else value}
                successors.append(((*status[:i], COMPLETE, *status[i + 1 :]), tuple(changed[p] for p in places)))
        for state in successors:
            if state not in seen:
                seen.add(state)
                stack.append(state)
        if not successors:
            for rank, chunk in places:
                required = c.required(rank, schedule.block_of(chunk))
                if required is not None and held[rank, chunk] != sum(100**r for r in required):
                    return False
    return True


def _collide(a: Transfer, b: Transfer) -> bool:
    def accesses(t: Transfer) -> dict[tuple[int, int], str]:
        return {(t.src, t.chunk): "read", (t.dst, t.chunk): "add" if t.reduce else "write"}

    ours, theirs = accesses(a), accesses(b)
    return any(
        place in theirs and not (kind == theirs[place] and kind in ("read", "add")) for place, kind in ours.items()
    )


def is_accepted(schedule: Schedule) -> bool:
    try:
        verify_schedule(schedule)
    except VerificationError:
        return False
    return True


# -- mutants ------------------------------------------------------------------------------------------------


def _renumber(transfers: list[Transfer], new_place: dict[int, int]) -> list[Transfer]:
    """``after`` in new numbers; references to what is gone or no longer earlier are dropped."""
    out = []
    for position, t in enumerate(transfers):
        after = sorted({new_place[i] for i in t.after if i in new_place and new_place[i] < position})
        out.append(replace(t, after=tuple(after)))
    return out


def drop(schedule: Schedule, i: int, _: int) -> list[Transfer]:
    """Without transfer i; those that waited for it wait for what it waited for."""
    ts = schedule.transfers
    heirs = [replace(t, after=tuple({*t.after, *ts[i].after}) if i in t.after else t.after) for t in ts]
    places = {old: old - (old > i) for old in range(len(ts)) if old != i}
    return _renumber([t for k, t in enumerate(heirs) if k != i], places)


def duplicate(schedule: Schedule, i: int, _: int) -> list[Transfer]:
    """Transfer i twice in a row; those that waited for it wait for both."""
    ts = list(schedule.transfers)
    places = {old: old + (old > i) for old in range(len(ts))}
    out = _renumber([*ts[: i + 1], ts[i], *ts[i + 1 :]], places)
    for k in range(i + 1, len(out)):
        if k == i + 1 or i in out[k].after:
            out[k] = replace(out[k], after=tuple(sorted({*out[k].after, i, *([i + 1] if k > i + 1 else [])})))
    return out


def redirect(schedule: Schedule, i: int, k: int) -> list[Transfer]:
    t, n = schedule.transfers[i], schedule.collective.num_ranks
    others = [r for r in range(n) if r not in (t.src, t.dst)]
    if not others:
        return list(schedule.transfers)
    other = others[k % len(others)]
    src, dst = (t.src, other) if k % 2 else (other, t.dst)
    return _swap_in(schedule, i, move(schedule.topology, t.chunk, src, dst, reduce=t.reduce, after=t.after))


def turn_round(schedule: Schedule, i: int, _: int) -> list[Transfer]:
    t = schedule.transfers[i]
    return _swap_in(schedule, i, move(schedule.topology, t.chunk, t.dst, t.src, reduce=t.reduce, after=t.after))


def other_chunk(schedule: Schedule, i: int, k: int) -> list[Transfer]:
    t = schedule.transfers[i]
    return _swap_in(schedule, i, replace(t, chunk=(t.chunk + 1 + k) % len(schedule.chunks)))


def flip(schedule: Schedule, i: int, _: int) -> list[Transfer]:
    return _swap_in(schedule, i, replace(schedule.transfers[i], reduce=not schedule.transfers[i].reduce))


def forget_wait(schedule: Schedule, i: int, k: int) -> list[Transfer]:
    after = list(schedule.transfers[i].after)
    if after:
        del after[k % len(after)]
    return _swap_in(schedule, i, replace(schedule.transfers[i], after=tuple(after)))


def reorder(schedule: Schedule, i: int, k: int) -> list[Transfer]:
    """Transfers i and j change places in the list, what waited for one waits for the one that stands there."""
    ts = list(schedule.transfers)
    j = k % len(ts)
    ts[i], ts[j] = replace(ts[j], after=ts[i].after), replace(ts[i], after=ts[j].after)
    return ts


def _swap_in(schedule: Schedule, i: int, transfer: Transfer) -> list[Transfer]:
    return [*schedule.transfers[:i], transfer, *schedule.transfers[i + 1 :]]


MUTATIONS = [drop, duplicate, redirect, turn_round, other_chunk, flip, forget_wait, reorder]


def mutated(schedule: Schedule, mutate: Callable[[Schedule, int, int], list[Transfer]], i: int, k: int) -> Schedule:
    return replace(schedule, transfers=tuple(mutate(schedule, i % len(schedule.transfers), k)))


# -- tests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fabric", [mesh, star])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 7])
@pytest.mark.parametrize(("make", "name"), MAKERS)
def test_right_schedules_are_accepted(make, name, n, fabric):
    schedule = make(name, fabric(n))
    verify_schedule(schedule)
    assert n > 3 or is_right_in_every_order(schedule)


def _tiny() -> Iterator[Schedule]:
    for make, name in MAKERS:
        for n in (2, 3):
            yield make(name, mesh(n))
    for name in ("broadcast", "reduce", "all_reduce"):
        yield tree(name, mesh(5))
    yield ring("all_reduce", mesh(4))


TINY = list(_tiny())


@relaxed(600)
@given(
    schedule=st.sampled_from(TINY),
    changes=st.lists(
        st.tuples(st.sampled_from(MUTATIONS), st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=3
    ),
)
def test_verifier_agrees_with_exhaustive_simulation(schedule, changes):
    for mutate, i, k in changes:
        if schedule.transfers:
            schedule = mutated(schedule, mutate, i, k)
    assert is_accepted(schedule) == is_right_in_every_order(schedule)


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_each_kind_of_mutant_is_judged_as_the_simulation_judges_it(mutate):
    judged = {True: 0, False: 0}
    for schedule in TINY:
        for i in range(len(schedule.transfers)):
            mutant = mutated(schedule, mutate, i, i + 1)
            if mutant.transfers != schedule.transfers:
                right = is_right_in_every_order(mutant)
                assert is_accepted(mutant) == right, mutant.to_text()
                judged[right] += 1
    assert judged[False] >= 10  # the mutation does make wrong schedules


@relaxed(60)
@given(
    make_name=st.sampled_from(MAKERS),
    n=st.integers(2, 7),
    fabric=st.sampled_from([mesh, star]),
    mutate=st.sampled_from([drop, duplicate, turn_round, flip]),
    i=st.integers(0, 200),
)
def test_minimal_schedules_tolerate_no_loss_repeat_reversal_or_flip(make_name, n, fabric, mutate, i):
    """In these schedules every transfer is needed exactly once, so such a mutant is wrong without looking.

    The exception is repeating a copy: it brings the same again.
    """
    make, name = make_name
    schedule = make(name, fabric(n))
    i %= len(schedule.transfers)
    mutant = mutated(schedule, mutate, i, 0)
    if mutate is duplicate and not schedule.transfers[i].reduce:
        verify_schedule(mutant)
    else:
        with pytest.raises(VerificationError, match=rf"{name} over {n} ranks is wrong at rank \d+, chunk \d+"):
            verify_schedule(mutant)


@relaxed(60)
@given(
    make_name=st.sampled_from([(m, n) for m, n in MAKERS if m is not direct]),
    n=st.integers(3, 7),
    i=st.integers(0, 200),
)
def test_no_wait_of_a_chain_or_tree_can_be_spared(make_name, n, i):
    make, name = make_name
    schedule = make(name, mesh(n))
    waiting = [k for k, t in enumerate(schedule.transfers) if t.after]
    assume(waiting)  # three ranks broadcast in one step
    k = waiting[i % len(waiting)]
    for which in range(len(schedule.transfers[k].after)):
        with pytest.raises(VerificationError, match=r"in no fixed order|empty"):
            verify_schedule(mutated(schedule, forget_wait, k, which))


#: Each leaves behind what the others ask for; nothing else does.
SUFFICIENT = {"all_reduce": ("reduce", "reduce_scatter"), "all_gather": ("gather",), "broadcast": ("scatter",)}


@relaxed(100)
@given(
    names=st.tuples(st.sampled_from(sorted({name for _, name in MAKERS})), st.sampled_from(COLLECTIVES)),
    n=st.integers(2, 5),
)
def test_a_schedule_of_one_collective_is_wrong_for_another(names, n):
    assume(names[0] != names[1])
    makers = {name: partial(make, name) for make, name in MAKERS}
    schedule = makers[names[0]](mesh(n))
    other = Collective(name=names[1], num_ranks=n, root=0 if names[1] in ROOTED else None)
    try:
        claimed = replace(schedule, collective=other)
    except ScheduleError:
        return  # chunks that cross the other collective's blocks are refused before
    if names[1] in SUFFICIENT.get(names[0], ()):
        verify_schedule(claimed)
    else:
        assert is_accepted(claimed) == (n <= 3 and is_right_in_every_order(claimed))
