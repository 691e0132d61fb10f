"""What a plan says of one iteration, as an order of events that an executor can follow whatever things take.

Memory is claimed by forwards, recomputations and transfers back. Claimed in the order of the plan, everything finds
room in the end: what a claim waits for was begun by claims before it. So the order is followed, and not the clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mycel.planning.residency import MemoryInstance, MemoryPlan

__all__ = ["Event", "backward_order", "order_of", "outs_of"]

Kind = Literal["forward", "forward end", "in", "recompute", "backward", "backward end"]
#: Of things at one moment: ends, then computation, then transfers, which would not have to wait for it.
_TURN = {"forward end": 0, "backward end": 0, "forward": 1, "recompute": 1, "backward": 1, "in": 2}
_ENDS: dict[str, Kind] = {"forward": "forward end", "backward": "backward end"}


@dataclass(frozen=True, slots=True, order=True)
class Event:
    """Something that begins or ends.

    Attributes:
        kind: what.
        block: of which block.
    """

    kind: Kind
    block: int


def order_of(instance: MemoryInstance, plan: MemoryPlan) -> tuple[Event, ...]:
    """Forwards, backwards and their ends, recomputations and transfers back, by time.

    Args:
        instance: what was planned.
        plan: right for it.

    Examples:
        >>> from mycel.planning.residency import Block, listed_plan
        >>> two = MemoryInstance(
        ...     blocks=(Block(forward_us=10, backward_us=20, saved=100, input=10),) * 2, capacity=150,
        ...     out_bytes_per_us=5.0, in_bytes_per_us=5.0,
        ... )
        >>> [f"{e.kind} {e.block}" for e in order_of(two, listed_plan(two, ["swap", "keep"]))][3:7]
        ['forward end 1', 'backward 1', 'backward end 1', 'in 0']
    """
    found: list[tuple[int, int, Event]] = []
    for step in plan.schedule:
        if step.action == "out":
            continue
        found.append((step.start_us, _TURN[step.action], Event(step.action, step.block)))
        if step.action in _ENDS:
            block = instance.blocks[step.block]
            lasts = block.forward_us if step.action == "forward" else block.backward_us
            end = _ENDS[step.action]
            found.append((step.start_us + lasts, _TURN[end], Event(end, step.block)))
    found.sort(key=lambda each: each[:2])
    return tuple(event for _, _, event in found)


def backward_order(order: tuple[Event, ...]) -> tuple[Event, ...]:
    """The same without forwards: of a graph that is gone through again.

    Args:
        order: of ``order_of``.
    """
    return tuple(event for event in order if not event.kind.startswith("forward"))


def outs_of(plan: MemoryPlan) -> tuple[int, ...]:
    """Blocks in the order in which they go out.

    Args:
        plan: of which.
    """
    outs = [(step.start_us, step.block) for step in plan.schedule if step.action == "out"]
    return tuple(block for _, block in sorted(outs))
