"""Simulation of orders: known times, messages on shared links, memory over time, credits, exchanges, pictures."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mycel.collectives.simulate import simulate as simulate_collective
from mycel.collectives.synth import synthesize
from mycel.errors import ScheduleError, UsageError
from mycel.pipeline.check import check
from mycel.pipeline.credits import by_credits
from mycel.pipeline.flow import Exchange
from mycel.pipeline.known import known_order, one_f_one_b
from mycel.pipeline.lower import lower
from mycel.pipeline.order import Order
from mycel.pipeline.placement import Placement
from mycel.pipeline.replay import replay, unit_times
from mycel.pipeline.simulate import simulate
from mycel.pipeline.stages import order_of
from mycel.pipeline.timeline import chrome_trace, svg
from mycel.pipeline.wires import path_between
from mycel.topology.builders import ring, star

DATA = Path(__file__).parents[1] / "data" / "pipeline" / "placements.json"
UNITS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
def test_free_messages_are_as_replayed(name: str) -> None:
    order = known_order(name, 4, 8)
    assert simulate(order, UNITS).makespan == pytest.approx(float(replay(order, unit_times(order)).makespan))


def test_messages_among_the_actions_change_nothing() -> None:
    order = one_f_one_b(3, 5)
    wires = star(num_ranks=3, bandwidth="1 GB/s")
    plain = simulate(order, UNITS, topology=wires, message_bytes=1e8)
    assert simulate(lower(order), UNITS, topology=wires, message_bytes=1e8).starts == plain.starts


def test_a_message_takes_bytes_over_rate_and_its_overhead() -> None:
    order = Order.from_csv("0F0,0B0\n1F0,1B0\n")
    run = simulate(order, UNITS, topology=ring(num_ranks=2, bandwidth="1 GB/s"), message_bytes=5e8, overhead_s=0.25)
    # 1 + (0.5 + 0.25) + 1 + 2 + 0.75 + 2
    assert run.makespan == pytest.approx(7.5)
    assert [round(m.sent_s - m.start_s, 9) for m in run.messages] == [0.5, 0.5]
    assert run.link_s == pytest.approx(0.5)
    assert run.load_s == 3
    assert run.link_busy[0, 1] == pytest.approx(0.5 / 7.5)


def test_messages_that_meet_on_a_link_share_it() -> None:
    # Two chains into one rank at once: its link from the switch carries both.
    shape = next(s for s in json.loads(DATA.read_text())["shapes"] if s["name"] == "K4_cap6")
    blocks = [b for b in shape["blocks"] if b["name"] in ("F0", "F1", "F2")]
    joined = Placement.from_json(
        {"devices": 3, "blocks": blocks, "deps": [[0, 2, 0], [1, 2, 0]], "cap": None}
        | {"blocks": [b | {"memory": 0} for b in blocks]}
    )
    order = Order.from_json(
        {
            "format": "mycel.order",
            "version": 1,
            "name": "",
            "num_stages": 3,
            "num_micro_batches": 1,
            "rows": [["0F0"], ["1F0"], ["2F0"]],
            "feeds": [["0F", "2F"], ["1F", "2F"]],
        }
    )
    run = simulate(order, joined, topology=star(num_ranks=3, bandwidth="1 GB/s"), message_bytes=1e9, overhead_s=0)
    assert run.makespan == pytest.approx(1 + 2 + 1)
    alone = simulate(order, joined, topology=ring(num_ranks=3, bandwidth="1 GB/s"), message_bytes=1e9, overhead_s=0)
    assert alone.makespan == pytest.approx(1 + 1 + 1)


def test_which_rank_of_the_fabric_plays_which() -> None:
    wires = ring(num_ranks=4, bandwidth="1 GB/s")
    near = simulate(one_f_one_b(2, 4), UNITS, topology=wires, message_bytes=1e9, ranks=(0, 1), overhead_s=0)
    far = simulate(one_f_one_b(2, 4), UNITS, topology=wires, message_bytes=1e9, ranks=(0, 2), overhead_s=0)
    assert sum(share > 0 for share in far.link_busy.values()) > sum(share > 0 for share in near.link_busy.values())
    with pytest.raises(UsageError, match=r"has 0\.\.3"):
        simulate(one_f_one_b(2, 4), UNITS, topology=wires, ranks=(0, 4))
    with pytest.raises(UsageError, match="each once"):
        simulate(one_f_one_b(2, 4), UNITS, topology=wires, ranks=(0, 0))


def test_paths_avoid_ranks_and_are_short_and_wide() -> None:
    assert path_between(star(num_ranks=4), 1, 3) == (1, 4, 3)
    assert path_between(ring(num_ranks=5), 0, 2) == (0, 1, 2)


def test_memory_over_time() -> None:
    run = simulate(known_order("gpipe", 2, 3), UNITS, held={0: 2.0, 1: 1.0})
    assert run.peak == (6.0, 3.0)
    assert run.memory(0)[0] == (0.0, 2.0)
    assert run.memory(0)[-1] == (run.ends[0][-1], 0.0)
    assert [held for _, held in run.memory(0)] == [2, 4, 6, 4, 2, 0]


def test_credits_are_enough_or_the_stage_is_named() -> None:
    order = one_f_one_b(4, 8)
    free = simulate(order, UNITS)
    assert simulate(order, UNITS, credits=4).starts == free.starts
    assert simulate(order, UNITS, credits=(4, 3, 2, 1)).makespan == free.makespan
    with pytest.raises(ScheduleError, match="stage 0 has 3 credits, and 0F3 needs one more: it stands before 0B0"):
        simulate(order, UNITS, credits=3)
    with pytest.raises(UsageError, match="credits for 2 stages, and there are 4"):
        simulate(order, UNITS, credits=(1, 2))


def test_exchanges_take_what_their_schedules_take() -> None:
    schedule = synthesize(ring(num_ranks=2, bandwidth="1 GB/s"), "all_reduce")
    each = simulate_collective(schedule, 1 << 20).seconds
    order = one_f_one_b(2, 4)
    exchange = Exchange(schedule=schedule, num_bytes=1 << 20, times=2)
    run = simulate(order, UNITS, exchanges={"F": exchange})
    longer = simulate(order, UNITS | {"F": 1 + 2 * each})
    assert run.makespan == pytest.approx(longer.makespan)
    last = simulate(order, UNITS, exchanges={"REDUCE_GRAD": exchange})
    assert last.makespan == pytest.approx(simulate(order, UNITS).makespan + 2 * each)
    assert last.load_s <= last.makespan
    only = simulate(order, UNITS, exchanges={"1B": exchange})
    assert only.load_s == pytest.approx(4 * (3 + 2 * each))


def test_times_of_stages_and_functions() -> None:
    order = one_f_one_b(2, 2)
    by_stage = simulate(order, {"0F": 1, "1F": 3, "B": 2})
    assert simulate(order, lambda a: 2 if a.kind.is_backward else 1 + 2 * a.stage).starts == by_stage.starts
    with pytest.raises(UsageError, match="no time is given for 0B0; say '0B' or 'B'"):
        simulate(order, {"F": 1})
    with pytest.raises(UsageError, match="seconds of F"):
        simulate(order, {"F": -1, "B": 1})
    with pytest.raises(UsageError, match="bytes of a message"):
        simulate(order, UNITS, topology=ring(num_ranks=2), message_bytes=-1)


def test_orders_that_wait_for_each_other() -> None:
    with pytest.raises(ScheduleError, match="for ever"):
        simulate(Order.from_csv("0B0,0F0\n1F0,1B0\n"), UNITS)


def test_overlapped_parts_and_no_time_at_all() -> None:
    order = known_order("dualpipe_v", 2, 6)
    assert simulate(order, {"F": 1, "B": 2, "I": 1, "W": 1}).makespan > 0
    quick = simulate(order, {"F": 1, "B": 2, "I": 1, "W": 1, "OVERLAP_F_B": 2})
    assert quick.makespan < simulate(order, {"F": 1, "B": 2, "I": 1, "W": 1}).makespan
    assert simulate(one_f_one_b(2, 2), {"F": 0, "B": 0}).makespan == 0


def test_a_trace_says_all() -> None:
    run = simulate(one_f_one_b(2, 3), UNITS, topology=ring(num_ranks=2, bandwidth="1 GB/s"), message_bytes=1e8)
    trace = json.loads(json.dumps(chrome_trace(run)))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert sum(event["tid"] == 0 for event in spans) == 12
    assert sum(event["tid"] > 0 for event in spans) == len(run.messages) == 6
    assert all(event["dur"] >= 0 for event in spans)
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(run.makespan * 1e6)
    assert {event["args"]["held"] for event in trace["traceEvents"] if event["ph"] == "C"} == {0, 1, 2}


def test_a_picture_is_well_formed() -> None:
    order = Order.from_csv("0F0,0B0\n1F0,1B0\n")
    run = simulate(order, UNITS, topology=ring(num_ranks=2, bandwidth="1 GB/s"), message_bytes=1e8)
    root = ElementTree.fromstring(svg(run, caption="a < b & c"))
    space = "{http://www.w3.org/2000/svg}"
    titles = [title.text for title in root.iter(f"{space}title")]
    assert titles == ["a < b & c", "0F0", "0B0", "1F0", "1B0"]
    assert len(list(root.iter(f"{space}line"))) == 2


def test_spans_and_busy_shares() -> None:
    run = simulate(one_f_one_b(4, 8), UNITS)
    assert run.makespan == 33
    assert run.spans == (33, 30, 27, 24)
    assert run.busy == pytest.approx([24 / 33] * 4)
    assert Fraction(run.load_s) == 24


def test_orders_by_credits() -> None:
    shape = next(s for s in json.loads(DATA.read_text())["shapes"] if s["name"] == "V4_cap4")
    free = Placement.from_json(shape | {"cap": None})
    spans = {}
    for credits in range(1, 9):
        timed = by_credits(free, 8, credits)
        assert max(timed.peak) <= credits
        check(order_of(timed))
        spans[credits] = timed.makespan
    assert spans[1] == 8 * 16
    assert list(spans.values()) == sorted(spans.values(), reverse=True)
    as_1f1b = by_credits(free, 8, (4, 3, 2, 1))
    assert (as_1f1b.makespan, as_1f1b.peak) == (44, (4, 3, 2, 1))
    assert min(spans.values()) == 44  # no schedule is shorter, and equal credits need six
    with pytest.raises(UsageError, match="credits of F0: 0"):
        by_credits(free, 8, 0)
    with pytest.raises(UsageError, match="credits for 2 blocks, and 4 take memory"):
        by_credits(free, 8, (1, 2))
    with pytest.raises(ScheduleError, match="its cap is 4"):
        by_credits(Placement.from_json(shape), 8, 8)
