"""Whether an order can be carried out to its end: what waits for what must have no circle.

Two things let an action wait: the one before it in its row, and the results that it needs. A block on several ranks
is one event for all of them. With messages among the actions, a send waits for nobody and a receive is only posted;
who needs the message waits for its send. Without any buffering a send is over when it is received. That is asked
separately: an order that needs buffering is right where there is some, and worth knowing about.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from mycel.pipeline.check.places import Place, at, places_of, wrong
from mycel.pipeline.order import Action, Kind, Order

__all__ = ["Need", "check_no_circle", "needs_of_work", "told", "waits_without_buffering", "words_of"]

_END = re.compile(r"(\d+)([FBIW])", re.ASCII)
#: Moves that are tried out to find one that opens a circle, and actions up to which that is quick.
_MOST_TRIALS, _MOST_ACTIONS = 8, 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """That one computation needs the result of another.

    Attributes:
        producer: where the result is made.
        consumer: where it is needed.
        letter: F of activations, B of gradients, W of a stage's own; S into or out of a shared block.
        stage: that makes the result; -1 of a block.
        consuming_stage: that needs it; -1 of a block.
        micro_batch: whose result it is.
    """

    producer: Place
    consumer: Place
    letter: str
    stage: int
    consuming_stage: int
    micro_batch: int

    @property
    def is_message(self) -> bool:
        """Whether it takes a message of its own."""
        return self.producer.rank != self.consumer.rank and self.letter != "S"


def words_of(need: Need) -> tuple[Action, Action]:
    """The send and the receive of a result that crosses ranks.

    Args:
        need: of another rank's result.
    """
    kinds = (Kind.SEND_F, Kind.RECV_F) if need.letter == "F" else (Kind.SEND_B, Kind.RECV_B)
    return (
        Action(stage=need.stage, kind=kinds[0], micro_batch=need.micro_batch),
        Action(stage=need.consuming_stage, kind=kinds[1], micro_batch=need.micro_batch),
    )


# -- what needs what ----------------------------------------------------------------------------------------


def needs_of_work(order: Order) -> list[Need]:
    """What needs what: along routes or as feeds say, and within each stage.

    Args:
        order: whose computations are looked at; those that are missing need nothing.
    """
    ends: dict[tuple[str, int], list[tuple[Place, Action]]] = defaultdict(list)
    for place, leaf in places_of(order):
        if leaf.micro_batch is not None and not leaf.kind.is_message:
            ends[_end_of(leaf), leaf.micro_batch].append((place, leaf))
    return [
        Need(
            producer=producer,
            consumer=consumer,
            letter="S" if Kind.SHARED in (made.kind, needing.kind) else before[-1],
            stage=made.stage,
            consuming_stage=needing.stage,
            micro_batch=m,
        )
        for m in range(order.num_micro_batches)
        for before, after in _pairs(order, m)
        for producer, made in ends.get((before, m), ())
        for consumer, needing in ends.get((after, m), ())
    ]


def _end_of(leaf: Action) -> str:
    if leaf.kind is Kind.SHARED:
        return leaf.block
    return f"{leaf.stage}{'B' if leaf.kind.is_backward else leaf.kind.value}"


def _pairs(order: Order, micro_batch: int) -> Iterable[tuple[str, str]]:
    """Who feeds whom for a micro-batch, by name."""
    route = order.route_of(micro_batch)
    for stage in route:
        yield f"{stage}F", f"{stage}B"
        yield f"{stage}B", f"{stage}W"
    if order.feeds is not None:
        own = {(f"{stage}F", f"{stage}B") for stage in route}
        yield from ((a, b) for a, b in ((_name(a), _name(b)) for a, b in order.feeds) if (a, b) not in own)
        return
    for stage, following in pairwise(route):
        yield f"{stage}F", f"{following}F"
        yield f"{following}B", f"{stage}B"


def _name(end: str) -> str:
    found = _END.fullmatch(end)
    return f"{int(found[1])}{'B' if found[2] == 'I' else found[2]}" if found else end


# -- circles ------------------------------------------------------------------------------------------------


def check_no_circle(order: Order, is_right: Callable[[Order], bool]) -> None:
    """The order comes to its end.

    Args:
        order: of which all work is there, and all messages where it has some.
        is_right: asked of an order in which one action was moved, before that is proposed.

    Raises:
        VerificationError: some actions wait for each other; the message names them and a move that would do.
    """
    events, rows = _events(order)
    found = _circle(rows, _waits(order, events))
    if found:
        first_cell = _first_cells(events)
        cells = [first_cell[event] for event in found]
        raise wrong(order, f"{told(order, cells)}; {_repair(order, cells, is_right)}", cells)


def waits_without_buffering(order: Order) -> list[Place]:
    """Cells that wait for each other in a circle where a send is over only when it is received; empty if none do.

    Of an order of computations only, a result is sent right after it was made and received right before it is
    needed, or earlier where a later message of the same ranks is needed first.

    Args:
        order: that is right where messages are buffered.
    """
    events, rows = _events(order)
    messages = [need for need in needs_of_work(order) if need.is_message]
    place_of = dict(enumerate(_first_cells(events).values()))
    if order.has_communication:
        cells = {leaf: place for place, leaf in places_of(order) if leaf.kind.is_message}
        for need in messages:
            send, receive = words_of(need)
            rows[cells[receive].rank][cells[receive].step] = events[cells[send]]
    else:
        rows = _with_meetings(rows, messages, place_of)
    return [place_of[event] for event in _circle(rows, _waits(order, events))]


def _with_meetings(rows: list[list[int]], messages: Sequence[Need], place_of: dict[int, Place]) -> list[list[int]]:
    """Rows with each message as one more event of both ranks; they are added to the places, as their producers."""
    sent: dict[Place, list[tuple[int, int]]] = defaultdict(list)
    needed: dict[Place, list[tuple[tuple[int, int], int]]] = defaultdict(list)
    queues: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    for need in sorted(messages, key=lambda need: (need.producer, need.consumer)):
        event = len(place_of)
        place_of[event] = need.producer
        pair = need.producer.rank, need.consumer.rank
        sent[need.producer].append((event, pair[1]))
        needed[need.consumer].append((pair, event))
        queues[pair].append(event)
    expanded: list[list[int]] = []
    received: set[int] = set()
    for rank, row in enumerate(rows):
        events: list[int] = []
        for step, cell in enumerate(row):
            for pair, event in needed[Place(rank, step)]:
                while event not in received:
                    events.append(queues[pair].popleft())
                    received.add(events[-1])
            events.append(cell)
            events += [event for event, _ in sent[Place(rank, step)]]
        expanded.append(events)
    return expanded


def _events(order: Order) -> tuple[dict[Place, int], list[list[int]]]:
    """A number for every cell, one for all cells of a shared block's micro-batch, and the rows of numbers."""
    events: dict[Place, int] = {}
    shared: dict[Action, int] = {}
    count = 0
    rows = []
    for rank, row in enumerate(order.rows):
        numbers = []
        for step, action in enumerate(row):
            number = shared.setdefault(action, count) if action.kind is Kind.SHARED else count
            count += number == count
            events[Place(rank, step)] = number
            numbers.append(number)
        rows.append(numbers)
    return events, rows


