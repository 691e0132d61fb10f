"""What a replay of a plan keeps count of: thread blocks, what is on its way through ports, signals and semaphores."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from mycel.collectives.verify.plan_data import Operation

__all__ = ["Counting", "Put", "ThreadBlock"]


@dataclass(slots=True)
class ThreadBlock:
    """A thread block as it runs: the last barrier of its threads, and what they have done since."""

    rank: int
    number: int
    operations: tuple[Operation, ...]
    at: int = 0
    barrier: int = -1
    barriers: int = 0
    since: list[int] = field(default_factory=list)

    def meet(self, event: int) -> None:
        """All its threads come together."""
        self.barrier, self.since = event, []
        self.barriers += 1


@dataclass(slots=True)
class Put:
    """Something on its way through a port channel: from which block, after how many barriers, by which thread."""

    event: int
    block: tuple[int, int]
    barriers: int
    thread: int

    def precedes(self, block: ThreadBlock, thread: int) -> bool:
        """Whether it was handed to the channel before what this thread of the block does now."""
        mine = self.block == (block.rank, block.number)
        return mine and (self.barriers < block.barriers or self.thread == thread)


class Counting:
    """A counter that some blocks raise and one block lowers: which raises are known to have happened after k."""

    def __init__(self, initial: int = 0) -> None:
        self.initial = initial
        self.expected: Counter[tuple[int, int]] = Counter()
        self.raised: dict[tuple[int, int], list[int]] = {}
        self.num_raised = 0
        self.num_lowered = 0

    def may_lower(self) -> bool:
        """Whether a wait goes on."""
        return self.initial + self.num_raised > self.num_lowered

    def raise_by(self, block: ThreadBlock, event: int) -> None:
        """One more, after an event; -1: after nothing that is known."""
        self.raised.setdefault((block.rank, block.number), []).append(event)
        self.num_raised += 1

    def lower(self) -> list[int]:
        """Events that have certainly happened: of each block, those that the others cannot stand in for."""
        self.num_lowered += 1
        total, known = sum(self.expected.values()), []
        for block, events in self.raised.items():
            sure = self.num_lowered - self.initial - (total - self.expected[block])
            known += [event for event in events[:sure] if event >= 0] if sure > 0 else []
        return known
