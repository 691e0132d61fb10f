"""The set of sequences that is worth most in one group, and what none is worth more than; compiled loops.

Two weights, times and tokens, of which each has its limit. Their best mixture is one weight, by which sequences are
in order of worth for weight, and a bound: as much as fits, and of the next one a part. Depth first along that order,
with the bound of what is left; what that does not end in its places is bounded by a table over the mixture, cut into
cells and rounded down, whose light sequences are counted in parts instead.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mycel.compiled import compiled_without_lock

__all__ = ["fullest"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Cells below which rounding down loses too much: such sequences are counted in parts.
_LIGHT = 16


@compiled_without_lock
def _in_parts(worth: Floats, weight: Floats, many: Ints, begin: int, room: float) -> float:
    """Worth of what fits from one sequence on, of the last a part."""
    total = 0.0
    for i in range(begin, worth.shape[0]):
        takes = weight[i] * many[i]
        if takes > room:
            return float(total + worth[i] * room / weight[i])
        total += worth[i] * many[i]
        room -= takes
    return total


@compiled_without_lock
def _deep(
    worth: Floats, time: Floats, held: Floats, weight: Floats, many: Ints, above: float, places: int, column: Ints
) -> tuple[float, bool]:
    """The best set worth more than something, 0 if none is, and whether all were looked at."""
    num = worth.shape[0]
    take = np.zeros(num, np.int64)
    best, found = above, 0.0
    room_time = room_held = room = 1.0 + 1e-12
    total = 0.0
    i = 0
    while True:
        is_dead = False
        while i < num:
            places -= 1
            if total + _in_parts(worth, weight, many, i, room) <= best * (1 + 1e-9):
                is_dead = True
                break
            count = many[i]
            if time[i] * count > room_time:
                count = np.int64(room_time / time[i])
            if held[i] * count > room_held:
                count = np.int64(room_held / held[i])
            take[i] = count
            room_time -= count * time[i]
            room_held -= count * held[i]
            room -= count * weight[i]
            total += count * worth[i]
            i += 1
        if not is_dead and total > best * (1 + 1e-9):
            best, found = total, total
            column[:] = take
        i -= 1
        while i >= 0 and take[i] == 0:
            i -= 1
        if i < 0:
            return found, True
        if places <= 0:
            return found, False
        take[i] -= 1
        room_time += time[i]
        room_held += held[i]
        room += weight[i]
        total -= worth[i]
        i += 1
        take[i:] = 0


@compiled_without_lock
def _table(worth: Floats, weight: Floats, many: Ints, cells: int) -> float:
    """What no set is worth more than: heavy sequences in cells, rounded down, light ones in parts.

    Args:
        worth, weight, many: in order of worth for weight.
        cells: of a group.
    """
    num = worth.shape[0]
    best = np.zeros(cells + 1)
    is_light = np.zeros(num, np.bool_)
    for i in range(num):
        takes = np.int64(weight[i] * cells)
        if takes < _LIGHT:
            is_light[i] = True
            continue
        for _ in range(many[i]):
            for cell in range(cells, takes - 1, -1):
                value = best[cell - takes] + worth[i]
                if value > best[cell]:
                    best[cell] = value
    light, weights, counts = worth[is_light], weight[is_light], many[is_light]
    most = 0.0
    for cell in range(cells + 1):
        room = 1.0 - cell / cells
        value = best[cell] + _in_parts(light, weights, counts, 0, room)
        if value > most:
            most = value
    return most


@compiled_without_lock
def fullest(
    time: Floats, held: Floats, prices: Floats, many: Ints, above: float, places: int, cells: int, column: Ints
) -> float:
    """What no set of sequences in a group is worth more than; at least ``above``.

    Args:
        time, held: of each length the parts that one sequence takes of a group's time and tokens.
        prices: what one is worth.
        many: sequences of each length.
        above: worth below which nothing is looked for.
        places: that are looked at one by one.
        cells: of the table that bounds what is left then.
        column: gets how many of each length are in the best set, nothing where none is worth more than ``above``.
    """
    column[:] = 0
    usable = np.flatnonzero((time <= 1.0) & (held <= 1.0) & (prices > 1e-12))
    if usable.shape[0] == 0:
        return above
    worth, times, tokens, counts = prices[usable], time[usable], held[usable], many[usable]
    least, share = np.inf, 1.0
    low, high = 0.0, 1.0
    for _ in range(4):  # the best mixture, on finer and finer grids
        width = (high - low) / 8
        for step in range(9):
            mixed = low + step * width
            weight = mixed * times + (1 - mixed) * tokens
            order = np.argsort(-worth / weight)
            value = _in_parts(worth[order], weight[order], counts[order], 0, 1.0)
            if value < least:
                least, share = value, mixed
        low, high = max(0.0, share - width), min(1.0, share + width)
    if least <= above:
        return above
    weight = share * times + (1 - share) * tokens
    order = np.argsort(-worth / weight)
    worth, times, tokens, counts, weight = worth[order], times[order], tokens[order], counts[order], weight[order]
    chosen = np.zeros(order.shape[0], np.int64)
    found, is_whole = _deep(worth, times, tokens, weight, counts, above, places, chosen)
    if found > 0:
        for place in range(order.shape[0]):
            column[usable[order[place]]] = chosen[place]
    if is_whole:
        return max(above, found)
    return max(above, min(least, _table(worth, weight, counts, cells)))
