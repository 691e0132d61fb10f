"""Search: periods of the given placements, batches against trying everything, makespans, memory proved least."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from tests.oracles.pipeline_batches import least_makespan
from tests.oracles.pipeline_placements import random_placement

from mycel.errors import ScheduleError, SynthesisError, UsageError
from mycel.pipeline.bounds import makespan_bound, period_bound
from mycel.pipeline.check import check
from mycel.pipeline.placement import Block, Dependency, Placement
from mycel.pipeline.search import Progress, find_batch, find_steady
from mycel.pipeline.search import by_states as by_states_module
from mycel.pipeline.search import cycles as circles_module
from mycel.pipeline.search.by_states import find_by_states, has_few_states
from mycel.pipeline.search.cycles import find_circles
from mycel.pipeline.search.ends import improve, reorder
from mycel.pipeline.search.modulo import find_repetend
from mycel.pipeline.search.solving import Clock
from mycel.pipeline.search.whole import find_whole
from mycel.pipeline.stages import order_of
from mycel.pipeline.timed import Timed, earliest

pytest.importorskip("ortools")

DATA = Path(__file__).parents[1] / "data" / "pipeline" / "placements.json"
SHAPES: dict[str, dict[str, Any]] = {shape["name"]: shape for shape in json.loads(DATA.read_text())["shapes"]}


def of(name: str) -> Placement:
    return Placement.from_json(SHAPES[name])


def v_min(ranks: int, cap: int) -> Placement:
    """Two chunks a rank in a V, backward in halves, memory given back by the second."""
    last = 2 * ranks - 1
    device = [k if k < ranks else last - k for k in range(2 * ranks)]
    blocks = [Block(name=f"F{k}", devices=(device[k],), time=1, memory=1) for k in range(2 * ranks)]
    blocks += [Block(name=f"I{k}", devices=(device[k],), time=1) for k in range(last, -1, -1)]
    blocks += [Block(name=f"W{k}", devices=(device[k],), time=1, memory=-1) for k in range(last, -1, -1)]
    place = {block.name: i for i, block in enumerate(blocks)}
    waits = [Dependency(before=a, after=b) for a, b in pairwise(range(4 * ranks))]
    waits += [Dependency(before=place[f"I{k}"], after=place[f"W{k}"]) for k in range(2 * ranks)]
    return Placement(
        name=f"V-Min {ranks}", num_devices=ranks, blocks=tuple(blocks), dependencies=tuple(waits), cap=(cap,) * ranks
    )


@pytest.mark.parametrize("name", SHAPES)
def test_least_period_of_one_micro_batch_a_repetend(name: str) -> None:
    placement = of(name)
    found = find_steady(placement, most_micro_batches=1)
    assert found.repetend.period == SHAPES[name]["period_one_micro_batch_repetend"]
    assert found.ruled_out == 1
    for held, cap in zip(found.repetend.peak, placement.cap, strict=True):
        assert cap is None or held <= cap
    unrolled = earliest(placement, found.repetend.rows(8))
    assert all(a <= b for a, b in zip(unrolled.peak, found.repetend.peak, strict=True))
    check(order_of(unrolled))


def test_several_micro_batches_a_repetend() -> None:
    found = find_steady(of("V4_cap3"))
    assert found.repetend.period == Fraction(16, 3)
    assert found.is_least
    assert found.bound.kind == "lifetime"
    assert found.repetend.num_micro_batches == 3


@pytest.mark.parametrize(
    ("name", "lead", "period"),
    [
        ("V4_cap3", 4, Fraction(16, 3)),
        ("M4_cap4", 6, Fraction(20, 3)),
        # Shared blocks hold nothing, so that several in a row cost less: 6 + 2 / u, as long as leads and u may grow.
        pytest.param("M4_cap4", 7, Fraction(13, 2), marks=pytest.mark.long),
    ],
)
def test_circles_of_states(name: str, lead: int, period: Fraction) -> None:
    placement = of(name)
    alone = find_steady(placement, most_micro_batches=1).repetend
    found = find_circles(placement, lead, period=alone.period, most_micro_batches=4, clock=Clock(60))
    assert found is not None
    assert found.is_least
    assert found.is_all == (name == "V4_cap3")  # there memory keeps blocks together; shared ones of M it does not
    assert found.repetend is not None
    assert found.repetend.period == period
    assert all(held <= 4 for held in found.repetend.peak)
    check(order_of(earliest(placement, found.repetend.rows(10))))


@pytest.mark.parametrize("seed", range(11))
def test_circles_against_the_solver(seed: int) -> None:
    placement = random_placement(seed, most_blocks=6)
    alone = find_repetend_of_any_length(placement)
    found = find_circles(placement, 5, period=alone + 1, most_micro_batches=60, clock=Clock(60))
    assert found is not None
    assert found.is_least
    assert found.repetend is not None  # one micro-batch alone beats a period that is longer by a unit
    assert found.repetend.period <= alone
    assert found.repetend.period >= period_bound(placement).value
    assert all(cap is None or held <= cap for held, cap in zip(found.repetend.peak, placement.cap, strict=True))
    earliest(placement, found.repetend.rows(2 * found.repetend.num_micro_batches))
    if found.is_all:
        for count in (2, 3):
            below = ceil(count * found.repetend.period) - 1
            assert find_repetend(placement, count, below, clock=Clock(60)) == "none"


def find_repetend_of_any_length(placement: Placement) -> int:
    """The least period of one micro-batch a repetend, by the solver alone."""
    return find_steady(placement, most_micro_batches=1).repetend.time


@pytest.mark.parametrize("seed", [seed for seed in range(24) if seed != 11])  # of which there are many states
def test_states_against_the_solver(seed: int) -> None:
    placement = random_placement(seed, most_blocks=6)
    count = 2 + seed % 3
    by_states = find_by_states(placement, count, clock=Clock(60), least=0)
    assert by_states is not None
    assert by_states.timed is not None
    whole = find_whole(placement, count, clock=Clock(60))
    assert whole.timed is not None
    assert by_states.timed.makespan == by_states.bound == whole.timed.makespan == whole.bound
    again = find_by_states(placement, count, clock=Clock(60), least=0, known=by_states.timed)
    assert again is not None
    assert again.timed == by_states.timed


def test_six_micro_batches_of_nn_with_short_memory() -> None:
    found = find_batch(of("NN4_cap4"), 6, time_limit_s=600)
    assert (found.timed.makespan, found.bound) == (63, 63)
    check(order_of(found.timed))


def test_too_many_states_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = of("NN4_cap4")
    monkeypatch.setattr(by_states_module, "_MOST_STATES", 1000)
    assert find_by_states(placement, 4, clock=Clock(60), least=0) is None
    monkeypatch.setattr(circles_module, "_MOST_STATES", 1000)
    assert find_circles(placement, 4, period=Fraction(9), most_micro_batches=8, clock=Clock(60)) is None
    assert find_batch(placement, 4).is_least  # by the solver
    assert not has_few_states(of("X4_cap4"), 6)


@pytest.mark.long
def test_three_micro_batches_a_repetend_where_one_takes_longer() -> None:
    answer = find_repetend(of("M4_cap4"), 3, 20, clock=Clock(60))
    assert not isinstance(answer, str)
    assert answer.period == Fraction(20, 3)


@pytest.mark.parametrize("ranks", [4, 6])
def test_v_mins_memory_is_found_and_proved_least(ranks: int) -> None:
    least = 2 * ((ranks + 4) // 3)
    clock = Clock(60)
    assert not isinstance(find_repetend(v_min(ranks, least), 1, 6, clock=clock), str)
    assert find_repetend(v_min(ranks, least - 1), 1, 6, clock=clock) == "none"


@pytest.mark.long
def test_v_mins_memory_at_8_ranks() -> None:
    clock = Clock(120)
    assert not isinstance(find_repetend(v_min(8, 8), 1, 6, clock=clock), str)
    assert find_repetend(v_min(8, 7), 1, 6, clock=clock) == "none"


@pytest.mark.parametrize("seed", range(16))
def test_whole_batches_against_trying_everything(seed: int) -> None:
    _against_everything(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(16, 66))
def test_more_whole_batches_against_trying_everything(seed: int) -> None:
    _against_everything(seed)


def _against_everything(seed: int) -> None:
    placement = random_placement(seed, most_blocks=4)
    count = 2 + seed % 2
    blocks = [(block.devices, block.time, block.memory_on(block.devices[0])) for block in placement.blocks]
    waits = [(d.before, d.after, d.delay) for d in placement.dependencies]
    least = least_makespan(blocks, waits, placement.cap, count)
    assert least is not None
    found = find_batch(placement, count)
    assert found.is_least
    assert found.timed.makespan == least
    assert makespan_bound(placement, count).value <= least


@pytest.mark.parametrize("name", ["V4_cap3", "M4_cap6", "K4_cap6", "X4_cap4", "finetune4_cap6"])
def test_small_batches_are_proved(name: str) -> None:
    found = find_batch(of(name), 4)
    assert found.is_least
    check(order_of(found.timed))


@pytest.mark.long
@pytest.mark.parametrize("count", [4, 5, 6])
@pytest.mark.parametrize("name", [name for name in SHAPES if "8_" not in name and not name.startswith("Vmin")])
def test_small_batches_of_all_shapes_are_proved(name: str, count: int) -> None:
    assert find_batch(of(name), count, time_limit_s=60).is_least


@pytest.mark.parametrize(("name", "gained"), [("X4_cap4", 3), ("alphafold4_cap4", 4), ("V4_cap2", 4)])
def test_windows_shorten_what_was_unrolled(name: str, gained: int) -> None:
    placement = of(name)
    repetend = find_steady(placement, most_micro_batches=1, tighten_s=5).repetend
    unrolled = earliest(placement, repetend.rows(8))
    least = ceil(makespan_bound(placement, 8).value)
    better = improve(unrolled, clock=Clock(120), least=least, rounds=0, most_s=30)
    assert better.makespan <= SHAPES[name]["makespan_of_unrolled_repetend_M8"] - gained
    check(order_of(better))


@pytest.mark.long
@pytest.mark.parametrize("count", [8, 32])
@pytest.mark.parametrize("name", SHAPES)
def test_makespans_are_never_above_the_unrolled_ones(name: str, count: int) -> None:
    found = find_batch(of(name), count, time_limit_s=30)
    assert found.timed.makespan <= SHAPES[name][f"makespan_of_unrolled_repetend_M{count}"]
    check(order_of(found.timed))


def test_a_window_keeps_the_rest() -> None:
    placement = of("V4_cap2")
    unrolled = earliest(placement, find_steady(placement, most_micro_batches=1).repetend.rows(6))
    same = reorder(unrolled, 20, 21, clock=Clock(10))
    assert same.makespan <= unrolled.makespan
    assert (
        reorder(unrolled, 0, unrolled.makespan, clock=Clock(30)).makespan == find_batch(placement, 6).timed.makespan
    )


def test_progress_goes_down_and_bounds_stay_below() -> None:
    told: list[Progress] = []
    found = find_batch(of("V4_cap3"), 6, told=told.append)
    made = [progress.best for progress in told if progress.best is not None]
    assert made
    assert made == sorted(made, reverse=True)
    assert all(progress.bound <= found.timed.makespan for progress in told)
    assert "best" in str(told[-1])


def test_caps_that_no_order_keeps() -> None:
    # Two branches on one device, each of which holds its memory until both have met on the other.
    names = [("F0", 0, 1), ("F1", 0, 1), ("J", 1, 0), ("B1", 0, -1), ("B0", 0, -1)]
    blocks = tuple(Block(name=n, devices=(d,), time=1, memory=m) for n, d, m in names)
    waits = tuple(Dependency(before=a, after=b) for a, b in ((0, 2), (1, 2), (2, 3), (2, 4)))
    with pytest.raises(UsageError, match="cap 1 of device 0 is under the 2"):
        Placement(name="both", num_devices=2, blocks=blocks, dependencies=waits, cap=(1, None))
    both = Placement(name="both", num_devices=2, blocks=blocks, dependencies=waits, cap=(2, None))
    found = find_steady(both)
    assert found.repetend.period == 5  # the bound is 4; no repetend of up to three is shorter
    assert found.proof == "the least of any schedule"  # nothing is left out of the states
    assert str(found.bound) == "5 (states)"


def test_no_time_no_answer() -> None:
    with pytest.raises(UsageError, match="time limit"):
        find_steady(of("V4_cap4"), time_limit_s=0)
    with pytest.raises(SynthesisError, match="allow more time"):
        find_steady(of("NN8_cap12"), time_limit_s=1e-6)
    with pytest.raises(UsageError, match="micro-batches"):
        find_batch(of("V4_cap4"), 0)


def test_interrupted_searches_keep_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Progress] = []
    stopped: list[Clock] = []
    solve = Clock.solve

    def interrupted(self: Clock, model: Any, **options: Any) -> Any:
        if told and told[-1].best is not None:
            stopped.append(self)
            self.stop()
        return solve(self, model, **options)

    monkeypatch.setattr(Clock, "solve", interrupted)
    found = find_batch(of("NN4_cap4"), 8, told=told.append)
    assert found.interrupted
    assert stopped
    assert not found.is_least
    check(order_of(found.timed))


def test_a_timed_schedule_proves_itself() -> None:
    placement = of("V4_cap3")
    good = find_batch(placement, 4).timed
    for m in range(4):
        for i in range(8):
            starts = [list(row) for row in good.starts]
            starts[m][i] = -1 if i else starts[m][1]
            with pytest.raises(ScheduleError):
                Timed(placement=placement, starts=tuple(map(tuple, starts)))
    free = find_batch(Placement.from_json(SHAPES["V4_cap3"] | {"cap": [4] * 4}), 8).timed
    with pytest.raises(ScheduleError, match="its cap is 3"):
        Timed(placement=placement, starts=free.starts)
    with pytest.raises(ScheduleError, match="circle"):
        earliest(placement, [list(reversed(row)) for row in good.rows])


def test_the_whole_batch_knows_when_nothing_is_shorter() -> None:
    placement = of("V4_cap2")
    known = find_batch(placement, 4).timed
    again = find_whole(placement, 4, clock=Clock(30), known=known)
    assert again.timed == known
    assert again.bound == known.makespan


def test_bounds_hold_for_every_period() -> None:
    for name in ("V4_cap2", "V4_cap3"):
        placement = of(name)
        below = ceil(period_bound(placement).value) - 1
        assert find_repetend(placement, 1, below, clock=Clock(30)) == "none"


def test_stages_by_name() -> None:
    order = order_of(earliest(of("X4_cap4"), find_steady(of("X4_cap4"), most_micro_batches=1).repetend.rows(2)))
    assert order.num_stages == 8
    assert order.rank_of(4) == 3  # f0
    forwards = order_of(
        earliest(of("alphafold4_cap4"), find_steady(of("alphafold4_cap4"), most_micro_batches=1).repetend.rows(2))
    )
    assert forwards.num_stages == 12
    assert {str(action) for row in forwards.rows for action in row if action.kind.value == "B"} == {
        f"{stage}B{m}" for stage in range(8, 12) for m in range(2)
    }
    shared = order_of(earliest(of("M4_cap6"), find_steady(of("M4_cap6"), most_micro_batches=1).repetend.rows(2)))
    assert shared.blocks == {"S0", "T0"}


def test_a_clock_that_counts_work() -> None:
    """Work goes from it and from its parts alike; time does not."""
    clock = Clock(2.0, is_counted=True)
    part = clock.within(1.5)
    part.count(1.0)
    assert (clock.left_s, part.left_s, clock.gone_s) == (1.0, 0.5, 1.0)
    clock.count(0.75)
    assert part.left_s == 0.0 and clock.left_s == pytest.approx(0.25)
    by_work = [find_batch(of("V4_cap4"), 5, clock=Clock(1.0, is_counted=True)).timed for _ in range(2)]
    assert by_work[0] == by_work[1]
