"""A time that no plan of an iteration is below, for any number of blocks.

Just before forward ``i`` ends, block ``i`` is held whole, and of the blocks before it all that was neither dropped,
to be computed again, nor moved out by then. So ``dropped + moved >= saved_0 + .. + saved_i - capacity``. What moved
had the way out from the end of the first forward on, and has the way in until the first block's backward; what is
dropped costs its forward once more. The least sum of computing again and of waiting for either way is a convex
function of what is moved: blocks that cost least for what they free are dropped first, parts of blocks allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from mycel.planning.residency.instance import MemoryInstance

__all__ = ["iteration_bound"]

#: Steps of the search for the least of a convex function, each leaving 0.618 of the interval.
_STEPS = 80


def iteration_bound(instance: MemoryInstance) -> int:
    """Whole microseconds that no plan is below.

    Args:
        instance: the blocks.

    Examples:
        >>> from mycel.planning.residency import Block
        >>> tight = MemoryInstance(
        ...     blocks=(Block(forward_us=10, backward_us=20, saved=100, input=10),) * 4, capacity=150,
        ...     out_bytes_per_us=1e-6, in_bytes_per_us=1e-6,
        ... )
        >>> tight.ideal_us, iteration_bound(tight)  # three blocks but for 5/9 of one are computed again
        (120, 148)
    """
    blocks, best = instance.blocks, float(instance.ideal_us)
    held, forward = 0, 0
    backward = sum(block.backward_us for block in blocks[1:])
    all_forward = sum(block.forward_us for block in blocks)
    for i, block in enumerate(blocks):
        held += block.saved
        forward += block.forward_us
        over = held - instance.capacity
        if over <= 0 or not i:
            continue
        freed = sorted(
            ((b.forward_us, b.saved - b.input) for b in blocks[:i] if b.saved > b.input),
            key=lambda pair: pair[0] / pair[1],
        )
        out_time = forward - blocks[0].forward_us
        in_time = all_forward - forward + backward

        def extra(
            moved: float,
            freed: list[tuple[int, int]] = freed,
            over: int = over,
            out_time: int = out_time,
            in_time: int = in_time,
        ) -> float:
            again = _least(freed, over - moved)
            return (
                again
                + max(0.0, moved / instance.out_bytes_per_us - out_time)
                + max(0.0, moved / instance.in_bytes_per_us - in_time - again)
            )

        # All that can be dropped may be too little: then at least the rest is moved.
        least_moved = max(0.0, over - sum(amount for _, amount in freed))
        best = max(best, instance.ideal_us + _minimum(extra, least_moved, float(over)))
    return ceil(best - 1e-6 * max(1.0, best * 1e-6))


def _least(freed: list[tuple[int, int]], needed: float) -> float:
    """Microseconds to compute again so much, the cheapest first."""
    cost = 0.0
    for time, amount in freed:
        if needed <= 0:
            break
        part = min(1.0, needed / amount)
        cost += part * time
        needed -= amount
    return cost


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """The least value of a convex function, from below: a chord's end may be a little above it."""
    ratio = 0.6180339887498949
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = function(a), function(b)
    best = min(at_a, at_b, function(low), function(high))
    for _ in range(_STEPS):
        if at_a <= at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = function(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = function(b)
        best = min(best, at_a, at_b)
    return best * (1 - 1e-9)
