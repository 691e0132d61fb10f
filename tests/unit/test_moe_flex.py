"""Layouts, cuts, the cost model and the choice, each on its own; what ranks do together is in tests/distributed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mycel.cost import Line, makespan
from mycel.errors import UsageError
from mycel.moe import ExpertLayout, ExpertParallel, ExpertSchedule, MoE, Tuner
from mycel.moe.flex.choice import Choice, Chooser
from mycel.moe.flex.cost import CostModel, Load
from mycel.moe.overlap import in_turn, parts_of_experts
from mycel.moe.slices import Cut
from mycel.moe.slots import routing_from_slots, spread_over_slices

layouts = st.builds(
    lambda experts, teams, shards: ExpertLayout(num_experts=experts, num_ranks=teams * shards, tensor_shards=shards),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from([1, 2, 3, 4, 6]),
)


@settings(max_examples=60, deadline=None)
@given(layouts, st.data())
def test_every_token_meets_every_slice_of_its_expert_once(layout: ExpertLayout, data: st.DataObject) -> None:
    r = data.draw(st.sampled_from(layout.ways[1:]))
    sender = data.draw(st.integers(0, layout.num_ranks - 1))
    index = torch.randint(0, layout.num_experts + 1, (5, 2))
    empty = torch.zeros(5, layout.num_experts)
    routing = routing_from_slots(index, torch.rand(5, 2), empty, empty, layout.num_experts, full=False)
    spread = spread_over_slices(layout, routing, r=r, rank=sender)
    assert int(spread.tokens_per_expert.sum()) == int((index < layout.num_experts).sum()) * r
    for slots, expert in zip(spread.top_k_index.view(-1, r).tolist(), index.flatten().tolist(), strict=True):
        if expert == layout.num_experts:
            assert slots == [layout.num_slots] * r
            continue
        ranks = [slot // layout.width for slot in slots]
        assert all(layout.of(rank)[slot % layout.width] == expert for rank, slot in zip(ranks, slots, strict=True))
        slices = [member % layout.tensor_shards for rank in ranks for member in layout.members(rank, r=r)]
        assert sorted(slices) == list(range(layout.tensor_shards))
        if sender // layout.tensor_shards == ranks[0] // layout.tensor_shards:
            assert sender in ranks  # what can stay, stays


@given(layouts)
def test_every_expert_has_one_team(layout: ExpertLayout) -> None:
    owners = [expert for rank in range(0, layout.num_ranks, layout.tensor_shards) for expert in layout.of(rank)]
    assert owners == list(range(layout.num_experts))
    assert all(
        layout.of(rank) == layout.of(rank // layout.tensor_shards * layout.tensor_shards)
        for rank in range(layout.num_ranks)
    )


def test_slices_of_gates_and_ups_have_both() -> None:
    whole = torch.arange(2 * 8 * 3).view(2, 8, 3)  # 4 gates, 4 ups
    part = Cut(dim=1, blocks=2).slice_of(whole, 1, 2)
    assert torch.equal(part, whole[:, [2, 3, 6, 7]])
    assert torch.equal(Cut(dim=2).slice_of(whole, 2, 3), whole[:, :, 2:])


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 3), st.floats(0, 3)), min_size=1, max_size=5),
    st.integers(1, 5),
)
def test_chunks_keep_host_and_network_busy_at_most_once(stages: list[tuple[float, float]], degree: int) -> None:
    host, network = (degree * sum(stage[part] for stage in stages) for part in (0, 1))
    taken = makespan(stages, degree)
    assert max(host, network) - 1e-9 <= taken <= host + network + 1e-9
    if degree == 1:
        assert taken == pytest.approx(host + network)


def test_flows_go_on_in_turn() -> None:
    said: list[str] = []

    def flow(name: str, steps: int) -> Any:
        for step in range(steps):
            said.append(f"{name}{step}")
            yield
        return name

    assert in_turn([flow("a", 2), flow("b", 3)]) == ["a", "b"]
    assert said == ["a0", "b0", "a1", "b1", "b2"]


def test_parts_of_experts() -> None:
    assert parts_of_experts(5, 2) == [range(2), range(2, 5)]
    with pytest.raises(UsageError, match="3 experts a rank cannot be done in 4 parts"):
        parts_of_experts(3, 4)


def model(**lines: Line) -> CostModel:
    line = Line(fixed_s=1e-4, unit_s=1e-8)
    return CostModel(
        layout=ExpertLayout(num_experts=8, num_ranks=4),
        row_bytes=1000.0,
        weight_bytes=1e6,
        num_nodes=2,
        exchanges={"all_to_all": line, "between": line, "inside": line, "all_gather": line} | lines,
        gathers={0: line},
        rows=Line(fixed_s=0.0, unit_s=1e-6),
    )


def test_the_model_prefers_what_is_cheap() -> None:
    def seconds(costs: CostModel, load: Load, **plan: Any) -> float:
        return costs.seconds(
            ExpertSchedule(**{"r": 1, "degree": 1, "algorithm": "all_to_all", **plan}), load, training=True
        )

    few, many = (Load(num_tokens=n, slots_per_token=4) for n in (8, 8192))
    slow_between = model(between=Line(fixed_s=1e-4, unit_s=1e-7), all_to_all=Line(fixed_s=1e-4, unit_s=5e-8))
    assert seconds(model(), many, degree=4) < seconds(model(), many)  # overlap
    assert seconds(model(), few, degree=4) > seconds(model(), few)  # latencies
    assert seconds(model(), many, r=0) < seconds(model(), many)  # weights are fewer bytes than so many tokens
    assert seconds(model(), few, r=0) > seconds(model(), few)
    eight = Load(num_tokens=8192, slots_per_token=8)
    assert seconds(slow_between, eight, algorithm="hierarchical") < seconds(slow_between, eight)


def test_a_line_through_points() -> None:
    line = Line.through((10, 2.0), (20, 3.0))
    assert line.at(30) == pytest.approx(4.0)
    assert Line.through((10, 2.0), (20, 1.0)).at(1000) == pytest.approx(2.0)  # noise does not make bytes a gain


def test_trials_end_with_the_fastest_measured(tmp_path: Path) -> None:
    layer = MoE(
        8, 8, 4, 2, parallel=ExpertParallel(tuner=Tuner(finalists=3, trials=2, file=tmp_path / "choices.json"))
    )
    chooser = layer.chooser
    assert isinstance(chooser, Chooser)
    plans = [ExpertSchedule(r=1, degree=d, algorithm="local") for d in (1, 2, 3, 4)]
    chooser.plans = plans
    bucket = (2, 4, False)
    chooser.table[bucket] = choice = Choice(predicted_s={plan: float(plan.degree) for plan in plans})
    true_s = {1: 5.0, 2: 1.0, 3: 9.0, 4: 0.1}
    steps = 0
    while choice.chosen is None:
        plan = chooser._trials(choice)[0]
        chooser._note(type("R", (), {"bucket": bucket, "plan": plan})(), true_s[plan.degree])
        steps += 1
    assert choice.chosen == plans[1]  # of the three that looked best; the fourth was never tried
    assert {plan.degree: len(found) for plan, found in choice.measured_s.items()} == {1: 1, 2: 2, 3: 1}
    assert steps == 4 + 3  # each plan's first step only warms up
    assert "fastest of 3 tried, of 4" in layer.explain()
    again = MoE(8, 8, 4, 2, parallel=ExpertParallel(tuner=Tuner()))
    assert again.chooser is not None
    again.chooser.load(json.loads((tmp_path / "choices.json").read_text()))
    assert again.chooser.table[bucket].chosen == plans[1]
    other = MoE(8, 8, 6, 2, parallel=ExpertParallel(tuner=Tuner()))
    assert other.chooser is not None
    with pytest.raises(UsageError, match="choices are for"):
        other.chooser.load(chooser.state())


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(UsageError, match="3 shards of an expert do not divide 4 ranks"):
        ExpertLayout(num_experts=2, num_ranks=4, tensor_shards=3)
    layer = MoE(8, 8, 4, 2)
    x = torch.randn(3, 8)
    with pytest.raises(UsageError, match="r = 2 with 1 shards"):
        layer(x, r=2)
    with pytest.raises(UsageError, match="'hierarchical' cannot be used by this layer; expected one of local"):
        layer(x, algorithm="hierarchical")
    with pytest.raises(UsageError, match="degree 0"):
        layer(x, degree=0)
    with pytest.raises(UsageError, match="at least 1"):
        Tuner(trials=0)
    assert layer.explain().startswith("ExpertSchedule(r=1, degree=1, algorithm='local'")
