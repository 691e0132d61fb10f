"""Ranks as threads of one process: collectives between them, with a deadline, for numerics that need no wires.

``on_ranks(3, work)`` runs ``work(rank, group)`` on three threads and gives what they return. What a collective does
is plain copying here, so that a failing test is about the code that calls it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["destroy_process_group", "new_group", "on_ranks"]

T = TypeVar("T")

#: Seconds that a rank waits for the others in one collective.
DEADLINE_S = 60.0


class Meeting:
    """What ranks have brought to collectives and not all of them have fetched yet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.brought: dict[int, dict[int, Any]] = {}
        self.fetched: dict[int, int] = {}
        self.letters: dict[tuple[int, int], list[Tensor]] = {}
        self.failed: BaseException | None = None
        self.parts: dict[tuple[int, tuple[int, ...]], Meeting] = {}

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.failed = self.failed or error
            self.changed.notify_all()
            parts = list(self.parts.values())
        for part in parts:
            part.fail(error)

    def part(self, number: int, ranks: tuple[int, ...]) -> Meeting:
        """Where some of the ranks meet: the ``number``-th group that each of all makes."""
        with self.changed:
            made = self.parts.setdefault((number, ranks), Meeting(len(ranks)))
            made.failed = self.failed
            return made

    def bring(self, call: int, rank: int, what: Any) -> None:
        with self.changed:
            self.brought.setdefault(call, {})[rank] = what
            self.changed.notify_all()

    def fetch(self, call: int) -> list[Any]:
        with self.changed:
            there = self.changed.wait_for(
                lambda: self.failed is not None or len(self.brought[call]) == self.size, DEADLINE_S
            )
            if self.failed is not None:
                raise RuntimeError(f"another rank failed: {self.failed}")
            if not there:
                raise RuntimeError(f"call {call}: only ranks {sorted(self.brought[call])} came")
            found = [self.brought[call][rank] for rank in range(self.size)]
            self.fetched[call] = self.fetched.get(call, 0) + 1
            if self.fetched[call] == self.size:
                del self.brought[call], self.fetched[call]
        kinds = {kind for kind, _ in found}
        if len(kinds) != 1:
            raise RuntimeError(f"ranks called different collectives: {sorted(kinds)}")
        return [what for _, what in found]

    def post(self, ends: tuple[int, int], letter: Tensor) -> None:
        with self.changed:
            self.letters.setdefault(ends, []).append(letter)
            self.changed.notify_all()

    def collect(self, ends: tuple[int, int]) -> Tensor:
        with self.changed:
            there = self.changed.wait_for(lambda: self.failed is not None or bool(self.letters.get(ends)), DEADLINE_S)
            if self.failed is not None:
                raise RuntimeError(f"another rank failed: {self.failed}")
            if not there:
                raise RuntimeError(f"rank {ends[0]} sent nothing to rank {ends[1]}")
            return self.letters[ends].pop(0)


class Underway(dist.Work):
    """A collective that finishes when it is waited for."""

    def __init__(self, finish: Callable[[], None]) -> None:
        super().__init__()
        self.finish: Callable[[], None] | None = finish

    def wait(self, timeout: Any = None) -> bool:
        if self.finish is not None:
            self.finish()
            self.finish = None
        return True


