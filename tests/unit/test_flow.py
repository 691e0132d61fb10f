"""Flow and direct: optima known by hand, what proves them, relays, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from tests.oracles.link_loads import verify_link_loads

from mycel.collectives import flow_bound
from mycel.collectives.bound import bound
from mycel.collectives.cost import choose
from mycel.collectives.flow_bound import solve_flow
from mycel.collectives.lower import RankTemplate, lower
from mycel.collectives.program import Buffer, Op
from mycel.collectives.schedule import Schedule, Transfer
from mycel.collectives.simulate import simulate
from mycel.collectives.single_source import least_time, whole_flow
from mycel.collectives.spec import Collective
from mycel.collectives.synth import methods_for, synthesize
from mycel.collectives.verify import verify_programs, verify_schedule
from mycel.errors import ScheduleError, UsageError, VerificationError
from mycel.topology.builders import full_mesh, ring, star, torus, two_boxes
from mycel.topology.load import load_topology
from mycel.topology.model import Link, Topology, Vertex

CLUSTERS = Path(__file__).resolve().parents[2] / "examples" / "clusters"


def on(topology: Topology, name: str, root: int | None = None) -> Collective:
    return Collective(name=name, num_ranks=topology.num_ranks, root=root)


@pytest.mark.parametrize(
    ("topology", "name", "root", "inverse_x"),
    [
        # Every rank sends to n-1 others over one link.
        (star(num_ranks=5, bandwidth="1 GB/s"), "all_to_all", None, Fraction(4)),
        (star(num_ranks=5, bandwidth="1 GB/s"), "scatter", 2, Fraction(4)),
        # Sum of distances over links: 4 * (1 + 1 + 2) / 8, and 6 * (1 + 1 + 2 + 2 + 3) / 12.
        (ring(num_ranks=4), "all_to_all", None, Fraction(2)),
        (ring(num_ranks=6), "all_to_all", None, Fraction(9, 2)),
        # Both links of the root.
        (ring(num_ranks=4), "gather", 3, Fraction(3, 2)),
        (full_mesh(num_ranks=4), "all_to_all", None, Fraction(1)),
        # 16 distances of 1, 1, 2, 2, ... : 32 a rank over 4 links.
        (torus(dims=(4, 4)), "all_to_all", None, Fraction(8)),
    ],
)
def test_known_optima(topology: Topology, name: str, root: int | None, inverse_x: Fraction) -> None:
    collective = on(topology, name, root)
    capacity = topology.links[0].capacity
    best = bound(topology, collective)
    assert best.inverse_x * capacity == inverse_x
    assert solve_flow(topology, collective).is_exact
    schedule = synthesize(topology, collective)
    assert schedule.method == "flow"
    verify_schedule(schedule)
    assert schedule.algbw == best.algbw
    with pytest.raises(VerificationError, match="does not reach"):
        verify_link_loads(schedule, best.algbw * Fraction(1001, 1000))


def test_nodes_are_bound_by_the_way_between() -> None:
    topology = two_boxes()
    best = bound(topology, on(topology, "all_to_all"))
    assert best.algbw == 100  # 8 * 50 Mbit/s out of a node, half of what its four ranks send
    assert "at most 100 Mbit/s" in best.explain()
    assert {topology.label(v) for hop in best.cut for v in hop} & {topology.label(v) for v in topology.switches}


def test_prices_prove_the_bound_without_the_solver() -> None:
    """Summed over pairs, the cheapest way at these prices, against what all links are worth."""
    topology = torus(dims=(2, 3))
    best = solve_flow(topology, on(topology, "all_to_all"))
    far = np.full((6, 6), 10**9)
    np.fill_diagonal(far, 0)
    for link, price in zip(topology.links, best.prices, strict=True):
        far[link.src, link.dst] = price
    for via in range(6):
        far = np.minimum(far, far[:, via : via + 1] + far[via : via + 1])
    worth = sum(k.capacity * price for k, price in zip(topology.links, best.prices, strict=True))
    assert Fraction(int(far.sum()), worth) == best.inverse_x


def test_size_of_all_to_all_is_one_ranks() -> None:
    topology = star(num_ranks=4, bandwidth="400 Mbit/s")
    schedule = synthesize(topology, on(topology, "all_to_all"))
    # A rank's buffer of 4 parts: 3 of them leave over 400 Mbit/s.
    assert schedule.algbw == Fraction(1600, 3)
    programs = lower(schedule, 16 * 5, piece_elements=100)
    assert [programs[1].length(b) for b in Buffer] == [20, 20, 0]


def test_relays_pass_through_scratch_and_own_blocks_are_copied() -> None:
    topology = ring(num_ranks=5)
    programs = lower(synthesize(topology, on(topology, "all_to_all"), "direct"), 25 * 3, piece_elements=2)
    verify_programs(programs)
    for program in programs:
        landed = [i for i in program.instructions if i.op is Op.RECV and i.buffer is Buffer.SCRATCH]
        sent_on = [i for i in program.instructions if i.op is Op.SEND and i.buffer is Buffer.SCRATCH]
        assert sum(i.count for i in landed) == sum(i.count for i in sent_on) == program.scratch_elements == 6
        assert all(i.needs for i in sent_on)
        copies = [i for i in program.instructions if i.op is Op.COPY]
        assert [(i.offset, i.operand_offset, i.count) for i in copies] == [(3 * program.rank, 3 * program.rank, 3)]


def test_only_the_root_copies_its_block() -> None:
    topology = ring(num_ranks=5)
    for name, place in (("gather", (6, 0, 3)), ("scatter", (0, 6, 3))):
        programs = lower(synthesize(topology, on(topology, name, 2)), 15, piece_elements=2)
        verify_programs(programs)
        copies = [
            (p.rank, (i.offset, i.operand_offset, i.count))
            for p in programs
            for i in p.instructions
            if i.op is Op.COPY
        ]
        assert copies == [(2, place)]


def coprime(seed: int, num_ranks: int, *, largest: int = 700) -> Topology:
    """A cycle through ranks and switches, and more links, whose capacities share nothing."""
    rng = random.Random(seed)
    count = num_ranks + rng.randint(0, 3)
    cycle = rng.sample(range(count), count)
    capacity = {hop: rng.randint(1, largest) for hop in zip(cycle, cycle[1:] + cycle[:1], strict=True)}
    for _ in range(rng.randint(0, 14)):
        a, b = rng.sample(range(count), 2)
        capacity[a, b] = rng.randint(1, largest)
    return Topology(
        name="coprime",
        unit="link",
        vertices=tuple(Vertex(kind="rank" if i < num_ranks else "switch", label=f"v{i}") for i in range(count)),
        links=tuple(Link(src=a, dst=b, capacity=c) for (a, b), c in capacity.items()),
    )


def test_flows_without_a_small_common_denominator_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_bound, "_MOST_UNITS", 1)
    solve_flow.cache_clear()
    try:
        topology = coprime(0, 5)
        collective = on(topology, "all_to_all")
        best = solve_flow(topology, collective)
        assert (best.is_exact, best.num_units) == (False, 0)
        schedule = synthesize(topology, collective)
    finally:
        solve_flow.cache_clear()
    verify_schedule(schedule)
    exact = bound(topology, collective)
    assert float(best.inverse_x) == pytest.approx(float(exact.inverse_x), rel=1e-8)
    assert best.inverse_x <= exact.inverse_x, "still a bound"
    assert 0.999 * exact.algbw <= schedule.algbw <= exact.algbw


@pytest.mark.parametrize("num_ranks", [3, 5, 8])
@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_one_source_meets_its_bound_whatever_the_capacities(name: str, num_ranks: int) -> None:
    for seed in range(6):
        topology = coprime(seed, num_ranks, largest=700 if seed % 2 else 10**7)
        collective = on(topology, name, seed % num_ranks)
        schedule = synthesize(topology, collective)
        verify_schedule(schedule)
        assert schedule.algbw == bound(topology, collective).algbw


def test_whole_flows_are_found_without_floating_point() -> None:
    topology = coprime(3, 6)
    demand = [0, 3, 1, 0, 2, 5]
    time, cut = least_time(topology, 0, demand)
    units = whole_flow(topology, 0, demand, time)
    for vertex in range(len(topology.vertices)):
        net = sum(
            u * ((k.dst == vertex) - (k.src == vertex)) for u, k in zip(units.tolist(), topology.links, strict=True)
        )
        rank = topology.rank_of.get(vertex)
        if rank is None or rank:
            assert net == (0 if rank is None else demand[rank]) * time.denominator
    assert all(u <= k.capacity * time.numerator for u, k in zip(units.tolist(), topology.links, strict=True))
    assert all(units[i] == topology.links[i].capacity * time.numerator for i in cut), "what binds is full"


def test_other_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="over 4 ranks"):
        synthesize(star(num_ranks=3), Collective(name="all_to_all", num_ranks=4))


def test_large_arrays_take_the_flow_and_small_ones_direct_messages() -> None:
    topology = torus(dims=(2, 4))
    candidates = {m: synthesize(topology, on(topology, "all_to_all"), m) for m in methods_for("all_to_all")}
    assert choose(candidates, 1 << 30).method == "flow"
    assert candidates["direct"].algbw < candidates["flow"].algbw


@pytest.mark.parametrize("file", ["torus_2x4", "two_boxes", "ring4", "star4"])
def test_simulated_time_is_near_the_bound(file: str) -> None:
    topology = load_topology(str(CLUSTERS / f"{file}.yaml"))
    collective = on(topology, "all_to_all")
    ran = simulate(synthesize(topology, collective), 16 << 20)
    rate = topology.bytes_per_second_per_unit
    assert rate is not None
    share = (16 << 20) / (ran.seconds * float(bound(topology, collective).algbw * rate))
    assert 0.95 <= share <= 1
    assert ran.num_bytes == 16 << 20
    assert ran.algbw == pytest.approx(share * float(bound(topology, collective).algbw))


# -- what the verifier must not let pass ------------------------------------------------------------------


def by_hand(*transfers: Transfer) -> Schedule:
    """Scatter over a ring of three from rank 0."""
    model = synthesize(ring(num_ranks=3), on(ring(num_ranks=3), "scatter", 0), "direct")
    return replace(model, transfers=transfers)


def move(chunk: int, src: int, dst: int, *after: int) -> Transfer:
    return Transfer(chunk=chunk, src=src, dst=dst, reduce=False, path=(src, dst), after=after)


def test_wrong_schedules_are_refused() -> None:
    verify_schedule(by_hand(move(1, 0, 1), move(2, 0, 1), move(2, 1, 2, 1)))
    with pytest.raises(VerificationError, match="rank 2, chunk 2: contribution of rank 0 is missing"):
        verify_schedule(by_hand(move(1, 0, 1)))
    with pytest.raises(VerificationError, match="reads it while it is empty"):
        verify_schedule(by_hand(move(1, 0, 1), move(2, 1, 2)))
    with pytest.raises(VerificationError, match="in no fixed order"):
        verify_schedule(by_hand(move(1, 0, 1), move(2, 0, 1), move(2, 1, 2)))


def test_a_program_cannot_bring_a_block_back_to_where_it_came_from() -> None:
    there_and_back = by_hand(move(1, 0, 1), move(2, 0, 1), move(2, 1, 0, 1), move(2, 0, 2, 2))
    verify_schedule(there_and_back)
    with pytest.raises(ScheduleError, match="transfer 2: rank 0 has the chunk in INPUT"):
        RankTemplate(there_and_back, 0)


@pytest.mark.parametrize("method", methods_for("all_to_all"))
def test_blocks_of_two_ranks_exchanged_are_noticed(method: str) -> None:
    """Programs that deliver everything, but two blocks in each other's place."""
    topology = star(num_ranks=3)
    programs = list(lower(synthesize(topology, on(topology, "all_to_all"), method), 9 * 4, piece_elements=4))
    columns = programs[0].columns.copy()
    landing = np.flatnonzero(columns["op"] == Op.RECV)
    columns["offset"][landing] = columns["offset"][landing][::-1]
    programs[0] = replace(programs[0], columns=columns)
    with pytest.raises(VerificationError, match="wrong at rank 0"):
        verify_programs(programs)
