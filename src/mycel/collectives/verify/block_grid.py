"""Draws the steps of thread blocks around a place where a plan goes wrong, for people."""

from __future__ import annotations

from mycel.collectives.blocks import READS_SOURCE, RECEIVES, SENDS, WRITES_TARGET, BlockPlan, Place, Step
from mycel.collectives.verify.grid import draw_table

__all__ = ["draw_blocks"]

_STEPS_AROUND = 2
_MOST_ROWS = 20
_LEGEND = ">r sends to rank r   <r receives from rank r   ^b.s waits for block b, step s   [..]! here it goes wrong"


def draw_blocks(plan: BlockPlan, rank: int, block: int, number: int) -> str:
    """A grid of the rank's blocks, and of those connected with the bad one, against step numbers.

    Args:
        plan: all of it.
        rank: where it goes wrong.
        block: the bad step's block; -1 where no step is to blame.
        number: the bad step.
    """
    rows = [(rank, b) for b in range(len(plan.ranks[rank].blocks))]
    if block >= 0:
        bad = plan.ranks[rank].blocks[block]
        rows.sort(key=lambda row: row[1] != block)
        for peer in sorted({bad.send, bad.recv} - {-1}):
            for b, other in enumerate(plan.ranks[peer].blocks):
                meets = (bad.send == peer and other.recv == rank) or (bad.recv == peer and other.send == rank)
                if meets and other.channel == bad.channel and peer != rank:
                    rows.insert(1, (peer, b))
    rows = sorted(rows[:_MOST_ROWS])
    longest = max((len(plan.ranks[r].blocks[b].steps) for r, b in rows), default=0)
    first, last = (0, 2 * _STEPS_AROUND) if block < 0 else (number - _STEPS_AROUND, number + _STEPS_AROUND)
    columns = range(max(0, first), min(last + 1, longest))
    table = [["", *(f"step {at}" for at in columns)]]
    for r, b in rows:
        here = plan.ranks[r].blocks[b]
        line = [f"rank {r} block {b}"]
        for at in columns:
            text = _cell(here.steps[at], here.send, here.recv) if at < len(here.steps) else "."
            line.append(f"[{text}]!" if (r, b, at) == (rank, block, number) else text)
        table.append(line)
    return draw_table(table, _LEGEND)


def _cell(step: Step, send: int, recv: int) -> str:
    text: str = step.kind
    if step.kind in READS_SOURCE:
        text += f" {_place(step.source, step.count)}"
    if step.kind in WRITES_TARGET:
        text += f" {'to ' if step.kind in READS_SOURCE else ''}{_place(step.target, step.count)}"
    if step.kind in RECEIVES:
        text += f" <{recv}"
    if step.kind in SENDS:
        text += f" >{send}"
    if step.waits is not None:
        text += f" ^{step.waits[0]}.{step.waits[1]}"
    return text


def _place(place: Place, count: int) -> str:
    return f"{place.buffer}{place.offset}" + (f"+{count}" if count > 1 else "")
