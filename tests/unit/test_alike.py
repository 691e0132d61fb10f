"""Schedules over ranks that are alike: stated by one rank's part, right and as fast as the bound for all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mycel.collectives.bound import bound
from mycel.collectives.columns import Columns
from mycel.collectives.cost import estimate_seconds
from mycel.collectives.lower import RankTemplate, lower
from mycel.collectives.moves import Moves, find_moves
from mycel.collectives.orbit import Orbit
from mycel.collectives.program import Op, Program
from mycel.collectives.proof import prove_lowering
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import COLLECTIVES, ROOTED, Collective, CollectiveName
from mycel.collectives.synth import methods_for, synthesize
from mycel.collectives.synth.nodes import NODES_FROM
from mycel.collectives.verify import verify_own_program, verify_programs, verify_schedule
from mycel.errors import MycelError, ScheduleError, VerificationError
from mycel.runtime.planner import sends_directly
from mycel.topology.builders import hosts, loopback, star
from mycel.topology.load import load_topology
from mycel.topology.model import Topology

FIVE_NODES = hosts([f"node{rank // 7}" for rank in range(35)])
SCATTERED = hosts([f"node{rank % 4}" for rank in range(36)])  # ranks of a node do not stand together
FABRICS = [FIVE_NODES, SCATTERED, star(num_ranks=33), loopback(num_ranks=34)]


def made(fabric: Topology, name: CollectiveName, method: str) -> Schedule:
    root = fabric.num_ranks - 2 if name in ROOTED else None
    return synthesize(fabric, Collective(name, fabric.num_ranks, root=root), method)


def expanded(schedule: Schedule) -> Schedule:
    """The same, with every transfer written out."""
    assert schedule.orbit is not None
    return Schedule.of_columns(
        collective=schedule.collective,
        topology=schedule.topology,
        method=schedule.method,
        num_units=schedule.num_units,
        chunks=schedule.chunks,
        columns=schedule.orbit.expanded(),
    )


# -- moves --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "orders"),
    [("star:ranks=6", (6,)), ("two_boxes:ranks=8", (2, 4)), ("dgx_a100:nodes=3", (3, 8)), ("ring:ranks=5", (5,))],
)
def test_moves_are_found_where_nodes_are_alike(spec, orders):
    moves = find_moves(load_topology(spec))
    assert moves is not None
    assert moves.orders == orders


@pytest.mark.parametrize("spec", ["two_boxes:ranks=7", "mesh:dims=2x3", "torus:dims=4x4"])
def test_no_moves_are_found_where_a_numbering_round_does_not_fit(spec):
    assert find_moves(load_topology(spec)) is None


def test_a_move_takes_links_to_equal_ones_and_is_undone():
    moves = find_moves(SCATTERED)
    assert moves is not None
    ranks = np.arange(36)
    for move in (1, 5, 35):
        there = moves.apply(move, ranks)
        assert sorted(there.tolist()) == list(range(36))
        assert (moves.between(ranks, there) == move).all()
        for link in SCATTERED.links:
            src, dst = moves.images(move, [link.src, link.dst]).tolist()
            assert SCATTERED.capacity[src, dst] == link.capacity


def test_moves_are_refused_that_change_a_link_leave_a_rank_out_or_do_not_commute():
    fabric = star(num_ranks=4)
    ranks = np.array(fabric.ranks)
    turn = np.append(ranks[1:], [ranks[0]])
    right = np.arange(5)
    right[ranks] = turn
    assert Moves(generators=(right,), orders=(4,), ranks=ranks).is_group_of(fabric)
    twice = right[right]
    swap = np.arange(5)
    swap[ranks[:2]] = ranks[1::-1]
    for generators, orders in (((twice,), (2,)), ((right,), (3,)), ((right, swap), (2, 2)), ((right, right), (2, 2))):
        assert not Moves(generators=generators, orders=orders, ranks=ranks).is_group_of(fabric)
    wider = replace(fabric, links=(replace(fabric.links[0], capacity=7), *fabric.links[1:]))
    assert not Moves(generators=(right,), orders=(4,), ranks=ranks).is_group_of(wider)


# -- schedules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fabric", FABRICS, ids=lambda fabric: fabric.name)
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce"])
def test_trees_by_construction_meet_the_bound_in_few_steps(fabric, name):
    schedule = made(fabric, name, "forest")
    verify_schedule(schedule)
    assert schedule.algbw == bound(fabric, schedule.collective).algbw
    steps = 2 + 2 * (fabric.num_ranks - 1).bit_length()
    assert schedule.depth <= steps * (2 if name == "all_reduce" else 1)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
@pytest.mark.parametrize("fabric", [FIVE_NODES, SCATTERED], ids=lambda fabric: fabric.name)
def test_one_ranks_part_says_what_all_transfers_say(fabric, name):
    for method in methods_for(name):
        schedule = made(fabric, name, method)
        if schedule.orbit is None:
            assert (name, method) == ("all_reduce", "tree")
            continue
        whole = expanded(schedule)
        verify_schedule(schedule)
        verify_schedule(whole)
        assert whole.orbit is None
        assert schedule == whole
        assert schedule.link_load == whole.link_load
        assert (schedule.algbw, schedule.depth, schedule.levels) == (whole.algbw, whole.depth, whole.levels)
        assert schedule.order_levels == whole.order_levels
        assert schedule.num_compute_vertices == whole.num_compute_vertices
        blocks = [[s.block_of(chunk) for chunk in range(len(s.chunks))] for s in (schedule, whole)]
        assert blocks[0] == blocks[1]
        assert estimate_seconds(schedule, 1 << 20, 1 << 14) == pytest.approx(
            estimate_seconds(whole, 1 << 20, 1 << 14)
        )
        elements = 5 * schedule.collective.num_blocks * (fabric.num_ranks if name == "all_reduce" else 1)
        for rank in (0, 17, fabric.num_ranks - 1):
            here, there = (RankTemplate(s, rank).expand(elements, 3) for s in (schedule, whole))
            assert here.to_text() == there.to_text()


def test_all_to_all_of_ranks_that_are_alike_is_known_to_be_direct():
    found = {method: made(FIVE_NODES, "all_to_all", method) for method in ("flow", "direct")}
    assert sends_directly(found)
    assert sends_directly({"direct": expanded(found["direct"])})
    assert found["flow"].algbw == bound(FIVE_NODES, "all_to_all").algbw


def test_nodes_that_are_not_alike_are_searched_as_before():
    uneven = hosts([f"node{rank // 8}" for rank in range(36)])
    schedule = made(uneven, "all_gather", "forest")
    assert schedule.orbit is None
    verify_schedule(schedule)
    assert schedule.algbw == bound(uneven, "all_gather").algbw
    assert uneven.num_ranks >= NODES_FROM


# -- mutants --------------------------------------------------------------------------------------------------


def with_columns(schedule: Schedule, columns: Columns) -> Schedule:
    orbit = schedule.orbit
    assert orbit is not None
    return Schedule.of_orbit(
        collective=schedule.collective,
        topology=schedule.topology,
        method=schedule.method,
        orbit=Orbit(moves=orbit.moves, columns=columns, stops=orbit.stops, turns=orbit.turns),
    )


@pytest.mark.parametrize("name", ["all_gather", "all_reduce", "all_to_all"])
def test_a_part_from_which_a_transfer_is_dropped_or_that_goes_elsewhere_is_refused(name):
    schedule = made(SCATTERED, name, methods_for(name)[0])
    assert schedule.orbit is not None
    transfers = list(schedule.orbit.columns.transfers())
    last = len(transfers) - 1  # nothing comes after it
    verify_schedule(with_columns(schedule, Columns.of(transfers)))
    refused = (
        [Columns.of(transfers[:last]), Columns.of([*transfers, transfers[last]])] if name == "all_reduce" else []
    )
    refused.append(Columns.of(transfers[:last]))
    one, other = transfers[last], transfers[last - 1]
    refused.append(Columns.of([*transfers[:last], replace(other, after=one.after)]))
    if name == "all_reduce":
        refused.append(Columns.of([*transfers[:last], replace(one, after=())]))
    for columns in refused:
        with pytest.raises(VerificationError):
            verify_schedule(with_columns(schedule, columns))


def test_moves_that_are_none_are_refused():
    schedule = made(FIVE_NODES, "all_gather", "tree")
    orbit = schedule.orbit
    assert orbit is not None
    first = orbit.moves.generators[0].copy()
    first[[0, 1]] = first[[1, 0]]
    moves = Moves(generators=(first, *orbit.moves.generators[1:]), orders=orbit.moves.orders, ranks=orbit.moves.ranks)
    wrong = Schedule.of_orbit(
        collective=schedule.collective,
        topology=schedule.topology,
        method="tree",
        orbit=Orbit(moves=moves, columns=orbit.columns, stops=orbit.stops, turns=False),
    )
    with pytest.raises(VerificationError, match="do not take the fabric"):
        verify_schedule(wrong)


def test_a_part_that_is_not_of_the_collective_is_malformed():
    schedule = made(FIVE_NODES, "all_gather", "tree")
    orbit = schedule.orbit
    assert orbit is not None
    for collective in (Collective("broadcast", 35, root=0), Collective("all_to_all", 35)):
        with pytest.raises(ScheduleError):
            Schedule.of_orbit(collective=collective, topology=FIVE_NODES, method="tree", orbit=orbit)


# -- one rank's program by itself -----------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["star:ranks=4", "two_boxes:ranks=5", "ring:ranks=6"])
def test_programs_that_are_right_together_are_right_one_by_one(spec):
    fabric = load_topology(spec)
    n = fabric.num_ranks
    for name in COLLECTIVES:
        for method in methods_for(name):
            schedule = made(fabric, name, method)
            for elements, piece in ((3 * n * n, n), (n * n, n * n)):
                programs = lower(schedule, elements, piece_elements=piece)
                verify_programs(programs)
                for program in programs:
                    verify_own_program(schedule, program, piece)


def test_a_rank_proves_its_own_program_of_a_large_group():
    for name in ("all_reduce", "all_gather", "all_to_all", "broadcast", "gather"):
        schedule = made(FIVE_NODES, name, methods_for(name)[0])
        for rank in (0, 33):
            own = sum(rank in (t.src, t.dst) for t in schedule.transfers)
            # Chunks of length 2 are whole and longer ones in two pieces; of one length, all are in two.
            assert own <= prove_lowering(schedule, rank=rank) <= 2 * own + 1
            assert prove_lowering(schedule, 35 * 35 * 35, 4, rank=rank) in (2 * own, 2 * own + 1)


def mutants(program: Program) -> list[Program]:
    """A program with one thing wrong in each."""
    found = []

    def changed(row: int, **fields: int) -> None:
        columns = program.columns.copy()
        for name, value in fields.items():
            columns[name][row] = value
        found.append({"columns": columns})

    c = program.columns
    adds = np.flatnonzero(c["op"] == Op.RECV_REDUCE).tolist()
    for row in range(len(c)):
        for name in ("offset", "channel"):
            changed(row, **{name: int(c[name][row]) + 1})
            changed(row, **{name: int(c[name][row]) - 1})
        if c["count"][row] > 1:
            changed(row, count=int(c["count"][row]) - 1)
        order = np.arange(len(c))
        order[[row, (row + 1) % len(c)]] = order[[(row + 1) % len(c), row]]
        found.append({"columns": c[order].copy()})
    for row in adds:
        changed(row, operand_offset=int(c["operand_offset"][row]) + 1)
        changed(row, final=1 - int(c["final"][row]))
        changed(row, op=int(Op.RECV))
    for need in range(len(program.need_index)):  # a need is dropped
        start = program.need_start.copy()
        start[start > need] -= 1
        found.append({"need_start": start, "need_index": np.delete(program.need_index, need)})
    programs = []
    for fields in found:
        try:
            programs.append(replace(program, **fields))
        except ScheduleError:  # malformed already
            continue
    return programs


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_whatever_all_programs_together_show_to_be_wrong_is_refused_by_its_rank(name):
    fabric = load_topology("two_boxes:ranks=4")
    schedule = made(fabric, name, methods_for(name)[0])
    programs = list(lower(schedule, 4 * 4 * 4, piece_elements=5))
    wrong = 0
    for mutant in mutants(programs[1]):
        try:
            verify_programs([programs[0], mutant, *programs[2:]])
        except MycelError:
            wrong += 1
            with pytest.raises(VerificationError):
                verify_own_program(schedule, mutant, 5)
    assert wrong > 20
