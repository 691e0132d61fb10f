"""Whether a plan of memory is right: replayed by the rules alone, without looking at how it was found.

Forwards are in order and then backwards in reverse, a recomputation right before its backward, all on one stream;
transfers out and in each on one of their own. What a block saved is there from the start of its forward and must be
there in its backward; near memory is counted at every start and end, ends first.
"""

from __future__ import annotations

from itertools import pairwise

from mycel.errors import VerificationError
from mycel.planning.residency.instance import MemoryInstance
from mycel.planning.residency.plan import MemoryPlan

__all__ = ["check_plan"]


def check_plan(instance: MemoryInstance, plan: MemoryPlan) -> int:
    """Most memory that the plan holds at any moment.

    Args:
        instance: what was to be planned.
        plan: its schedule.

    Raises:
        VerificationError: an action is missing or there twice, begins before what it needs has ended, a stream does
        two
            things at a time, memory is above the capacity, or the stated time is another; the message says where.
    """
    blocks = instance.blocks
    count = len(blocks)
    if len(plan.policy) != count:
        raise VerificationError(f"{len(plan.policy)} policies for {count} blocks")
    begins: dict[tuple[str, int], int] = {}
    for step in plan.schedule:
        if step.block >= count:
            raise VerificationError(f"{step.action} of block {step.block}: there are {count} blocks")
        if (step.action, step.block) in begins:
            raise VerificationError(f"{step.action} of block {step.block} is there twice")
        begins[step.action, step.block] = step.start_us
    ends = _ends(instance, plan, begins)
    _check_needs(plan, begins, ends)
    for stream in (("forward", "recompute", "backward"), ("out",), ("in",)):
        _check_stream(begins, ends, stream)
    most = _check_memory(instance, plan, begins, ends)
    last = ends["backward", 0]
    if plan.iteration_us != last:
        raise VerificationError(f"the plan says {plan.iteration_us} us, and its last backward ends at {last} us")
    return most


def _ends(
    instance: MemoryInstance, plan: MemoryPlan, begins: dict[tuple[str, int], int]
) -> dict[tuple[str, int], int]:
    """When everything ends that has to be there, and nothing else is."""
    wanted: dict[tuple[str, int], int] = {}
    for k, (block, policy) in enumerate(zip(instance.blocks, plan.policy, strict=True)):
        wanted["forward", k] = block.forward_us
        wanted["backward", k] = block.backward_us
        moved = block.saved if policy == "swap" else block.input
        if policy in ("swap", "recompute_swap"):
            wanted["out", k] = instance.out_us(moved)
            wanted["in", k] = instance.in_us(moved)
        if policy in ("recompute", "recompute_swap"):
            wanted["recompute", k] = block.forward_us
    for action, k in wanted.keys() - begins.keys():
        raise VerificationError(f"block {k} is to {plan.policy[k]}, and its {action} is missing")
    for action, k in begins.keys() - wanted.keys():
        raise VerificationError(f"block {k} is to {plan.policy[k]}, and has no {action}")
    return {key: begins[key] + length for key, length in wanted.items()}


def _check_needs(plan: MemoryPlan, begins: dict[tuple[str, int], int], ends: dict[tuple[str, int], int]) -> None:
    count = len(plan.policy)

    def after(later: str, k: int, earlier: str, j: int) -> None:
        if (later, k) in begins and (earlier, j) in ends and begins[later, k] < ends[earlier, j]:
            raise VerificationError(
                f"{later} of block {k} begins at {begins[later, k]} us, before {earlier} of block {j} ends at "
                f"{ends[earlier, j]} us"
            )

    for k in range(count):
        if k:
            after("forward", k, "forward", k - 1)
            after("backward", k - 1, "backward", k)
            after("recompute", k - 1, "backward", k)
        after("backward", k, "forward", count - 1)
        after("recompute", k, "forward", count - 1)
        after("out", k, "forward", k)
        after("in", k, "out", k)
        after("recompute", k, "in", k)
        after("backward", k, "recompute", k)
        after("backward", k, "in", k)


def _check_stream(
    begins: dict[tuple[str, int], int], ends: dict[tuple[str, int], int], actions: tuple[str, ...]
) -> None:
    mine = sorted((begin, ends[key], key) for key, begin in begins.items() if key[0] in actions)
    for (_, end, one), (begin, _, other) in pairwise(mine):
        if begin < end:
            raise VerificationError(
                f"{other[0]} of block {other[1]} begins at {begin} us, while {one[0]} of block {one[1]} goes on "
                f"until {end} us on the same stream"
            )


def _check_memory(
    instance: MemoryInstance,
    plan: MemoryPlan,
    begins: dict[tuple[str, int], int],
    ends: dict[tuple[str, int], int],
) -> int:
    changes: list[tuple[int, int]] = []  # ends sort first, as they are negative

    def held(amount: int, since: int, until: int) -> None:
        changes.append((since, amount))
        changes.append((until, -amount))

    for k, (block, policy) in enumerate(zip(instance.blocks, plan.policy, strict=True)):
        start, done = begins["forward", k], ends["backward", k]
        rest = block.saved - block.input
        if policy == "keep":
            held(block.saved, start, done)
        elif policy == "swap":
            held(block.saved, start, ends["out", k])
            held(block.saved, begins["in", k], done)
        else:
            held(rest, start, ends["forward", k])
            held(rest, begins["recompute", k], done)
            if policy == "recompute":
                held(block.input, start, done)
            else:
                held(block.input, start, ends["out", k])
                held(block.input, begins["in", k], done)
    now, most = 0, 0
    for time, change in sorted(changes):
        now += change
        most = max(most, now)
        if now > instance.capacity:
            raise VerificationError(
                f"at {time} us {now} is held, {now - instance.capacity} more than the capacity of {instance.capacity}"
            )
    return most
