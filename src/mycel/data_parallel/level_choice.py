"""Which level of compression each layer gets: fewest bytes with a sum of errors within a budget, solved exactly.

The problem is the multiple-choice knapsack. A price on error (a Lagrange multiplier) gives a bound from below and a
first choice; layers are then taken one after the other, keeping every partial choice that no other beats in both
bytes and error and whose bound is below the best choice known. Errors are real numbers and stay what they are: the
dynamic programme over rounded errors of the L-GreCo paper needs as many columns as there are roundings.

References:
    M. Alimohammadi, I. Markov, E. Frantar, D. Alistarh, "L-GreCo: Layerwise-Adaptive Gradient Compression for
    Efficient and Accurate Deep Learning", arXiv 2210.17357, section 4 (the problem). H. Kellerer, U. Pferschy,
    D. Pisinger, "Knapsack Problems", Springer 2004, chapter 11 (multiple choice, dominance, reduction by bounds).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mycel.brief import brief
from mycel.errors import UsageError

__all__ = ["LevelChoice", "choose_levels"]

#: Partial choices kept after a layer. Where more are worth keeping, those with the worst bounds go, and the result
#: is not called optimal any more; its distance from the bound is still known.
MAX_STATES = 2_000
#: Part of the bytes that nobody searches for.
TOLERANCE = 1e-4
#: Two sums of errors nearer than this, relatively, are the same: adding in another order moves the last digits.
_ROUNDING = 1e-12
#: Halvings that take a range of prices from 2^60 to one part in 10^12.
_PRICE_STEPS = 48

#: Bytes for the greatest error beyond which no price is looked for: levels that only such a price tells apart have,
#: beside it, the same error.
_DEAREST = 1e200


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelChoice:
    """A level for each layer.

    Attributes:
        levels: index of the chosen level of each layer.
        num_bytes: in total.
        error: in total, at most the budget.
        bound: bytes that no choice within the budget can go below.
        is_optimal: whether no choice within the budget has fewer bytes by more than the tolerance; proved.
        solve_s: seconds it took.
    """

    levels: tuple[int, ...]
    num_bytes: int
    error: float
    bound: int
    is_optimal: bool
    solve_s: float

    __repr__ = brief


def choose_levels(
    sizes: Sequence[Sequence[int]],
    errors: Sequence[Sequence[float]],
    budget: float,
    *,
    tolerance: float = TOLERANCE,
    max_states: int = MAX_STATES,
) -> LevelChoice:
    """The levels with the fewest bytes whose errors add up to at most the budget.

    Args:
        sizes: bytes of each level of each layer.
        errors: what each level of each layer adds to the error, finite and not negative.
        budget: the most that the errors may add up to.
        tolerance: part of the bytes that are not searched for: a choice this near to the best is good enough.
        max_states: partial choices kept after a layer; with fewer, the result may not be optimal.

    Raises:
        UsageError: layers without levels, lengths that differ, errors that are no numbers, or a budget below the
            sum of the layers' smallest errors.

    Examples:
        >>> choose_levels([[4, 2, 1], [40, 20, 10]], [[0.0, 1.0, 2.0], [0.0, 1.0, 3.0]], 3.0).levels
        (0, 2)
    """
    begin = time.perf_counter()
    size, error = _tables(sizes, errors)
    budget_with_rounding = budget + _ROUNDING * abs(budget)
    least = float(error.min(axis=1).sum())
    if not least <= budget_with_rounding:
        raise UsageError(f"no choice of levels has an error below {least:g}; the budget is {budget:g}")
    # In units of the greatest error, so that prices of them stay far from what floating point can hold.
    unit = float(error.max()) or 1.0
    share = error / unit
    limit = min(budget_with_rounding / unit, 2 * float(share.max(axis=1).sum()))
    price = _best_price(size, share, limit)
    best = _filled(size, share, _priced(size, share, price), limit)
    levels, dual, is_optimal = _search(size, share, limit, price, best, max_states, tolerance)
    rows = np.arange(len(levels))
    num_bytes = int(size[rows, levels].sum())
    proved = math.ceil(num_bytes * (1 - tolerance)) if is_optimal else 0
    return LevelChoice(
        levels=tuple(int(level) for level in levels),
        num_bytes=num_bytes,
        error=math.fsum(error[rows, levels]),
        bound=max(proved, min(num_bytes, math.ceil(dual * (1 - 1e-12)))),
        is_optimal=is_optimal,
        solve_s=time.perf_counter() - begin,
    )


def _tables(
    sizes: Sequence[Sequence[int]], errors: Sequence[Sequence[float]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Layers as rows, levels as columns; missing levels repeat the layer's first. Bytes are whole numbers < 2^53."""
    if not sizes or len(sizes) != len(errors):
        raise UsageError(f"sizes of {len(sizes)} layers and errors of {len(errors)}; at least one layer, and as many")
    width = max(len(row) for row in sizes)
    size, error = np.empty((len(sizes), max(1, width))), np.empty((len(sizes), max(1, width)))
    for layer, (bytes_of, errors_of) in enumerate(zip(sizes, errors, strict=True)):
        if not bytes_of or len(bytes_of) != len(errors_of):
            raise UsageError(f"layer {layer} has {len(bytes_of)} sizes and {len(errors_of)} errors")
        size[layer], error[layer] = bytes_of[0], errors_of[0]
        size[layer, : len(bytes_of)], error[layer, : len(errors_of)] = bytes_of, errors_of
    if not (np.isfinite(error).all() and (error >= 0).all() and (size >= 0).all()):
        layer = int(np.flatnonzero(~(np.isfinite(error) & (error >= 0) & (size >= 0)).all(axis=1))[0])
        raise UsageError(f"layer {layer} has sizes {list(sizes[layer])} and errors {list(errors[layer])}; want >= 0")
    return size, error


