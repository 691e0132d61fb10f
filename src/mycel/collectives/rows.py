"""Rows of a program by arithmetic: a rank's part of a schedule for any size, in one pass of compiled code.

A rank's part is a table of integers (``tabulate``): its chunks as fractions of their blocks, and its *roles*, one a
transfer that it sends or receives. A size turns that into rows: every chunk into pieces, every role into a message a
piece, and all of them into one order, by pipeline step and then by transfer. That takes one pass over the rows and no
search, some tens of nanoseconds a row, so that a size never seen before costs no more than one that has been.

Everything here is a whole number and exact: parts of blocks are rounded down at both ends of a chunk, pieces of a
chunk likewise, so that neighbours meet and nothing is left out or moved twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mycel.compiled import compiled_without_lock

__all__ = ["fill", "measure", "tabulate", "work_to_measure"]

Ints = npt.NDArray[np.int64]

# The head of a table: how many there are of what follows.
_CHUNKS, _ROLES, _PAIRS, _INPUTS, _OUTPUTS, _SCRATCH, _CHANNELS, _LEVELS, _OWN_INPUT, _OWN_OUTPUT = range(10)
_HEAD = 10
# Of a chunk: block, its weight, first unit, end and units of the block; place of the block in INPUT and OUTPUT.
_BLOCK, _WEIGHT, _START, _STOP, _UNITS, _IN_INPUT, _IN_OUTPUT = range(7)
_CHUNK_FIELDS = 7
# Of a role; those of a row, but for the chunk instead of an offset, its depth instead of a count, and its first need.
_OP, _CHANNEL, _BUFFER, _CHUNK, _LEVEL, _OPERAND, _NEED, _FINAL = range(8)
# Of a row: op, channel, buffer, offset, count, operand buffer, operand offset, final (``program.COLUMNS``).
ROW_FIELDS = 8
_RECV_REDUCE, _COPY = 2, 3
_INPUT, _OUTPUT, _SCRATCH_BUFFER = 0, 1, 2
# Of a chunk of one size: elements, pieces, nothing, and its offsets in the three buffers.
_SIZE, _PIECES, _PLACE = 0, 1, 3
_CUT_FIELDS = 6
# What ``measure`` tells.
NUM_ROWS, NUM_NEEDS, SCRATCH_ELEMENTS, STAGING_BYTES, PIPELINE, WORK = range(6)
TOLD = 6
LINE_BYTES = 64  # of the processor's cache: staging areas of two channels share none


def tabulate(
    chunks: Sequence[Sequence[int]],
    roles: Sequence[Sequence[int]],
    needs: Sequence[Sequence[int]],
    blocks: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]],
    scratch: Sequence[int],
    *,
    num_channels: int,
    own: tuple[int, int],
) -> Ints:
    """A rank's part of a schedule as integers, for ``measure`` and ``fill``.

    Args:
        chunks: that the rank sends or receives: block, weight, first unit, end, units of the block, and which block
            of INPUT and of OUTPUT that is (0 where it is in neither).
        roles: in the order of the transfers: op, channel, buffer, chunk (of these), level, operand buffer, final.
        needs: of each role, the roles that come before it.
        blocks: those in INPUT and those in OUTPUT, in order: number and weight.
        scratch: chunks that have a place in SCRATCH, in order.
        num_channels: of the rank.
        own: which block of INPUT and of OUTPUT stays here and is copied; -1 where none is.
    """
    head = [0] * _HEAD
    head[_CHUNKS], head[_ROLES], head[_PAIRS] = len(chunks), len(roles), sum(map(len, needs))
    head[_INPUTS], head[_OUTPUTS], head[_SCRATCH] = len(blocks[0]), len(blocks[1]), len(scratch)
    head[_CHANNELS], head[_LEVELS] = num_channels, 1 + max((role[_LEVEL] for role in roles), default=0)
    head[_OWN_INPUT], head[_OWN_OUTPUT] = own
    flat: list[int] = [*head]
    for row in chunks:
        flat.extend(row)
    first = 0
    for (op, channel, buffer, chunk, level, operand, final), those in zip(roles, needs, strict=True):
        flat.extend((op, channel, buffer, chunk, level, operand, first, final))
        first += len(those)
    flat.extend((0, 0, 0, 0, 0, 0, first, 0))  # where the needs of the last role end
    for those in (*needs, *blocks[0], *blocks[1], scratch):
        flat.extend(those)
    return np.array(flat, dtype=np.int64)


@compiled_without_lock
def _part(size, start, units) -> int:  # type: ignore[no-untyped-def]
    """``size * start // units``, exactly, though the product may exceed 64 bits; ``start`` is at most ``units``."""
    if start == 0:
        return 0
    if start == units:
        return size  # type: ignore[no-any-return]
    whole, rest = size // units * start, size % units
    if units < 1 << 31:
        return whole + rest * start // units  # type: ignore[no-any-return]
    quotient, left = 0, 0
    for bit in range(61, -1, -1):
        quotient *= 2
        left *= 2
        if (rest >> bit) & 1:
            left += start
        while left >= units:
            left -= units
            quotient += 1
    return whole + quotient  # type: ignore[no-any-return]


