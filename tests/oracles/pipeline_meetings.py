"""Two small worlds in which ranks wait for each other: messages without any buffer, and blocks that several ranks do.

They read the text of orders by themselves and share nothing with the library.
"""

from __future__ import annotations

import re
from collections import Counter

_MESSAGE = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)")
_SHARED = re.compile(r"SHARED(\d+)\[(.+)\]")
_WORK = re.compile(r"(\d+)([FBIW])(\d+)")


def ends_without_buffers(rows: list[list[str]]) -> bool:
    """Whether an order of stages in a chain ends where a send and its receive are over only together.

    Args:
        rows: cells of an order with communication, in torch's text, a list a rank.
    """

    def meeting(cell: str) -> tuple[str, int, int] | None:
        found = _MESSAGE.fullmatch(cell)
        if found is None:
            return None
        stage, towards = int(found[1]), 1 if found[3] == "F" else -1
        return found[3], stage if found[2] == "SEND" else stage - towards, int(found[4])

    places = [0] * len(rows)
    while True:
        at: dict[tuple[str, int, int], int] = {}
        moved = False
        for rank, row in enumerate(rows):
            while places[rank] < len(row) and (meeting(row[places[rank]])) is None:
                places[rank] += 1
                moved = True
            if places[rank] == len(row):
                continue
            message = meeting(row[places[rank]])
            assert message is not None
            if message in at:
                places[at.pop(message)] += 1
                places[rank] += 1
                moved = True
            else:
                at[message] = rank
        if not moved:
            return all(place == len(row) for place, row in zip(places, rows, strict=True))


def meets(
    rows: list[list[str]], feeds: list[tuple[str, str]], blocks: dict[str, set[int]], micro_batches: int
) -> str:
    """What is wrong with an order of computations and shared blocks; empty if all is done, once, and in time.

    Args:
        rows: cells, a list a rank.
        feeds: what needs the result of what, for each micro-batch, with what is within a stage.
        blocks: ranks of each shared block.
        micro_batches: how many.
    """
    ends = {end for pair in feeds for end in pair}
    wanted = Counter((end, m) for end in ends for m in range(micro_batches) for _ in blocks.get(end, {0}))
    owner: dict[str, int] = {}
    read: list[list[tuple[str, int]]] = []
    for rank, row in enumerate(rows):
        read.append([])
        for cell in row:
            if found := _SHARED.fullmatch(cell):
                if rank not in blocks[found[2]]:
                    return f"{cell} on rank {rank}"
                read[-1].append((found[2], int(found[1])))
            else:
                work = _WORK.fullmatch(cell)
                assert work is not None
                if owner.setdefault(work[1], rank) != rank:
                    return f"stage {work[1]} on two ranks"
                read[-1].append((work[1] + work[2], int(work[3])))
    if Counter(event for row in read for event in row) != wanted:
        return "not all once"
    if any(len(set(row)) < len(row) for row in read):
        return "twice on a rank"
    done: set[tuple[str, int]] = set()
    places, moved = [0] * len(rows), True
    while moved:
        moved = False
        for rank, events in enumerate(read):
            if places[rank] == len(events):
                continue
            event = events[places[rank]]
            if any((before, event[1]) not in done for before, after in feeds if after == event[0]):
                continue
            there = [r for r, other in enumerate(read) if places[r] < len(other) and other[places[r]] == event]
            if len(there) < len(blocks.get(event[0], {rank})):
                continue
            for r in there:
                places[r] += 1
            done.add(event)
            moved = True
    return "" if all(place == len(events) for place, events in zip(places, read, strict=True)) else "it stops"
