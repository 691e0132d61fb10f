"""What a failure in the middle of a pipeline means: who is awaited, for which action, by way of whom."""

from __future__ import annotations

import re
from collections import deque

from mycel.errors import CollectiveTimeoutError, CommunicationError, PeerLostError
from mycel.parallel.lists import Routes
from mycel.pipeline.needs import needs_of, result_of
from mycel.pipeline.order import Action, Kind, Order

__all__ = ["explained"]

#: Ranks that one message speaks of.
_MOST_NAMED = 8
_RANK = re.compile(r"\brank (\d+)\b")
#: In messages of torch's own backends, which have one type for all.
_LATE = re.compile(r"tim(ed|e)[ -]?out|still under way", re.IGNORECASE)
_LOST = re.compile(r"reset by peer|closed by peer|broken pipe|connection refused|eof|socket", re.IGNORECASE)


def explained(error: Exception, order: Order, routes: Routes, rank: int, action: Action) -> CommunicationError | None:
    """The failure of a wait in words of the order; ``None``: it is not about other ranks.

    Args:
        error: what a wait for messages, or a collective inside of an action, has raised.
        order: that was being carried out.
        routes: of the order.
        rank: this one.
        action: that was under way.
    """
    text = str(error)
    if isinstance(error, PeerLostError) or (not isinstance(error, CommunicationError) and _LOST.search(text)):
        kind: type[CommunicationError] = PeerLostError
    elif isinstance(error, CollectiveTimeoutError) or _LATE.search(text):
        kind = CollectiveTimeoutError
    elif isinstance(error, CommunicationError):
        kind = type(error)
    else:
        return None
    lines = [f"rank {rank} was at {action}"]
    awaited = _awaited(order, routes, action)
    if awaited is not None and order.rank_of(awaited.stage) != rank:
        lines.append(f"which waits for {awaited} of rank {order.rank_of(awaited.stage)}")
    # Who is late, a time-out does not know: whoever stands behind what is awaited.
    everybody = range(len(order.rows)) if kind is CollectiveTimeoutError else []
    behind: list[str] = []
    for named in dict.fromkeys([*(int(found) for found in _RANK.findall(text)), *everybody]):
        if named != rank and named < len(order.rows) and len(behind) < _MOST_NAMED:
            other = _behind(order, awaited or action, named)
            if other is not None and other != awaited:
                behind.append(f"{other} of rank {named}")
    if behind:
        lines.append(f"and behind that for {', '.join(behind)}")
    return kind(f"{', '.join(lines)}: {text}")


def _awaited(order: Order, routes: Routes, action: Action) -> Action | None:
    """The computation of another rank whose result an action takes."""
    for leaf in action.leaves:
        if leaf.micro_batch is None or leaf.kind in (Kind.SHARED, Kind.WEIGHT, Kind.SEND_F, Kind.SEND_B):
            continue
        is_forward = leaf.kind in (Kind.FORWARD, Kind.RECV_F)
        stage = (routes.before if is_forward else routes.after)(leaf.stage, leaf.micro_batch)
        if stage is not None:
            kinds = (Kind.FORWARD,) if is_forward else (Kind.BACKWARD, Kind.INPUT)
            return _there(order, stage, kinds, leaf.micro_batch)
    return None


def _there(order: Order, stage: int, kinds: tuple[Kind, ...], micro_batch: int) -> Action | None:
    for action in order.rows[order.rank_of(stage)]:
        for leaf in action.leaves:
            if leaf.stage == stage and leaf.kind in kinds and leaf.micro_batch == micro_batch:
                return leaf
    return None


def _behind(order: Order, action: Action, rank: int) -> Action | None:
    """Of a rank's actions the nearest one that an action cannot do without."""
    needs = needs_of(order)
    made = {result_of(leaf): leaf for row in order.rows for a in row for leaf in a.leaves if result_of(leaf)}
    seen, waiting = {action}, deque([action])
    while waiting:
        leaf = waiting.popleft()
        if leaf.stage >= 0 and order.rank_of(leaf.stage) == rank:
            return leaf
        for result in needs(leaf):
            if (before := made.get(result)) is not None and before not in seen:
                seen.add(before)
                waiting.append(before)
    return None
