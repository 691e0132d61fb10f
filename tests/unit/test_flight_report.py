"""Merged flight records: clocks, where time went, late ranks, slow links, what never ended; and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mycel.errors import UsageError
from mycel.report.flight.clocks import align
from mycel.report.flight.findings import examine
from mycel.report.flight.links import carried, suspect
from mycel.report.flight.page import render_page
from mycel.report.flight.records import Call, Connection, Dump, Group, Program, read_dumps
from mycel.report.flight.trace import render_trace
from mycel.report.flight.words import headline, kind_row, summary
from mycel.report.picture import CUT_COLOUR
from mycel.topology.builders import star
from mycel.topology.json_format import to_json

FABRIC = star(num_ranks=3, bandwidth="400 Mbit/s")
MS = 1_000_000
RING = tuple((FABRIC.ranks[r], FABRIC.switches[0], FABRIC.ranks[(r + 1) % 3]) for r in range(3))
PROGRAM = Program(channels=((0, 1), (1, 2)), paths=RING[:2], num_bytes=(64, 64), num_messages=(4, 4))


def call(sequence: int, called: int, started: int | None, ended: int | None, **changes: Any) -> Call:
    made = Call(
        group="f00",
        sequence=sequence,
        what="all_reduce",
        collective="all_reduce",
        root=None,
        num_bytes=1 << 20,
        dtype="float32",
        op="SUM",
        even=True,
        method="forest",
        piece_bytes=32768,
        program=PROGRAM,
        state="done" if ended is not None else "running" if started is not None else "queued",
        called_ns=called,
        started_ns=started,
        ended_ns=ended,
        messages_done=None if ended is not None or started is None else (4, 1),
    )
    return replace(made, **changes)


def dump(rank: int, calls: list[Call], **changes: Any) -> Dump:
    links = changes.pop("connections", ())
    group = Group(
        identity="f00", name="0", ranks=(0, 1, 2), topology=FABRIC, described=True, connections=tuple(links)
    )
    made = Dump(
        file=Path(f"rank{rank}.jsonl"),
        rank=rank,
        world_size=3,
        host="box",
        clock="one",
        monotonic_ns=10**12,
        wall_ns=10**18,
        why="asked for by the program",
        recorded=len(calls),
        groups={"f00": group},
        calls=tuple(calls),
    )
    return replace(made, **changes)


def late_job() -> list[Dump]:
    """Rank 2 comes 40 ms late to the second collective; 1 MB takes 50 ms."""
    times = {
        0: [(0, 0, 50), (60, 60, 150)],
        1: [(0, 0, 50), (60, 60, 150)],
        2: [(0, 0, 50), (100, 100, 150)],
    }
    return [
        dump(rank, [call(n, a * MS, b * MS, c * MS) for n, (a, b, c) in enumerate(of_rank, start=1)])
        for rank, of_rank in times.items()
    ]


# -- where time went ----------------------------------------------------------------------------------------------


def test_time_is_divided_into_queue_wait_and_move() -> None:
    (kind,) = examine(late_job()).kinds
    assert (kind.what, kind.count, kind.num_ranks) == ("all_reduce", 2, 3)
    assert kind.queued_s == 0
    assert kind.waiting_s == pytest.approx((0.040 + 0.040) / 3)
    assert kind.moving_s == pytest.approx(0.050 + 0.050)
    # 1 MB over a star of 400 Mbit/s: the bound of all_reduce is 200 Mbit/s times 3/2 for 3 ranks.
    least_s = (1 << 20) * 8 / float(Fraction(300) * 10**6)
    assert kind.of_bound == pytest.approx(least_s / 0.050)


@pytest.mark.parametrize(("moving_ms", "part"), [(20, 28 / 60), (40, 28 / 40)])
def test_data_that_had_gone_ahead_is_no_more_than_the_bound(moving_ms: int, part: float) -> None:
    """Rank 2 begins 40 ms late; what is over sooner after that than any schedule can be began with the others."""
    ended = 40 + moving_ms
    dumps = [dump(r, [call(1, *((40 if r == 2 else 0) * MS,) * 2, ended * MS)]) for r in range(3)]
    assert examine(dumps).kinds[0].of_bound == pytest.approx(part, rel=0.01)


def test_times_that_cannot_be_give_no_fraction_of_the_bound() -> None:
    (kind,) = examine([dump(r, [call(1, 0, 0, 20 * MS)]) for r in range(3)]).kinds
    assert kind.of_bound is None and kind_row(kind)[-1] == ""


def test_the_late_rank_is_named_with_what_it_cost() -> None:
    found = examine(late_job())
    assert found.latest is not None
    assert (found.latest.rank, found.latest.late) == (2, 1)
    assert found.latest.awaited_s == pytest.approx(0.040)


def test_a_queue_is_no_fault_of_the_program() -> None:
    """All call at once; on rank 2 an earlier collective is still under way."""
    dumps = [dump(r, [call(1, 0, (40 if r == 2 else 0) * MS, 90 * MS)]) for r in range(3)]
    found = examine(dumps)
    assert found.latest is None
    assert found.kinds[0].queued_s == pytest.approx(0.040 / 3)
    assert found.kinds[0].waiting_s == pytest.approx(0.080 / 3)


def test_what_not_every_rank_has_is_left_out_and_counted() -> None:
    dumps = late_job()
    dumps[1] = replace(dumps[1], calls=dumps[1].calls[1:], recorded=9)
    found = examine(dumps)
    assert (len(found.whole), found.skipped, found.unfinished) == (1, 1, ())


def test_uneven_blocks_have_no_fraction_of_the_bound() -> None:
    dumps = [replace(d, calls=tuple(replace(c, even=False) for c in d.calls)) for d in late_job()]
    assert examine(dumps).kinds[0].of_bound is None


def test_the_round_that_confirms_a_collective_is_one_of_its_own() -> None:
    """It has the number of the collective, where groups go on when links fail."""
    dumps = [
        dump(r, [call(1, 0, 0, 50 * MS), call(1, 51 * MS, 51 * MS, 52 * MS, what="commit", num_bytes=4)])
        for r in range(3)
    ]
    found = examine(dumps)
    assert [(k.what, k.count, k.num_bytes) for k in found.kinds] == [("all_reduce", 1, 1 << 20), ("commit", 1, 4)]


# -- what did not end ---------------------------------------------------------------------------------------------


def test_who_hangs_and_who_never_called() -> None:
    ended = call(1, 0, 0, 10 * MS)
    dumps = [
        dump(0, [ended, call(2, 20 * MS, 20 * MS, None)], why="CollectiveTimeoutError: rank 2 is silent"),
        dump(1, [ended, call(2, 20 * MS, 20 * MS, None), call(3, 21 * MS, None, None)], why="SIGUSR2"),
        dump(2, [ended]),
    ]
    found = examine(dumps)
    (open_call,) = found.unfinished
    assert open_call.call.sequence == 2
    assert open_call.states == {0: "running", 1: "running", 2: "not called"}
    assert open_call.stalled == ((1, 2, 1, 4, 0), (1, 2, 1, 4, 1))
    assert headline(found, None) == "rank 2 is silent"
    page = render_page(found, [], None)
    assert "rank 2: not called" in page and "What did not end" in page


def test_ranks_without_records_are_named() -> None:
    """The others' times are told all the same; what they waited for it cannot be told from moving."""
    found = examine(late_job()[:2])
    assert found.silent == (2,)
    assert (len(found.whole), found.kinds[0].waiting_s) == (2, 0.0)
    assert found.kinds[0].moving_s == pytest.approx(0.050 + 0.090)
    assert "No records of rank 2" in render_page(found, [], None)


