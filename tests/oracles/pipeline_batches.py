"""The least makespan of a small batch by trying every order of its blocks; knows nothing of mycel's searches."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["least_makespan"]

#: (devices, time, memory of each of its devices)
BlockData = tuple[tuple[int, ...], int, int]


def least_makespan(
    blocks: Sequence[BlockData],
    waits: Sequence[tuple[int, int, int]],
    caps: Sequence[int | None],
    micro_batches: int,
) -> int | None:
    """Depth first over all sequences in which blocks are started one after the other, each as early as it can.

    Every schedule in which nothing can start earlier is found by starting its blocks in the order of their start
    times, and some shortest schedule is of that kind. Micro-batches are not taken for interchangeable.

    Args:
        blocks: devices, time and memory of each.
        waits: (before, after, delay).
        caps: of each device.
        micro_batches: of the batch.

    Returns:
        The makespan; ``None`` where no order keeps the caps.
    """
    places = [(i, m) for m in range(micro_batches) for i in range(len(blocks))]
    before: dict[tuple[int, int], list[tuple[tuple[int, int], int]]] = {place: [] for place in places}
    for a, b, delay in waits:
        for m in range(micro_batches):
            before[b, m].append(((a, m), delay))
    rest = {}
    for i in range(len(blocks)):
        rest[i] = _rest(i, blocks, waits)
    best: list[int | None] = [None]
    seen: dict[tuple[object, ...], int] = {}

    def go(ends: dict[tuple[int, int], int], free: tuple[int, ...], held: tuple[int, ...], last: int) -> None:
        if len(ends) == len(places):
            makespan = max(ends.values())
            if best[0] is None or makespan < best[0]:
                best[0] = makespan
            return
        state = (frozenset(ends.items()), free)
        if seen.get(state, 1 << 60) <= last:
            return
        seen[state] = last
        for i, m in places:
            if (i, m) in ends or any(earlier not in ends for earlier, _ in before[i, m]):
                continue
            if m and (i, m - 1) not in ends:
                continue  # which micro-batch is called the first decides nothing
            devices, time, memory = blocks[i]
            start = max([ends[e] + delay for e, delay in before[i, m]] + [free[d] for d in devices] + [0])
            if start < last or (best[0] is not None and start + rest[i] >= best[0]):
                continue
            now = list(held)
            for d in devices:
                now[d] += memory
                cap = caps[d]
                if cap is not None and now[d] > cap:
                    break
            else:
                then = list(free)
                for d in devices:
                    then[d] = start + time
                go(ends | {(i, m): start + time}, tuple(then), tuple(now), start)

    devices = len(caps)
    go({}, (0,) * devices, (0,) * devices, 0)
    return best[0]


def _rest(i: int, blocks: Sequence[BlockData], waits: Sequence[tuple[int, int, int]]) -> int:
    """Time from a block's start until all that waits for it is over."""
    return blocks[i][1] + max((delay + _rest(b, blocks, waits) for a, b, delay in waits if a == i), default=0)