class ThreadGroup(dist.ProcessGroup):
    """The group as one rank sees it."""

    def __init__(self, rank: int, meeting: Meeting, ranks: Sequence[int] | None = None) -> None:
        super().__init__(rank, meeting.size)
        self.meeting = meeting
        self.calls = 0
        self.parts: list[ThreadGroup | None] = []
        world = dist.distributed_c10d._world
        members = range(meeting.size) if ranks is None else ranks
        world.pg_group_ranks[self] = {member: place for place, member in enumerate(members)}
        world.pg_map[self] = ("threads", None)  # type: ignore[assignment]

    def close(self) -> None:
        """Torch knows the group no more."""
        world = dist.distributed_c10d._world
        world.pg_group_ranks.pop(self, None)
        world.pg_map.pop(self, None)
        for part in self.parts:
            if part is not None:
                part.close()

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "threads"

    def _begin(self, kind: str, what: Any, finish: Callable[[list[Any]], None]) -> Underway:
        call, self.calls = self.calls, self.calls + 1
        self.meeting.bring(call, self.rank(), (kind, what))
        return Underway(lambda: finish(self.meeting.fetch(call)))

    def all_to_all_single(
        self, out: Tensor, x: Tensor, gets: Sequence[int], gives: Sequence[int], opts: Any = None
    ) -> Underway:
        even = [len(x) // self.size()] * self.size()
        parts = copied(x).split_with_sizes(list(gives) or even)

        def finish(brought: list[Any]) -> None:
            arrived = [parts_of[self.rank()] for parts_of in brought]
            if [len(part) for part in arrived] != (list(gets) or even):
                raise RuntimeError(f"rank {self.rank()} expected {list(gets)} rows, got {[len(p) for p in arrived]}")
            out.copy_(torch.cat(list(arrived)))

        return self._begin("all_to_all", parts, finish)

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Underway:
        return self._begin("all_gather", copied(x), lambda brought: void(out.copy_(torch.cat(brought))))

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Underway:
        def finish(brought: list[Any]) -> None:
            out.copy_(sum(part.chunk(self.size())[self.rank()] for part in brought))

        return self._begin("reduce_scatter", copied(x), finish)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Underway:
        root = opts.rootRank
        return self._begin(
            "broadcast", copied(tensors[0]), lambda brought: void(tensors[0].copy_(brought[root].view_as(tensors[0])))
        )

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Underway:
        return self._begin("all_reduce", copied(tensors[0]), lambda brought: void(tensors[0].copy_(sum(brought))))

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> Underway:
        self.meeting.post((self.rank(), to), tensors[0].detach().clone())
        return Underway(lambda: None)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Underway:
        return Underway(lambda: void(tensors[0].copy_(self.meeting.collect((source, self.rank())))))

    # Torch before 2.13 calls them so.
    alltoall_base, _allgather_base, _reduce_scatter_base = all_to_all_single, all_gather_single, reduce_scatter_single


_HERE = threading.local()


def new_group(ranks: Sequence[int], **_: Any) -> ThreadGroup | None:
    """In place of ``dist.new_group``: every thread of ``on_ranks`` calls it, and members get a group."""
    whole: ThreadGroup = _HERE.group
    meeting = whole.meeting.part(len(whole.parts), tuple(ranks))
    made = ThreadGroup(ranks.index(whole.rank()), meeting, ranks) if whole.rank() in ranks else None
    whole.parts.append(made)
    return made


def destroy_process_group(group: ThreadGroup) -> None:
    """In place of ``dist.destroy_process_group``."""
    group.close()


def copied(x: Tensor) -> Tensor:
    """What the wire has of it: of no interest to those who look on at a rank's operators."""
    with _disable_current_modes():
        return x.detach().clone()


def void(_: object) -> None:
    """Nothing of it."""


def on_ranks(size: int, work: Callable[[int, dist.ProcessGroup], T]) -> list[T]:
    """What each of ``size`` ranks, each a thread of its own, returns; the first error of a rank is raised.

    Args:
        size: how many.
        work: called with the rank and its group.
    """
    meeting, results, errors = Meeting(size), [None] * size, [None] * size

    def run(rank: int) -> None:
        group = _HERE.group = ThreadGroup(rank, meeting)
        try:
            results[rank] = work(rank, group)  # type: ignore[call-overload]
        except BaseException as error:
            errors[rank] = error  # type: ignore[call-overload]
            meeting.fail(error)
        finally:
            group.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * DEADLINE_S)
        if thread.is_alive():
            raise RuntimeError("a rank did not end")
    if meeting.failed is not None:
        raise meeting.failed
    return results  # type: ignore[return-value]