# -- clocks -------------------------------------------------------------------------------------------------------


@given(
    offsets=st.lists(st.integers(-(10**12), 10**12), min_size=3, max_size=3),
    walls=st.lists(st.integers(-(10**9), 10**9), min_size=3, max_size=3),
    gaps=st.lists(st.tuples(*[st.integers(0, 10**7)] * 6), min_size=1, max_size=8),
)
def test_clocks_are_off_by_no_more_than_is_said(
    offsets: list[int], walls: list[int], gaps: list[tuple[int, ...]]
) -> None:
    """True starts and ends are made up such that no rank ends before the last has begun; each clock is shifted."""
    calls: list[list[Call]] = [[], [], []]
    now = 10**13
    for sequence, gap in enumerate(gaps, start=1):
        starts = [now + g for g in gap[:3]]
        ends = [max(starts) + 1 + g for g in gap[3:]]
        for rank in range(3):
            off = offsets[rank]
            calls[rank].append(call(sequence, starts[rank] + off, starts[rank] + off, ends[rank] + off))
        now = max(ends)
    dumps = [
        dump(r, calls[r], clock=f"clock {r}", monotonic_ns=now + offsets[r], wall_ns=10**18 + walls[r])
        for r in range(3)
    ]
    clocks = align(dumps)
    for rank in range(3):
        truth = offsets[0] - offsets[rank]
        assert abs(clocks.shift_ns[rank] - truth) <= clocks.uncertainty_s * 1e9 + 2
    width = min(max(g[:3]) - min(g[:3]) + max(g[3:]) for g in gaps)
    assert clocks.uncertainty_s * 1e9 <= width + 2


