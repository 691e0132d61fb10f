"""Placements, their policies, and traces: each against its definition, on generated loads."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mycel.errors import UsageError
from mycel.moe import MoE
from mycel.moe.placement import RoutingTrace, TraceRecorder, replay
from mycel.moe.placement.spread import SlotTable
from mycel.moe.placement.trace import num_arrivals
from mycel.moe.slots import count_tokens, routing_from_slots
from mycel.planning.placement import (
    EMPTY,
    POLICIES,
    ExpertPlacement,
    PlacementCost,
    eplb,
    flex,
    make_policy,
    shadow,
)
from mycel.planning.placement.policies import pack, replica_counts


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[float], ExpertPlacement]:
    """Loads and a placement in use: ranks of one or of two machines, with spare slots."""
    num_ranks = draw(st.sampled_from([1, 2, 3, 4]))
    num_experts = draw(st.integers(num_ranks, 9))
    nodes: tuple[tuple[int, ...], ...] = ()
    if num_ranks % 2 == 0 and draw(st.booleans()):
        nodes = (tuple(range(num_ranks // 2)), tuple(range(num_ranks // 2, num_ranks)))
    spare = draw(st.integers(0, 2))
    placed = ExpertPlacement.contiguous(num_experts, num_ranks, spare=spare, nodes=nodes)
    loads = st.lists(st.integers(0, 50).map(float), min_size=num_experts, max_size=num_experts)
    for _ in range(draw(st.integers(0, 2))):
        placed = draw(st.sampled_from([eplb, flex]))(draw(loads), placed)
    return draw(loads), placed


@settings(max_examples=25, deadline=None)
@given(situations(), st.sampled_from(sorted(POLICIES)))
def test_policies_keep_sizes_and_repeat(situation: tuple[list[float], ExpertPlacement], name: str) -> None:
    """That the result is a placement at all, ``ExpertPlacement`` has checked."""
    loads, current = situation
    placed = make_policy(name)(loads, current)
    assert (placed.num_ranks, placed.slots_per_rank, placed.nodes) == (
        current.num_ranks,
        current.slots_per_rank,
        current.nodes,
    )
    assert placed == make_policy(name)(loads, current)
    total = sum(loads)
    assert sum(placed.rank_loads(loads)) == pytest.approx(total)


@settings(max_examples=25, deadline=None)
@given(situations(), st.integers(1, 3))
def test_flex_makes_few_moves_and_never_a_bad_one(
    situation: tuple[list[float], ExpertPlacement], max_moves: int
) -> None:
    loads, current = situation
    for cost in (PlacementCost(token_s=1.0), PlacementCost(token_s=1.0, carry_s=0.2, expert_s=3.0)):
        placed = flex(loads, current, max_moves=max_moves, cost=cost)
        assert cost.of(placed.slots, loads) <= cost.of(current.slots, loads)
        assert num_arrivals(current, placed) <= 2 * max_moves  # an exchange carries two


def test_flex_expands_shrinks_and_migrates() -> None:
    start = ExpertPlacement(num_experts=4, slots=((0, 1, EMPTY), (2, 3, EMPTY)))
    expanded = flex([90.0, 10.0, 1.0, 1.0], start, max_moves=1)
    assert expanded.replicas(0) == (0, 1)
    full = ExpertPlacement(num_experts=4, slots=((0, 1), (2, 3)))
    migrated = flex([50.0, 50.0, 1.0, 1.0], full, max_moves=1)
    assert all(len(migrated.replicas(e)) == 1 for e in range(4)) and migrated.imbalance([50.0, 50.0, 1.0, 1.0]) < 1.1
    replicated = ExpertPlacement(num_experts=3, slots=((0, 1), (0, 2)))
    assert flex([1.0, 9.0, 90.0], replicated, max_moves=1).replicas(2) == (0, 1)
    dear = PlacementCost(token_s=1.0, expert_s=1000.0)  # replicas cost more than they save
    assert flex([90.0, 10.0, 1.0, 1.0], start, max_moves=2, cost=dear).imbalance([1.0] * 4) >= 1.0
    assert all(len(flex([90.0, 10.0, 1.0, 1.0], start, cost=dear).replicas(e)) == 1 for e in range(4))


def every_move(slots: tuple[tuple[int, ...], ...], loads: list[float]) -> list[tuple[tuple[int, ...], ...]]:
    """Everything one move away that takes load from the busiest rank, written out."""
    counts = {e: sum(held.count(e) for held in slots) for e in range(len(loads))}
    of_ranks = [sum(loads[e] / counts[e] for e in held if e != EMPTY) for held in slots]
    busy = of_ranks.index(max(of_ranks))
    found = []

    def changed(*cells: tuple[int, int, int]) -> None:
        after = [list(held) for held in slots]
        for rank, place, expert in cells:
            after[rank][place] = expert
        found.append(tuple(tuple(held) for held in after))

    for place, expert in enumerate(slots[busy]):
        if expert == EMPTY:
            continue
        if counts[expert] > 1:
            changed((busy, place, EMPTY))
        for rank, held in enumerate(slots):
            for there, other in enumerate(held if expert not in held else ()):
                if other == EMPTY or counts[other] > 1:
                    changed((rank, there, expert))
                if other == EMPTY or other not in slots[busy]:
                    changed((rank, there, expert), (busy, place, other))
    return found


@settings(max_examples=60, deadline=None)
@given(situations())
def test_flex_takes_the_cheapest_of_all_moves(situation: tuple[list[float], ExpertPlacement]) -> None:
    loads, current = situation
    for cost in (PlacementCost(token_s=1.0), PlacementCost(token_s=1.0, carry_s=0.2, expert_s=3.0)):
        least = min((cost.of(slots, loads) for slots in every_move(current.slots, loads)), default=np.inf)
        placed = flex(loads, current, max_moves=1, cost=cost, min_gain=0.0)
        if placed != current:
            assert cost.of(placed.slots, loads) == pytest.approx(least, rel=1e-9)
        else:
            assert least >= cost.of(current.slots, loads) * (1 - 1e-9)


def test_flex_makes_no_move_that_changes_nothing() -> None:
    """Two ranks are the busiest: whatever leaves one of them, the other stays as busy."""
    even = ExpertPlacement(num_experts=4, slots=((0, EMPTY), (1, EMPTY), (2, 3)))
    for min_gain in (0.0, 0.01):
        for max_moves in (1, 2):  # a second one may undo the first
            assert flex([10.0, 10.0, 10.0, 0.0], even, max_moves=max_moves, min_gain=min_gain) == even


def test_shadows_stand_on_every_rank_while_they_pay() -> None:
    start = ExpertPlacement.contiguous(8, 4, spare=2)
    loads = [100.0, 1, 1, 1, 90.0, 1, 1, 1]
    placed = shadow(loads, start)
    assert placed.replicas(0) == placed.replicas(4) == (0, 1, 2, 3)
    assert placed.replicas(1) == (0,)
    dear = PlacementCost(token_s=1.0, expert_s=60.0)
    assert shadow(loads, start, cost=dear) == start
    assert shadow([1.0] * 8, start) == start


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 99).map(float), min_size=1, max_size=10), st.integers(1, 5), st.integers(0, 8))
def test_slots_go_where_most_is_to_do(loads: list[float], num_ranks: int, spare: int) -> None:
    """No replica more helps its expert more than giving it to the one that has most to do."""
    counts = replica_counts(loads, len(loads) + spare, most=num_ranks)
    assert all(1 <= n <= num_ranks for n in counts)
    assert sum(counts) == min(len(loads) + spare, len(loads) * num_ranks)
    for mine, load in zip(counts, loads, strict=True):
        for other, load_of_other in zip(counts, loads, strict=True):
            if mine > 1 and other < num_ranks:
                assert load / (mine - 1) >= load_of_other / other


def test_packing_puts_the_heaviest_first_and_nothing_twice_in_a_bin() -> None:
    assert pack([(5.0, 0), (4.0, 1), (3.0, 2), (3.0, 3)], 2, 2) == [[0, 3], [1, 2]]
    bins = pack([(9.0, 7), (9.0, 7), (1.0, 1), (1.0, 2)], 2, 2)
    assert sorted(map(sorted, bins)) == [[1, 7], [2, 7]]


def test_eplb_balances_and_keeps_what_it_can() -> None:
    loads = [80.0, 10, 10, 10, 10, 10, 10, 20]
    start = ExpertPlacement.contiguous(8, 4, spare=1)
    placed = eplb(loads, start)
    assert placed.imbalance(loads) < 1.1 < start.imbalance(loads)
    assert len(placed.replicas(0)) == 4
    assert eplb(loads, placed) == placed


def test_eplb_keeps_replicas_and_groups_on_one_machine() -> None:
    nodes = ((0, 1), (2, 3))
    rng = np.random.default_rng(0)
    for _ in range(10):
        loads = rng.exponential(10.0, 8).tolist()
        placed = eplb(loads, ExpertPlacement.contiguous(8, 4, spare=1, nodes=nodes), num_groups=4)
        machine = {rank: number for number, node in enumerate(nodes) for rank in node}
        for group in range(4):
            ranks = {rank for e in (2 * group, 2 * group + 1) for rank in placed.replicas(e)}
            assert len({machine[rank] for rank in ranks}) == 1


@settings(max_examples=25, deadline=None)
@given(situations())
def test_shares_are_even_and_near(situation: tuple[list[float], ExpertPlacement]) -> None:
    _, placed = situation
    machine = {rank: number for number, node in enumerate(placed.machines) for rank in node}
    for expert in range(placed.num_experts):
        holders, shares = placed.replicas(expert), placed.shares(expert)
        assert all(sum(parts.values()) == 1 for parts in shares)
        for holder in holders:
            assert sum(parts.get(holder, Fraction(0)) for parts in shares) == Fraction(placed.num_ranks, len(holders))
            assert shares[holder] == {holder: 1}
        for node in placed.machines:
            # What a machine takes in from outside, it does not send out as well.
            inside = [rank for rank in holders if machine[rank] == machine[node[0]]]
            if inside:
                away = sum(part for rank in node for holder, part in shares[rank].items() if holder not in node)
                wanted = len(node) - Fraction(placed.num_ranks * len(inside), len(holders))
                assert away == max(0, wanted)


@settings(max_examples=25, deadline=None)
@given(situations(), st.integers(0, 30), st.randoms(use_true_random=False))
def test_tokens_go_to_replicas_in_their_shares(
    situation: tuple[list[float], ExpertPlacement], num_tokens: int, random: Any
) -> None:
    _, placed = situation
    E = placed.num_experts  # noqa: N806
    slots = [random.sample(range(E + 1), k=min(2, E)) for _ in range(num_tokens)]
    index = torch.tensor(slots, dtype=torch.int64).view(num_tokens, min(2, E))
    empty = torch.zeros(num_tokens, E)
    routing = routing_from_slots(index, torch.ones(index.shape), empty, empty, E, full=False)
    sent = torch.zeros(placed.num_ranks, E)
    for source in [*range(placed.num_ranks), None]:
        found = SlotTable(placed, source).apply(routing)
        assert torch.equal(found.tokens_per_expert, count_tokens(found.top_k_index, placed.num_slots))
        flat = [held for rank in placed.slots for held in rank]
        got = [flat[s] if s < placed.num_slots else E for s in found.top_k_index.flatten().tolist()]
        assert got == index.flatten().tolist()  # the expert in the slot is the one that was chosen
        for expert in range(E):
            tokens = int(routing.tokens_per_expert[expert])
            holders = placed.replicas(expert)
            even = dict.fromkeys(holders, Fraction(1, len(holders)))
            parts = even if source is None else placed.shares(expert)[source]
            for holder in holders:
                went = int(found.tokens_per_expert[placed.slot_of(expert, rank=holder)])
                assert abs(went - tokens * parts.get(holder, 0)) < 1
                sent[holder, expert] += went if source is not None else 0


def test_wrong_placements_are_named() -> None:
    for slots, said in (
        (((0, 1), (2,)), "slots; expected one number"),
        (((0, 1), (1, 3)), "rank 1 holds expert 3; there are 3"),
        (((0, 0), (1, 2)), "rank 0 holds expert 0 twice"),
        (((0, 1), (1, 0)), "expert 2 has no slot"),
    ):
        with pytest.raises(UsageError, match=said):
            ExpertPlacement(num_experts=3, slots=slots)
    with pytest.raises(UsageError, match="no partition of 2 ranks"):
        ExpertPlacement(num_experts=2, slots=((0,), (1,)), nodes=((0,),))
    with pytest.raises(UsageError, match=r"known: eplb, flex, shadow, static"):
        make_policy("best")
    with pytest.raises(UsageError, match="rank 1 does not hold expert 0"):
        ExpertPlacement(num_experts=2, slots=((0,), (1,))).slot_of(0, rank=1)


# -- traces ---------------------------------------------------------------------------------------------------------


def test_a_recorder_counts_what_routers_choose(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(MoE(8, 8, 5, 2), MoE(8, 8, 5, 1))
    wanted = []
    with TraceRecorder(model) as recorder:
        for num_tokens in (7, 3):
            x = torch.randn(num_tokens, 8)
            model(x)
            wanted.append(model[0].router(x).tokens_per_expert)  # seen as well: a batch that the second layer lacks
    with pytest.raises(UsageError, match="different numbers of batches"):
        recorder.trace()
    recorder.seen["0"] = recorder.seen["0"][::2]
    trace = recorder.trace()
    assert trace.layers == ("0", "1")
    assert trace.counts[:, 0].tolist() == [w.tolist() for w in wanted]
    assert trace.counts[:, 1].sum(axis=1).tolist() == [7, 3]
    model(torch.randn(2, 8))
    assert recorder.trace().counts.shape == trace.counts.shape  # closed
    trace.save(tmp_path / "trace.npz")
    again = RoutingTrace.load(tmp_path / "trace.npz")
    assert again.layers == trace.layers and np.array_equal(again.counts, trace.counts)
    np.savez(tmp_path / "other.npz", counts=trace.counts)
    with pytest.raises(UsageError, match="no routing trace"):
        RoutingTrace.load(tmp_path / "other.npz")
    with pytest.raises(UsageError, match="no module with a router"):
        TraceRecorder(nn.Linear(2, 2))


def test_replay_places_by_the_past_only() -> None:
    # The hot expert changes at batch 3: the placement follows one batch later.
    hot = [0, 0, 0, 2, 2, 2]
    counts = np.array([[[60 if e == h else 10 for e in range(4)]] for h in hot])
    trace = RoutingTrace(counts=counts, layers=("moe",))
    start = ExpertPlacement.contiguous(4, 2, spare=1)
    seen = list(replay(trace, eplb, start, memory=0.0))
    assert [s.batch for s in seen] == [1, 2, 3, 4, 5]
    imbalances = [s.imbalance for s in seen]
    assert imbalances[0] == imbalances[1] == imbalances[3] == imbalances[4] < 1.15 < imbalances[2]
    assert seen[0].moved and not seen[1].moved
    static = [s.imbalance for s in replay(trace, POLICIES["static"], start)]
    assert static == [start.imbalance(batch[0]) for batch in counts[1:].tolist()]
    seldom = list(replay(trace, partial(flex, max_moves=1), start, every=3))
    assert not any(s.moved for s in seldom if (s.batch - 1) % 3)
    with pytest.raises(UsageError, match="the trace has 4 experts, the placement 5"):
        list(replay(trace, eplb, ExpertPlacement.contiguous(5, 2)))


def test_policies_on_a_recorded_trace() -> None:
    """The last batches of what ``benchmarks/moe_placement.py`` recorded: counted loads, so figures are exact."""
    whole = RoutingTrace.load(Path(__file__).parents[1] / "data" / "moe" / "routing.npz")
    trace = RoutingTrace(counts=whole.counts[-40:], layers=whole.layers)
    mean: dict[str, float] = {}
    for name, policy in POLICIES.items():
        start = ExpertPlacement.contiguous(16, 4, spare=0 if name == "static" else 1)
        seen = [s for s in replay(trace, policy, start) if s.batch >= 10]
        mean[name] = sum(s.imbalance for s in seen) / len(seen)
    assert mean["eplb"] <= 1.095 and mean["flex"] <= 1.21
    assert mean["eplb"] < mean["flex"] < mean["shadow"] < mean["static"]
