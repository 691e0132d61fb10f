"""Proves that the programs of a schedule are right at every size, from their programs at one.

The size decides into how many pieces each chunk is cut, 0 for one without elements, and nothing else. A piece is
moved and added as its whole chunk is, by an instruction of its own for each of the chunk's, which needs those of the
same piece alone. So programs at two sizes hold the same thing, a piece's instructions, in other numbers and with
messages that follow each other on a channel in another order. What ``verify_programs`` finds at one size is true at
all if it does not rest on that order, which ``every_size`` asks for:

- *Contents*: a piece meets only instructions of its own, so it ends as it does at the size that was looked at.
- *Races*: two accesses to one element are of the same piece, and what orders them, needs and messages, is too.
- *Messages meet*, and *no deadlock*: all ranks order all messages by one key, the piece's place in the pipeline
  and then the transfer. Needs that point backwards for one piece do so for all, and by the same distance.

What remains to be trusted is that ``RankTemplate.expand`` cuts other sizes as it cuts this one; ``prove_size`` looks
at the very programs of a size.
"""

from __future__ import annotations

import numpy as np

from mycel.collectives.cost import choose
from mycel.collectives.lower import RankTemplate, chunk_bounds, lower
from mycel.collectives.schedule import Schedule
from mycel.collectives.verify import verify_own_program, verify_programs
from mycel.errors import UsageError

__all__ = ["prove_lowering", "prove_size"]

_ELEMENT_BYTES = 4
#: Blocks up to which they are given different lengths: all_to_all has a block a pair of ranks.
_MOST_LENGTHS = 1 << 14


def prove_lowering(
    schedule: Schedule, num_elements: int | None = None, piece_elements: int = 0, *, rank: int | None = None
) -> int:
    """Instructions that were looked at, if programs of the schedule are right at every size.

    Args:
        schedule: a verified schedule.
        num_elements: of the array to look at, in equal blocks; small ones of different lengths if not given (of more
            than some thousands, one length).
        piece_elements: longest message. The longest chunks are looked at in two pieces where it asks for more.
        rank: look at this rank's program only, by itself (``verify_own_program``): all are right if every rank does.

    Raises:
        ScheduleError: it cannot be lowered.
        VerificationError: a program is wrong; the message names rank, instruction, channel and elements.
    """
    lengths = None
    if num_elements is None:
        units = np.diff(schedule.block_bounds)
        num_elements = 3 * schedule.num_units
        if len(units) <= _MOST_LENGTHS:
            lengths = ((3 - np.arange(len(units), dtype=np.int64) % 2) * units).tolist()
            num_elements = sum(lengths)
    bounds = chunk_bounds(schedule, num_elements, lengths)
    # Two thirds: the longest chunks are cut in two, and shorter ones are not, so that both kinds meet.
    piece_elements = max(-(-2 * int((bounds[:, 1] - bounds[:, 0]).max()) // 3), piece_elements, 1)
    if rank is not None:
        program = RankTemplate(schedule, rank).expand(num_elements, piece_elements, block_elements=lengths)
        verify_own_program(schedule, program, piece_elements)
        return len(program.columns)
    programs = lower(schedule, num_elements, piece_elements=piece_elements, block_elements=lengths)
    verify_programs(programs, every_size=True)
    return sum(len(program.columns) for program in programs)


def prove_size(schedule: Schedule, num_bytes: int, piece_bytes: int | None = None) -> dict[str, int]:
    """Facts of the programs of one size, which are right: elements of 4 bytes, pieces, instructions of all ranks.

    Args:
        schedule: a verified schedule.
        num_bytes: of the collective's whole array; rounded up to whole elements in every block.
        piece_bytes: longest message; the cost model's choice if not given.

    Raises:
        UsageError: no bytes, or a piece of less than an element.
        ScheduleError: the schedule cannot be lowered.
        VerificationError: a program is wrong; the message names rank, instruction, channel and elements.
    """
    piece_bytes = piece_bytes or choose({schedule.method: schedule}, max(num_bytes, 1)).piece_bytes
    if num_bytes <= 0 or piece_bytes < _ELEMENT_BYTES:
        raise UsageError(
            f"no programs for {num_bytes} bytes in pieces of {piece_bytes}; at least 1 and {_ELEMENT_BYTES} bytes"
        )
    share = _ELEMENT_BYTES * schedule.collective.total_weight
    blocks = [-(-num_bytes * weight // share) for weight in schedule.collective.block_weights]
    piece = piece_bytes // _ELEMENT_BYTES
    programs = lower(schedule, sum(blocks), piece_elements=piece, block_elements=blocks)
    verify_programs(programs)
    rows = sum(len(program.columns) for program in programs)
    return {"num_elements": sum(blocks), "piece_bytes": piece_bytes, "num_instructions": rows}
