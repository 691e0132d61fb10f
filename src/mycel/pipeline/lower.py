"""From an order of computations to one with messages, gathers of parameters and reductions of gradients.

A result is sent right after it was made and received just before it is needed, so that a receive buffer lives no
longer than it must. Messages carry no tags: between two ranks the n-th that is sent is the n-th that is received. So
where a rank needs a later message of a pair first, the earlier ones are received before it. Sends and receives of two
ranks then stand in the same sequence on both, which is all that makes the result right.

Parameters are gathered (``UNSHARD``) for the next stages in use, three at most, given back (``RESHARD``) when a stage
is not among them, and gradients reduced (``REDUCE_GRAD``) right after a stage's last backward, as torch's runtime
expects it. Where parameters are not sharded, it passes over the first two.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from mycel.errors import ScheduleError
from mycel.pipeline.needs import Message, Result, messages_of, needs_of, result_of
from mycel.pipeline.order import Action, Kind, Order

__all__ = ["lower"]

#: Stages whose parameters are whole at once on a rank: one each for a forward and a backward, and the one to come.
_MOST_GATHERED = 3

_SENDS = {"F": Kind.SEND_F, "B": Kind.SEND_B}
_RECEIVES = {"F": Kind.RECV_F, "B": Kind.RECV_B}


def lower(order: Order, *, most_gathered: int = _MOST_GATHERED) -> Order:
    """The same computations with everything between them.

    Args:
        order: of computations only.
        most_gathered: stages of a rank whose parameters are whole at once. As many as a rank has are gathered once a
            step; fewer hold less and are gathered again.

    Raises:
        ScheduleError: it has communication already, or a stage takes its input from several stages, for which
            torch's actions have no words.

    Examples:
        >>> from mycel.pipeline.known import gpipe
        >>> print(lower(gpipe(2, 2)).to_csv(), end="")
        0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD
        1UNSHARD,1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD
    """
    if order.has_communication:
        raise ScheduleError(f"order {order.name!r} has communication already; lower one of computations only")
    messages = messages_of(order)
    _check_words(messages.values())
    by_result: dict[Result, Message] = {message.result: message for message in messages.values()}
    pairs: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
    for rank, row in enumerate(order.rows):
        for leaf in (leaf for action in row for leaf in action.leaves):
            message = by_result.get(result_of(leaf) or ("", 0, 0))
            if message is not None:
                pairs[rank, message.destination].append(message)
    needs = needs_of(order)
    rows = []
    for rank, computations in enumerate(order.rows):
        row = tuple(_gathered(computations, most_gathered))
        lowered: list[Action] = []
        received: set[Result] = set()
        last = _last_backwards(row)
        for position, action in enumerate(row):
            for leaf in action.leaves:
                for result in needs(leaf) if leaf.kind is not Kind.SHARED else ():
                    message = messages.get((result, leaf.stage))
                    if message is not None and message.destination == rank:
                        lowered += _received(message, pairs[message.source, rank], received)
            lowered.append(action)
            for leaf in action.leaves:
                message = by_result.get(result_of(leaf) or ("", 0, 0))
                if message is not None:
                    lowered.append(
                        Action(stage=leaf.stage, kind=_SENDS[message.result[0]], micro_batch=leaf.micro_batch)
                    )
            lowered += [Action(stage=stage, kind=Kind.REDUCE_GRAD) for stage in last.get(position, ())]
        rows.append(tuple(lowered))
    return replace(order, rows=tuple(rows))


def _check_words(messages: Iterable[Message]) -> None:
    sources: dict[tuple[str, int, int], Message] = {}
    targets: dict[Result, Message] = {}
    for message in messages:
        letter, stage, m = message.result
        for other in (
            sources.setdefault((letter, message.stage, m), message),
            targets.setdefault(message.result, message),
        ):
            if other is not message:
                kind = _RECEIVES[letter].value
                raise ScheduleError(
                    f"stages {message.stage} and {other.stage} exchange micro-batch {m} with stages {stage} and "
                    f"{other.result[1]}: {message.stage}{kind}{m} can be one message only; join branches in a block"
                )


def _received(message: Message, pair: deque[Message], received: set[Result]) -> Iterable[Action]:
    """The receives that are due when a message is needed: its own, and before it those sent earlier."""
    while message.result not in received:
        if not pair:
            letter, stage, m = message.result
            raise ScheduleError(
                f"stage {message.stage} needs {stage}{letter}{m}, which rank {message.source} never does"
            )
        following = pair.popleft()
        received.add(following.result)
        letter, _, m = following.result
        yield Action(stage=following.stage, kind=_RECEIVES[letter], micro_batch=m)


def _last_backwards(row: Sequence[Action]) -> dict[int, list[int]]:
    """Stages by the position in a row after which nothing more is added to their gradients."""
    last: dict[int, int] = {}
    for position, action in enumerate(row):
        for leaf in action.leaves:
            if leaf.kind in (Kind.BACKWARD, Kind.WEIGHT):
                last[leaf.stage] = position
    found: dict[int, list[int]] = defaultdict(list)
    for stage, position in last.items():
        found[position].append(stage)
    return found


def _gathered(row: Sequence[Action], most: int) -> Iterable[Action]:
    """The row with gathers and returns of parameters around its computations."""
    following = _next_stages(row, most)
    whole: dict[int, None] = {}  # in the order in which they were gathered
    for action, wanted in zip(row, following, strict=True):
        for stage in [stage for stage in whole if stage not in wanted]:
            del whole[stage]
            yield Action(stage=stage, kind=Kind.RESHARD)
        for stage in wanted:
            if stage not in whole:
                whole[stage] = None
                yield Action(stage=stage, kind=Kind.UNSHARD)
        yield action
    yield from (Action(stage=stage, kind=Kind.RESHARD) for stage in whole)


def _next_stages(row: Sequence[Action], most: int) -> list[tuple[int, ...]]:
    """At each position, the stages whose computations come next, from there on, soonest first."""
    found: list[tuple[int, ...]] = []
    soonest: tuple[int, ...] = ()
    for action in reversed(row):
        stages = [leaf.stage for leaf in action.leaves if leaf.kind.is_computation]
        if stages:
            room = max(most, len(set(stages)))
            soonest = tuple(dict.fromkeys([*stages, *soonest]))[:room]
        found.append(soonest)
    return found[::-1]
