"""Verifies MSCCL++ execution plans: runs them with symbolic contents, and asks whether another order could differ.

The model of time is that of a GPU, taken strictly. Operations of a thread block are not ordered by standing one after
the other, since each is shared out over threads: a ``nop`` or ``barrier``, at which all threads of the block meet,
orders what stands before it against what stands after. Between blocks, ``sem_release`` orders against ``sem_acquire``
and ``signal`` against ``wait``; the relaxed forms of the latter say only that the rank has begun. What is put on a
port channel moves later, by itself: it has certainly happened once the peer has waited for the signal after it, or
after a ``flush``. What goes through a switch channel is the work of the thread block that asks for it, at all ranks
behind the switch. A packet says by its flag that it is there: whoever reads it comes after it was written, element by
element, and after what was read to write it, and after nothing else.

A rank's memory is nobody else's before the rank has begun and after it has finished: whoever reads or writes it from
outside must know the first, and the rank must wait for the second. So a right plan is also right when it runs twice.
Scratch with packets is the exception, for a flag is another one in each run; there two runs are looked at after each
other, or three where they use two halves in turns, and no packet may be overwritten while it may still be read.

Four checks: nothing waits for ever and no signal is left over; every chunk of the output holds each contribution
exactly once; no operation reads what nothing was written to; and every two accesses to a chunk, one of them a write,
are ordered (``order``), so that every other possible order gives the same result. They are made at all sizes that
differ in something: steps of pipelines, parts of groups, rounds of scratch of a fixed length (``plan_units``).

References:
    L. Lamport, "Time, clocks, and the ordering of events in a distributed system", CACM 21(7), 1978 (happens-before).
"""

from __future__ import annotations

from typing import Any

from mycel.collectives.verify.plan_data import SENDRECV, UNLOADED, ForeignPlan
from mycel.collectives.verify.plan_form import read_plan
from mycel.collectives.verify.plan_replay import Replay
from mycel.collectives.verify.plan_units import in_units, sizes_of
from mycel.errors import VerificationError

__all__ = ["check_plan", "verify_plan"]


def check_plan(data: Any) -> dict[str, Any]:
    """Facts of the plan in a JSON value, which is right.

    Raises:
        ScheduleError: malformed or beyond a limit.
        VerificationError: it computes something wrong, or may.
    """
    plan = read_plan(data)
    verify_plan(plan)
    return {
        "name": plan.name,
        "collective": SENDRECV if plan.is_sendrecv else plan.collective.name,
        "num_ranks": plan.collective.num_ranks,
        "in_place": plan.in_place,
        "num_thread_blocks": max(len(blocks) for blocks in plan.blocks),
        "num_operations": sum(1 + len(op.inner) for blocks in plan.blocks for block in blocks for op in block),
        "num_chunks": max(plan.chunks[0]["i"], plan.chunks[0]["o"]),
        "notes": _notes(plan),
    }


def verify_plan(plan: ForeignPlan) -> None:
    """Return if the plan carries out its collective, however it is timed; raise otherwise.

    Raises:
        ScheduleError: messages that it allows do not fit into scratch of a fixed length.
        VerificationError: the message names rank, thread block and operation; ``grid`` shows the blocks around.
    """
    for size in sizes_of(plan):
        try:
            Replay(in_units(plan, size)).run()
        except VerificationError as error:
            if size.folded is None:
                raise
            length = size.folded * size.unit_bytes
            raise VerificationError(
                f"{error} (in messages of more than {length} bytes a chunk, which do not fit into scratch at once; "
                "give a lower max_message_size, or let the first step wait for the last that uses its place)",
                grid=error.grid,
            ) from None


def _notes(plan: ForeignPlan) -> list[str]:
    """What a user of the runtime should know though the plan is right."""
    notes: list[str] = []
    everything = [op for blocks in plan.blocks for block in blocks for op in block]
    if unknown := sorted({op.name for op in everything} & set(UNLOADED)):
        notes.append(f"the runtime's loader (August 2026) has no name for {', '.join(unknown)}, and refuses the plan")
    if (parts := max((op.num_parts for op in everything), default=1)) > 1:
        notes.append(
            f"groups of {parts} thread blocks: the runtime (August 2026) leaves pieces of less than {16 * parts} "
            "bytes unmoved; min_message_size should keep such away"
        )
    return notes
