"""Blocks of a placement as stages of an order: a timed schedule becomes what ranks carry out.

A block on one device whose name is ``F`` and a number is a stage's forward; ``B``, or ``I`` and ``W``, with the same
number its backward, whole or in halves. A second chain may use small letters. A backward without a forward of its
number goes with the last forward on its device that comes before it and has none (three forwards, one backward). Any
other block on one device is a stage with a forward alone, and a block on several devices is shared.
"""

from __future__ import annotations

import re

from mycel.errors import ScheduleError
from mycel.pipeline.action import BLOCK_NAME, NO_STAGE, Action, Kind
from mycel.pipeline.order import Order
from mycel.pipeline.placement import Placement
from mycel.pipeline.timed import Timed

__all__ = ["Stages", "order_of"]

_NAME = re.compile(r"([FBIWfbiw])_?(\d{1,9})", re.ASCII)
_LETTERS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.INPUT, "W": Kind.WEIGHT}


class Stages:
    """Which action each block of a placement is.

    Args:
        placement: the blocks.

    Attributes:
        count: how many stages there are.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        of_stage = self._grouped()
        numbers = self._numbers(of_stage)
        self.count = len(of_stage)
        self._actions: list[tuple[Kind, int, str]] = []
        found = {
            block: (kind, numbers[forward]) for forward, parts in of_stage.items() for kind, block in parts.items()
        }
        for i, block in enumerate(placement.blocks):
            if i in found:
                self._actions.append((*found[i], ""))
            else:
                name = block.name if BLOCK_NAME.fullmatch(block.name) else f"block{i}"
                self._actions.append((Kind.SHARED, NO_STAGE, name))

    def action(self, block: int, micro_batch: int) -> Action:
        """What a rank does when it carries out a block.

        Args:
            block: position in the placement.
            micro_batch: with which.
        """
        kind, stage, name = self._actions[block]
        return Action(stage=stage, kind=kind, micro_batch=micro_batch, block=name)

    @property
    def feeds(self) -> tuple[tuple[str, str], ...] | None:
        """What waits for what, as orders say it; ``None`` where stages wait in a chain, there and back."""
        pairs: list[tuple[str, str]] = []
        for d in self._placement.dependencies:
            before, after = self._end(d.before), self._end(d.after)
            # The halves of a backward, and that it comes after its forward, are not said.
            if before[:-1] != after[:-1] or before in self._shared or after in self._shared:
                pairs.append((before, after))
        named = {end for pair in pairs for end in pair}
        backward = {stage for kind, stage, _ in self._actions if kind in (Kind.BACKWARD, Kind.INPUT)}
        last = range(self.count - 1)
        chain = {(f"{k}F", f"{k + 1}F") for k in last} | {(f"{k + 1}B", f"{k}B") for k in last}
        if set(pairs) == chain and backward == set(range(self.count)) and not self._shared:
            return None
        # A backward that is named nowhere would count as none.
        pairs += [(f"{k}F", f"{k}B") for k in sorted(backward) if f"{k}B" not in named]
        return tuple(dict.fromkeys(pairs))

    @property
    def _shared(self) -> frozenset[str]:
        return frozenset(name for kind, _, name in self._actions if kind is Kind.SHARED)

    def _end(self, block: int) -> str:
        kind, stage, name = self._actions[block]
        return name or f"{stage}{'F' if kind is Kind.FORWARD else 'B'}"

    def _grouped(self) -> dict[int, dict[Kind, int]]:
        """Of each stage, by its forward, the blocks that it consists of."""
        placement = self._placement
        named: dict[tuple[bool, str], dict[Kind, int]] = {}
        single = [i for i in placement.sequence if len(placement.blocks[i].devices) == 1]
        for i in single:
            if found := _NAME.fullmatch(placement.blocks[i].name):
                key = (found[1].isupper(), found[2])
                named.setdefault(key, {})[_LETTERS[found[1].upper()]] = i
        stages = {
            parts[Kind.FORWARD]: {Kind.FORWARD: parts[Kind.FORWARD]}
            for parts in named.values()
            if Kind.FORWARD in parts
        }
        for parts in named.values():
            back = self._backward(parts)
            forward = parts.get(Kind.FORWARD)
            if back and (forward is None or not self._fits(forward, back)):
                others = [f for f in stages if len(stages[f]) == 1 and self._fits(f, back)]
                taken = {p[Kind.FORWARD] for p in named.values() if Kind.FORWARD in p and self._backward(p)}
                forward = next((f for f in reversed(others) if f not in taken), None)
            if back and forward is not None:
                stages[forward] |= back
        used = {block for parts in stages.values() for block in parts.values()}
        for i in single:
            if i not in used:
                stages[i] = {Kind.FORWARD: i}
        return stages

    def _backward(self, parts: dict[Kind, int]) -> dict[Kind, int]:
        """The backward among a stage's blocks: whole, or both halves; a half alone is a whole one."""
        if Kind.BACKWARD in parts:
            return {Kind.BACKWARD: parts[Kind.BACKWARD]}
        if Kind.INPUT in parts and Kind.WEIGHT in parts:
            return {kind: parts[kind] for kind in (Kind.INPUT, Kind.WEIGHT)}
        return {Kind.BACKWARD: parts[Kind.INPUT]} if Kind.INPUT in parts else {}

    def _fits(self, forward: int, back: dict[Kind, int]) -> bool:
        blocks = self._placement.blocks
        return all(
            blocks[i].devices == blocks[forward].devices and self._placement.longest[forward][i] is not None
            for i in back.values()
        )

    def _numbers(self, of_stage: dict[int, dict[Kind, int]]) -> dict[int, int]:
        """The stage of each forward: the number in its name where these count from 0 on, or else their sequence."""
        names = {forward: _NAME.fullmatch(self._placement.blocks[forward].name) for forward in of_stage}
        said = {f: int(found[2]) for f, found in names.items() if found is not None and found[1] == "F"}
        if sorted(said.values()) == list(range(len(of_stage))):
            return said
        sequence = [i for i in self._placement.sequence if i in of_stage]
        return {forward: number for number, forward in enumerate(sequence)}


def order_of(timed: Timed, *, name: str | None = None) -> Order:
    """The order of a timed schedule: each rank's actions by their starts.

    Args:
        timed: the schedule.
        name: of the order; the placement's if none is given.

    Raises:
        ScheduleError: every block is on several devices, so that there is no stage.

    Examples:
        >>> from mycel.pipeline.placement import Block, Dependency
        >>> ends = [(f"F{d}", 1) for d in (0, 1)] + [(f"B{d}", 2) for d in (1, 0)]
        >>> blocks = tuple(Block(name=n, devices=(int(n[1]),), time=t) for n, t in ends)
        >>> waits = tuple(Dependency(before=i, after=i + 1) for i in range(3))
        >>> two = Placement(name="two", num_devices=2, blocks=blocks, dependencies=waits)
        >>> print(order_of(Timed(placement=two, starts=((0, 1, 2, 4), (1, 4, 5, 7)))).to_csv(), end="")
        0F0,0F1,0B0,0B1
        1F0,1B0,1F1,1B1
    """
    stages = Stages(timed.placement)
    if not stages.count:
        raise ScheduleError(
            f"placement {timed.placement.name}: every block is on several devices; an order needs a stage on one"
        )
    return Order(
        rows=tuple(tuple(stages.action(i, m) for i, m in row) for row in timed.rows),
        num_stages=stages.count,
        num_micro_batches=timed.num_micro_batches,
        name=timed.placement.name if name is None else name,
        feeds=stages.feeds,
    )
