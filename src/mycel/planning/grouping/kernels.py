"""Distributing sequences over the groups of a division within a time, as compiled loops.

All arrays are of one micro-batch: ``work`` has microseconds of each sequence on each kind of group, float64 of shape
(sequences, kinds), longest sequence first; ``tokens`` its tokens; ``ranked`` the kinds of each sequence by the
rank-time that they take for it, least first; ``sizes`` and ``rooms`` ranks and tokens of each kind.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mycel.compiled import compiled_without_lock

__all__ = ["anneal", "areas", "best_of", "fill", "lightest_first", "priced", "settle", "shake"]

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


@compiled_without_lock
def priced(
    work: Floats, tokens: Ints, sizes: Ints, rooms: Ints, divisions: Ints, most: float, rounds: int, least: Floats
) -> None:
    """Bounds of divisions by prices of what their kinds of groups have: time and tokens.

    With prices ``a`` of time and ``b`` of tokens, of each kind, no distribution ends before
    ``(sum_i min_kind (a t_i + b s_i) - sum_kind b rooms) / sum_kind a counts``. Prices are raised of what too much
    would go to, and the best is kept, until it is ``most``.

    Args:
        work, tokens, sizes, rooms: see the module.
        divisions: groups of each kind, a row each.
        most: microseconds that a group may work; sequences are on no kind where one alone takes longer.
        rounds: that prices change.
        least: bounds that are known; raised, and infinite where a sequence fits nowhere.
    """
    num, kinds = work.shape
    for row in range(divisions.shape[0]):
        if least[row] >= most:
            continue
        counts = divisions[row]
        ranks = 0
        for kind in range(kinds):
            ranks += counts[kind] * sizes[kind]
        times, holds = np.zeros(kinds), np.zeros(kinds)
        for kind in range(kinds):
            times[kind] = sizes[kind] / ranks
            holds[kind] = 0.02 * sizes[kind] / ranks
        step, best = 0.5, -np.inf
        loads, filled = np.zeros(kinds), np.zeros(kinds)
        for _ in range(rounds):
            loads[:] = 0.0
            filled[:] = 0.0
            total = 0.0
            for i in range(num):
                chosen, value = -1, np.inf
                for kind in range(kinds):
                    if counts[kind] and work[i, kind] <= most and tokens[i] <= rooms[kind]:
                        costs = times[kind] * work[i, kind] / most + holds[kind] * tokens[i] / rooms[kind]
                        if costs < value:
                            chosen, value = kind, costs
                if chosen < 0:
                    total = np.inf
                    break
                total += value
                loads[chosen] += work[i, chosen] / most
                filled[chosen] += tokens[i] / rooms[chosen]
            if total == np.inf:
                least[row] = np.inf
                break
            of_time, of_rooms = 0.0, 0.0
            for kind in range(kinds):
                of_time += times[kind] * counts[kind]
                of_rooms += holds[kind] * counts[kind]
            bound = (total - of_rooms) / of_time * most
            if bound > best:
                best = bound
            else:
                step *= 0.95
            if bound > least[row]:
                least[row] = bound
                if bound >= most:
                    break
            summed = 0.0
            for kind in range(kinds):
                if counts[kind]:
                    over = min(1.0, max(-1.0, loads[kind] / counts[kind] - 1.0))
                    times[kind] *= np.exp(step * over)
                    over = min(1.0, max(-1.0, filled[kind] / counts[kind] - 1.0))
                    holds[kind] *= np.exp(step * over)
                    summed += counts[kind] * (times[kind] + holds[kind])
            for kind in range(kinds):
                times[kind] /= summed
                holds[kind] /= summed


@compiled_without_lock
def anneal(
    work: Floats, tokens: Ints, rooms: Ints, kind_of: Ints, seed: int, steps: int, most: float, placed: Ints
) -> float:
    """Moves and exchanges at random towards a time that no group passes, by simulated annealing.

    What is made less is what groups work beyond the time; when nothing is, the time is what the slowest takes.

    Args:
        work, tokens, rooms: see the module.
        kind_of: kind of each group.
        seed: of the random numbers; the same gives the same.
        steps: how many.
        most: microseconds that a group may work.
        placed: group of each sequence, of which no group has too many tokens; changed where a time is met.

    Returns:
        What the slowest group works; infinite where the time was not met.
    """
    np.random.seed(seed)
    num, slots = work.shape[0], kind_of.shape[0]
    now = placed.copy()
    load = np.zeros(slots)
    held = np.zeros(slots, np.int64)
    for k in range(num):
        load[now[k]] += work[k, kind_of[now[k]]]
        held[now[k]] += tokens[k]
    best, goal = np.inf, most
    over = 0.0
    for slot in range(slots):
        over += max(0.0, load[slot] - goal)
    heat = 0.02 * most
    cooling = np.exp(np.log(1e-3) / max(1, steps))
    for _ in range(steps):
        heat *= cooling
        if over <= 1e-9 * goal:
            best = load.max()
            placed[:] = now
            goal = best * (1 - 2e-5)
            over = 0.0
            for slot in range(slots):
                over += max(0.0, load[slot] - goal)
        k = np.random.randint(num)
        a = now[k]
        if load[a] <= goal and np.random.random() < 0.8:
            continue
        other = -1
        if np.random.random() < 0.4:
            b = np.random.randint(slots)
        else:
            other = np.random.randint(num)
            b = now[other]
        if a == b:
            continue
        first, second = kind_of[a], kind_of[b]
        load_a, load_b = load[a] - work[k, first], load[b] + work[k, second]
        held_a, held_b = held[a] - tokens[k], held[b] + tokens[k]
        if other >= 0:
            load_a += work[other, first]
            load_b -= work[other, second]
            held_a += tokens[other]
            held_b -= tokens[other]
        if held_a > rooms[first] or held_b > rooms[second]:
            continue
        gain = max(0.0, load_a - goal) + max(0.0, load_b - goal)
        gain -= max(0.0, load[a] - goal) + max(0.0, load[b] - goal)
        if gain <= 0 or np.random.random() < np.exp(-gain / heat):
            over += gain
            load[a], load[b], held[a], held[b] = load_a, load_b, held_a, held_b
            now[k] = b
            if other >= 0:
                now[other] = a
    return float(best)
