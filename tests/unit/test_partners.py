"""Schedules in which partners add each other's sums: their form, what is refused, programs, and who chooses them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mycel.collectives.cost import choose
from mycel.collectives.export import export
from mycel.collectives.imports.msccl_xml import parse
from mycel.collectives.lower import RankTemplate, lower
from mycel.collectives.program import Buffer, Op
from mycel.collectives.proof import prove_lowering
from mycel.collectives.schedule import Chunk, Schedule, Transfer
from mycel.collectives.select import select
from mycel.collectives.spec import Collective
from mycel.collectives.synth import exchange, synthesize
from mycel.collectives.verify import sums_agree, verify_programs, verify_schedule
from mycel.collectives.verify.blocks import verify_blocks
from mycel.errors import ScheduleError, SynthesisError, VerificationError
from mycel.runtime.device import steps
from mycel.runtime.planner import verified_schedules
from mycel.topology.builders import dgx_h100, full_mesh, hypercube, ring, star, torus, two_boxes
from mycel.topology.model import Topology


def exchanged(*transfers: Transfer, ranks: int = 2, name: str = "all_reduce") -> Schedule:
    collective = Collective(name=name, num_ranks=ranks)  # type: ignore[arg-type]
    return Schedule(
        collective=collective,
        topology=full_mesh(num_ranks=ranks),
        method="by_hand",
        num_units=collective.num_blocks,
        chunks=tuple(Chunk(start=i, stop=i + 1) for i in range(collective.num_blocks)),
        transfers=transfers,
    )


def send(src: int, dst: int, places: tuple[int, int], **more: Any) -> Transfer:
    return Transfer(chunk=0, src=src, dst=dst, path=(src, dst), places=places, **({"reduce": True} | more))


def test_two_partners_add_at_the_same_time() -> None:
    schedule = exchanged(send(0, 1, (0, 1)), send(1, 0, (0, 1)))
    verify_schedule(schedule)
    assert schedule.depth == 1 and sums_agree(schedule)
    with pytest.raises(VerificationError, match=r"reads it and .* adds to it in no fixed order|counted twice"):
        verify_schedule(exchanged(send(0, 1, (0, 0)), send(1, 0, (0, 0))))


def test_forms_keep_places() -> None:
    schedule = synthesize(star(num_ranks=6), "all_reduce", "recursive_doubling")
    assert Schedule.from_text(schedule.to_text()) == schedule
    assert Schedule.from_json(schedule.to_json()) == schedule
    assert '"reduce", [0, 1], [], [0, 1]]' in exchanged(send(0, 1, (0, 1)), send(1, 0, (0, 1))).to_json_text()


@pytest.mark.parametrize(
    ("transfer", "name", "message"),
    [
        (
            send(0, 1, (0, 64)),
            "all_reduce",
            r"0 \(chunk 0, 0 -> 1\): reads place 0 and writes place 64; 0..63",
        ),
        (send(0, 1, (-1, 0)), "all_reduce", "reads place -1"),
        (send(0, 1, (0, 1)), "reduce_scatter", "names places, which reduce_scatter does not have; all_reduce does"),
        (send(0, 1, (0, 1), reduce=False), "all_reduce", "copies to place 1; copies go to place 0"),
    ],
)
def test_malformed_places(transfer: Transfer, name: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        exchanged(transfer, name=name)


def test_switches_have_one_place() -> None:
    fabric = star(num_ranks=2, computes=True)
    up = Transfer(chunk=0, src=0, dst=2, reduce=True, path=(0, 2), places=(0, 1))
    with pytest.raises(ScheduleError, match="names places, but a switch has one"):
        replace(synthesize(fabric, "all_reduce", "tree"), transfers=(up,))


def test_what_is_wrong_is_said_with_its_place() -> None:
    right = synthesize(star(num_ranks=4), "all_reduce", "recursive_doubling")
    later = next(i for i, t in enumerate(right.transfers) if t.places == (1, 2))
    t = right.transfers[later]
    before, behind = right.transfers[:later], right.transfers[later + 1 :]
    stale = replace(right, transfers=(*before, replace(t, places=(0, 2)), *behind))
    with pytest.raises(VerificationError, match=rf"wrong at rank {t.dst}, chunk 0, place 2: contribution of rank"):
        verify_schedule(stale)
    early = replace(right, transfers=(*before, replace(t, after=()), *behind))
    with pytest.raises(VerificationError, match=rf"rank {t.src}, chunk 0, place 1: .* in no fixed order"):
        verify_schedule(early)
    twice = exchanged(send(0, 1, (0, 1)), send(1, 0, (0, 1)), send(1, 0, (1, 2), after=(0,)))
    with pytest.raises(VerificationError, match="contribution of rank 0 is counted twice"):
        verify_schedule(twice)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8, 9])
@pytest.mark.parametrize("method", ["exchange", "recursive_doubling", "swing_latency", "trivance_latency"])
def test_programs_at_every_size(method: str, ranks: int) -> None:
    try:
        schedule = synthesize(star(num_ranks=ranks), "all_reduce", method)
    except SynthesisError:
        assert method not in ("exchange", "recursive_doubling")
        return
    prove_lowering(schedule)
    for elements, piece in ((1, 4), (13, 5), (64, 8)):
        verify_programs(lower(schedule, elements, piece_elements=piece))
    # The engine of devices takes every rank's steps as well, with at most one copy a piece before them.
    for rank in range(ranks):
        template = RankTemplate(schedule, rank)
        made = steps.prepare(template.expand(13, 5), template.steps(13, 5), 4)
        assert len(made.copies) in (0, 3)


def test_sums_take_turns_in_two_buffers() -> None:
    """An even number of sums ends where the array stands; of an odd number, the array is copied first."""
    for bits in (1, 2, 3, 4):
        template = RankTemplate(synthesize(star(num_ranks=1 << bits), "all_reduce", "recursive_doubling"), 0)
        program = template.expand(1, 1)
        assert program.scratch_elements == 1
        sums = [i.buffer for i in program.instructions if i.op is Op.RECV_REDUCE]
        assert sums == [Buffer.OUTPUT if (bits - k) % 2 else Buffer.SCRATCH for k in range(bits)]
        assert sum(i.op is Op.COPY for i in program.instructions) == bits % 2


def test_a_program_forms_its_sums_in_turn() -> None:
    late = exchanged(
        send(0, 1, (0, 1)),
        send(1, 0, (0, 1)),
        send(1, 2, (1, 1), after=(0,)),
        send(2, 0, (0, 2)),
        send(2, 1, (0, 2)),
        ranks=3,
    )
    verify_schedule(late)
    verify_programs(lower(late, 3, piece_elements=2))
    back = exchanged(send(0, 1, (0, 1)), send(1, 0, (0, 1)), send(0, 1, (0, 0), after=()), ranks=2)
    with pytest.raises(ScheduleError, match="forms its sums one after the other"):
        lower(back, 2, piece_elements=1)


def test_exports_carry_them() -> None:
    schedule = synthesize(dgx_h100(num_nodes=1), "all_reduce", "exchange")
    verify_blocks(parse(export(schedule, "msccl_xml")))  # type: ignore[arg-type]
    for form in ("mscclpp_json", "chakra", "dot", "chrome_trace"):
        assert export(schedule, form, num_bytes=4096)
    apart = synthesize(full_mesh(num_ranks=4), "all_reduce", "exchange")
    with pytest.raises(ScheduleError, match="a port reads what it sends at any time before the end"):
        export(apart, "mscclpp_json")


@pytest.mark.parametrize(
    ("fabric", "rounds"),
    [(hypercube(dim=4), 4), (torus(dims=(4, 4)), 4), (ring(num_ranks=4), 2), (two_boxes(num_ranks=6), 3)],
)
def test_exchange_keeps_to_links(fabric: Topology, rounds: int) -> None:
    schedule = synthesize(fabric, "all_reduce", "exchange")
    verify_schedule(schedule)
    assert schedule.depth == rounds and sums_agree(schedule)


def test_exchange_meets_near_partners_first() -> None:
    schedule = synthesize(two_boxes(num_ranks=8), "all_reduce", "exchange")
    node = [schedule.topology.vertices[vertex].node for vertex in schedule.topology.ranks]
    between = {t.places[1] for t in schedule.transfers if node[t.src] != node[t.dst]}
    assert between == {3}, "only the last round leaves a box"


def test_exchange_says_where_it_does_not_go() -> None:
    with pytest.raises(
        SynthesisError, match="have no partners left to which there are paths that pass no other rank"
    ):
        synthesize(ring(num_ranks=5), "all_reduce", "exchange")
    with pytest.raises(SynthesisError, match="exchange does not serve all_gather"):
        exchange.synthesize(star(num_ranks=3), Collective(name="all_gather", num_ranks=3))


def test_small_messages_are_exchanged() -> None:
    fabric = star(num_ranks=8)
    made = verified_schedules(fabric, "all_reduce", None, ["forest", "tree", "exchange"])
    assert [choose(made, size).method for size in (64, 4096, 1 << 24)] == ["exchange", "exchange", "forest"]
    row = select(fabric, "all_reduce", [64], methods=["forest", "tree", "exchange", "binomial_tree"]).rows[0]
    assert row.method == "exchange"
    assert "exchange" not in verified_schedules(ring(num_ranks=5), "all_reduce", None)


def test_a_method_that_does_not_fit_is_skipped_unless_it_is_the_only_one_asked_for() -> None:
    lonely = ring(num_ranks=5)
    for methods in (["tree", "exchange"], ["exchange", "tree"]):
        assert set(verified_schedules(lonely, "all_reduce", None, methods)) == {"tree"}
    with pytest.raises(SynthesisError, match=f"exchange on {lonely.name}"):
        verified_schedules(lonely, "all_reduce", None, ["exchange"])


def test_ranks_that_would_round_differently_are_not_run() -> None:
    fabric = star(num_ranks=8)
    with pytest.raises(SynthesisError, match="ranks would form their sums in different orders"):
        verified_schedules(fabric, "all_reduce", None, ["swing_latency"])
    assert set(verified_schedules(fabric, "all_reduce", None, ["swing_latency", "ring"])) == {"ring"}
    # What agreement is about: the same additions by the same rule, in numbers that do not associate.
    values = np.array([1e16, 1.0, -1e16, 1.0, 3.0, 1e-9, 7.0, 1e8])
    for method, agree in (("recursive_doubling", True), ("exchange", True), ("swing_latency", False)):
        schedule = synthesize(fabric, "all_reduce", method)
        held: dict[tuple[int, int], float] = {(rank, 0): value for rank, value in enumerate(values)}
        for t in schedule.transfers:
            read, place = t.places
            before = held.get((t.dst, place), held.get((t.dst, place - 1), 0.0))
            held[t.dst, place] = before + held[t.src, read]
        assert (len({held[rank, 3] for rank in range(8)}) == 1) == agree
        assert sums_agree(schedule) == agree