def _first_cells(events: dict[Place, int]) -> dict[int, Place]:
    first: dict[int, Place] = {}
    for place, event in events.items():
        first.setdefault(event, place)
    return first


def _waits(order: Order, events: dict[Place, int]) -> list[tuple[int, int]]:
    """Pairs of events of which the first waits for the second, beside what rows say."""
    sends = {}
    if order.has_communication:
        sends = {leaf: place for place, leaf in places_of(order) if leaf.kind in (Kind.SEND_F, Kind.SEND_B)}
    found = []
    for need in needs_of_work(order):
        source = need.producer
        if sends and need.is_message:
            source = sends.get(words_of(need)[0], source)
        found.append((events[need.consumer], events[source]))
    return found


def _circle(rows: list[list[int]], waits: list[tuple[int, int]]) -> list[int]:
    """Events that wait for each other, each for the one after it and the last for the first; empty where none do."""
    before: dict[int, set[int]] = {event: set() for row in rows for event in row}
    for row in rows:
        for earlier, later in pairwise(row):
            before[later].add(earlier)
    for later, earlier in waits:
        # Of two parts of one cell, one may need the other; and a receive that has become its send is no event.
        if later != earlier and later in before and earlier in before:
            before[later].add(earlier)
    after: dict[int, list[int]] = defaultdict(list)
    missing = {}
    for later, earliers in before.items():
        missing[later] = len(earliers)
        for earlier in earliers:
            after[earlier].append(later)
    ready = [event for event, count in missing.items() if not count]
    while ready:
        for later in after[ready.pop()]:
            missing[later] -= 1
            if not missing[later]:
                ready.append(later)
    stuck = {event for event, count in missing.items() if count}
    if not stuck:
        return []
    event, seen = min(stuck), set[int]()
    while event not in seen:  # whoever is stuck waits for one that is stuck
        seen.add(event)
        event = min(before[event] & stuck)
    return _shortest(event, before, stuck)


