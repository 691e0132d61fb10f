"""What the schedule verifier says: which rank, chunk and transfer, and the drawing around them."""

from __future__ import annotations

import pickle
from dataclasses import replace
from fractions import Fraction

import pytest
from tests.oracles.link_loads import verify_link_loads

from mycel.collectives.schedule import Chunk, Schedule, Transfer
from mycel.collectives.spec import Collective
from mycel.collectives.verify import schedule as checker
from mycel.collectives.verify import verify_schedule
from mycel.errors import UsageError, VerificationError
from mycel.topology.model import Link, Topology, Vertex


def ring_all_reduce(n: int, *, tie_chunks: bool = False) -> Schedule:
    """Every chunk round the ring twice, first added, then copied; optionally each chunk after the one before."""
    topology = Topology(
        name="ring",
        unit="GB/s",
        vertices=tuple(Vertex(kind="rank", label=f"r{i}") for i in range(n)),
        links=tuple(Link(src=i, dst=(i + 1) % n, capacity=10) for i in range(n)),
    )
    transfers: list[Transfer] = []
    for chunk in range(n):
        after = (len(transfers) - 1,) if tie_chunks and chunk else ()
        for step in range(2 * n - 2):
            src = (chunk + step) % n
            path = (src, (src + 1) % n)
            transfers.append(Transfer(chunk=chunk, src=src, dst=path[1], reduce=step < n - 1, path=path, after=after))
            after = (len(transfers) - 1,)
    return Schedule(
        collective=Collective(name="all_reduce", num_ranks=n),
        topology=topology,
        method="ring",
        num_units=n,
        chunks=tuple(Chunk(start=i, stop=i + 1) for i in range(n)),
        transfers=tuple(transfers),
    )


def edit(schedule: Schedule, index: int, **changes: object) -> Schedule:
    ts = schedule.transfers
    return replace(schedule, transfers=(*ts[:index], replace(ts[index], **changes), *ts[index + 1 :]))


def refusal(schedule: Schedule) -> VerificationError:
    with pytest.raises(VerificationError) as caught:
        verify_schedule(schedule)
    return caught.value


def test_names_the_missing_contribution_and_the_last_write():
    wrong = edit(ring_all_reduce(4), 6 + 1, reduce=False)  # chunk 1: rank 3 copies over its own contribution
    assert str(refusal(wrong)) == (
        "all_reduce over 4 ranks is wrong at rank 0, chunk 1: contribution of rank 3 is missing; "
        "last write: transfer 8, step 2, 3 -> 0"
    )


def test_counts_how_often_a_contribution_is_there():
    right = ring_all_reduce(3)
    again = replace(right.transfers[0], after=(0,))
    later = [replace(t, after=tuple(i + 1 for i in t.after)) for t in right.transfers[1:]]
    wrong = replace(right, transfers=(right.transfers[0], again, *later))
    assert "rank 0, chunk 0: contribution of rank 0 is counted twice; last write: transfer" in str(refusal(wrong))


def test_counts_do_not_overflow():
    pair = ring_all_reduce(2)
    path = {0: (0, 1), 1: (1, 0)}
    doubling = tuple(
        Transfer(chunk=0, src=i % 2, dst=1 - i % 2, reduce=True, path=path[i % 2], after=(i - 1,) if i else ())
        for i in range(300)
    )
    error = refusal(replace(pair, num_units=1, chunks=(Chunk(start=0, stop=1),), transfers=doubling))
    assert "is counted 1073741824 times" in str(error)


def test_names_a_place_that_is_never_written_and_one_read_while_empty():
    right = ring_all_reduce(2)
    gather = replace(right, collective=Collective(name="all_gather", num_ranks=2), transfers=())
    assert "rank 1, chunk 0: contribution of rank 0 is missing; it is never written" in str(refusal(gather))
    backwards = Transfer(chunk=0, src=1, dst=0, reduce=False, path=(1, 0))
    error = refusal(replace(gather, transfers=(backwards,)))
    assert "rank 1, chunk 0: transfer 0 (step 0, 1 -> 0) reads it while it is empty" in str(error)


def test_names_a_foreign_contribution():
    right = ring_all_reduce(2)
    moves = (
        Transfer(chunk=0, src=0, dst=1, reduce=False, path=(0, 1)),
        Transfer(chunk=1, src=1, dst=0, reduce=False, path=(1, 0)),
    )
    gather = replace(right, collective=Collective(name="all_gather", num_ranks=2), transfers=moves)
    verify_schedule(gather)
    whole = replace(right, collective=Collective(name="broadcast", num_ranks=2, root=1), transfers=moves[1:])
    error = refusal(whole)
    assert "at rank 0, chunk 0: contribution of rank 1 is missing; it is never written" in str(error)


@pytest.mark.parametrize("name", ["all_gather", "broadcast"])
def test_adding_is_refused_where_nothing_is_combined(name):
    collective = Collective(name=name, num_ranks=2, root=0 if name == "broadcast" else None)
    moves = (Transfer(chunk=0, src=0, dst=1, reduce=True, path=(0, 1)),)
    error = refusal(replace(ring_all_reduce(2), collective=collective, transfers=moves))
    assert f"transfer 0 (step 0, 0 -> 1) adds, but {name} combines nothing" in str(error)