def _priced(size: NDArray[np.float64], error: NDArray[np.float64], price: float) -> NDArray[np.intp]:
    """Each layer's level of least bytes plus price times error; of two such, that of less error."""
    cost = size + price * error
    least = cost.min(axis=1, keepdims=True)
    levels: NDArray[np.intp] = np.where(cost <= least * (1 + _ROUNDING), error, np.inf).argmin(axis=1)
    return levels


def _best_price(size: NDArray[np.float64], error: NDArray[np.float64], budget: float) -> float:
    """A price at which the priced choice keeps the budget, close to the lowest such; errors are at most 1."""
    rows = np.arange(len(size))

    def fits(price: float) -> bool:
        return float(error[rows, _priced(size, error, price)].sum()) <= budget

    if fits(0.0):
        return 0.0
    high = max(1e-300, float(size.max()))
    while not fits(high) and high < _DEAREST:
        high *= 16
    low = high / 2.0**60  # at which all errors together are worth less than a byte
    for _ in range(_PRICE_STEPS):
        middle = math.sqrt(low) * math.sqrt(high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _filled(
    size: NDArray[np.float64], error: NDArray[np.float64], levels: NDArray[np.intp], budget: float
) -> NDArray[np.intp]:
    """Spends what is left of the budget on the change that saves most, as long as there is one."""
    rows = np.arange(len(levels))
    levels = levels.copy()
    if float(error[rows, levels].sum()) > budget:  # prices cannot tell levels of almost the same error apart
        levels = error.argmin(axis=1)
    while True:
        left = budget - float(error[rows, levels].sum())
        saved = size[rows, levels][:, None] - size
        saved[error - error[rows, levels][:, None] > left] = 0
        layer, level = divmod(int(saved.argmax()), size.shape[1])
        if saved[layer, level] <= 0:
            return levels
        levels[layer] = level


def _search(
    size: NDArray[np.float64],
    error: NDArray[np.float64],
    budget: float,
    price: float,
    incumbent: NDArray[np.intp],
    max_states: int,
    tolerance: float,
) -> tuple[NDArray[np.intp], float, bool]:
    """Layers one after the other over all partial choices that can still become better than the incumbent.

    Returns:
        The levels, bytes that no choice goes below, and whether nothing is better by more than the tolerance.
    """
    best = float(size[np.arange(len(size)), incumbent].sum())
    # What the price proves. By how much a choice lies above it is the sum of its layers' regrets; better than the
    # incumbent by a byte and by the tolerance is below the slack.
    cost = size + price * error
    floor = cost.min(axis=1)
    dual = float(floor.sum()) - price * budget
    regret, slack = cost - floor[:, None], min(best - 1 + 1e-6, best * (1 - tolerance)) - dual
    alive = regret <= slack
    if not alive.any(axis=1).all():
        return incumbent, dual, True
    levels, count = alive.argmax(axis=1), alive.sum(axis=1)
    settled, order = np.flatnonzero(count == 1), np.argsort(count, kind="stable")[(count == 1).sum() :]
    states = np.array([[table[settled, levels[settled]].sum()] for table in (size, error, regret)])
    least = np.where(alive, error, np.inf).min(axis=1)[order]
    most_error = budget - (np.cumsum(least[::-1])[::-1] - least)  # leaves what the layers after lose at least
    history, is_complete = [], True
    for layer, most in zip(order, most_error, strict=True):
        options = np.flatnonzero(alive[layer])
        added = np.stack([size[layer, options], error[layer, options], regret[layer, options]])
        made = (states[:, :, None] + added[:, None, :]).reshape(3, -1)
        kept = np.flatnonzero((made[1] <= most) & (made[2] <= slack))
        kept = kept[np.lexsort((made[1, kept], made[0, kept]))]
        # By bytes, without those that one of no more bytes beats in error.
        lowest = np.minimum.accumulate(made[1, kept])
        kept = kept[np.append(True, made[1, kept][1:] < lowest[:-1])[: len(kept)]]
        if len(kept) > max_states:
            kept, is_complete = np.sort(kept[np.argpartition(made[2, kept], max_states)[:max_states]]), False
        if not len(kept):
            return incumbent, dual, is_complete
        states = made[:, kept]
        history.append((layer, options, kept))
    state = int(states[0].argmin())
    if not (states[1, state] <= budget and states[0, state] < best):
        return incumbent, dual, is_complete
    for layer, options, kept in reversed(history):
        state, option = divmod(int(kept[state]), len(options))
        levels[layer] = options[option]
    return levels, dual, is_complete
