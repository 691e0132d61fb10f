"""Draws what every rank does with one chunk, step by step, with the bad cell marked; and tables in general."""

from __future__ import annotations

from collections.abc import Sequence

from mycel.collectives.schedule import Schedule

__all__ = ["draw_grid", "draw_table"]

#: Steps shown on each side of the bad one; a deep schedule would not fit a screen otherwise.
_STEPS_AROUND = 6
#: Ranks up to which all rows are shown; beyond, only ranks that do something in the steps shown.
_ALL_RANKS = 16
_LEGEND = ">r sends to r   <r overwritten by r   +r adds what r sends   [..]! here it goes wrong"


def draw_grid(schedule: Schedule, chunk: int, rank: int, step: int, members: Sequence[int]) -> str:
    """A row a vertex, a column a step: what happens to ``chunk``, with the cell of ``rank`` at ``step`` marked.

    Args:
        schedule: where the chunk moves.
        chunk: index of the chunk.
        rank: row of the bad cell; a vertex.
        step: column of the bad cell; -1 is the state before the first transfer.
        members: indices of the chunk's transfers.
    """
    levels = schedule.levels
    first, last = step - _STEPS_AROUND, step + _STEPS_AROUND
    cells: dict[tuple[int, int], list[str]] = {}
    for index in members:
        t, at = schedule.transfers[index], levels[index]
        if first <= at <= last:
            cells.setdefault((t.dst, at), []).append(f"{'+' if t.reduce else '<'}{t.src}")
            cells.setdefault((t.src, at), []).append(f">{t.dst}")
    n, num_vertices = schedule.collective.num_ranks, schedule.num_compute_vertices
    block = schedule.block_of(chunk)
    columns = sorted({at for _, at in cells} | {step})
    rows = [
        r
        for r in range(num_vertices)
        if num_vertices <= _ALL_RANKS or r == rank or any((r, at) in cells for at in columns)
    ]
    if first <= -1 and -1 not in columns:
        columns.insert(0, -1)
    if -1 in columns:
        for r in rows:
            cells[r, -1] = ["own" if r < n and schedule.collective.initial(r, block) else "empty"]
    table = [[f"chunk {chunk}", *("start" if at < 0 else f"step {at}" for at in columns)]]
    for r in rows:
        line = [f"rank {r}" if r < n else f"switch {r}"]
        for at in columns:
            text = " ".join(cells.get((r, at), ["."]))
            line.append(f"[{text}]!" if (r, at) == (rank, step) else text)
        table.append(line)
    return draw_table(table, _LEGEND)


def draw_table(table: Sequence[Sequence[str]], legend: str) -> str:
    """Rows of cells under each other, and what their signs mean."""
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    drawn = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in table]
    return "\n".join([*(line.rstrip() for line in drawn), legend])