def _shortest(start: int, before: dict[int, set[int]], stuck: set[int]) -> list[int]:
    """The shortest circle through an event that is known to be in one."""
    waiting: dict[int, int] = {}
    queue = deque([start])
    while queue:
        event = queue.popleft()
        for earlier in sorted(before[event] & stuck):
            if earlier == start:
                path = [event]
                while path[-1] != start:
                    path.append(waiting[path[-1]])
                return path[::-1]
            if earlier not in waiting:
                waiting[earlier] = event
                queue.append(earlier)
    raise AssertionError(f"event {start} is in no circle")


# -- in words -----------------------------------------------------------------------------------------------


def told(order: Order, cells: Sequence[Place]) -> str:
    """A circle in words: who waits for whom, stretches of one row shortened to their ends.

    Args:
        order: that the cells are of.
        cells: each waits for the one after it, the last for the first.
    """
    parts = []
    turns = _turns(cells)
    for first, last in turns:
        text = at(order, first)
        if last != first:
            text += f" stands after {order.rows[last.rank][last.step]} (step {last.step})"
        parts.append(text)
    first = turns[0][0]
    return "the order stops in a circle: " + ", which waits for ".join(
        [*parts, str(order.rows[first.rank][first.step])]
    )


def _turns(cells: Sequence[Place]) -> list[tuple[Place, Place]]:
    """Stretches of one row in a circle, each as its first and last cell."""
    start = next((i for i in range(len(cells)) if cells[i - 1].rank != cells[i].rank), 0)
    found: list[tuple[Place, Place]] = []
    for place in [*cells[start:], *cells[:start]]:
        if found and found[-1][0].rank == place.rank and found[-1][1].step == place.step + 1:
            found[-1] = (found[-1][0], place)
        else:
            found.append((place, place))
    return found


def _repair(order: Order, cells: list[Place], is_right: Callable[[Order], bool]) -> str:
    """A move of one action that opens the circle, tried out; nothing is proposed that was not."""
    if sum(map(len, order.rows)) <= _MOST_ACTIONS:
        for first, last in [turn for turn in _turns(cells) if turn[0] != turn[1]][:_MOST_TRIALS]:
            row = list(order.rows[first.rank])
            moved = row.pop(first.step)
            row.insert(last.step, moved)
            rows = (*order.rows[: first.rank], tuple(row), *order.rows[first.rank + 1 :])
            if is_right(replace(order, rows=rows)):
                return (
                    f"move {moved} of rank {first.rank} from step {first.step} before "
                    f"{order.rows[last.rank][last.step]} (step {last.step}), and the order is right"
                )
    return "one of them has to come earlier in its row"
