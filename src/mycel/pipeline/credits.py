"""Orders that make themselves: every block runs as soon as it can, and credits say how much may be under way.

In OneFlow an actor runs when its inputs are there and one of its registers is free; how many it has decides how many
micro-batches are in flight, and no order is written down. Here a block that takes memory has so many credits: it may
start when fewer of its micro-batches than that are between it and the block that gives the memory back. Devices
serve first what became ready first. What comes out is a schedule like any other, to be simulated, checked and run.

References:
    Yuan et al., "OneFlow: Redesign the Distributed Deep Learning Framework from Scratch", arXiv:2110.15032,
    section 4.3 (registers as credits, back-pressure).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from mycel.arguments import whole_number
from mycel.errors import SynthesisError, UsageError
from mycel.pipeline.placement import Placement
from mycel.pipeline.timed import Place, Timed

__all__ = ["by_credits"]


def by_credits(placement: Placement, num_micro_batches: int, credits: int | Sequence[int]) -> Timed:
    """The schedule that follows from readiness and credits alone.

    Args:
        placement: blocks and devices; caps are those of its own, and the schedule has to keep them.
        num_micro_batches: of the batch.
        credits: of every block that takes memory, or a number for each of these in the order of the placement.

    Raises:
        UsageError: no micro-batches, credits below 1, or as many credits as there are not blocks that take memory.
        ScheduleError: a device holds more than its cap with so many credits.
        SynthesisError: blocks wait for each other's credits for ever.

    Examples:
        >>> from mycel.pipeline.placement import Block, Dependency
        >>> ends = [(f"F{d}", 1, 1) for d in (0, 1)] + [(f"B{d}", 2, -1) for d in (1, 0)]
        >>> blocks = tuple(Block(name=n, devices=(int(n[1]),), time=t, memory=m) for n, t, m in ends)
        >>> waits = tuple(Dependency(before=i, after=i + 1) for i in range(3))
        >>> two = Placement(name="two", num_devices=2, blocks=blocks, dependencies=waits)
        >>> [by_credits(two, 6, credits).makespan for credits in (1, 2, 3)]  # two are 1F1B
        [36, 21, 21]
    """
    count = whole_number(num_micro_batches, "micro-batches", least=1)
    blocks = placement.blocks
    taking = [i for i, block in enumerate(blocks) if _takes(placement, i) > 0]
    given = [credits] * len(taking) if isinstance(credits, int) else list(credits)
    if len(given) != len(taking):
        raise UsageError(
            f"credits for {len(given)} blocks, and {len(taking)} take memory; give one number, or one for each"
        )
    most = {
        i: whole_number(number, f"credits of {blocks[i].name}", least=1)
        for i, number in zip(taking, given, strict=True)
    }
    releases = _releases(placement, taking)
    waits = {(i, m): len(placement.waits[i]) for i in range(len(blocks)) for m in range(count)}
    after: list[list[tuple[int, int]]] = [[] for _ in blocks]
    for d in placement.dependencies:
        after[d.before].append((d.after, d.delay))
    # (time, kind, place): 0, a block ends; 1, what a block waits for has come.
    events: list[tuple[int, int, Place]] = [(0, 1, place) for place, open_waits in waits.items() if not open_waits]
    heapq.heapify(events)
    ready: list[tuple[int, int, int]] = []  # since when, micro-batch, block
    busy = [False] * placement.num_devices
    under_way = dict.fromkeys(taking, 0)
    starts: dict[Place, int] = {}
    came: dict[Place, int] = {}
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, kind, (i, m) = heapq.heappop(events)
            if kind == 1:
                ready.append((now, m, i))
                continue
            for device in blocks[i].devices:
                busy[device] = False
            if i in releases:
                under_way[releases[i]] -= 1
            for j, delay in after[i]:
                waits[j, m] -= 1
                came[j, m] = max(came.get((j, m), 0), now + delay)
                if not waits[j, m]:
                    heapq.heappush(events, (came[j, m], 1, (j, m)))
        for item in sorted(ready):
            _, m, i = item
            if any(busy[device] for device in blocks[i].devices) or under_way.get(i, 0) >= most.get(i, 1):
                continue
            ready.remove(item)
            starts[i, m] = now
            if i in most:
                under_way[i] += 1
            for device in blocks[i].devices:
                busy[device] = True
            heapq.heappush(events, (now + blocks[i].time, 0, (i, m)))
    if len(starts) < len(waits):
        name = blocks[min(ready)[2]].name if ready else "a block"
        raise SynthesisError(
            f"placement {placement.name}: {name} waits for a credit that never comes back; give more credits"
        )
    return Timed(
        placement=placement, starts=tuple(tuple(starts[i, m] for i in range(len(blocks))) for m in range(count))
    )


def _takes(placement: Placement, block: int) -> int:
    return max(placement.blocks[block].memory_on(device) for device in placement.blocks[block].devices)


def _releases(placement: Placement, taking: Sequence[int]) -> dict[int, int]:
    """Of each block that gives memory back the one that took it: the last before it on its device without one."""
    left = list(taking)
    found: dict[int, int] = {}
    for j in placement.sequence:
        if min(placement.blocks[j].memory_on(device) for device in placement.blocks[j].devices) >= 0:
            continue
        fits = [
            i
            for i in left
            if placement.longest[i][j] is not None and placement.blocks[i].devices == placement.blocks[j].devices
        ]
        if fits:
            found[j] = fits[-1]
            left.remove(fits[-1])
    return found