def test_a_broadcast_bounds_clocks_from_its_root_only() -> None:
    changes = {"what": "broadcast", "collective": "broadcast", "root": 0}
    dumps = [dump(r, [call(1, 5, 5, 90, **changes)], clock=f"clock {r}", wall_ns=10**18 + 7 * r) for r in range(3)]
    clocks = align(dumps)
    assert "wall-clock" in clocks.how
    assert clocks.shift_ns == {0: 0, 1: 7, 2: 14}


# -- links --------------------------------------------------------------------------------------------------------


def connections(slow: frozenset[int]) -> list[Dump]:
    """A ring over the star's ranks, 20 MB on each connection; those that touch a slow rank get a quarter."""
    dumps = []
    for rank in range(3):
        to = (rank + 1) % 3
        rate = 400e6 / 8 * 0.95 * (0.25 if {rank, to} & slow else 1.0)
        made = Connection(
            src=rank,
            dst=to,
            path=RING[rank],
            sent_bytes=20_000_000,
            busy_s=20_000_000 / rate + 1.0,
            receiver_full_s=1.0,
            retransmitted=0,
            round_trip_s=1e-4,
        )
        program = Program(channels=((rank, to),), paths=(RING[rank],), num_bytes=(64,), num_messages=(4,))
        dumps.append(dump(rank, [call(1, 0, 0, MS, program=program)], connections=[made]))
    return dumps


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_cable_of_the_slow_rank_is_suspected(rank: int) -> None:
    found = carried(connections(frozenset({rank})))
    blamed = suspect(found)
    assert blamed is not None
    assert set(blamed.ends) == {FABRIC.label(FABRIC.ranks[rank]), FABRIC.label(FABRIC.switches[0])}
    assert (blamed.slow, blamed.fast, blamed.others) == (2, 0, ())
    assert blamed.reached == pytest.approx(0.95 * 0.25)
    page = render_page(examine(connections(frozenset({rank}))), found, blamed)
    assert f"The cable between {blamed.ends[0]} and {blamed.ends[1]} is slow" in page
    assert "the cable that is suspected" in page and page.count(CUT_COLOUR) >= 2


def test_no_cable_is_suspected_where_all_carry_what_they_should() -> None:
    found = carried(connections(frozenset()))
    assert [round(c.reached, 3) for c in found] == [0.95] * 3
    assert suspect(found) is None


@pytest.mark.parametrize(("rate", "reached", "of_path"), [(0.4, 0.8, 0.4), (0.9, 1.0, 0.9), (1.2, 1.0, None)])
def test_a_connection_is_held_against_its_part_and_against_its_path(
    rate: float, reached: float, of_path: float | None
) -> None:
    """Half of a link of 400 Mbit/s is its part; it gets more while the other rests, and never more than the link."""
    dumps = connections(frozenset())
    group = dumps[0].groups["f00"]
    moved = replace(group.connections[0], busy_s=20_000_000 / (rate * 50e6) + 1.0)
    dumps[0] = replace(dumps[0], groups={"f00": replace(group, connections=(moved,))})
    twice = {
        "channels": ((0, 1), (0, 2)),
        "paths": (RING[0], (RING[0][0], RING[0][1], RING[1][-1])),
        "num_bytes": (64, 64),
        "num_messages": (4, 4),
    }
    only = dumps[0].calls[0]
    dumps[0] = replace(dumps[0], calls=(replace(only, program=Program(**twice)),))
    (found,) = (c for c in carried(dumps) if (c.src, c.dst) == (0, 1))
    assert (found.limit, found.fair) == (50e6, 25e6)
    assert found.reached == pytest.approx(reached)
    assert found.of_path == (None if of_path is None else pytest.approx(of_path))
    page = render_page(examine(dumps), [found], None)
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page[page.index("Connections, slowest first") :])
    assert cells[5] == ("0.80" if reached < 1 else "all")
    assert cells[7] == ("more" if of_path is None else f"{of_path:.2f}")
    told = summary(examine(dumps), [found], None)["connections"][0]
    assert told["reached"] <= 1 and (told["of_path"] is None) == (of_path is None)


