"""Distributing sequences over the groups of a division within a time, as compiled loops.

All arrays are of one micro-batch: ``work`` has microseconds of each sequence on each kind of group, float64 of shape
(sequences, kinds), longest sequence first; ``tokens`` its tokens; ``ranked`` the kinds of each sequence by the
rank-time that they take for it, least first; ``sizes`` and ``rooms`` ranks and tokens of each kind.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mycel.compiled import compiled_without_lock

__all__ = ["areas", "best_of", "fill", "lightest_first", "settle", "shake"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@compiled_without_lock
def areas(work: Floats, sizes: Ints, masks: NDArray[np.bool_], longest: Floats, area: Floats) -> None:
    """Of kinds that may be used, the time of the longest sequence and the rank-time of all.

    Args:
        work: see the module; infinite where a sequence does not fit.
        sizes: ranks of each kind.
        masks: which kinds may be used, of shape (masks, kinds).
        longest, area: get the results, one a mask.
    """
    num, kinds = work.shape
    for mask in range(masks.shape[0]):
        for k in range(num):
            soonest, cheapest = np.inf, np.inf
            for kind in range(kinds):
                if masks[mask, kind]:
                    soonest = min(soonest, work[k, kind])
                    cheapest = min(cheapest, work[k, kind] * sizes[kind])
            longest[mask] = max(longest[mask], soonest)
            area[mask] += cheapest


@compiled_without_lock
def lightest_first(work: Floats, tokens: Ints, rooms: Ints, kind_of: Ints, placed: Ints) -> float:
    """Longest first, each to the group that is done with it first.

    Args:
        work, tokens, rooms: see the module.
        kind_of: kind of each group.
        placed: gets the group of each sequence.

    Returns:
        What the slowest group works; -1 where a sequence finds no place.
    """
    slots = kind_of.shape[0]
    load = np.zeros(slots)
    held = np.zeros(slots, np.int64)
    for k in range(work.shape[0]):
        best, found = np.inf, -1
        for slot in range(slots):
            kind = kind_of[slot]
            if held[slot] + tokens[k] <= rooms[kind] and load[slot] + work[k, kind] < best:
                best, found = load[slot] + work[k, kind], slot
        if found < 0:
            return -1.0
        placed[k] = found
        load[found] = best
        held[found] += tokens[k]
    return float(load.max())


@compiled_without_lock
def fill(
    work: Floats, tokens: Ints, ranked: Ints, rooms: Ints, counts: Ints, most: float, placed: Ints, kind_of: Ints
) -> float:
    """Longest first, on the kind where rank-time is least and the time suffices; of its groups the fullest that fits.

    Args:
        work, tokens, ranked, rooms: see the module.
        counts: groups of each kind.
        most: microseconds that a group may work.
        placed: gets the group of each sequence.
        kind_of: gets the kind of each group.

    Returns:
        What the slowest group works; -1 where a sequence finds no place.
    """
    num, kinds = work.shape
    total = 0
    first = np.zeros(kinds, np.int64)
    for kind in range(kinds):
        first[kind] = total
        for slot in range(total, total + counts[kind]):
            kind_of[slot] = kind
        total += counts[kind]
    load = np.zeros(total)
    held = np.zeros(total, np.int64)
    for k in range(num):
        found = -1
        for choice in range(kinds):
            kind = ranked[k, choice]
            if counts[kind] == 0:
                continue
            takes = work[k, kind]
            if takes > most:
                continue
            fullest = -1.0
            for slot in range(first[kind], first[kind] + counts[kind]):
                if load[slot] + takes <= most and held[slot] + tokens[k] <= rooms[kind] and load[slot] > fullest:
                    fullest = load[slot]
                    found = slot
                    if held[slot] == 0:
                        break  # the others are as empty
            if found >= 0:
                break
        if found < 0:
            return -1.0
        placed[k] = found
        load[found] += work[k, kind_of[found]]
        held[found] += tokens[k]
    slowest = 0.0
    for slot in range(total):
        if load[slot] > slowest:
            slowest = load[slot]
    return slowest


@compiled_without_lock
def best_of(
    work: Floats,
    tokens: Ints,
    ranked: Ints,
    rooms: Ints,
    divisions: Ints,
    least: Floats,
    most: float,
    patience: int,
    placed: Ints,
) -> tuple[float, int]:
    """The division, and the shortest time in it, that ``fill`` finds: searched by halving, divisions in turn.

    Args:
        work, tokens, ranked, rooms: see the module.
        divisions: counts of each, the promising ones first.
        least: a time that each cannot be below.
        most: a time that is to be improved on; infinite if there is none.
        patience: after so many places looked at no further division is.
        placed: gets the group of each sequence in the best.

    Returns:
        The time, ``most`` where none is better, and the division, -1 where none is.
    """
    num = work.shape[0]
    best, chosen = most, -1
    now = np.zeros(num, np.int64)
    kind_of = np.zeros(1, np.int64)
    looked = 0
    for row in range(divisions.shape[0]):
        if looked > patience and chosen >= 0:
            break
        if least[row] >= best * (1 - 1e-4):
            continue
        slots = divisions[row].sum()
        if slots > kind_of.shape[0]:
            kind_of = np.zeros(slots, np.int64)
        goal = best * (1 - 1e-4)
        looked += num * (4 + slots // 4)
        reached = fill(work, tokens, ranked, rooms, divisions[row], goal, now, kind_of)
        if reached < 0:
            continue
        best, chosen = reached, row
        placed[:] = now
        low = least[row]
        if not np.isfinite(goal):
            low = max(low, 0.0)
        while best - low > 2e-4 * best:
            looked += num * (4 + slots // 4)
            middle = 0.5 * (low + best)
            reached = fill(work, tokens, ranked, rooms, divisions[row], middle, now, kind_of)
            if reached < 0:
                low = middle
            else:
                best = reached
                placed[:] = now
    return best, chosen


@compiled_without_lock
def settle(work: Floats, tokens: Ints, rooms: Ints, kind_of: Ints, placed: Ints, most_rounds: int) -> float:
    """Moves and exchanges that make the slowest group faster and no other slower than it was, while there are any.

    Args:
        work, tokens, rooms: see the module.
        kind_of: kind of each group.
        placed: group of each sequence; changed.
        most_rounds: at most so many.

    Returns:
        What the slowest group works.
    """
    num, slots = work.shape[0], kind_of.shape[0]
    load = np.zeros(slots)
    held = np.zeros(slots, np.int64)
    for k in range(num):
        load[placed[k]] += work[k, kind_of[placed[k]]]
        held[placed[k]] += tokens[k]
    for _ in range(most_rounds):
        top = 0
        for slot in range(slots):
            if load[slot] > load[top]:
                top = slot
        goal = load[top] * (1 - 1e-9)
        best, which, into, back = goal, -1, -1, -1
        kind = kind_of[top]
        for k in range(num):
            if placed[k] != top:
                continue
            lighter = load[top] - work[k, kind]
            for slot in range(slots):
                if slot == top or held[slot] + tokens[k] > rooms[kind_of[slot]]:
                    continue
                after = max(lighter, load[slot] + work[k, kind_of[slot]])
                if after < best:
                    best, which, into, back = after, k, slot, -1
            for other in range(num):
                slot = placed[other]
                if slot == top:
                    continue
                there = kind_of[slot]
                if held[slot] - tokens[other] + tokens[k] > rooms[there]:
                    continue
                if held[top] - tokens[k] + tokens[other] > rooms[kind]:
                    continue
                after = max(lighter + work[other, kind], load[slot] - work[other, there] + work[k, there])
                if after < best:
                    best, which, into, back = after, k, slot, other
        if which < 0:
            break
        load[top] -= work[which, kind]
        held[top] -= tokens[which]
        load[into] += work[which, kind_of[into]]
        held[into] += tokens[which]
        placed[which] = into
        if back >= 0:
            load[into] -= work[back, kind_of[into]]
            held[into] -= tokens[back]
            load[top] += work[back, kind]
            held[top] += tokens[back]
            placed[back] = top
    return float(load.max())


@compiled_without_lock
def shake(
    work: Floats,
    tokens: Ints,
    sizes: Ints,
    rooms: Ints,
    counts: Ints,
    seed: int,
    tries: int,
    most: float,
    placed: Ints,
) -> float:
    """``fill`` and ``settle`` again and again with sequences out of order and kinds weighed anew, at random.

    Args:
        work, tokens, sizes, rooms: see the module.
        counts: groups of each kind.
        seed: of the random numbers; the same gives the same.
        tries: how often.
        most: what the slowest group works now.
        placed: group of each sequence; changed where something better is found.

    Returns:
        What the slowest group works.
    """
    np.random.seed(seed)
    num, kinds = work.shape
    slots = counts.sum()
    kind_of = np.zeros(slots, np.int64)
    now = np.zeros(num, np.int64)
    landed = np.zeros(num, np.int64)
    ranked = np.zeros((num, kinds), np.int64)
    best = most
    for _ in range(tries):
        strength = 0.3 * np.random.random()
        taste = np.ones(kinds)
        for kind in range(kinds):
            taste[kind] = sizes[kind] * np.exp(strength * np.random.normal())
        keys = np.zeros(num)
        for k in range(num):
            keys[k] = -work[k, 0] * np.exp(strength * np.random.normal())
        order = np.argsort(keys)
        for place in range(num):
            ranked[place] = np.argsort(work[order[place]] * taste)
        # Somewhat more than the best so far: exchanges then end below it more often than a tight time is met.
        goal = best * (1 - 1e-6 + 0.03 * np.random.random() ** 2)
        reached = fill(work[order], tokens[order], ranked, rooms, counts, goal, now, kind_of)
        if reached < 0:
            continue
        for place in range(num):
            landed[order[place]] = now[place]
        reached = settle(work, tokens, rooms, kind_of, landed, 200)
        if reached < best * (1 - 1e-9):
            best = reached
            placed[:] = landed
    return best
