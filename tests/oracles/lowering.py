"""Lowering by operations on whole columns: what the compiled arithmetic of ``mycel.collectives.rows`` must equal.

It starts from the same roles of a rank, and shares nothing else: it sorts where that counts, takes every block of the
array where that takes those of the rank, and multiplies where that keeps quotient and rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mycel.collectives.lower import RankTemplate
from mycel.collectives.program import COLUMNS, Buffer, Op, Program, block_sizes

__all__ = ["expand_by_columns", "steps_by_columns"]

Ints = npt.NDArray[np.int64]


def _starts(sizes: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)


def _bounds(plan: RankTemplate, sizes: Ints) -> tuple[Ints, Ints, Ints]:
    """Block, first element in it and length of each of the schedule's chunks, in Python's integers."""
    schedule = plan.schedule
    block = np.array([schedule.block_of(chunk) for chunk in range(len(schedule.chunks))], dtype=np.int64)
    begin, length = [], []
    for number, chunk in zip(block.tolist(), schedule.chunks, strict=True):
        first, end = schedule.block_starts[number], schedule.block_starts[number + 1]
        size = int(sizes[number])
        begin.append(size * (chunk.start - first) // (end - first))
        length.append(size * (chunk.stop - first) // (end - first) - begin[-1])
    return block, np.array(begin, dtype=np.int64), np.array(length, dtype=np.int64)


def _layout(plan: RankTemplate, sizes: Ints) -> tuple[Ints, Ints]:
    """First element of each block in INPUT and in OUTPUT; means nothing for blocks that are not there."""
    name, n = plan.schedule.collective.name, plan.schedule.collective.num_ranks
    starts, nowhere = _starts(sizes), np.zeros_like(sizes)
    if plan.rank >= n or name in ("all_reduce", "broadcast", "reduce"):
        return nowhere, nowhere
    if name == "all_to_all":
        nowhere[plan.rank :: n] = _starts(sizes[plan.rank :: n])
        return starts - starts[plan.rank * n], nowhere
    return (starts, nowhere) if name in ("reduce_scatter", "scatter") else (nowhere, starts)


def _order(plan: RankTemplate, length: Ints, piece_elements: int) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Pieces of each chunk; role, piece and step of every message; and the order of the messages."""
    roles = plan._roles
    pieces = -(-length // piece_elements)
    per_role = pieces[[r.chunk for r in roles]] if roles else np.zeros(0, dtype=np.int64)
    role = np.repeat(np.arange(len(per_role)), per_role)
    piece = np.arange(len(role)) - np.concatenate([[0], np.cumsum(per_role)])[role]
    level = np.array([r.level for r in roles], dtype=np.int64)
    step = piece * int(pieces.max(initial=1)) // np.maximum(per_role[role], 1) + level[role]
    return pieces, role, piece, step, np.lexsort((role, step))


def _own_block(plan: RankTemplate) -> int | None:
    c, rank = plan.schedule.collective, plan.rank
    if rank >= c.num_ranks:
        return None
    if c.name == "all_to_all":
        return rank * (c.num_ranks + 1)
    return rank if c.name == "all_gather" or (c.name in ("gather", "scatter") and c.root == rank) else None


def expand_by_columns(
    plan: RankTemplate, num_elements: int, piece_elements: int, block_elements: Sequence[int] | None = None
) -> Program:
    """The program that ``plan.expand`` has to make."""
    collective, roles = plan.schedule.collective, plan._roles
    sizes = block_sizes(collective, num_elements, block_elements)
    block, inside, length = _bounds(plan, sizes)
    pieces, role, piece, _, order = _order(plan, length, piece_elements)
    scratch_base, scratch_elements = np.zeros(len(length), dtype=np.int64), 0
    for passing in plan._scratch_chunks:
        scratch_base[passing] = scratch_elements
        scratch_elements += int(length[passing])

    chunk = np.array([r.chunk for r in roles], dtype=np.int64)
    in_input, in_output = _layout(plan, sizes)
    places = np.stack([inside + in_input[block], inside + in_output[block], scratch_base])
    base = places[np.array([r.buffer for r in roles], dtype=np.int64), chunk][role]
    operand = places[np.array([r.operand for r in roles], dtype=np.int64), chunk][role]
    begin = length[chunk[role]] * piece // np.maximum(pieces[chunk[role]], 1)
    end = length[chunk[role]] * (piece + 1) // np.maximum(pieces[chunk[role]], 1)
    columns = np.zeros(len(role), dtype=COLUMNS)
    for i, number in enumerate(role.tolist()):
        r = roles[number]
        has_operand = r.op in (Op.RECV_REDUCE, Op.COPY)
        columns[i] = (
            *(r.op, r.channel, r.buffer, base[i] + begin[i], end[i] - begin[i], r.operand),
            operand[i] + begin[i] if has_operand else 0,
            r.final,
        )
    columns = columns[order]

    row_of = np.empty(len(order), dtype=np.int64)
    row_of[order] = np.arange(len(order))
    at = {(r, p): row for r, p, row in zip(role.tolist(), piece.tolist(), row_of.tolist(), strict=True)}
    needs = [[at[need, int(piece[m])] for need in roles[role[m]].needs] for m in order.tolist()]
    own = _own_block(plan)
    if own is not None and sizes[own]:
        copy = np.zeros(1, dtype=COLUMNS)
        copy[0] = (Op.COPY, -1, Buffer.OUTPUT, in_output[own], sizes[own], Buffer.INPUT, in_input[own], 0)
        columns = np.concatenate([columns, copy])
        needs.append([])
    return Program(
        collective=collective,
        rank=plan.rank,
        num_elements=num_elements,
        scratch_elements=scratch_elements,
        channels=plan.channels,
        columns=columns,
        need_start=np.cumsum([0, *map(len, needs)]),
        need_index=np.array([need for those in needs for need in those], dtype=np.int64),
        block_elements=None if block_elements is None else tuple(block_elements),
    )


def steps_by_columns(
    plan: RankTemplate, num_elements: int, piece_elements: int, block_elements: Sequence[int] | None = None
) -> Ints:
    """The steps that ``plan.steps`` has to give."""
    sizes = block_sizes(plan.schedule.collective, num_elements, block_elements)
    _, _, length = _bounds(plan, sizes)
    _, role, _, step, order = _order(plan, length, piece_elements)
    is_copy = np.array([r.op is Op.COPY for r in plan._roles], dtype=bool)
    step = np.where(is_copy[role], -1, step) if len(role) else step
    own = _own_block(plan)
    return np.append(step[order], [-1] if own is not None and sizes[own] else []).astype(np.int64)
