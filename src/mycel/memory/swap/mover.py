"""Moves storages between near and far memory for all passes of a model, within the budget."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from mycel.errors import CommunicationError, UsageError
from mycel.memory.swap.saved import Record
from mycel.memory.tiers.far import FarMemory
from mycel.memory.tiers.link import Link
from mycel.memory.tiers.near import Claim, NearMemory
from mycel.units import format_size

__all__ = ["Moved", "Mover"]

#: Between looks at what was freed: whoever frees cannot always say so.
_LOOK_S = 0.005

_Outgoing = tuple[Callable[[], None], Sequence[Record], Callable[[str], None]]


@dataclass(slots=True)
class Moved:
    """Counts since the beginning.

    Attributes:
        out_bytes: that went out.
        in_bytes: that came back.
        forwarded_bytes: that were asked for while they were still near, so that they did not have to come.
        spilled_bytes: that went out, or were dropped, against the plan, because something else needed the room.
        waited_s: seconds for which computation stood still, for room or for what was on its way.
    """

    out_bytes: int = 0
    in_bytes: int = 0
    forwarded_bytes: int = 0
    spilled_bytes: int = 0
    waited_s: float = 0.0


class Mover:
    """Carries records out and in over a link, and knows what can make room.

    A thread waits for what goes out, and lets near memory go when far memory has it.

    Args:
        near: the budget; its lock guards records as well.
        far: where copies are.
        link: between the two.
        deadline_s: how long to wait for room.
    """

    def __init__(self, near: NearMemory, far: FarMemory, link: Link, deadline_s: float) -> None:
        self.near, self.far, self.link, self.deadline_s = near, far, link, deadline_s
        self.moved = Moved()
        self._jobs: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._asked = self._ended = 0
        #: Transfers asked for up to here belong to iterations that are over.
        self._over = 0

    # -- out ------------------------------------------------------------------------------------------------------

    @property
    def _going(self) -> int:
        """Transfers to far memory that have not ended."""
        return self._asked - self._ended

    def iteration_over(self) -> None:
        """What was asked to go out so far is for no later iteration: the next one waits for it."""
        with self.near.changed:
            self._over = self._asked

    def begin_iteration(self) -> None:
        """Wait for what iterations that are over left on its way; then trim far memory.

        What was asked for again while it went out did not come from far memory, so that a backward pass can end
        before the transfer does. Without this wait such transfers queue, each with its two copies, until near memory
        is full of them.

        Raises:
            CommunicationError: the link does not end what it took.
        """
        with self.near.changed:
            if not self._over:
                return
            begin = time.perf_counter()
            while self._ended < self._over:
                if time.perf_counter() - begin > self.deadline_s:
                    raise CommunicationError(
                        f"waited {self.deadline_s:g} s for {self._over - self._ended} transfers to far memory that "
                        "an iteration before left on their way"
                    )
                self.near.changed.wait(_LOOK_S)
            self.moved.waited_s += time.perf_counter() - begin
            self._over = 0
            self.far.trim()

    def send(self, records: Iterable[Record], told: Callable[[str], None], *, spill: bool = False) -> int:
        """Begin to move what is near and nowhere far.

        Args:
            records: of any kind.
            told: is called when they are out, with what went wrong, or nothing.
            spill: whether room is made with it, so that also what is kept goes.

        Returns:
            Bytes that go.

        Raises:
            UsageError: far memory has no room.
            CommunicationError: the link takes nothing.
        """
        with self.near.changed:
            records = list(records)
            for record in records:  # another block has sent it before
                if record.has_copy and record.near is not None and record.coming is None and not record.kept:
                    record.drop()
            going = [r for r in records if r.near is not None and r.copy is None and (spill or not r.kept)]
            if not going:
                return 0
            buffers: list[Tensor] = []
            try:
                buffers.extend(self.far.take(record.num_bytes) for record in going)
            except UsageError:
                for buffer in buffers:
                    self.far.give(buffer)
                raise
            num_bytes = sum(record.num_bytes for record in going)
            try:
                copies = [record.send(buffer) for record, buffer in zip(going, buffers, strict=True)]
                pending = self.link.store(copies)
            except Exception as error:
                for record in going:
                    self._stays(record)
                raise CommunicationError(_not_out(num_bytes, error)) from error
            if spill:
                for record in going:
                    record.kept = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="mycel-swap", daemon=True)
                self._thread.start()
            self._asked += 1
            self._jobs.put((pending.wait, going, told))
            self.moved.out_bytes += num_bytes
            return num_bytes

    def _stays(self, record: Record) -> None:
        """It did not get out."""
        record.going = False
        if record.copy is not None:
            self.far.forget(record.copy)  # whatever carried it may still write there
        record.copy = None

    def _watch(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._arrived(*job)
            del job  # records live as long as somebody holds them, so that this comes first
            with self.near.changed:
                self._ended += 1
                self.near.changed.notify_all()

    def _arrived(self, wait: Callable[[], None], records: Sequence[Record], told: Callable[[str], None]) -> None:
        wrong = ""  # raised where the next block begins; of an exception, which holds frames, only the words stay
        try:
            wait()
        except Exception as error:
            wrong = _not_out(sum(record.num_bytes for record in records), error)
        with self.near.changed:
            for record in records:
                record.going = False
                if wrong:
                    self._stays(record)
                elif not (record.kept or record.wanted):
                    record.drop()
        told(wrong)

    # -- in -------------------------------------------------------------------------------------------------------

    def fetch(
        self,
        records: Iterable[Record],
        *,
        block: int,
        must: bool,
        spare: Iterable[Record] = (),
        check: Callable[[], None] = lambda: None,
    ) -> bool:
        """Begin to bring what is only far.

        Args:
            records: of one block.
            block: which, for messages.
            must: whether to wait for room, and to make it; else nothing is done where there is none.
            spare: what may be moved for it.
            check: raises where something went wrong meanwhile.

        Returns:
            Whether everything is near or on its way.

        Raises:
            UsageError, CommunicationError: there is no room, or the link brings nothing.
        """
        with self.near.changed:
            wanted = list(records)
            for record in wanted:
                if record.going and not record.wanted:
                    record.wanted = True
                    self.moved.forwarded_bytes += record.num_bytes
            missing = [record for record in wanted if record.near is None]
            if not missing:
                return True
            num_bytes = sum(record.num_bytes for record in missing)
            claim = self.room(num_bytes, f"block {block}", spare, check) if must else self.near.claim(num_bytes)
            if claim is None:
                return False
            bring: list[tuple[Record, Tensor, Tensor]] = []
            for record in missing:
                if record.near is not None or record.copy is None:  # while this waited
                    continue
                record.near = torch.empty(record.num_bytes, dtype=torch.uint8, device=record.device)
                self.near.count(record.near, claim)
                bring.append((record, record.copy, record.near))
            self.near.release(claim)
            if bring:
                try:
                    pending = self.link.fetch([(far, near) for _, far, near in bring])
                except Exception as error:
                    for record, _, _ in bring:
                        record.near = None  # nothing has been written there
                    raise CommunicationError(_not_back(block, num_bytes, error)) from error
                for record, _, _ in bring:
                    record.coming = pending
                self.moved.in_bytes += sum(far.nbytes for _, far, _ in bring)
            return True

    def arrive(self, record: Record, block: int) -> None:
        """Wait for what is on its way.

        Args:
            record: one that is near or coming.
            block: that needs it, for messages.

        Raises:
            CommunicationError: it did not come.
        """
        coming = record.coming
        if coming is None:
            return
        begin = time.perf_counter()
        try:
            coming.wait()
        except Exception as error:
            record.near = record.coming = None  # so that it can be asked for again
            raise CommunicationError(_not_back(block, record.num_bytes, error)) from error
        finally:
            self.moved.waited_s += time.perf_counter() - begin
        record.coming = None

    # -- room -----------------------------------------------------------------------------------------------------

    def room(
        self, num_bytes: int, who: str, spare: Iterable[Record] = (), check: Callable[[], None] = lambda: None
    ) -> Claim:
        """Keep room; wait for what goes out, then move what the plan has not foreseen to move.

        Args:
            num_bytes: that are needed.
            who: needs them.
            spare: what may be moved, what is needed last first.
            check: raises where something went wrong meanwhile.

        Raises:
            UsageError: nothing more can be moved.
            CommunicationError: what goes out did not get there in time.
        """
        near = self.near
        claim = near.claim(num_bytes)
        if claim is not None:
            return claim
        begin = time.perf_counter()
        with near.changed:
            try:
                while (claim := near.claim(num_bytes)) is None:
                    check()
                    if time.perf_counter() - begin > self.deadline_s:
                        raise CommunicationError(
                            f"{who} waited {self.deadline_s:g} s for {num_bytes} bytes of near memory; "
                            f"{self._going} transfers to far memory were on their way"
                        )
                    if self._going:
                        near.changed.wait(_LOOK_S)
                    elif not self._spill(num_bytes, spare):
                        raise UsageError(
                            f"{who} needs {format_size(num_bytes)} of near memory: of "
                            f"{format_size(near.capacity)} {format_size(near.held + near.claimed)} are held by what "
                            f"nothing can move; {near.held + near.claimed + num_bytes - near.capacity} bytes are "
                            "missing: let go of other graphs, or plan with a larger budget"
                        )
            finally:
                self.moved.waited_s += time.perf_counter() - begin
        return claim

    def _spill(self, num_bytes: int, spare: Iterable[Record]) -> bool:
        """Make room against the plan; whether that has begun or is done."""
        before = self.near.held
        for record in spare:
            if record.near is None or record.going:
                continue
            if record.has_copy:
                if record.coming is not None:  # near memory must not be written any more when it is let go
                    with suppress(Exception):
                        record.coming.wait()
                self.moved.spilled_bytes += record.num_bytes
                record.drop()
                if before - self.near.held >= num_bytes:
                    return True
            else:
                self.moved.spilled_bytes += record.num_bytes
                self.send([record], lambda wrong: None, spill=True)
                return True
        return self.near.held < before

    def close(self) -> None:
        """Wait for what goes out, and end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(self.deadline_s)
            self._thread = None
        self.far.clear()


def _not_out(num_bytes: int, error: Exception) -> str:
    return f"{num_bytes} bytes did not get to far memory: {error}"


def _not_back(block: int, num_bytes: int, error: Exception) -> str:
    return f"block {block}: {num_bytes} bytes did not come back from far memory: {error}"
