"""Skewed all_to_all: boxes found, interfaces carrying equally much, matchings in order, and what is not served."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from tests.effort import long
from tests.unit.test_concurrent_flow import everything_is_large, raw, unlike

from large_fabrics import Cables, fabric, rails
from mycel.collectives.bound import bound
from mycel.collectives.boxes import Boxes, find_boxes
from mycel.collectives.lower import lower
from mycel.collectives.simulate import simulate
from mycel.collectives.skewed_plan import SkewedPlan, plan_skewed
from mycel.collectives.spec import Collective
from mycel.collectives.synth import candidates_for, synthesize
from mycel.collectives.verify import verify_programs, verify_schedule
from mycel.errors import SynthesisError
from mycel.topology.builders import ring
from mycel.topology.load import load_topology
from mycel.topology.model import Topology

__all__ = ["everything_is_large"]


def skewed_weights(num_ranks: int, seed: int) -> np.ndarray:
    """Few experts that many tokens want, some ranks without any, blocks of ranks for themselves."""
    rng = np.random.default_rng(seed)
    wanted = rng.zipf(1.6, (num_ranks, num_ranks)).clip(0, 300) - 1
    wanted[:, rng.integers(num_ranks)] *= 9
    wanted[rng.integers(num_ranks)] = 0
    return wanted.astype(np.int64)


def of(weights: np.ndarray) -> Collective:
    return Collective(name="all_to_all", num_ranks=len(weights), weights=tuple(weights.reshape(-1).tolist()))


def boxes_of(topology: Topology) -> Boxes:
    boxes = find_boxes(topology)
    assert boxes is not None
    return boxes


@pytest.mark.parametrize("seed", range(4))
def test_every_matrix_is_planned_exactly_and_at_its_bound(seed: int, everything_is_large: None) -> None:
    topology = load_topology("dgx_h100:boxes=4") if seed % 2 else raw(5, seed, nics=[25])
    collective = of(skewed_weights(topology.num_ranks, seed))
    schedule = synthesize(topology, collective)
    assert schedule.method == "skewed", "flow takes it where what binds proves it optimal"
    verify_schedule(schedule)
    assert schedule.algbw <= bound(topology, collective).algbw
    assert schedule.algbw >= bound(topology, collective).algbw * (1 - 1e-6)


def test_places_carry_equally_much_and_parts_add_up() -> None:
    topology = raw(6, 3, nics=[25])
    weights = skewed_weights(24, 5)
    plan = plan_skewed(boxes_of(topology), weights)
    assert check_sums(plan, weights)
    box = plan.boxes.box_of
    apart = box[plan.source] != box[plan.target]
    carried = np.zeros((6, 6, 4), dtype=np.int64)
    np.add.at(carried, (box[plan.source][apart], box[plan.target][apart], plan.via[apart]), plan.units[apart])
    assert (carried == carried[:, :, :1]).all()


def check_sums(plan: SkewedPlan, weights: np.ndarray) -> bool:
    total = np.zeros_like(weights)
    np.add.at(total, (plan.source, plan.target), plan.units)
    np.fill_diagonal(weights, 0)
    return bool((total == plan.unit * weights).all() and (plan.units > 0).all())


def test_at_any_time_a_box_sends_to_one_and_gets_from_one() -> None:
    """Of one place the parts, each as long as its units: none at once with another from, or to, the same box."""
    weights = skewed_weights(24, 8)
    plan = plan_skewed(boxes_of(raw(6, 1, nics=[25])), weights)
    box = plan.boxes.box_of
    sums = weights.reshape(24, 24)
    order = plan.boxes.ranks.reshape(-1)
    between = sums[np.ix_(order, order)].reshape(6, 4, 6, 4).sum(axis=(1, 3))
    np.fill_diagonal(between, 0)
    most = max(between.sum(axis=0).max(), between.sum(axis=1).max())
    apart = box[plan.source] != box[plan.target]
    assert (plan.begins[apart] < most).all(), "all have begun before the busiest box is through"
    for ends in (box[plan.source], box[plan.target]):
        for one in range(6):
            chosen = apart & (ends == one) & (plan.via == 0)
            begins = np.sort(plan.begins[chosen])
            assert len(np.unique(begins)) == len(begins), "one part after the other"


def test_programs_are_right_and_the_time_is_near_the_bound(everything_is_large: None) -> None:
    topology = raw(4, 2, nics=[25])
    weights = skewed_weights(16, 4) * 1000
    schedule = synthesize(topology, of(weights), "skewed")
    verify_programs(lower(schedule, int(weights.sum()), piece_elements=1 << 14))
    ran = simulate(schedule, 1 << 26)
    rate = topology.bytes_per_second_per_unit
    assert rate is not None
    assert (1 << 26) / ran.seconds / float(rate) >= 0.9 * float(schedule.algbw * schedule.collective.num_parts) / 16


def test_boxes_without_names_are_found() -> None:
    boxes = boxes_of(raw(5, 9, nics=[25]))
    assert boxes.ranks.shape == (5, 4)
    assert sorted(boxes.ranks.reshape(-1).tolist()) == list(range(20))
    assert all(boxes.box_of[rank] == box for box, ranks in enumerate(boxes.ranks) for rank in ranks)
    assert find_boxes(ring(num_ranks=6)) is None
    assert find_boxes(unlike(1, 12)) is None


def test_what_is_not_served_says_what_is() -> None:
    topology = load_topology("dgx_h100:boxes=2")
    assert "skewed" in candidates_for("all_to_all")
    with pytest.raises(SynthesisError, match="flow and direct plan equal ones"):
        synthesize(topology, "all_to_all", "skewed")
    with pytest.raises(SynthesisError, match="no boxes that are alike"):
        synthesize(ring(num_ranks=4), of(skewed_weights(4, 1)), "skewed")


def test_nothing_to_send_between_boxes() -> None:
    weights = np.zeros((16, 16), dtype=np.int64)
    weights[0, 1] = weights[9, 9] = 5
    schedule = synthesize(load_topology("dgx_h100:boxes=2"), of(weights), "skewed")
    verify_schedule(schedule)
    assert len(schedule.transfers) == 1


def least_time(boxes: Boxes, weights: np.ndarray, nic: int) -> Fraction:
    """What leaves and enters a box, and what leaves and enters all boxes behind the same leaves, over their cables.

    Leaves are oversubscribed 2:1. Boxes behind the same leaves have one way between them, others one over each spine.
    """
    count, places = boxes.ranks.shape
    order = boxes.ranks.reshape(-1)
    between = weights[np.ix_(order, order)].reshape(count, places, count, places).sum(axis=(1, 3))
    np.fill_diagonal(between, 0)
    alone = [Fraction(int(max(between[i].sum(), between[:, i].sum())), places * nic) for i in range(count)]
    behind = [np.flatnonzero(row == 1) for row in boxes.num_ways]
    for group in behind if (boxes.num_ways > 1).any() else []:
        others = np.setdiff1d(np.arange(count), group)
        most = max(between[np.ix_(group, others)].sum(), between[np.ix_(others, group)].sum())
        alone.append(Fraction(int(most) * 2, len(group) * places * nic))
    return max(alone)


def test_all_spines_carry_equally_much(everything_is_large: None) -> None:
    topology = rails(8, boxes_a_leaf=4, spine=12).topology("rails", random.Random(4))
    boxes, weights = boxes_of(topology), skewed_weights(64, 6)
    assert boxes.ranks.shape == (8, 8), "links between leaves and spines are narrower than cables, and part no boxes"
    assert sorted(boxes.num_ways[0].tolist()) == [1] * 4 + [8] * 4
    plan = plan_skewed(boxes, weights)
    assert check_sums(plan, weights)
    assert plan.time(topology) == least_time(boxes, weights, 48)
    schedule = synthesize(topology, of(weights))
    assert schedule.method == "skewed", "what the leaves' links carry proves it optimal"
    verify_schedule(schedule)
    assert plan.time(topology) == Fraction(schedule.num_units, plan.unit) / (schedule.algbw * 64)


def test_two_interfaces_a_rank_carry_equally_much() -> None:
    cables = Cables()
    planes = [cables.switch() for _ in range(2)]
    for _ in range(3):
        inside = cables.switch()
        for rank in [cables.rank() for _ in range(4)]:
            for other, gbps in ((inside, 300), (planes[0], 25), (planes[1], 25)):
                cables.join(rank, other, gbps)
    topology = cables.topology("two planes", random.Random(2))
    boxes, weights = boxes_of(topology), skewed_weights(12, 3)
    assert set(boxes.num_ways.reshape(-1).tolist()) == {1, 2}
    plan = plan_skewed(boxes, weights)
    assert check_sums(plan, weights)
    between = least_time(replace(boxes, num_ways=np.ones_like(boxes.num_ways)), weights, 50)
    assert plan.time(topology) == between


@long
@pytest.mark.parametrize("name", ["h100_256", "a100_256", "rails_256"])
def test_many_matrices_of_256_ranks(name: str) -> None:
    topology = fabric(name, 3)
    boxes = boxes_of(topology)
    rng = random.Random(3)
    for number in range(200):
        weights = skewed_weights(256, rng.randrange(1 << 30))
        plan = plan_skewed(boxes, weights)
        assert check_sums(plan, weights)
        if number % 20 == 0:
            assert plan.time(topology) == least_time(boxes, weights, 25 if name.startswith("a100") else 50)
