"""Plans of memory: against exhaustive search and known optima; replayed, and mutants of them refused."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mycel.errors import MycelError, UsageError, VerificationError
from mycel.planning.residency import (
    MemoryInstance,
    MemoryPlan,
    Step,
    check_plan,
    fast_plan,
    known_plans,
    listed_plan,
    plan_memory,
)
from mycel.planning.residency.bounds import iteration_bound
from mycel.planning.residency.plan import POLICIES

pytest.importorskip("ortools")

DATA = Path(__file__).parents[1] / "data" / "planning" / "memory_instances.json"
KNOWN: list[dict[str, Any]] = json.loads(DATA.read_text())["instances"]


def instance(**changes: Any) -> MemoryInstance:
    blocks = [{"forward_us": 40, "backward_us": 80, "saved": 80, "input": 10}] * 4
    data: dict[str, Any] = {"blocks": blocks, "capacity": 170, "out_bytes_per_us": 1, "in_bytes_per_us": 1}
    return MemoryInstance.from_json(data | changes)


def drawn(chance: random.Random, count: int) -> MemoryInstance:
    blocks = []
    for _ in range(count):
        forward, saved = chance.randint(1, 12), chance.randint(1, 12)
        blocks.append(
            {
                "forward_us": forward,
                "backward_us": chance.randint(1, 2 * forward),
                "saved": saved,
                "input": chance.randint(0, saved),
            }
        )
    largest, total = max(b["saved"] for b in blocks), sum(b["saved"] for b in blocks)
    return instance(
        blocks=blocks,
        capacity=chance.randint(largest, max(largest, total)),
        out_bytes_per_us=chance.choice([0.3, 1, 2.5]),
        in_bytes_per_us=chance.choice([0.5, 1, 4]),
        latency_us=chance.choice([0, 0, 2]),
    )


# -- an oracle of its own ---------------------------------------------------------------------------------------


def exhaustive(one: MemoryInstance) -> int:
    """The least time, by trying all policies and, event by event, all that could begin or be left to wait.

    In a best schedule everything begins at 0 or when something else ends, so only those moments matter.
    """
    blocks, count, best = one.blocks, len(one.blocks), 1 << 60

    def play(policy: tuple[str, ...]) -> None:
        # A state: time, held, position on the computation stream, and when the three streams are free.
        computation: list[tuple[str, int]] = [("forward", k) for k in range(count)]
        for k in reversed(range(count)):
            if policy[k].startswith("recompute"):
                computation.append(("recompute", k))
            computation.append(("backward", k))
        moved = {k: blocks[k].saved if policy[k] == "swap" else blocks[k].input for k in range(count)}
        away = {k for k in range(count) if policy[k] in ("swap", "recompute_swap")}
        seen: set[Any] = set()

        def takes(action: str, k: int) -> int:
            rest = blocks[k].saved - blocks[k].input
            return {"forward": blocks[k].saved, "recompute": rest, "backward": 0, "out": 0, "in": moved[k]}[action]

        def gives(action: str, k: int) -> int:
            rest = blocks[k].saved - blocks[k].input
            dropped = rest if policy[k].startswith("recompute") else 0
            return {"forward": dropped, "recompute": 0, "backward": blocks[k].saved, "out": moved[k], "in": 0}[action]

        def lasts(action: str, k: int) -> int:
            if action == "out":
                return one.out_us(moved[k])
            if action == "in":
                return one.in_us(moved[k])
            return blocks[k].backward_us if action == "backward" else blocks[k].forward_us

        def go(now: int, held: int, at: int, running: tuple[tuple[int, str, int], ...], done: frozenset[Any]) -> None:
            nonlocal best
            left = sum(lasts(*each) for each in computation[at:])
            busy = max(
                (end for end, action, _ in running if action in ("forward", "recompute", "backward")), default=now
            )
            if busy + left >= best:
                return
            state = (now, held, at, running, done)
            if state in seen:
                return
            seen.add(state)
            if at == len(computation) and not any(a == "backward" for _, a, _ in running):
                best = now
                return
            options: list[tuple[str, int]] = []
            on = {"compute" if a in ("forward", "recompute", "backward") else a for _, a, _ in running}
            if "compute" not in on and at < len(computation):
                action, k = computation[at]
                needs_in = k in away and action != "forward"
                waits_for_again = action == "backward" and policy[k] == "recompute_swap"
                if not needs_in or waits_for_again or ("in", k) in done:
                    options.append((action, k))
            if "out" not in on:
                options += [("out", k) for k in away if ("forward", k) in done and ("out", k) not in done]
            if "in" not in on:
                options += [("in", k) for k in away if ("out", k) in done and ("in", k) not in done]
            for action, k in options:
                if any(a == action and j == k for _, a, j in running):
                    continue
                if held + takes(action, k) <= one.capacity:
                    more = tuple(sorted((*running, (now + lasts(action, k), action, k))))
                    step = 1 if action in ("forward", "recompute", "backward") else 0
                    go(now, held + takes(action, k), at + step, more, done)
            if running:
                end = running[0][0]
                over = [each for each in running if each[0] == end]
                after = held - sum(gives(a, k) for _, a, k in over)
                rest = tuple(each for each in running if each[0] != end)
                go(end, after, at, rest, done | {(a, k) for _, a, k in over})

        go(0, 0, 0, (), frozenset())

    for policy in itertools.product(POLICIES, repeat=count):
        play(policy)
    return best


def agrees_with_exhaustive(seed: int, count: int) -> None:
    one = drawn(random.Random(seed), count)
    best = exhaustive(one)
    plan = plan_memory(one, limit_s=20)
    check_plan(one, plan)
    assert plan.iteration_us == best, seed
    assert plan.proved
    assert iteration_bound(one) <= best


@pytest.mark.parametrize("seed", range(12))
def test_plans_are_the_best_of_all(seed: int) -> None:
    agrees_with_exhaustive(seed, 2 + seed % 2)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 300))
def test_many_plans_are_the_best_of_all(seed: int) -> None:
    agrees_with_exhaustive(seed, 3)


# -- known optima -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", KNOWN, ids=[known["name"] for known in KNOWN])
def test_known_optima_are_found_and_proved(known: dict[str, Any]) -> None:
    one = MemoryInstance.from_json(known)
    plan = plan_memory(one, limit_s=90)  # two seconds, where nobody else wants the processor
    assert check_plan(one, plan) <= one.capacity
    assert plan.iteration_us == plan.lower_bound_us == known["optimum_us"]
    assert iteration_bound(one) <= known["optimum_us"]
    assert MemoryInstance.from_json(one.to_json()) == one
    assert MemoryPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_their_own_schedules_are_right_by_the_check() -> None:
    for known in KNOWN:
        one = MemoryInstance.from_json(known)
        steps = tuple(Step(**step) for step in known["schedule"])
        time = known["optimum_us"]
        plan = MemoryPlan(policy=tuple(known["policy"]), schedule=steps, iteration_us=time, lower_bound_us=time)
        assert check_plan(one, plan) <= one.capacity


def test_never_slower_than_known_designs() -> None:
    for seed in range(20):
        one = drawn(random.Random(seed), 12)
        plan = fast_plan(one)
        check_plan(one, plan)
        for name, other in known_plans(one).items():
            check_plan(one, other)
            assert plan.iteration_us <= other.iteration_us, name
    roomy = instance(capacity=320)
    assert known_plans(roomy)["keep all"].iteration_us == roomy.ideal_us == fast_plan(roomy).iteration_us
    assert "keep all" not in known_plans(instance())


def test_any_policy_that_fits_is_played_right() -> None:
    chance = random.Random(5)
    fitted = 0
    for _ in range(300):
        one = drawn(chance, chance.randint(1, 9))
        count = len(one.blocks)
        policy = [chance.choice(POLICIES) for _ in range(count)]
        urgency = [chance.randint(0, count) for _ in range(count)]
        plan = listed_plan(one, policy, urgency=urgency, prefetch=chance.random() < 0.8)
        if plan is not None:
            fitted += 1
            check_plan(one, plan)
            assert plan.iteration_us >= iteration_bound(one)
    assert fitted > 100


def test_200_blocks() -> None:
    one = drawn(random.Random(2), 200)
    one = replace(one, capacity=sum(b.saved for b in one.blocks) // 3, out_bytes_per_us=1.0, in_bytes_per_us=1.0)
    fast, plan = fast_plan(one), plan_memory(one, limit_s=2)
    check_plan(one, plan)
    assert plan.iteration_us <= fast.iteration_us
    assert plan.lower_bound_us == iteration_bound(one) or plan.proved


# -- mutants ----------------------------------------------------------------------------------------------------


def refused_mutants(how_many: int) -> int:
    """Mutants of right plans that would break a rule, all of which the check must refuse."""
    chance = random.Random(11)
    plans = []
    for known in KNOWN:
        one = MemoryInstance.from_json(known)
        plans.append((one, tuple(Step(**step) for step in known["schedule"]), tuple(known["policy"])))
    made = 0
    while made < how_many:
        one, steps, policy = chance.choice(plans)
        at = chance.randrange(len(steps))
        step, others = steps[at], [*steps[:at], *steps[at + 1 :]]
        kind = chance.randrange(6)
        time = max(
            s.start_us + one.blocks[s.block].backward_us for s in steps if (s.action, s.block) == ("backward", 0)
        )
        changed, names, capacity = [*others, step], list(policy), one.capacity
        if kind == 0:  # an action is dropped
            changed = others
        elif kind == 1:  # an action is there twice
            changed = [*others, step, step]
        elif kind == 2:  # a computation begins inside the one before
            computed = sorted((s for s in steps if s.action not in ("out", "in")), key=lambda s: s.start_us)
            place = chance.randrange(1, len(computed))
            later = computed[place]
            early = replace(later, start_us=computed[place - 1].start_us)
            changed = [*(s for s in steps if s is not later), early]
        elif kind == 3:  # a transfer out before its forward, or one in before it is out
            moved = [s for s in steps if s.action in ("out", "in")]
            one_moved = chance.choice(moved)
            before = next(
                s
                for s in steps
                if s.block == one_moved.block and s.action == ("forward" if one_moved.action == "out" else "out")
            )
            changed = [*(s for s in steps if s is not one_moved), replace(one_moved, start_us=before.start_us)]
        elif kind == 4:  # a policy says something else than the schedule does
            block = chance.randrange(len(policy))
            names[block] = chance.choice([p for p in POLICIES if p != policy[block]])
            if {names[block], policy[block]} == {"swap", "recompute_swap"}:
                continue  # differs by the recomputation alone, which kind 0 drops
        else:  # less memory than it takes
            right = MemoryPlan(policy=policy, schedule=steps, iteration_us=time, lower_bound_us=0)
            capacity = check_plan(one, right) - 1
            if capacity < max(b.saved for b in one.blocks):
                continue
        if kind == 3 and one.out_us(one.blocks[one_moved.block].input) == 0:
            continue
        mutant = MemoryPlan(policy=tuple(names), schedule=tuple(changed), iteration_us=time, lower_bound_us=0)
        with pytest.raises(VerificationError):
            check_plan(replace(one, capacity=capacity), mutant)
        made += 1
    return made


def test_mutants_are_refused() -> None:
    assert refused_mutants(400) == 400


@pytest.mark.long
def test_5000_mutants_are_refused() -> None:
    assert refused_mutants(5000) == 5000


def test_a_wrong_time_is_refused() -> None:
    one = instance()
    plan = fast_plan(one)
    with pytest.raises(VerificationError, match="the plan says"):
        check_plan(one, replace(plan, iteration_us=plan.iteration_us + 1))
    with pytest.raises(VerificationError, match="3 policies for 4 blocks"):
        check_plan(one, replace(plan, policy=plan.policy[:3]))


# -- input ------------------------------------------------------------------------------------------------------

BLOCK = {"forward_us": 1, "backward_us": 1, "saved": 5, "input": 1}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"capacity": 79}, r"blocks\[0\] saves 80, and the capacity is 79: 1 too little"),
        ({"capacity": 0}, "capacity is 0"),
        ({"capacity": float("nan")}, "capacity is nan"),
        ({"out_bytes_per_us": 0}, "out_bytes_per_us is 0"),
        ({"in_bytes_per_us": float("inf")}, "in_bytes_per_us is inf"),
        ({"in_bytes_per_us": -1}, "in_bytes_per_us is -1"),
        ({"latency_us": -1}, "latency_us is -1"),
        ({"latency_us": 0.5}, "latency_us is 0.5"),
        ({"blocks": []}, "there are none"),
        ({"blocks": 3}, "expected a list"),
        ({"blocks": [BLOCK, {"saved": 1}]}, r"blocks\[1\]: there is no forward_us"),
        ({"blocks": [BLOCK | {"forward_us": 0}]}, r"blocks\[0\]: forward_us is 0"),
        ({"blocks": [BLOCK | {"backward_us": float("nan")}]}, r"blocks\[0\]: backward_us is nan"),
        ({"blocks": [BLOCK | {"saved": -5}]}, r"blocks\[0\]: saved is -5"),
        ({"blocks": [BLOCK | {"input": 6}]}, r"blocks\[0\]: input is 6, and saved"),
        ({"latency": 3}, r"unknown key 'latency' \(did you mean 'latency_us'\?\)"),
        ({"version": 2}, "version 2"),
    ],
)
def test_what_is_no_instance(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        instance(**changes)
    assert "\n" not in str(refused.value)


def test_values_say_what_they_need() -> None:
    with pytest.raises(UsageError, match="action 'wait'"):
        Step(action="wait", block=0, start_us=0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no plan of memory"):
        MemoryPlan.from_json([])
    with pytest.raises(UsageError, match="a limit of -1"):
        plan_memory(instance(), limit_s=-1)
    with pytest.raises(MycelError, match="below its bound"):
        MemoryPlan(policy=(), schedule=(), iteration_us=1, lower_bound_us=2)
