"""Plans of sequences: against brute force, known optima and static plans; what is wrong is said; plans made ahead."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mycel.errors import MycelError, UsageError, VerificationError
from mycel.pipeline.search.solving import Clock
from mycel.planning.grouping import (
    Candidate,
    PlannedGroup,
    SequenceInstance,
    SequencePlan,
    SequencePlanner,
    aligned_groups,
    candidates_of,
    check_plan,
    greedy_plan,
    plan_sequences,
    static_plans,
)
from mycel.planning.grouping.batch import Batch
from mycel.planning.grouping.buckets import buckets
from mycel.planning.grouping.columns import Columns
from mycel.planning.grouping.configurations import configurations
from mycel.planning.grouping.kernels import priced
from mycel.planning.grouping.knapsack import fullest
from mycel.topology import load_topology

pytest.importorskip("ortools")

DATA = Path(__file__).parents[1] / "data" / "planning"
KNOWN: list[dict[str, Any]] = json.loads((DATA / "sequence_instances.json").read_text())["instances"]
LENGTHS: list[int] = json.loads((DATA / "stdlib_lengths.json").read_text())["lengths"]


def instance(**changes: Any) -> SequenceInstance:
    data: dict[str, Any] = {
        "num_ranks": 4,
        "capacity_tokens": 100,
        "compute": {"us_per_token2": 0.01, "us_per_token": 1.0, "us_per_step": 20.0},
        "degrees": {"1": 0.0, "2": 0.5, "4": 1.0},
        "lengths": [150, 60, 30],
    }
    return SequenceInstance.from_json(data | changes)


# -- an oracle of its own ---------------------------------------------------------------------------------------


def brute_force(one: SequenceInstance) -> float | None:
    """The least time, by trying every division into micro-batches and groups, and all ways to seat them."""
    lengths = one.lengths

    def seated(blocks: tuple[tuple[int, ...], ...]) -> float | None:
        """The least time of one micro-batch whose groups have these sequences."""
        best: float | None = None

        def descend(at: int, free: frozenset[int], left: int, slowest: float) -> None:
            nonlocal best
            if best is not None and slowest >= best:
                return
            if at == len(blocks):
                best = slowest
                return
            tokens = [lengths[k] for k in blocks[at]]
            for c in one.candidates:
                if sum(tokens) > c.size * one.capacity_tokens:
                    continue
                work = sum(one.us_per_token2 * s * s + one.us_per_token * s for s in tokens) / c.size
                time = max(slowest, one.us_per_step + work + c.comm_us_per_token * sum(tokens))
                if c.ranks is not None:
                    if free >= set(c.ranks):
                        descend(at + 1, free - set(c.ranks), left, time)
                elif c.size <= left:
                    descend(at + 1, free, left - c.size, time)

        descend(0, frozenset(range(one.num_ranks)), one.num_ranks, 0.0)
        return best

    def partitions(items: list[int]) -> Any:
        if not items:
            yield ()
            return
        first, rest = items[0], items[1:]
        for size in range(len(rest) + 1):
            for others in itertools.combinations(rest, size):
                remaining = [k for k in rest if k not in others]
                for more in partitions(remaining):
                    yield ((first, *others), *more)

    shortest: dict[tuple[int, ...], float | None] = {}

    def of_batch(items: tuple[int, ...]) -> float | None:
        if items not in shortest:
            times = [seated(blocks) for blocks in partitions(list(items)) if len(blocks) <= one.num_ranks]
            shortest[items] = min((time for time in times if time is not None), default=None)
        return shortest[items]

    best: float | None = None
    for batches in partitions(list(range(len(lengths)))):
        if len(batches) <= one.max_micro_batches:
            times = [of_batch(batch) for batch in batches]
            if all(time is not None for time in times):
                total = sum(time for time in times if time is not None)
                best = total if best is None else min(best, total)
    return best


def small(seed: int) -> SequenceInstance | None:
    chance = random.Random(seed)
    ranks = chance.choice([2, 3, 4])
    data: dict[str, Any] = {
        "num_ranks": ranks,
        "capacity_tokens": chance.randint(60, 200),
        "compute": {
            "us_per_token2": chance.choice([0.0, 0.01, 0.1]),
            "us_per_token": chance.uniform(0.1, 2),
            "us_per_step": chance.choice([0.0, 5.0, 100.0]),
        },
        "lengths": [chance.randint(1, 180) for _ in range(chance.randint(1, 6))],
        "max_micro_batches": chance.choice([1, 1, 2, 3]),
    }
    if chance.random() < 0.5:
        sizes = sorted(chance.sample(range(1, ranks + 1), chance.randint(1, ranks)))
        data["degrees"] = {str(size): chance.uniform(0, 2) for size in sizes}
    else:
        everything = [c for size in range(1, ranks + 1) for c in itertools.combinations(range(ranks), size)]
        chosen = chance.sample(everything, chance.randint(1, min(8, len(everything))))
        costs = [0.0, 0.3, 1.5]
        data["groups"] = [{"ranks": list(c), "comm_us_per_token": chance.choice(costs)} for c in chosen]
    try:
        return SequenceInstance.from_json(data)
    except UsageError:
        return None


def agrees_with_brute_force(seed: int) -> bool:
    one = small(seed)
    if one is None:
        return False
    best = brute_force(one)
    if best is None:
        with pytest.raises(MycelError, match="no plan"):
            plan_sequences(one, limit_s=20)
        return True
    plan = plan_sequences(one, limit_s=20)
    assert check_plan(one, plan) == pytest.approx(plan.total_us)
    assert plan.total_us == pytest.approx(best, rel=1e-5), seed
    assert plan.lower_bound_us <= best * (1 + 1e-9)
    assert plan.proved
    return True


def test_plans_are_the_best_of_all() -> None:
    assert sum(agrees_with_brute_force(seed) for seed in range(60)) >= 30


@pytest.mark.long
def test_300_plans_are_the_best_of_all() -> None:
    count = seed = 0
    while count < 300:
        count += agrees_with_brute_force(1000 + seed)
        seed += 1


# -- known optima -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", KNOWN, ids=[known["name"] for known in KNOWN])
def test_known_optima_are_found_and_proved(known: dict[str, Any]) -> None:
    one = SequenceInstance.from_json(known)
    plan = plan_sequences(one, limit_s=90)  # two seconds, where nobody else wants the processor
    check_plan(one, plan)
    assert plan.total_us == pytest.approx(known["optimum_us"], rel=1e-9)
    assert plan.proved
    assert plan.lower_bound_us <= known["optimum_us"] * (1 + 1e-9)
    fast = greedy_plan(one)
    check_plan(one, fast)
    assert fast.total_us <= 1.02 * known["optimum_us"]
    assert SequenceInstance.from_json(one.to_json()) == one
    assert SequencePlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_never_worse_than_a_static_plan() -> None:
    chance = random.Random(3)
    compute = {"us_per_token2": 0.005128, "us_per_token": 184.0, "us_per_step": 629356.3}
    degrees = {"1": 0.0, "2": 6.5, "4": 3.6, "8": 2.1, "16": 14.4}
    for _ in range(10):
        lengths = [min(chance.choice(LENGTHS), 200_000) for _ in range(chance.randint(5, 60))]
        one = instance(
            num_ranks=16,
            capacity_tokens=40_000,
            compute=compute,
            degrees=degrees,
            lengths=lengths,
            max_micro_batches=8,
        )
        static = static_plans(one)
        plan = greedy_plan(one)
        check_plan(one, plan)
        for each in static.values():
            check_plan(one, each)
        assert static
        assert plan.total_us <= min(each.total_us for each in static.values()) * (1 + 1e-9)
        assert plan.lower_bound_us <= plan.total_us


def test_the_greedy_is_the_same_every_time() -> None:
    one = SequenceInstance.from_json(KNOWN[0])
    assert greedy_plan(one) == greedy_plan(one)


def test_many_sequences() -> None:
    degrees = {str(2**k): 2.0 * k for k in range(7)}
    lengths = [min(length, 60_000) for length in LENGTHS[:: len(LENGTHS) // 512]][:512]
    one = instance(num_ranks=64, capacity_tokens=200_000, degrees=degrees, lengths=lengths)
    plan = greedy_plan(one)
    check_plan(one, plan)
    assert plan.gap < 0.1


# -- bounds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_a_knapsack_is_worth_no_less_than_its_best_set(seed: int) -> None:
    chance = np.random.default_rng(seed)
    num = int(chance.integers(1, 8))
    time, held = chance.uniform(0.05, 1.1, num), chance.uniform(0.05, 1.1, num)
    prices = chance.uniform(0.0, 1.0, num) * (chance.random(num) < 0.9)
    many = chance.integers(1, 4, num)
    best = 0.0
    for chosen in itertools.product(*(range(each + 1) for each in many)):
        if chosen @ time <= 1 and chosen @ held <= 1:
            best = max(best, float(chosen @ prices))
    for places in (100_000, 3):  # all sets, and what the table says where they are too many
        column = np.zeros(num, dtype=np.int64)
        worth = fullest(time, held, prices, many, 0.0, places, 1 << 10, column)
        assert worth >= best * (1 - 1e-9)
        assert column @ time <= 1 + 1e-9
        assert column @ held <= 1 + 1e-9
        assert (column <= many).all()
        if places > 3:
            assert worth == pytest.approx(best, rel=1e-6)
            assert column @ prices == pytest.approx(best, rel=1e-6)
    assert fullest(time, held, prices, many, best + 1.0, 100_000, 1 << 10, column) == best + 1.0
    assert not column.any()


def of_division(one: SequenceInstance, batch: Batch, counts: list[int]) -> float:
    """The least work of the slowest group of a division, by trying all distributions; infinite where none fits."""
    kinds = [kind for kind, count in enumerate(counts) for _ in range(count)]
    best = float("inf")
    for placed in itertools.product(range(len(kinds)), repeat=len(batch.which)):
        loads, tokens = [0.0] * len(kinds), [0] * len(kinds)
        for place, slot in enumerate(placed):
            loads[slot] += batch.work[place, kinds[slot]]
            tokens[slot] += int(batch.tokens[place])
        if all(held <= batch.rooms[kind] for held, kind in zip(tokens, kinds, strict=True)):
            best = min(best, max(loads))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_no_bound_of_a_division_is_above_its_best_distribution(seed: int) -> None:
    chance = random.Random(seed)
    one = instance(
        capacity_tokens=chance.choice([90, 120, 200]),
        compute={"us_per_token2": 0.01, "us_per_token": 1.0, "us_per_step": 0.0},
        degrees={"1": 0.0, "2": chance.uniform(0, 1), "4": chance.uniform(0, 1)},
        lengths=[chance.randint(5, 85) for _ in range(5)],
    )
    batch = Batch.of(one)
    counts = batch.divisions.counts
    best = np.array([of_division(one, batch, row) for row in counts.tolist()])
    assert np.isfinite(best).any()
    columns = Columns(batch=batch)
    ruled = 0
    for most in (1.2 * best.min(), best.min() * (1 + 1e-6), 0.98 * best.min(), 0.7 * best.min()):
        least = np.zeros(len(counts))
        priced(batch.work, batch.tokens, batch.sizes, batch.rooms, counts, most, 100, least)
        assert (np.minimum(least, most) <= best * (1 + 1e-9)).all()
        for row in range(len(counts)):
            assert min(columns.spread(counts[row], most), most) <= best[row] * (1 + 1e-9)
        out, parts = columns.rule_out(counts, most, Clock(20))
        assert not out[best <= most].any()
        assert (0 if out.all() else 1e-6) <= parts.sum() <= 1 + 1e-6
        assert not parts[out].any()
        ruled += int(out.sum())
    assert ruled  # within seven tenths of the best nothing fits, and it is seen
    # Sets of a plan are room enough for all sequences in the plan's time.
    known = greedy_plan(one)
    fresh = Columns(batch=batch)
    fresh.add(known)
    out, parts = fresh.rule_out(counts, known.total_us * (1 + 1e-9), Clock(20))
    assert not out.all()
    assert parts.any()


def test_two_of_three_fifths_of_a_group_do_not_fit() -> None:
    chance = random.Random(1)
    lengths = [chance.randint(570, 630) for _ in range(13)]
    one = instance(num_ranks=12, capacity_tokens=10_000, degrees={"1": 0.0, "2": 0.5}, lengths=lengths)
    batch = Batch.of(one)
    counts = batch.divisions.counts
    columns = Columns(batch=batch)
    # Of twelve ranks one has two, the shortest: pairs of ranks are slower by what they exchange.
    best = sum(sorted(batch.work[:, 0].tolist())[:2])
    most = 0.99 * best
    alone = int(np.flatnonzero(counts[:, 0] == 12)[0])
    assert columns.spread(counts[alone], most) < 0.6 * best
    out, _ = columns.rule_out(counts[[alone]], most, Clock(60))
    assert out.all()
    assert not columns.rule_out(counts[[alone]], 1.001 * best, Clock(60))[0].any()
    assert columns.rule_out(counts[[alone]], most, Clock(60))[0].all()  # with what is known by now, too


# -- buckets ----------------------------------------------------------------------------------------------------


def test_buckets_add_least() -> None:
    chance = random.Random(1)
    for _ in range(20):
        lengths = [chance.randint(1, 30) for _ in range(7)]
        rounded = buckets(lengths, 3)
        values = sorted(set(lengths))
        tops = [set(inner) | {values[-1]} for size in (0, 1, 2) for inner in itertools.combinations(values, size)]
        least = min(sum(min(t for t in top if t >= each) for each in lengths) for top in tops)
        assert sum(rounded) == least
        assert all(a >= b for a, b in zip(rounded, lengths, strict=True))
        assert len(set(rounded)) <= 3
    with pytest.raises(UsageError, match="0 buckets"):
        buckets([1], 0)


# -- the check --------------------------------------------------------------------------------------------------


def mutants(plan: SequencePlan) -> Any:
    first, *rest = plan.groups

    def with_first(**changes: Any) -> SequencePlan:
        return replace(plan, groups=(replace(first, **changes), *rest))

    yield replace(plan, groups=tuple(rest)), "missing"
    yield replace(plan, groups=(*plan.groups, first)), "overlap"
    yield with_first(sequences=(*first.sequences, 99)), "no sequence 99"
    yield with_first(sequences=(*first.sequences, first.sequences[0])), "is in groups"
    yield with_first(ranks=(*first.ranks[:-1], 77)), "no rank 77"
    yield with_first(micro_batch=9), "micro-batch 9"
    yield with_first(ranks=first.ranks[:-1]), "none of the candidates|tokens on"
    yield replace(plan, total_us=plan.total_us + 1), "the plan says"


def test_wrong_plans_are_refused() -> None:
    one = instance()
    plan = plan_sequences(one, limit_s=5)
    check_plan(one, plan)
    assert len(plan.groups[0].ranks) > 1
    for wrong, says in mutants(plan):
        with pytest.raises(VerificationError, match=says):
            check_plan(one, wrong)


# -- input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"lengths": [0, 3]}, r"lengths\[0\] is 0"),
        ({"lengths": [1.5]}, r"lengths\[0\] is 1.5"),
        ({"lengths": []}, "no sequences"),
        ({"lengths": [501]}, r"lengths\[0\]: 501 tokens.*holds 400: 101 too many. A group of 6 ranks.*\(2 more\)"),
        ({"lengths": [300, 300]}, "at least 2 micro-batches"),
        ({"compute": {"us_per_token2": 0, "us_per_token": 0, "us_per_step": 1}}, "both 0"),
        ({"compute": {"us_per_token2": float("nan"), "us_per_token": 1, "us_per_step": 1}}, "us_per_token2 is nan"),
        ({"compute": {"us_per_token2": -1, "us_per_token": 1, "us_per_step": 1}}, "us_per_token2 is -1"),
        ({"compute": 3}, "compute: expected an object"),
        ({"degrees": {"8": 1.0}}, "degree 8: no set of 4 ranks"),
        ({"degrees": {"0": 1.0}}, "degree 0: its size is 0"),
        ({"degrees": {"two": 1.0}}, "'two' is no number of ranks"),
        ({"degrees": {}}, "no group to choose"),
        ({"groups": []}, "either degrees or groups"),
        ({"degrees": None, "groups": [{"ranks": [0, 4], "comm_us_per_token": 1}]}, "no rank 4"),
        ({"degrees": None, "groups": [{"ranks": [0, 0], "comm_us_per_token": 1}]}, "2 different ranks"),
        ({"degrees": None, "groups": [{"ranks": [0, 1]}]}, "no comm_us_per_token"),
        ({"degrees": None, "groups": [{"ranks": [0, 1], "comm_us_per_token": 1}] * 2}, "there twice"),
        ({"max_micro_batches": 0}, "max_micro_batches is 0"),
        ({"capacity_tokens": True}, "capacity_tokens is True"),
        ({"max_microbatches": 3}, r"unknown key 'max_microbatches' \(did you mean 'max_micro_batches'\?\)"),
        ({"version": 2}, "version 2"),
    ],
)
def test_what_is_no_instance(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        instance(**changes)
    assert "\n" not in str(refused.value)


def test_what_fits_nowhere_is_said() -> None:
    one = instance(num_ranks=2, lengths=[70, 70, 60], degrees={"1": 0.0})
    with pytest.raises(MycelError, match="no plan exists: 3 sequences do not fit"):
        plan_sequences(one, limit_s=10)


# -- topologies and steps ---------------------------------------------------------------------------------------


def test_groups_of_a_topology_cost_what_its_wires_take() -> None:
    boxes = load_topology("two_boxes:ranks=8")
    found = {c.ranks: c.comm_us_per_token for c in candidates_of(boxes, 1e5)}
    assert set(found) == set(aligned_groups(8))
    assert found[0,] == 0
    inside, across = found[0, 1, 2, 3], found[tuple(range(8))]
    assert found[4, 5, 6, 7] == pytest.approx(inside)
    assert across > inside
    with pytest.raises(UsageError, match="each once in a group"):
        candidates_of(boxes, 1e5, [(0, 8)])


def test_named_groups_of_a_topology_are_planned() -> None:
    one = SequenceInstance(
        num_ranks=8,
        capacity_tokens=5000,
        us_per_token2=0.002,
        us_per_token=10.0,
        us_per_step=1000.0,
        lengths=(12_000, 4000, 3000, 2000, 1000, 900, 800),
        candidates=candidates_of(load_topology("two_boxes:ranks=8"), 1e4),
    )
    plan = plan_sequences(one, limit_s=20)
    check_plan(one, plan)
    assert plan.proved


def divisions_by_trying(one: SequenceInstance) -> set[tuple[int, ...]]:
    """Counts of each kind in all sets of disjoint candidates, those that another set has more of left out."""
    found = set()
    for many in range(len(one.candidates) + 1):
        for chosen in itertools.combinations(one.candidates, many):
            ranks = [rank for c in chosen for rank in c.ranks or ()]
            if len(ranks) == len(set(ranks)):
                kinds = [(c.size, c.comm_us_per_token) for c in chosen]
                found.add(tuple(kinds.count(kind) for kind in one.kinds))
    return {a for a in found if not any(a != b and all(x <= y for x, y in zip(a, b, strict=True)) for b in found)}


@pytest.mark.parametrize("seed", range(40))
def test_divisions_of_nested_and_of_crossing_groups_are_all(seed: int) -> None:
    chance = random.Random(seed)
    ranks = chance.choice([3, 4, 6])
    groups = {(rank,) for rank in range(ranks) if chance.random() < 0.8}
    edges = sorted(chance.sample(range(1, ranks), 2))
    for begin, end in itertools.pairwise([0, *edges, ranks]):
        groups.add(tuple(range(begin, end)))
    groups.add(tuple(range(ranks)))
    if seed % 2:  # two that cross
        groups |= {(0, ranks - 1), (ranks - 2, ranks - 1)}
    one = instance(
        num_ranks=ranks,
        degrees=None,
        groups=[{"ranks": list(group), "comm_us_per_token": chance.choice([0.0, 1.0])} for group in sorted(groups)],
    )
    found = configurations(one)
    assert {tuple(row) for row in found.counts.tolist()} == divisions_by_trying(one)
    assert found.is_whole
    for row, chosen in zip(found.counts.tolist(), found.chosen, strict=True):
        members = [one.candidates[index] for index in chosen]
        kinds = [(c.size, c.comm_us_per_token) for c in members]
        assert [kinds.count(kind) for kind in one.kinds] == row
        taken = [rank for c in members for rank in c.ranks or ()]
        assert len(taken) == len(set(taken))


def test_groups_of_many_ranks_of_a_topology_are_divided_in_every_way() -> None:
    chance = random.Random(5)
    one = SequenceInstance(
        num_ranks=32,
        capacity_tokens=15_870,
        us_per_token2=0.0011,
        us_per_token=26.0,
        us_per_step=90_000.0,
        lengths=tuple(chance.randint(500, 14_000) for _ in range(64)),
        candidates=candidates_of(load_topology("two_boxes:ranks=32"), 8e4),
    )
    divisions = configurations(one)
    assert divisions.is_whole
    assert len(divisions.counts) == 202  # those of 32 ranks in powers of two
    plan = greedy_plan(one)
    check_plan(one, plan)
    assert plan.gap < 0.02


def planner(**changes: Any) -> SequencePlanner:
    one = instance()
    given: dict[str, Any] = {
        "num_ranks": 4,
        "capacity_tokens": 100,
        "us_per_token2": 0.01,
        "us_per_token": 1.0,
        "us_per_step": 20.0,
        "candidates": one.candidates,
        "limit_s": 5,
    }
    return SequencePlanner(**given | changes)


def test_steps_are_planned_ahead() -> None:
    steps = [(150, 60, 30), (90,), (50, 50, 50, 50)]
    with planner() as ahead:
        found = list(ahead.ahead(steps))
        assert [lengths for lengths, _ in found] == steps
        for lengths, plan in found:
            assert plan.total_us == pytest.approx(ahead.plan(lengths).total_us)
        pending = ahead.begin((40, 30))
        assert check_plan(instance(lengths=[40, 30]), ahead.take(pending, (40, 30), most_s=60)) > 0
        with pytest.raises(UsageError, match="501 tokens"):
            ahead.begin((501,))


def test_a_late_plan_is_the_greedys() -> None:
    from concurrent.futures import Future

    never: Future[SequencePlan] = Future()
    plan = planner().take(never, (150, 60), most_s=0.0)
    assert plan.source.endswith("as the search was late")
    check_plan(instance(lengths=[150, 60]), plan)
    with pytest.raises(UsageError, match="degree 9"):
        planner(candidates=(Candidate(size=9, comm_us_per_token=0.0),))


def test_values_say_what_they_need() -> None:
    with pytest.raises(UsageError, match="ranks and sequences"):
        PlannedGroup(micro_batch=0, ranks=(), sequences=(1,))
    with pytest.raises(UsageError, match="below its bound"):
        SequencePlan(groups=(), total_us=1.0, lower_bound_us=2.0)
    with pytest.raises(UsageError, match="no plan of sequences"):
        SequencePlan.from_json({"groups": 3})