def test_assumed_capacities_say_nothing() -> None:
    dumps = connections(frozenset({1}))
    assumed = [replace(d, groups={"f00": replace(d.groups["f00"], described=False)}) for d in dumps]
    assert carried(assumed) == []


# -- forms --------------------------------------------------------------------------------------------------------


def test_page_and_summary_are_made_of_the_records() -> None:
    found = examine(late_job())
    page = render_page(found, [], None)
    assert page.startswith("<!doctype html>") and "http" not in page and "<script" not in page
    assert page.count("<rect") == 6 + 2  # every rank moves twice; ranks 0 and 1 wait once
    told = json.loads(json.dumps(summary(found, [], None)))
    share = (0.080 / 3) / (0.080 / 3 + 0.100)
    assert 0.2 < share < 0.25 and told["headline"] == "79 % of the time in collectives went into moving bytes"
    assert told["slowest_rank"] == 2 and told["slowest_link"] is None
    assert told["kinds"][0]["waiting_s"] == pytest.approx(0.080 / 3)


def test_the_timeline_has_a_process_a_rank() -> None:
    trace = json.loads(render_trace(examine(late_job())))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {0, 1, 2}
    waits = [event for event in events if event["name"] == "waiting for rank 2"]
    assert [(event["pid"], event["ts"], event["dur"]) for event in waits] == [(0, 60e3, 40e3), (1, 60e3, 40e3)]


def lines(rank: int) -> list[dict[str, Any]]:
    head = {"mycel_flight": 1, "rank": rank, "world_size": 2, "host": "a", "clock": "c", "pid": 1, "kept": 0}
    head |= {"monotonic_ns": 5, "wall_ns": 6, "why": "SIGUSR2", "recorded": 0}
    group = {"group": "f00", "name": "0", "ranks": [0, 1], "topology": to_json(star(num_ranks=2)), "connections": []}
    return [head, {**group, "described": False}]


def write(file: Path, content: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in content), encoding="utf-8")
    return file


def test_what_is_no_flight_record_is_refused_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no flight records"):
        read_dumps([tmp_path])
    with pytest.raises(UsageError, match="no such file"):
        read_dumps([tmp_path / "rank0.jsonl"])
    good = write(tmp_path / "rank0.jsonl", lines(0))
    assert read_dumps([tmp_path])[0].groups["f00"].topology == star(num_ranks=2)
    with pytest.raises(UsageError, match="are both of rank 0"):
        read_dumps([good, write(tmp_path / "x.jsonl", lines(0))])
    with pytest.raises(UsageError, match=r"a job of 2 ranks, .* of one of 4"):
        read_dumps([good, write(tmp_path / "x.jsonl", [{**lines(1)[0], "world_size": 4}])])
    head, group = lines(1)
    of_another_run = write(tmp_path / "x.jsonl", [{**head, "wall_ns": 5}, {**group, "group": "f11"}])
    with pytest.raises(UsageError, match=r"are of two runs: .* leave out the older, .*x\.jsonl"):
        read_dumps([good, of_another_run])
    assert len(read_dumps([good, write(tmp_path / "x.jsonl", [head, group, {**group, "group": "f11"}])])) == 2
    broken: list[tuple[list[dict[str, Any]], str]] = [
        ([{"a": 1}], r":1: no flight record: key 'mycel_flight' is missing"),
        ([{**lines(0)[0], "mycel_flight": 9}], r":1: .*version 9"),
        ([*lines(0), {"sequence": 1, "group": "f00"}], r":3: no flight record: key"),
        ([lines(0)[0], {**lines(0)[1], "topology": {}}], r":2: no flight record"),
    ]
    for content, message in broken:
        with pytest.raises(UsageError, match=message):
            read_dumps([write(tmp_path / "y.jsonl", content)])
