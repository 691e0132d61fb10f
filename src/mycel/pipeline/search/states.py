"""States of a schedule in time, and what can happen next: a block starts, or time goes on to the next event.

Every order has a schedule in which each block starts as soon as its devices, in that order, and what it waits for
allow: at an event, which is the end of a block or the arrival of what it sends. Seen in the order of starts such a
schedule is a walk over states: of each block how many micro-batches have started, what runs on each device and for
how long still, and which messages are on their way. Micro-batches are alike and come in order, so that counts say
which they are; the device of a block that starts is idle, so that counts say what it holds. What led to a state does
not matter to what may follow. So of all ways to a state one that is there first is enough, and states are few where
blocks wait for each other in a row: for ``n`` blocks and ``M`` micro-batches there are ``C(n + M, M)`` counts.

References:
    M. Held, R. M. Karp, "A dynamic programming approach to sequencing problems", J. SIAM 10(1), 1962 (of all ways to
    a set of jobs that are done one is enough).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import comb

from mycel.pipeline.placement import Placement

__all__ = ["Moves", "State", "count_of_ideals"]

#: Started micro-batches of each block; of each device time left and block, as ``left * blocks + block``, or 0; of
#: each delayed dependency the times until its messages arrive.
State = tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, ...], ...]]


class Moves:
    """What may follow in time on a state of a placement.

    Args:
        placement: blocks, devices and caps.
    """

    def __init__(self, placement: Placement) -> None:
        blocks = placement.blocks
        self.placement = placement
        self.num_blocks = len(blocks)
        self.times = [block.time for block in blocks]
        self._devices = [block.devices for block in blocks]
        delayed = [d for d in placement.dependencies if d.delay]
        self._delayed = [[(e, d.delay) for e, d in enumerate(delayed) if d.before == i] for i in range(len(blocks))]
        self._late = [[(d.before, e) for e, d in enumerate(delayed) if d.after == i] for i in range(len(blocks))]
        self._waits = [
            sorted({d.before for d in placement.dependencies if d.after == i and not d.delay})
            for i in range(len(blocks))
        ]
        sizes = [[(i, size) for i in mine if (size := blocks[i].memory_on(d))] for d, mine in enumerate(placement.on)]
        self._takes = [
            [
                (sizes[d], cap - size)
                for d in block.devices
                if (cap := placement.cap[d]) is not None and (size := block.memory_on(d)) > 0
            ]
            for block in blocks
        ]
        self.first: State = ((0,) * len(blocks), (0,) * placement.num_devices, ((),) * len(delayed))

    def starts(self, state: State) -> Iterator[tuple[int, State]]:
        """Each block that may start now, with the state behind it; how many micro-batches there are is not asked.

        Args:
            state: now.
        """
        counts, running, late = state
        now = {code % self.num_blocks for code in running if code}
        for b in range(self.num_blocks):
            if any(running[device] for device in self._devices[b]):
                continue
            count = counts[b]
            if any(counts[a] - (a in now) <= count for a in self._waits[b]):
                continue
            if any(counts[a] - len(late[e]) <= count for a, e in self._late[b]):
                continue
            if any(sum(size * counts[i] for i, size in held) > most for held, most in self._takes[b]):
                continue
            code = self.times[b] * self.num_blocks + b
            after = list(running)
            for device in self._devices[b]:
                after[device] = code
            on_their_way = late
            if self._delayed[b]:
                ways = list(late)
                for e, delay in self._delayed[b]:
                    ways[e] = (*ways[e], self.times[b] + delay)
                on_their_way = tuple(ways)
            yield b, ((*counts[:b], count + 1, *counts[b + 1 :]), tuple(after), on_their_way)

    def wait(self, state: State) -> tuple[int, State] | None:
        """Time until the next event and the state then; ``None`` where nothing is under way.

        Args:
            state: now.
        """
        counts, running, late = state
        ends = [code // self.num_blocks for code in running if code]
        ends += [way[0] for way in late if way]
        if not ends:
            return None
        step = min(ends)
        gone = step * self.num_blocks
        after = tuple(code - gone if code >= gone + self.num_blocks else 0 for code in running)
        if any(late):
            late = tuple(tuple(left - step for left in way if left > step) for way in late)
        return step, (counts, after, late)


def count_of_ideals(placement: Placement, num_micro_batches: int) -> int:
    """How many counts of started micro-batches there are, at most: blocks are split into chains.

    Args:
        placement: of whose blocks.
        num_micro_batches: of the batch.
    """
    left = list(placement.sequence)
    total = 1
    while left:
        # The longest way through what is left, by number of blocks.
        best: dict[int, tuple[int, ...]] = {}
        for i in left:
            ways = [best[a] for a in best if placement.longest[a][i] is not None]
            best[i] = (*max(ways, key=len, default=()), i)
        chain = max(best.values(), key=len)
        left = [i for i in left if i not in chain]
        total *= comb(len(chain) + num_micro_batches, num_micro_batches)
    return total
