"""Draws the operations of a rank's thread blocks around a place where a plan goes wrong, for people."""

from __future__ import annotations

from mycel.collectives.verify.grid import draw_table
from mycel.collectives.verify.plan_data import WAITS, ForeignPlan, Operation

__all__ = ["draw_operations"]

_AROUND = 3
_LEGEND = "rank.block; wait<r and signal>r by peer   [..]! here it goes wrong"


def draw_operations(plan: ForeignPlan, rank: int, number: int, at: int) -> str:
    """The rank's thread blocks, a row each, and their operations around the bad one.

    Args:
        plan: with plain operations alone.
        rank: whose blocks.
        number: the bad operation's block.
        at: its place in it.
    """
    columns = range(max(0, at - _AROUND), at + _AROUND + 1)
    table = [["rank.block", *(f"op {column}" for column in columns)]]
    for other, operations in enumerate(plan.blocks[rank]):
        line = [f"{rank}.{other}"]
        for column in columns:
            text = _cell(plan, operations[column]) if column < len(operations) else ""
            line.append(f"[{text}]!" if (other, column) == (number, at) else text)
        table.append(line)
    return draw_table(table, _LEGEND)


def _cell(plan: ForeignPlan, op: Operation) -> str:
    peers = [plan.peers[end].rank for end in op.ends if end in plan.peers]
    peers = peers or [span.rank for span in op.targets if op.name in ("put", "ppkt", "rppkt")]
    mark = "<" if op.name in WAITS else ">"
    return f"{op.name}{mark}{','.join(map(str, peers))}" if peers else op.name