def test_adding_into_an_empty_place_is_refused():
    right = ring_all_reduce(2)
    chunks = (Chunk(start=0, stop=1),)

    # No collective so far adds where a rank holds nothing, so here is one.

    class Partial(Collective):
        def holder(self, block: int) -> int | None:
            return 0

    moves = (Transfer(chunk=0, src=0, dst=1, reduce=True, path=(0, 1)),)
    collective = Partial(name="reduce", num_ranks=2, root=1)
    error = refusal(replace(right, collective=collective, num_units=1, chunks=chunks, transfers=moves))
    assert "rank 1, chunk 0: transfer 0 (step 0, 0 -> 1) adds to it while it is empty" in str(error)


def test_open_order_names_both_transfers_and_the_way_out():
    right = ring_all_reduce(4)
    wrong = edit(right, 3, after=())  # the first copy no longer waits for the sums
    message = str(refusal(wrong))
    assert message == (
        "all_reduce over 4 ranks is wrong at rank 0, chunk 0: transfer 0 (step 0, 0 -> 1) reads it and transfer 3 "
        "(step 0, 3 -> 0) overwrites it in no fixed order; let transfer 3 come after 0"
    )
    verify_schedule(edit(right, 3, after=(0, 1, 2)))


def test_two_additions_may_stay_unordered_but_not_an_addition_and_a_read():
    star = Topology(
        name="star",
        unit="link",
        vertices=tuple(Vertex(kind="rank", label=f"r{i}") for i in range(3)),
        links=tuple(Link(src=a, dst=b, capacity=1) for a, b in ((0, 2), (1, 2), (2, 0), (2, 1))),
    )
    up = [Transfer(chunk=0, src=r, dst=2, reduce=True, path=(r, 2)) for r in (0, 1)]
    down = [Transfer(chunk=0, src=2, dst=r, reduce=False, path=(2, r), after=(0, 1)) for r in (0, 1)]
    right = Schedule(
        collective=Collective(name="all_reduce", num_ranks=3),
        topology=star,
        method="by_hand",
        num_units=1,
        chunks=(Chunk(start=0, stop=1),),
        transfers=(*up, *down),
    )
    verify_schedule(right)
    assert "transfer 0 (step 0, 0 -> 2) adds to it and transfer 3 (step 1, 2 -> 1) reads it" in str(
        refusal(edit(right, 3, after=(1,)))
    )


def test_order_through_other_chunks_counts():
    """The copy of chunk 0 waits for a transfer of chunk 1, which waits for the sum of chunk 0."""
    right = ring_all_reduce(2)
    a, b, c, d = right.transfers  # chunk 0: add, copy; chunk 1: add, copy
    detour = replace(right, transfers=(a, replace(c, after=(0,)), replace(b, after=(1,)), replace(d, after=(1,))))
    verify_schedule(detour)
    assert "no fixed order" in str(refusal(edit(detour, 1, after=())))


def test_many_events_are_traced_in_several_passes(monkeypatch):
    tied = ring_all_reduce(12, tie_chunks=True)
    wrong = edit(tied, 150, after=())
    whole = str(refusal(wrong))
    monkeypatch.setattr(checker, "_MAX_BITS", 1)  # 64 events a pass
    assert len(tied.transfers) > 4 * 64
    verify_schedule(tied)
    assert str(refusal(wrong)) == whole


def test_the_drawing_marks_the_bad_cell():
    error = refusal(edit(ring_all_reduce(4), 7, reduce=False))
    lines = error.grid.splitlines()
    assert lines[0].split("  ")[0] == "chunk 1"
    assert [cell.strip() for cell in lines[0].split("  ") if cell][1:] == ["start", *(f"step {i}" for i in range(6))]
    assert lines[1].split()[:3] == ["rank", "0", "own"]
    assert "\n".join(lines[:-1]).count("]!") == 1
    assert "[+3]!" in lines[1]
    assert "<2" in lines[4]
    assert "\n" not in str(error)


def test_the_drawing_of_a_large_schedule_fits_a_screen():
    right = ring_all_reduce(24)
    error = refusal(edit(right, 2 * 46 + 20, reduce=False))
    lines = error.grid.splitlines()
    assert max(map(len, lines)) < 180
    assert "\n".join(lines[:-1]).count("]!") == 1
    assert len(lines) <= 24


def test_the_drawing_shows_the_start_where_nothing_was_written():
    gather = replace(ring_all_reduce(2), collective=Collective(name="all_gather", num_ranks=2), transfers=())
    lines = refusal(gather).grid.splitlines()
    assert lines[1].split() == ["rank", "0", "own"]
    assert lines[2].split() == ["rank", "1", "[empty]!"]


def test_an_error_survives_pickling():
    error = refusal(edit(ring_all_reduce(4), 7, reduce=False))
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.grid) == (str(error), error.grid)


def test_link_loads_at_and_above_the_claim():
    schedule = ring_all_reduce(4)  # every link carries 6 of 4 units
    verify_link_loads(schedule, Fraction(20, 3))
    verify_link_loads(schedule, schedule.algbw)
    with pytest.raises(VerificationError, match=r"link r0 -> r1 would carry 21/20 of its capacity \(6 of 4 units"):
        verify_link_loads(schedule, Fraction(7))
    with pytest.raises(UsageError, match="must be positive"):
        verify_link_loads(schedule, Fraction(0))