@compiled_without_lock
def _longest_pipeline(spans, lengths, unit, piece) -> int:  # type: ignore[no-untyped-def]
    """Pieces of the schedule's longest chunk, on every rank alike."""
    most = 1
    for i in range(0, len(spans), 4):
        size = lengths[spans[i]] if len(lengths) > 0 else spans[i] * unit
        size = _part(size, spans[i + 2], spans[i + 3]) - _part(size, spans[i + 1], spans[i + 3])
        most = max(most, -(-size // piece))
    return most


@compiled_without_lock
def _starts(blocks, lengths, unit, starts) -> None:  # type: ignore[no-untyped-def]
    """Where each block of a buffer starts, and the buffer's end."""
    starts[0] = 0
    for i in range(len(blocks) // 2):
        starts[i + 1] = starts[i] + (lengths[blocks[2 * i]] if len(lengths) > 0 else blocks[2 * i + 1] * unit)


@compiled_without_lock
def _cut(table, lengths, unit, piece, cut) -> int:  # type: ignore[no-untyped-def]
    """Write of each chunk what ``_CUT_FIELDS`` says; then the copy that stays here, and the lengths of the buffers.

    The copy's three integers are elements (0: there is none), offset in INPUT, offset in OUTPUT. Returns how many
    integers have been written, places of blocks, which nobody needs any more, included.
    """
    num_chunks, num_inputs, num_outputs = table[_CHUNKS], table[_INPUTS], table[_OUTPUTS]
    at = _HEAD + num_chunks * _CHUNK_FIELDS + (table[_ROLES] + 1) * ROW_FIELDS + table[_PAIRS]
    last = num_chunks * _CUT_FIELDS
    inputs = last + _CUT_FIELDS
    outputs = inputs + num_inputs + 1
    end = outputs + num_outputs + 1
    _starts(table[at : at + 2 * num_inputs], lengths, unit, cut[inputs:outputs])
    at += 2 * num_inputs
    _starts(table[at : at + 2 * num_outputs], lengths, unit, cut[outputs:end])
    at += 2 * num_outputs
    for i in range(num_chunks):
        chunk, to = _HEAD + i * _CHUNK_FIELDS, i * _CUT_FIELDS
        whole = lengths[table[chunk + _BLOCK]] if len(lengths) > 0 else table[chunk + _WEIGHT] * unit
        begin = _part(whole, table[chunk + _START], table[chunk + _UNITS])
        size = _part(whole, table[chunk + _STOP], table[chunk + _UNITS]) - begin
        cut[to + _SIZE] = size
        cut[to + _PIECES] = -(-size // piece)
        cut[to + _PLACE] = cut[inputs + table[chunk + _IN_INPUT]] + begin
        cut[to + _PLACE + 1] = cut[outputs + table[chunk + _IN_OUTPUT]] + begin
        cut[to + _PLACE + 2] = 0
    scratch = 0
    for i in range(at, at + table[_SCRATCH]):
        to = table[i] * _CUT_FIELDS
        cut[to + _PLACE + 2] = scratch
        scratch += cut[to + _SIZE]
    cut[last] = 0
    if table[_OWN_INPUT] >= 0:
        place = inputs + table[_OWN_INPUT]
        cut[last] = cut[place + 1] - cut[place]
        cut[last + 1] = cut[place]
        cut[last + 2] = cut[outputs + table[_OWN_OUTPUT]]
    cut[last + _PLACE] = cut[inputs + num_inputs]
    cut[last + _PLACE + 1] = cut[outputs + num_outputs]
    cut[last + _PLACE + 2] = scratch
    return end  # type: ignore[no-any-return]


def work_to_measure(table: Ints) -> int:
    """Integers that ``measure`` needs to work in."""
    chunks, inputs, outputs, channels = table[[_CHUNKS, _INPUTS, _OUTPUTS, _CHANNELS]].tolist()
    return int((chunks + 1) * _CUT_FIELDS + inputs + outputs + 2 + channels)


@compiled_without_lock
def measure(table, lengths, spans, unit, piece, item_bytes, work, told) -> None:  # type: ignore[no-untyped-def]
    """How much ``fill`` will make, and needs for that.

    Args:
        table: see ``tabulate``.
        lengths: of all blocks of the array; empty where they are ``unit`` elements for each weight.
        spans: of each of the schedule's chunks the block (its weight where ``lengths`` is empty), first unit, end and
            units of the block; one of several that are alike will do.
        unit: see ``lengths``.
        piece: longest message, in elements.
        item_bytes: of an element.
        work: ``work_to_measure`` integers.
        told: gets rows, needs, elements of SCRATCH, bytes of staging (the longest piece that each channel brings for
            a sum), the length of the pipeline, and integers to work in.
    """
    used = _cut(table, lengths, unit, piece, work)
    num_chunks, num_roles, num_channels = table[_CHUNKS], table[_ROLES], table[_CHANNELS]
    last = num_chunks * _CUT_FIELDS
    longest = work[used : used + num_channels]
    for c in range(num_channels):
        longest[c] = 0
    rows = 1 if work[last] > 0 else 0
    needs = 0
    for r in range(num_roles):
        role = _HEAD + num_chunks * _CHUNK_FIELDS + r * ROW_FIELDS
        chunk = table[role + _CHUNK] * _CUT_FIELDS
        pieces = work[chunk + _PIECES]
        rows += pieces
        needs += pieces * (table[role + ROW_FIELDS + _NEED] - table[role + _NEED])
        if pieces > 0 and table[role + _OP] == _RECV_REDUCE:
            channel = table[role + _CHANNEL]
            longest[channel] = max(longest[channel], -(-work[chunk + _SIZE] // pieces))
    staging = 0
    for c in range(num_channels):
        staging += -(-longest[c] * item_bytes // LINE_BYTES) * LINE_BYTES
    most = _longest_pipeline(spans, lengths, unit, piece)
    told[NUM_ROWS] = rows
    told[NUM_NEEDS] = needs
    told[SCRATCH_ELEMENTS] = work[last + _PLACE + 2]
    told[STAGING_BYTES] = staging
    told[PIPELINE] = most
    told[WORK] = used + most + table[_LEVELS] + 1 + num_roles + 1 + rows


@compiled_without_lock
def fill(table, lengths, unit, piece, item_bytes, most, work, rows, need_start, need_index, steps) -> int:  # type: ignore[no-untyped-def]
    """Write the rows of a program, and what each of them needs.

    Args:
        table, lengths, unit, piece, item_bytes: as for ``measure``. Offsets and counts are written in bytes.
        most: length of the pipeline.
        work: as many integers as ``measure`` has told.
        rows: as many as ``measure`` has told, of ``ROW_FIELDS`` integers each, one after the other.
        need_start, need_index: row ``i`` needs ``need_index[need_start[i] : need_start[i + 1]]``.
        steps: gets the pipeline step of each row, -1 for a copy; empty where nobody asks.

    Returns:
        0; or 1 and the number of the first row that is outside of its buffers, which no schedule's is.
    """
    used = _cut(table, lengths, unit, piece, work)
    num_chunks, num_roles, num_rows = table[_CHUNKS], table[_ROLES], len(need_start) - 1
    roles, last = _HEAD + num_chunks * _CHUNK_FIELDS, num_chunks * _CUT_FIELDS
    num_steps = most + table[_LEVELS] + 1
    next_in, first = work[used : used + num_steps], work[used + num_steps : used + num_steps + num_roles + 1]
    row_of = work[used + num_steps + num_roles + 1 :]
    # Sorted by counting. The step of piece p of n is its level plus p * most // n: quotient and rest are kept.
    for s in range(num_steps):
        next_in[s] = 0
    for r in range(num_roles):
        role = roles + r * ROW_FIELDS
        pieces = work[table[role + _CHUNK] * _CUT_FIELDS + _PIECES]
        step, rest = table[role + _LEVEL], 0
        for _ in range(pieces):
            next_in[step + 1] += 1
            rest += most
            step += rest // pieces
            rest %= pieces
    for s in range(1, num_steps):
        next_in[s] += next_in[s - 1]
    message = 0
    first[0] = 0
    for r in range(num_roles):
        role = roles + r * ROW_FIELDS
        chunk = table[role + _CHUNK] * _CUT_FIELDS
        pieces, size = work[chunk + _PIECES], work[chunk + _SIZE]
        has_operand = table[role + _OP] >= _RECV_REDUCE
        base = work[chunk + _PLACE + table[role + _BUFFER]]
        operand = work[chunk + _PLACE + table[role + _OPERAND]]
        step, rest, left = table[role + _LEVEL], 0, 0
        for _ in range(pieces):
            number = next_in[step]
            next_in[step] += 1
            row_of[message] = number
            message += 1
            left += size
            count = left // pieces
            left %= pieces
            at = number * ROW_FIELDS
            rows[at] = table[role + _OP]
            rows[at + 1] = table[role + _CHANNEL]
            rows[at + 2] = table[role + _BUFFER]
            rows[at + 3] = base * item_bytes
            rows[at + 4] = count * item_bytes
            rows[at + 5] = table[role + _OPERAND]
            rows[at + 6] = operand * item_bytes if has_operand else 0
            rows[at + 7] = table[role + _FINAL]
            need_start[number + 1] = table[role + ROW_FIELDS + _NEED] - table[role + _NEED]
            if len(steps) > 0:
                steps[number] = -1 if table[role + _OP] == _COPY else step
            base += count
            operand += count
            rest += most
            step += rest // pieces
            rest %= pieces
        first[r + 1] = message
    if message < num_rows:  # the copy of what stays here: nothing waits for it
        at = message * ROW_FIELDS
        rows[at] = _COPY
        rows[at + 1] = -1
        rows[at + 2] = _OUTPUT
        rows[at + 3] = work[last + 2] * item_bytes
        rows[at + 4] = work[last] * item_bytes
        rows[at + 5] = _INPUT
        rows[at + 6] = work[last + 1] * item_bytes
        rows[at + 7] = 0
        need_start[num_rows] = 0
        if len(steps) > 0:
            steps[message] = -1
    need_start[0] = 0
    for i in range(num_rows):
        need_start[i + 1] += need_start[i]
    awaited = roles + (num_roles + 1) * ROW_FIELDS
    for r in range(num_roles):
        begin, end = table[roles + r * ROW_FIELDS + _NEED], table[roles + (r + 1) * ROW_FIELDS + _NEED]
        if begin < end:
            for p in range(first[r + 1] - first[r]):
                to = need_start[row_of[first[r] + p]]
                for k in range(begin, end):
                    need_index[to + k - begin] = row_of[first[table[awaited + k]] + p]
    return _first_outside(rows, work[last + _PLACE : last + _PLACE + 3], item_bytes)


@compiled_without_lock
def _first_outside(rows, buffers, item_bytes) -> int:  # type: ignore[no-untyped-def]
    """1 and the number of the first row that reads or writes outside of its buffers, or moves nothing; 0 if none."""
    for at in range(0, len(rows), ROW_FIELDS):
        count = rows[at + 4]
        outside = count <= 0 or rows[at + 3] < 0 or rows[at + 3] + count > buffers[rows[at + 2]] * item_bytes
        if rows[at] >= _RECV_REDUCE:
            outside |= rows[at + 6] < 0 or rows[at + 6] + count > buffers[rows[at + 5]] * item_bytes
        if outside:
            return at // ROW_FIELDS + 1
    return 0
