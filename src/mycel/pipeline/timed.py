"""Timed: when every block of every micro-batch starts. What searches find, and what becomes an ``Order``.

Construction proves the schedule: each device does one block at a time, every dependency and delay is kept, and no
device holds more memory than its cap. So whatever a solver or a repair answers, what is wrong goes no further.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from mycel.brief import brief
from mycel.errors import ScheduleError
from mycel.pipeline.placement import Placement

__all__ = ["Place", "Timed", "earliest"]

#: A block of a micro-batch: ``(block, micro_batch)``.
Place = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A whole batch in time.

    Attributes:
        placement: what every micro-batch consists of.
        starts: of each micro-batch the start of each block.

    Raises:
        ScheduleError: two blocks of a device at once, a block before what it waits for, or more memory than the cap.

    Examples:
        >>> from mycel.pipeline.placement import Block, Dependency
        >>> halves = (Block(name="F0", devices=(0,), time=1), Block(name="F1", devices=(1,), time=2))
        >>> two = Placement(name="", num_devices=2, blocks=halves, dependencies=(Dependency(before=0, after=1),))
        >>> Timed(placement=two, starts=((0, 1), (1, 3))).makespan
        5
    """

    placement: Placement
    starts: tuple[tuple[int, ...], ...]

    __repr__ = brief

    def __post_init__(self) -> None:
        blocks = self.placement.blocks
        if not self.starts or any(len(row) != len(blocks) for row in self.starts):
            raise ScheduleError(f"a timed schedule needs {len(blocks)} starts for each of at least one micro-batch")
        for micro_batch, row in enumerate(self.starts):
            for d in self.placement.dependencies:
                earliest_start = row[d.before] + blocks[d.before].time + d.delay
                if row[d.after] < earliest_start:
                    raise ScheduleError(
                        f"micro-batch {micro_batch}: {blocks[d.after].name} starts at {row[d.after]}, and what it "
                        f"waits for, {blocks[d.before].name}, allows {earliest_start}"
                    )
        for device, row_ in enumerate(self.rows):
            for (i, m), (j, k) in pairwise(row_):
                if self.starts[m][i] + blocks[i].time > self.starts[k][j]:
                    raise ScheduleError(
                        f"device {device}: {blocks[i].name} of micro-batch {m} and {blocks[j].name} of {k} overlap"
                    )
        for device, (peak, cap) in enumerate(zip(self.peak, self.placement.cap, strict=True)):
            if cap is not None and peak > cap:
                raise ScheduleError(f"device {device} holds {peak} of memory; its cap is {cap}")

    @property
    def num_micro_batches(self) -> int:
        """How many micro-batches the batch has."""
        return len(self.starts)

    @cached_property
    def rows(self) -> tuple[tuple[Place, ...], ...]:
        """Of each device its blocks in order of execution, ``(block, micro_batch)``."""
        return tuple(
            tuple(
                sorted(((i, m) for i in mine for m in range(len(self.starts))), key=lambda p: self.starts[p[1]][p[0]])
            )
            for mine in self.placement.on
        )

    @cached_property
    def makespan(self) -> int:
        """From the first start to the last end."""
        blocks = self.placement.blocks
        ends = max(start + block.time for row in self.starts for start, block in zip(row, blocks, strict=True))
        return ends - min(min(row) for row in self.starts)

    @cached_property
    def peak(self) -> tuple[int, ...]:
        """The most memory that each device holds."""
        peaks = []
        for device, row in enumerate(self.rows):
            held = most = 0
            for i, _ in row:
                held += self.placement.blocks[i].memory_on(device)
                most = max(most, held)
            peaks.append(most)
        return tuple(peaks)

    @cached_property
    def idle(self) -> float:
        """Share of all devices' time in which they do nothing: the bubble."""
        return 1 - sum(self.placement.work) * self.num_micro_batches / (self.placement.num_devices * self.makespan)


def earliest(placement: Placement, rows: Sequence[Sequence[Place]]) -> Timed:
    """The schedule in which every device keeps an order and everything starts as soon as it can.

    An order of blocks decides the memory of a device, so that starting earlier never needs more.

    Args:
        placement: what every micro-batch consists of.
        rows: of each device its blocks in order, ``(block, micro_batch)``.

    Raises:
        ScheduleError: the orders and the dependencies go round in a circle.
    """
    blocks = placement.blocks
    count = 1 + max(m for row in rows for _, m in row)
    after: dict[Place, list[tuple[Place, int]]] = {(i, m): [] for i in range(len(blocks)) for m in range(count)}
    waits = dict.fromkeys(after, 0)
    for m in range(count):
        for d in placement.dependencies:
            after[d.before, m].append(((d.after, m), blocks[d.before].time + d.delay))
            waits[d.after, m] += 1
    for row in rows:
        for first, then in pairwise(row):
            after[first].append((then, blocks[first[0]].time))
            waits[then] += 1
    start = dict.fromkeys(after, 0)
    ready = [place for place, open_waits in waits.items() if not open_waits]
    done = 0
    while ready:
        place = ready.pop()
        done += 1
        for then, far in after[place]:
            start[then] = max(start[then], start[place] + far)
            waits[then] -= 1
            if not waits[then]:
                ready.append(then)
    if done < len(after):
        raise ScheduleError("the devices' orders and the dependencies wait for each other in a circle")
    return Timed(
        placement=placement, starts=tuple(tuple(start[i, m] for i in range(len(blocks))) for m in range(count))
    )
