"""What ranks make of an order's lists: earlier receives, buffers needed, messages that are certainly used."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mycel.errors import ScheduleError
from mycel.parallel.lists import Routes, answered, buffers_needed, receive_ahead
from mycel.parallel.theirs import torch_name
from mycel.pipeline.check import check
from mycel.pipeline.known import gpipe, interleaved, one_f_one_b, zb_v
from mycel.pipeline.lower import lower
from mycel.pipeline.order import Action, Kind, Order


@given(st.integers(2, 5), st.integers(1, 8), st.integers(0, 4))
def test_earlier_receives_keep_their_sequence_and_everything_else_its_place(
    ranks: int, count: int, ahead: int
) -> None:
    for row in lower(one_f_one_b(ranks, count)).rows:
        moved = receive_ahead(row, ahead)
        for kinds in ((Kind.RECV_F, Kind.RECV_B), tuple(set(Kind) - {Kind.RECV_F, Kind.RECV_B})):
            assert [a for a in moved if a.kind in kinds] == [a for a in row if a.kind in kinds]
        for action in row:
            if action.kind in (Kind.RECV_F, Kind.RECV_B):
                assert moved.index(action) <= row.index(action)


@given(st.integers(2, 5), st.integers(1, 8))
def test_a_rank_needs_a_buffer_for_what_it_has_in_flight(ranks: int, count: int) -> None:
    rows = lower(one_f_one_b(ranks, count)).rows
    for rank, row in enumerate(rows):
        in_flight = min(ranks - rank, count)
        # One gradient besides, and no activations on the first rank, no gradients on the last.
        assert buffers_needed(row) == (in_flight if rank else 0) + (rank < ranks - 1)
        assert buffers_needed(receive_ahead(row, 1)) <= buffers_needed(row) + 2


def test_what_comes_back_says_what_was_used() -> None:
    order = lower(gpipe(2, 3))
    found = answered(order.rows, Routes(order), 0, order.stage_ranks)
    # All three forwards of the other rank come before its first backward.
    assert {str(action): count for action, count in found.items()} == {"0RECV_B0": 3, "0RECV_B1": 3, "0RECV_B2": 3}
    order = lower(one_f_one_b(2, 3))
    found = answered(order.rows, Routes(order), 0, order.stage_ranks)
    assert [count for _, count in sorted(found.items(), key=lambda item: str(item[0]))] == [1, 2, 3]


def test_routes_follow_what_feeds_what() -> None:
    order = Order.from_csv("# mycel order 1\n# feeds 0F>meet 1F>meet meet>0B meet>1B\n"
                           "0F0,SHARED0[meet],0B0\n1F0,SHARED0[meet],1B0\n")  # fmt: skip
    routes = Routes(order)
    assert routes.after(0, 0) is None and routes.before(1, 0) is None and routes.into_blocks == {0, 1}
    with pytest.raises(ScheduleError, match="no stage hands anything"):
        routes.sender(Action.parse("1RECV_F0"))
    fork = Order.from_csv("# mycel order 1\n# feeds 0F>1F 0F>2F\n0F0\n1F0\n2F0\n")
    with pytest.raises(ScheduleError, match="one stage"):
        Routes(fork)


def test_torchs_orders_are_known() -> None:
    assert torch_name(one_f_one_b(3, 6)) == "1F1B" and torch_name(gpipe(3, 6)) == "GPipe"
    assert torch_name(interleaved(2, 4, 2)) == "Interleaved1F1B" and torch_name(zb_v(2, 4)) == "ZBVZeroBubble"
    assert torch_name(lower(gpipe(2, 2))) is None


def test_parameters_are_gathered_once_where_all_stages_may_be_whole() -> None:
    order = interleaved(2, 8, 4)
    counts = {}
    for most in (3, 4):
        whole = lower(order, most_gathered=most)
        counts[most] = sum(action.kind is Kind.UNSHARD for row in whole.rows for action in row)
        check(whole, executor="mycel")
    assert counts[4] == order.num_stages < counts[3]
