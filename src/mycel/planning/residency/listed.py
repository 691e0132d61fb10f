"""Plans that follow from a policy: whoever can begin begins. Known designs are among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mycel.planning.residency.instance import Block, MemoryInstance
from mycel.planning.residency.kernels import play
from mycel.planning.residency.plan import POLICIES, MemoryPlan, Policy, Step

__all__ = ["as_columns", "families", "known_plans", "listed_plan", "load_loops"]

Ints = NDArray[np.int64]
#: Columns of starts, as the compiled loop has them.
_ACTIONS = ("forward", "backward", "recompute", "out", "in")


def as_columns(instance: MemoryInstance) -> Ints:
    """Blocks as the compiled loops take them, int64 of shape (blocks, 8).

    Args:
        instance: with the blocks.
    """
    return np.array(
        [
            (
                b.forward_us,
                b.backward_us,
                b.saved,
                b.input,
                instance.out_us(b.saved),
                instance.in_us(b.saved),
                instance.out_us(b.input),
                instance.in_us(b.input),
            )
            for b in instance.blocks
        ],
        dtype=np.int64,
    )


def listed_plan(
    instance: MemoryInstance,
    policy: Sequence[Policy],
    *,
    urgency: Sequence[int] | None = None,
    prefetch: bool = True,
    source: str = "",
) -> MemoryPlan | None:
    """The plan in which everything begins as soon as it can.

    Args:
        instance: the blocks.
        policy: of each.
        urgency: of what is ready to go out the least goes first; in order of the blocks if not given.
        prefetch: whether transfers back begin before their backward is next.
        source: what chose the policy.

    Returns:
        The plan, with the ideal as its bound; ``None`` where it does not fit.

    Examples:
        >>> from mycel.planning.residency import Block
        >>> two = MemoryInstance(
        ...     blocks=(Block(forward_us=10, backward_us=20, saved=100, input=10),) * 2, capacity=150,
        ...     out_bytes_per_us=5.0, in_bytes_per_us=5.0,
        ... )
        >>> listed_plan(two, ["keep", "keep"]) is None
        True
        >>> listed_plan(two, ["swap", "keep"]).iteration_us
        100
    """
    count = len(instance.blocks)
    numbers = np.array([POLICIES.index(each) for each in policy], dtype=np.int64)
    order = np.arange(count) if urgency is None else np.array(urgency, dtype=np.int64)
    delay = np.full(count, 0 if prefetch else 1, dtype=np.int64)
    starts = np.zeros((count, len(_ACTIONS)), dtype=np.int64)
    time = play(as_columns(instance), instance.capacity, numbers, order, delay, starts, 1 << 60)
    if time < 0:
        return None
    found = sorted((int(starts[k, a]), a, k) for k, a in np.argwhere(starts >= 0).tolist())
    steps = tuple(Step(action=_ACTIONS[a], block=k, start_us=start) for start, a, k in found)  # type: ignore[arg-type]
    return MemoryPlan(
        policy=tuple(policy),
        schedule=steps,
        iteration_us=time,
        lower_bound_us=min(instance.ideal_us, time),
        source=source,
    )


def load_loops() -> None:
    """Have the compiled loops in this process; what they need takes memory and a second, once.

    Libraries of linear algebra come with them, which never return where a limit on memory is met while they load.
    """
    block = Block(forward_us=1, backward_us=1, saved=1, input=1)
    one = MemoryInstance(blocks=(block,), capacity=1, out_bytes_per_us=1.0, in_bytes_per_us=1.0)
    listed_plan(one, ["keep"])


def known_plans(instance: MemoryInstance) -> dict[str, MemoryPlan]:
    """Plans of known designs, those that fit.

    ``torchtune`` moves everything out as its ``OffloadActivations`` does, and fetches a block when its backward
    begins.

    Args:
        instance: the blocks.
    """
    count = len(instance.blocks)
    designs: dict[str, tuple[Policy, bool]] = {
        "keep all": ("keep", True),
        "recompute all": ("recompute", True),
        "swap all": ("swap", True),
        "recompute all from swapped inputs": ("recompute_swap", True),
        "torchtune": ("swap", False),
    }
    plans = {
        name: listed_plan(instance, [policy] * count, prefetch=prefetch, source=name)
        for name, (policy, prefetch) in designs.items()
    }
    return {name: plan for name, plan in plans.items() if plan is not None}


def families(instance: MemoryInstance) -> Iterator[list[Policy]]:
    """Policies to start from: the last blocks kept, and of the others every so many recomputed and the rest moved.

    Args:
        instance: the blocks.
    """
    count = len(instance.blocks)
    kept_counts = sorted({0, 1, 2, 3, *(count * part // 16 for part in range(1, 16))})
    patterns: list[list[Policy]] = [
        ["swap"],
        ["recompute"],
        ["recompute_swap"],
        ["swap", "recompute_swap"],
        ["swap", "swap", "recompute_swap"],
        ["swap", "recompute_swap", "recompute_swap"],
        ["swap", "recompute"],
        ["recompute", "recompute_swap"],
        ["keep", "recompute"],
        ["keep", "swap"],
        ["keep", "swap", "recompute_swap"],
    ]
    for kept in kept_counts:
        for pattern in patterns:
            policy = [pattern[k % len(pattern)] for k in range(count)]
            policy[count - kept :] = ["keep"] * min(kept, count)
            yield policy
