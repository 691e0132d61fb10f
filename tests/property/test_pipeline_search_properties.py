"""Whatever placement: what search answers is right, and no simulated run is below a bound."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.oracles.pipeline_placements import random_placement

from mycel.pipeline.bounds import makespan_bound, period_bound
from mycel.pipeline.check import check
from mycel.pipeline.placement import Placement
from mycel.pipeline.replay import replay
from mycel.pipeline.search import find_steady
from mycel.pipeline.simulate import simulate
from mycel.pipeline.stages import order_of
from mycel.pipeline.timed import earliest
from mycel.topology.builders import ring, star

pytest.importorskip("ortools")


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 6))
def test_repetends_unrolled_are_right_and_bounded(seed: int, count: int) -> None:
    placement = random_placement(seed)
    assume(any(len(block.devices) == 1 for block in placement.blocks))
    assert Placement.from_json(placement.to_json()) == placement
    found = find_steady(placement, most_micro_batches=1)
    assert period_bound(placement).value <= found.repetend.period
    timed = earliest(placement, found.repetend.rows(count))
    assert timed.makespan >= ceil(makespan_bound(placement, count).value)
    for held, most in zip(timed.peak, found.repetend.peak, strict=True):
        assert held <= max(most, 0)
    order = order_of(timed)
    check(order)
    run = simulate(order, placement)
    assert run.makespan == pytest.approx(timed.makespan, rel=1e-9)
    assert run.peak == pytest.approx(timed.peak)
    assert replay(order).makespan > 0


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 5),
    megabytes=st.floats(0, 50),
    is_ring=st.booleans(),
)
def test_simulated_runs_are_never_below_the_bounds(seed: int, count: int, megabytes: float, is_ring: bool) -> None:
    placement = random_placement(seed)
    assume(any(len(block.devices) == 1 for block in placement.blocks))
    timed = earliest(placement, find_steady(placement, most_micro_batches=1).repetend.rows(count))
    make = ring if is_ring else star
    fabric = make(num_ranks=max(3, placement.num_devices), bandwidth="1 GB/s")
    run = simulate(order_of(timed), placement, unit_s=0.01, topology=fabric, message_bytes=megabytes * 1e6)
    slack = 1 + 1e-9
    assert run.makespan * slack >= run.load_s
    assert run.makespan * slack >= run.link_s
    without = Placement.from_json(
        placement.to_json() | {"deps": [[d.before, d.after, 0] for d in placement.dependencies]}
    )
    assert run.makespan * slack >= 0.01 * float(makespan_bound(without, count).value)
    assert run.peak == pytest.approx(timed.peak)
    assert all(share <= slack for share in run.link_busy.values())
    assert all(m.start_s <= m.sent_s <= m.done_s for m in run.messages)
