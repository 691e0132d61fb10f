"""What an action of an order waits for, and which results go from one rank to another.

A *result* is what a computation leaves for others: the activations of a stage's forward, the gradient of its input
from the backward (whole, or its first half), a shared block's outcome.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from mycel.pipeline.order import Action, Kind, Order

__all__ = ["Message", "Result", "messages_of", "needs_of", "result_of"]

#: What is made, by which stage or block, of which micro-batch: ("F" | "B" | "W", stage, m), or ("S", block, m).
Result = tuple[str, int | str, int]

_LETTER = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.INPUT: "B", Kind.WEIGHT: "W"}
_END = re.compile(r"(\d+)(F|B|I|W)", re.ASCII)


def result_of(leaf: Action) -> Result | None:
    """What an action without parts makes; ``None`` of messages and of what is about parameters.

    Args:
        leaf: the action.
    """
    if leaf.micro_batch is None or leaf.kind.is_message:
        return None
    if leaf.kind is Kind.SHARED:
        return ("S", leaf.block, leaf.micro_batch)
    return (_LETTER[leaf.kind], leaf.stage, leaf.micro_batch)


def needs_of(order: Order) -> Callable[[Action], tuple[Result, ...]]:
    """A function from an action without parts to the results that it needs.

    A forward needs that of the stage before it on the micro-batch's route, a backward its own forward and the
    backward of the stage after it, the second half of a backward the first. With ``feeds`` it is what they say.

    Args:
        order: whose actions are asked for.
    """
    if order.feeds is not None:
        return _needs_by_feeds(order)
    before: list[dict[int, int]] = []
    for micro_batch in range(order.num_micro_batches if order.routes is not None else 1):
        route = order.route_of(micro_batch)
        before.append(dict(zip(route[1:], route, strict=False)))
    after = [{stage: following for following, stage in step.items()} for step in before]
    is_plain = order.routes is None

    def needs(leaf: Action) -> tuple[Result, ...]:
        kind, stage, m = leaf.kind, leaf.stage, leaf.micro_batch
        if m is None or not kind.is_computation:
            return ()
        at = 0 if is_plain else m
        if kind is Kind.FORWARD:
            return (("F", before[at][stage], m),) if stage in before[at] else ()
        if kind is Kind.WEIGHT:
            return (("B", stage, m),)
        own: Result = ("F", stage, m)
        return (own, ("B", after[at][stage], m)) if stage in after[at] else (own,)

    return needs


def _needs_by_feeds(order: Order) -> Callable[[Action], tuple[Result, ...]]:
    there = {result_of(leaf) for row in order.rows for action in row for leaf in action.leaves}
    befores: dict[tuple[str, int | str], list[tuple[str, int | str]]] = defaultdict(list)
    for before, after in order.feeds or ():
        befores[_end(after)].append(_end(before))

    def needs(leaf: Action) -> tuple[Result, ...]:
        made = result_of(leaf)
        if made is None:
            return ()
        letter, place, m = made
        found: list[Result] = [(*end, m) for end in befores[letter, place] if (*end, m) in there]
        if letter == "B":
            found.append(("F", place, m))
        elif letter == "W":
            found.append(("B", place, m))
        return tuple(dict.fromkeys(found))

    return needs


def _end(text: str) -> tuple[str, int | str]:
    if found := _END.fullmatch(text):
        return ("B" if found[2] == "I" else found[2], int(found[1]))
    return ("S", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A result that one rank makes and another needs.

    Attributes:
        result: what is sent.
        source: rank that makes it.
        destination: rank that needs it.
        stage: that needs it.
    """

    result: Result
    source: int
    destination: int
    stage: int


def messages_of(order: Order) -> dict[tuple[Result, int], Message]:
    """The messages between stages that an order's computations ask for, by result and by the stage that needs it.

    What goes into and out of shared blocks is the blocks' own affair, which all their ranks carry out together.

    Args:
        order: with messages among its actions or without.
    """
    needs = needs_of(order)
    found = {}
    for rank, row in enumerate(order.rows):
        for action in row:
            for leaf in action.leaves:
                for result in needs(leaf) if leaf.kind is not Kind.SHARED else ():
                    if isinstance(result[1], int) and (source := order.rank_of(result[1])) != rank:
                        found[result, leaf.stage] = Message(
                            result=result, source=source, destination=rank, stage=leaf.stage
                        )
    return found
