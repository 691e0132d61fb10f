"""What an order means to the ranks that run it: who hands what to whom, and from when to when a buffer is needed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from mycel.errors import ScheduleError
from mycel.pipeline.order import Action, Kind, Order

__all__ = ["Routes", "answered", "buffers_needed", "receive_ahead"]


class Routes:
    """Which stage's output is which stage's input, for each micro-batch.

    Args:
        order: any.

    Raises:
        ScheduleError: a stage's output goes to two stages, or its input comes from two.

    Examples:
        >>> routes = Routes(Order.from_csv("0F0,0B0\\n1F0,1B0\\n"))
        >>> routes.after(0, 0), routes.after(1, 0), routes.before(1, 0)
        (1, None, 0)
    """

    def __init__(self, order: Order) -> None:
        self._after: dict[tuple[int, int], int] = {}
        self._before: dict[tuple[int, int], int] = {}
        self._visits = [set(order.route_of(m)) for m in range(order.num_micro_batches)]
        #: Stages whose output a shared block takes, and that therefore end in no loss of their own.
        self.into_blocks: set[int] = set()
        fed = None if order.feeds is None else _ends(order.feeds)
        for micro_batch in range(order.num_micro_batches):
            for before, after in pairwise(order.route_of(micro_batch)) if fed is None else fed:
                if before in self._visits[micro_batch] and after in self._visits[micro_batch]:
                    self._connect(before, after, micro_batch)
        for source, target in order.feeds or ():
            if source[-1] == "F" and source[:-1].isdigit() and target in order.blocks:
                self.into_blocks.add(int(source[:-1]))

    def _connect(self, before: int, after: int, micro_batch: int) -> None:
        if (before, micro_batch) in self._after or (after, micro_batch) in self._before:
            other = self._after.get((before, micro_batch), self._before.get((after, micro_batch)))
            raise ScheduleError(
                f"micro-batch {micro_batch} goes from stage {before} to {after} and also by stage {other}: a stage "
                "hands its output to one stage; let a shared block, which takes any number of outputs, join branches"
            )
        self._after[before, micro_batch] = after
        self._before[after, micro_batch] = before

    def after(self, stage: int, micro_batch: int) -> int | None:
        """The stage that gets a stage's output; ``None``: the loss, or a shared block.

        Args:
            stage: from 0 on.
            micro_batch: from 0 on.
        """
        return self._after.get((stage, micro_batch))

    def before(self, stage: int, micro_batch: int) -> int | None:
        """The stage whose output a stage gets; ``None``: it begins with the batch, or a shared block gives it.

        Args:
            stage: from 0 on.
            micro_batch: from 0 on.
        """
        return self._before.get((stage, micro_batch))

    def num_visits(self, stage: int) -> int:
        """Micro-batches that visit a stage.

        Args:
            stage: from 0 on.
        """
        return sum(stage in visited for visited in self._visits)

    def begins(self, stage: int) -> bool:
        """Whether some micro-batch comes to a stage from no other.

        Args:
            stage: from 0 on.
        """
        return any(stage in seen and (stage, m) not in self._before for m, seen in enumerate(self._visits))

    def ends(self, stage: int) -> bool:
        """Whether some micro-batch goes from a stage to no other, and to no shared block.

        Args:
            stage: from 0 on.
        """
        return stage not in self.into_blocks and any(
            stage in seen and (stage, m) not in self._after for m, seen in enumerate(self._visits)
        )

    def sender(self, action: Action) -> tuple[int, Action]:
        """Of a receive: the stage it comes from, and the send that it waits for.

        Args:
            action: ``RECV_F`` or ``RECV_B``.

        Raises:
            ScheduleError: no stage sends it.
        """
        micro_batch = action.micro_batch
        is_forward = action.kind is Kind.RECV_F
        found = (self.before if is_forward else self.after)(action.stage, _number(micro_batch))
        if found is None:
            raise ScheduleError(f"{action}: no stage hands anything to stage {action.stage} for that micro-batch")
        kind = Kind.SEND_F if is_forward else Kind.SEND_B
        return found, Action(stage=found, kind=kind, micro_batch=micro_batch)

    def receiver(self, action: Action) -> tuple[int, Action]:
        """Of a send: the stage it goes to, and the receive that waits for it.

        Args:
            action: ``SEND_F`` or ``SEND_B``.

        Raises:
            ScheduleError: no stage receives it.
        """
        micro_batch = action.micro_batch
        is_forward = action.kind is Kind.SEND_F
        found = (self.after if is_forward else self.before)(action.stage, _number(micro_batch))
        if found is None:
            raise ScheduleError(f"{action}: stage {action.stage} hands nothing on for that micro-batch")
        kind = Kind.RECV_F if is_forward else Kind.RECV_B
        return found, Action(stage=found, kind=kind, micro_batch=micro_batch)


def _number(micro_batch: int | None) -> int:
    if micro_batch is None:
        raise ScheduleError("an action without a micro-batch moves no message")
    return micro_batch


def _ends(feeds: tuple[tuple[str, str], ...]) -> list[tuple[int, int]]:
    """Pairs of stages, of the forwards that feed forwards."""
    found = []
    for before, after in feeds:
        if before[-1] == after[-1] == "F" and before[:-1].isdigit() and after[:-1].isdigit():
            found.append((int(before[:-1]), int(after[:-1])))
    return found


def receive_ahead(row: Sequence[Action], count: int) -> tuple[Action, ...]:
    """A rank's list with every receive so many computations earlier, that messages come while it computes.

    The receives keep their sequence: between two ranks it is what says which message is which.

    Args:
        row: with messages.
        count: computations; 0 leaves the list as it is.

    Examples:
        >>> row = [Action.parse(text) for text in "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0".split()]
        >>> print(*receive_ahead(row, 1))
        0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0
    """
    computations = [i for i, action in enumerate(row) if _is_work(action)]
    places: defaultdict[int, list[Action]] = defaultdict(list)
    for i, action in enumerate(row):
        if action.kind in (Kind.RECV_F, Kind.RECV_B) and count:
            passed = [place for place in computations if place < i]
            places[passed[-count] if len(passed) >= count else 0].append(action)
        else:
            places[i].append(action)
    # What moved stands before what it moved to.
    return tuple(
        action
        for i in sorted(places)
        for action in sorted(places[i], key=lambda each: each is row[i] and not _receives(each))
    )


def _receives(action: Action) -> bool:
    return action.kind in (Kind.RECV_F, Kind.RECV_B)


def _is_work(action: Action) -> bool:
    return any(leaf.kind.is_computation for leaf in action.leaves) or action.kind is Kind.SHARED


def answered(rows: Sequence[Sequence[Action]], routes: Routes, rank: int, ranks: Sequence[int]) -> dict[Action, int]:
    """For each receive of a rank, how many of its messages to the sender are certainly used when it has come.

    What comes back was made by an action of the other rank; all that this rank had sent and that actions before that
    one have used is through.

    Args:
        rows: with messages, of all ranks.
        routes: of the order.
        rank: whose receives.
        ranks: on which rank each stage is.
    """
    place = {leaf: i for row in rows for i, action in enumerate(row) for leaf in action.leaves}
    sent: defaultdict[int, list[int]] = defaultdict(list)  # by receiver: the places of what uses them, there
    for action in rows[rank]:
        if action.kind in (Kind.SEND_F, Kind.SEND_B):
            stage, receive = routes.receiver(action)
            used = [place[user] for user in _users(receive) if user in place]
            sent[ranks[stage]].append(min(used, default=len(rows[ranks[stage]])))
    found = {}
    for action in rows[rank]:
        if _receives(action):
            stage, send = routes.sender(action)
            made = place.get(send, -1)
            uses = sent[ranks[stage]]
            found[action] = next((i for i, used in enumerate(uses) if used >= made), len(uses))
    return found


def _users(receive: Action) -> Iterator[Action]:
    kinds = (Kind.FORWARD,) if receive.kind is Kind.RECV_F else (Kind.BACKWARD, Kind.INPUT)
    for kind in kinds:
        yield Action(stage=receive.stage, kind=kind, micro_batch=receive.micro_batch)


def buffers_needed(row: Sequence[Action]) -> int:
    """How many receive buffers, one a message, a rank's list needs at once.

    Both an activation and a gradient are needed from their receive to the end of the backward: where it is cut in
    two, its second half multiplies the one with the other.

    Args:
        row: with messages.

    Examples:
        >>> buffers_needed([Action.parse(text) for text in "1RECV_F0 1F0 1B0 1RECV_F1 1F1 1B1".split()])
        1
    """
    held: set[Action] = set()
    most = 0
    for action in row:
        if _receives(action):
            held.add(action)
            most = max(most, len(held))
        for leaf in action.leaves:
            if leaf.kind in (Kind.BACKWARD, Kind.WEIGHT):
                for kind in (Kind.RECV_F, Kind.RECV_B):
                    held.discard(Action(stage=leaf.stage, kind=kind, micro_batch=leaf.micro_batch))
    return most
