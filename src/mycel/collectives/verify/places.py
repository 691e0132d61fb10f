"""The two halves of the check of a schedule, compiled: what places hold in the end, and whether accesses are ordered.

A place is a vertex's copy of a chunk, or one of the several that it has where partners add each other's sums: each is
known by its slot (``mycel.collectives.slots``). These functions only find that something is wrong, and where;
``schedule`` says what it is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mycel.compiled import compiled

__all__ = [
    "ADDS_TO_EMPTY",
    "ADDS_TO_NOTHING",
    "EMPTY",
    "HOLDS_WRONG",
    "MANY",
    "READS_EMPTY",
    "RIGHT",
    "find_open_order",
    "find_wrong_content",
]

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

#: Counts stop here: mutual additions double them at every step, and any count above 1 is equally wrong.
MANY = 1 << 30
#: In place of the number of a content: nothing is there.
EMPTY = -1

#: What is wrong in the first chunk in which something is.
RIGHT, READS_EMPTY, ADDS_TO_NOTHING, ADDS_TO_EMPTY, HOLDS_WRONG = range(5)


@compiled
def find_wrong_content(
    chunk_start: IntArray,
    members: IntArray,
    source: IntArray,
    target: IntArray,
    base: IntArray,
    reduce: BoolArray,
    reduces: bool,
    num_slots: int,
    width: int,
    holder: IntArray,
    taker: IntArray,
    wanted: IntArray,
    known: IntArray,
) -> tuple[int, int, int, int, IntArray]:
    """Run each chunk's transfers in their order, counting contributions, and compare what is left.

    A content is a row of counts, one a rank, and has a number: a row of ``known``, or after those a row of one of the
    contents that additions made. Copying takes the number over; an addition makes a row, or changes one that no other
    place holds.

    Args:
        chunk_start: where each chunk's transfers begin in ``members``, and their end.
        members: numbers of transfers, chunk by chunk.
        source, target, base: slots of every transfer, see ``Slots``.
        reduce: of every transfer.
        reduces: whether the collective adds at all.
        num_slots: of ranks and switches.
        width: slots of each.
        holder: the only rank that holds each chunk before, its own contribution; -1: every rank holds its own.
        taker: the only rank that must hold something after; -1: every rank must.
        wanted: what that is, the number of a content.
        known: contents, shape ``[num_ranks + 1, num_ranks]``: the contribution of each rank, and of all.

    Returns:
        What is wrong; in which chunk; at which transfer (of wrong content: the last that wrote it, -1: none did); at
        which slot; and the counts that it holds.
    """
    num_known, num_ranks = known.shape
    made = np.empty((num_slots, num_ranks), dtype=np.int64)
    holders = np.empty(num_slots, dtype=np.int64)  # places that hold each of the contents made
    free = np.empty(num_slots, dtype=np.int64)
    compared = np.empty(num_slots, dtype=np.int64)  # the required content that each was found equal to
    held = np.empty(num_slots, dtype=np.int64)
    last = np.empty(num_slots, dtype=np.int64)
    nothing = np.zeros(num_ranks, dtype=np.int64)
    held[:] = EMPTY
    last[:] = -1
    is_fresh, num_free = False, 0
    for chunk in range(len(chunk_start) - 1):
        if holder[chunk] >= 0:
            held[holder[chunk] * width] = holder[chunk]
        else:
            for rank in range(num_ranks):
                held[rank * width] = rank
        if not is_fresh:  # as additions have left it
            num_free = num_slots
            for i in range(num_slots):
                free[i] = num_slots - 1 - i
            compared[:] = EMPTY
            is_fresh = True
        for t in members[chunk_start[chunk] : chunk_start[chunk + 1]]:
            a, b = source[t], target[t]
            given, there = held[a], held[b]
            if base[t] >= 0:  # the first addition to a further place starts from what the place before it holds
                there = held[base[t]]
                held[b] = there
                if there >= num_known:
                    holders[there - num_known] += 1
            if given == EMPTY:
                return READS_EMPTY, chunk, t, a, nothing
            if reduce[t] and not reduces:
                return ADDS_TO_NOTHING, chunk, t, b, nothing
            if reduce[t] and there == EMPTY and b < num_ranks * width:
                return ADDS_TO_EMPTY, chunk, t, b, nothing
            last[b] = t
            if reduce[t] and there != EMPTY:
                is_fresh = False
                row = known[given] if given < num_known else made[given - num_known]
                if there >= num_known and holders[there - num_known] == 1:
                    place = there - num_known
                    made[place] = np.minimum(made[place] + row, MANY)
                else:
                    num_free -= 1
                    place = free[num_free]
                    old = known[there] if there < num_known else made[there - num_known]
                    made[place] = np.minimum(old + row, MANY)
                    if there >= num_known:
                        holders[there - num_known] -= 1
                    holders[place] = 1
                    held[b] = num_known + place
                continue
            if given >= num_known:
                holders[given - num_known] += 1
            if there >= num_known:
                holders[there - num_known] -= 1
                if holders[there - num_known] == 0:
                    free[num_free] = there - num_known
                    num_free += 1
            held[b] = given
        for rank in range(max(taker[chunk], 0), num_ranks if taker[chunk] < 0 else taker[chunk] + 1):
            slot = rank * width
            for place in range(slot + 1, slot + width):  # the result is in the last place that was written
                if last[place] >= 0:
                    slot = place
            found = held[slot]
            if found == wanted[chunk]:
                continue
            if found >= num_known and compared[found - num_known] == wanted[chunk]:
                continue
            row = nothing
            if found >= num_known:
                row = made[found - num_known]
            elif found != EMPTY:
                row = known[found]
            if (row != known[wanted[chunk]]).any():
                return HOLDS_WRONG, chunk, last[slot], slot, row.copy()
            if found >= num_known:
                compared[found - num_known] = wanted[chunk]
        if holder[chunk] >= 0:  # few places of many: a chunk of one pair of ranks touches a handful
            held[holder[chunk] * width] = EMPTY
            for t in members[chunk_start[chunk] : chunk_start[chunk + 1]]:
                held[target[t]] = EMPTY
                last[target[t]] = -1
        else:
            held[:] = EMPTY
            last[:] = -1
    return RIGHT, -1, -1, -1, nothing


@compiled
def find_open_order(
    set_start: IntArray,
    members: IntArray,
    chunk: IntArray,
    source: IntArray,
    target: IntArray,
    base: IntArray,
    previous: IntArray,
    reduce: BoolArray,
    after_start: IntArray,
    after: IntArray,
    num_slots: int,
    max_bits: int,
) -> tuple[int, int, int]:
    """Two accesses to a place that conflict and that ``after`` leaves in no fixed order.

    The accesses to a place come in turns: all reads between two writes are one turn, so are all additions between
    two others; every write is one. Each access must come after all of the turn before; an access two turns away is
    then ordered through any between. What has been completed before a transfer begins is kept as a set of bits; what
    has been before it writes, where destinations keep additions in order by themselves, as another.

    Args:
        set_start: where sets of transfers that ``after`` never leaves begin in ``members``, and their end.
        members: numbers of transfers, set by set, rising in each.
        chunk, reduce, after_start, after: of every transfer, see ``Columns``.
        source, target, base, previous: of every transfer, see ``Slots``.
        num_slots: of ranks and switches.
        max_bits: held at once; more transfers are traced in several passes.

    Returns:
        The earlier and the later transfer, and the slot of the place; -1 each if all is ordered.
    """
    num_transfers, num_chunks = len(chunk), 0
    local = np.empty(num_transfers, dtype=np.int64)
    for t in range(num_transfers):
        num_chunks = max(num_chunks, chunk[t] + 1)
    # Chunks are numbered set by set: usually there is one in each, and one row of places serves all of them.
    number, most = np.full(num_chunks, -1, dtype=np.int64), 1
    for s in range(len(set_start) - 1):
        met = 0
        for t in members[set_start[s] : set_start[s + 1]]:
            if number[chunk[t]] < 0:
                number[chunk[t]] = met
                met += 1
        most = max(most, met)
    place_of = np.full(most * num_slots, -1, dtype=np.int64)
    sides = 2  # of a transfer: what it reads at its source, what a sum of its own starts from, what it writes
    for t in range(num_transfers):
        if base[t] >= 0:
            sides = 3
    chained = sides == 3
    for s in range(len(set_start) - 1):
        mine = members[set_start[s] : set_start[s + 1]]
        count = len(mine)
        # Accesses by place, places in the order in which they are first met, a transfer's source before its target.
        place = np.empty(sides * count, dtype=np.int64)
        num_places = 0
        for e in range(count):
            local[mine[e]] = e
            for side in range(sides):
                slot = source[mine[e]] if side == 0 else target[mine[e]] if side == sides - 1 else base[mine[e]]
                if slot < 0:
                    place[sides * e + side] = -1
                    continue
                at = number[chunk[mine[e]]] * num_slots + slot
                if place_of[at] < 0:
                    place_of[at] = num_places
                    num_places += 1
                place[sides * e + side] = place_of[at]
        begin = np.zeros(num_places + 1, dtype=np.int64)
        for access in range(sides * count):
            if place[access] >= 0:
                begin[place[access] + 1] += 1
        for p in range(num_places):
            begin[p + 1] += begin[p]
        cursor = begin[:-1].copy()
        accesses = np.empty(begin[-1], dtype=np.int64)
        for access in range(sides * count):
            if place[access] < 0:
                continue
            accesses[cursor[place[access]]] = access
            cursor[place[access]] += 1
            t, side = mine[access // sides], access % sides
            slot = source[t] if side == 0 else target[t] if side == sides - 1 else base[t]
            place_of[number[chunk[t]] * num_slots + slot] = -1  # for the next set
        window = max(64, max_bits // max(count, 1))
        words = (min(window, count) + 63) // 64
        begun = np.empty((count, words), dtype=np.uint64)  # those complete when each begins, of a window of them
        # ... and when each writes; where vertices keep no order of their own the same array.
        written = np.empty((count, words), dtype=np.uint64) if chained else begun
        wanted = np.empty(words, dtype=np.uint64)
        for low in range(0, count, window):
            high = min(low + window, count)
            for e in range(count):
                begun[e] = 0
                for i in range(after_start[mine[e]], after_start[mine[e] + 1]):
                    other = local[after[i]]
                    begun[e] = begun[e] | written[other]
                    if low <= other < high:
                        begun[e, (other - low) >> 6] |= np.uint64(1) << np.uint64((other - low) & 63)
                if chained:
                    written[e] = begun[e]
                    if previous[mine[e]] >= 0:
                        other = local[previous[mine[e]]]
                        written[e] = written[e] | written[other]
                        if low <= other < high:
                            written[e, (other - low) >> 6] |= np.uint64(1) << np.uint64((other - low) & 63)
            for p in range(num_places):
                before = begin[p]
                now = before
                while now < begin[p + 1]:
                    stop = now + 1
                    access = accesses[now]
                    # Reads, overwrites, adds. The first addition to a further place fills it, as a write does.
                    t = mine[access // sides]
                    kind = 0 if access % sides < sides - 1 else 2 if reduce[t] and base[t] < 0 else 1
                    while kind != 1 and stop < begin[p + 1]:
                        access = accesses[stop]
                        t = mine[access // sides]
                        other_kind = 0 if access % sides < sides - 1 else 2 if reduce[t] and base[t] < 0 else 1
                        if other_kind != kind:
                            break
                        stop += 1
                    wanted[:] = 0
                    any_wanted = False
                    for i in range(before, now):
                        other = accesses[i] // sides
                        if low <= other < high:
                            wanted[(other - low) >> 6] |= np.uint64(1) << np.uint64((other - low) & 63)
                            any_wanted = True
                    for i in range(now, stop if any_wanted else now):
                        e, side = accesses[i] // sides, accesses[i] % sides
                        missing = wanted & ~(begun[e] if side == 0 else written[e])
                        if missing.any():
                            bit = 0
                            while not (missing[bit >> 6] >> np.uint64(bit & 63)) & np.uint64(1):
                                bit += 1
                            t = mine[e]
                            slot = source[t] if side == 0 else target[t] if side == sides - 1 else base[t]
                            return mine[low + bit], t, slot
                    before, now = now, stop
    return -1, -1, -1
