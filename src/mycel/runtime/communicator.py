"""Communicator: a group of ranks that run collectives over verified schedules. Knows addresses, not tensors.

Collectives of a communicator run one after the other in the order they were started, which must be the same on
every rank. A blocking call runs in the caller's thread, with the interpreter lock released. Others go through a ring
to a thread that stays in compiled code, so that a main thread busy in Python delays neither their start nor their
progress.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from mycel.collectives.cost import Choice, choose, longest_piece
from mycel.collectives.program import Channel, Program
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import CollectiveName
from mycel.collectives.synth import SYNTHESIZERS
from mycel.collectives.synth.classics import CLASSICS
from mycel.cost import Costs
from mycel.errors import CommunicationError, MycelError, PeerLostError, TopologyError, UsageError
from mycel.runtime import engine as e
from mycel.runtime.calls import Call, Ticket
from mycel.runtime.control import Control
from mycel.runtime.faults import Alarm, Attempt, Faults, LinksFailed
from mycel.runtime.flight import FlightLog
from mycel.runtime.headers import pack_kind
from mycel.runtime.pacing import Pacer, is_unpaced, path_pace
from mycel.runtime.planner import Planner, sends_directly, verified_schedules
from mycel.runtime.prepared import Job, Origin, Prepared, prepare
from mycel.runtime.proof import Proofs
from mycel.runtime.reroute import Rerouter, without_links
from mycel.runtime.transport.rendezvous import Rendezvous
from mycel.topology.model import Topology

__all__ = ["PACE", "Call", "Communicator", "Ticket"]

_log = logging.getLogger(__name__)

#: Channels are paced at this part of their path's bandwidth: what TCP/IP headers leave of it is 0.956 with 1,500-byte
#: packets.
PACE = 0.97
_METHODS = (*SYNTHESIZERS, *CLASSICS)


class Communicator:
    """This rank's end of a group.

    Args:
        rank, size: in the group; at least two ranks.
        topology: the fabric between exactly these ranks.
        rendezvous: this rank's listener, with everyone's addresses.
        address_of: at which address a channel's destination is reached over its path.
        timeout_s: for connecting, and for calls that name no time-out.
        dtype_names: from a dtype's code to its name, for messages.
        piece_bytes: a piece size to use instead of the cost model's.
        paced: part of a path's bandwidth at which its channel sends at most; 0 for no pacing.
        costs: of the machines' processors, the same on every rank.
        methods: to choose schedules from, where any of them serves a collective; ``None``: the usual ones.
        flight: keeps the last calls; ``None``: nobody does.
        reroutes: whether to go on without links that have failed (``mycel.runtime.reroute``).

    Attributes:
        planner: this group's schedules and choices.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        topology: Topology,
        rendezvous: Rendezvous,
        address_of: Callable[[Channel], str],
        timeout_s: float,
        dtype_names: Callable[[int], str],
        piece_bytes: int | None = None,
        paced: float = PACE,
        costs: Costs | None = None,
        methods: Sequence[str] | None = None,
        flight: FlightLog | None = None,
        reroutes: bool = False,
    ) -> None:
        self.rank, self.size = rank, size
        self.topology = topology
        self.timeout_s = timeout_s
        self._rendezvous = rendezvous
        self._address_of = address_of
        self._paced = paced
        self._pacer = Pacer(rank, paced)
        if unknown := [method for method in methods or () if method not in _METHODS]:
            raise UsageError(f"MYCEL_METHODS: unknown method {unknown[0]!r}; known: {', '.join(_METHODS)}")
        is_local = rendezvous.is_one_host and is_unpaced(topology, paced)
        machines = _machines([address.host for address in rendezvous.addresses])
        self._methods = methods
        # Of a rank that does not know the lengths of others' blocks, and so cannot choose.
        self._direct = Choice(
            method="direct", piece_bytes=piece_bytes or longest_piece(is_local=is_local), seconds=0.0
        )
        self._control = Control(rendezvous.connect_control(timeout_s))
        self._sockets: dict[Channel, int] = {}
        self._faults = Faults(
            rank=rank,
            size=size,
            control=self._control,
            dtype_names=dtype_names,
            topology=topology,
            channels=lambda: dict(self._sockets),
            reroutes=reroutes,
        )
        self.proofs = Proofs(rank, self._faults.poison)
        self.planner: Planner[Prepared] = Planner(
            rank,
            self._make_schedules,
            partial(choose, piece_bytes=piece_bytes, is_local=is_local, costs=costs or Costs(), machines=machines),
            self.proofs.require,
        )
        self._rerouter = Rerouter(rank, self._run_once, self._go_on) if reroutes else None
        self._flight = flight
        if flight is not None:
            flight.watch(self._sockets)
        self._open: list[socket.socket] = []
        self._sequence = 0
        self._order = threading.RLock()
        self._queued: deque[Ticket] = deque()
        self._ring: npt.NDArray[np.int64] | None = None
        self._threads: list[threading.Thread] = []
        self._wake_fd = self._done_fd = -1
        self._closed = False

    @property
    def control(self) -> Control:
        """The group's control connections."""
        return self._control

    @property
    def cause(self) -> CommunicationError | None:
        """Why the group has failed; ``None`` while it has not."""
        return self._faults.cause

    @property
    def identity(self) -> str:
        """The same for all ranks of this group, and for no other: no other ever had all their ports and processes."""
        return repr([(a.host, a.ip, a.port, a.pid) for a in self._rendezvous.addresses])

    @property
    def is_idle(self) -> bool:
        """Whether no call of this rank's is under way, in any thread."""
        if not self._order.acquire(blocking=False):
            return False
        try:
            return all(ticket.finished.is_set() for ticket in self._queued)
        finally:
            self._order.release()

    # -- schedules ----------------------------------------------------------------------------------------

    def _make_schedules(self, name: CollectiveName, root: int | None) -> dict[str, Schedule]:
        made = verified_schedules(self.topology, name, root, self._methods)
        _log.debug("rank %d: schedules of %s: %s", self.rank, name, {m: s.depth for m, s in made.items()})
        return made

    @cached_property
    def exchanges_directly(self) -> bool:
        """Whether ranks send the parts of an uneven all_to_all themselves; see ``sends_directly``."""
        if self._rerouter is not None:  # the answer would change with the fabric, while calls are under way
            return False
        return sends_directly(self.planner.schedules("all_to_all"))

    def connect(self, name: CollectiveName, root: int | None = None) -> None:
        """Open the channels that a collective's schedules use. Every rank must come here to get on.

        Raises:
            CommunicationError: a peer does not come, or cannot be reached.
        """
        plans = [self.planner.plan(name, root, method) for method in self.planner.schedules(name, root)]
        try:
            for plan in plans:
                attempt = self._attempt(f"connecting for {name}", self.timeout_s, (0, 0, 0))
                self._descriptors(plan.channels, attempt)
        except LinksFailed as failed:  # ranks may be at different collectives: there is no common place to go on from
            raise self._faults.poison("timeout", str(failed)) from None

    def _descriptors(self, channels: tuple[Channel, ...], attempt: Attempt) -> list[int]:
        missing = [channel for channel in channels if channel not in self._sockets]
        if missing:
            sockets = self._connect(missing, attempt)
            for channel, sock in zip(missing, sockets, strict=True):
                self._open.append(sock)
                self._sockets[channel] = sock.fileno()
        return [self._sockets[channel] for channel in channels]

    def _connect(self, channels: list[Channel], attempt: Attempt) -> list[socket.socket]:
        rendezvous = self._rendezvous
        try:
            return rendezvous.connect(
                channels,
                self._address_of,
                self._pace,
                attempt.timeout_s,
                deadline=attempt.deadline,
                observe=self._faults.observe_connecting,
                epoch=self._faults.epoch,
            )
        except (Alarm, CommunicationError) as error:
            if self._faults.cause is not None:
                raise self._faults.cause from None
            _log.debug("rank %d: %s: %s", self.rank, attempt.what, error)
            lost = isinstance(error, PeerLostError)
            raise self._faults.not_connected(attempt, rendezvous.awaited, rendezvous.unanswered, lost=lost) from None

    def _pace(self, channel: Channel) -> int | None:
        return path_pace(self.topology, channel, self._paced)

    def _lay_out(self, program: Program, call: Call, choice: Choice, attempt: Attempt) -> Prepared:
        return prepare(
            program,
            call.item_bytes,
            self._descriptors(program.channels, attempt),
            self._control.descriptors,
            states_channel_bytes=not call.knows_all,
            origin=Origin(
                collective=call.name,
                root=call.root,
                method=choice.method,
                piece_bytes=choice.piece_bytes,
                even=call.block_elements is None,
            ),
        )

    # -- calls --------------------------------------------------------------------------------------------

    def run(self, call: Call, *, timeout_s: float | None = None) -> None:
        """Run a collective to its end.

        Raises:
            CommunicationError: it failed; the group cannot be used any more.
        """
        with self._order:
            if not self._queued and self._rerouter is None:
                ticket = self._ticket(call, timeout_s)
                if ticket.job is not None:
                    self._drive(ticket)
                return
        ticket = self.start(call, timeout_s=timeout_s)
        self.wait(ticket)

    def start(self, call: Call, *, timeout_s: float | None = None) -> Ticket:
        """Start a collective; it proceeds by itself.

        Raises:
            CommunicationError: the group has failed before.
        """
        if self._rerouter is not None:
            with self._order:
                ticket = Ticket(job=None, attempt=self._next_attempt(call, timeout_s))
                self._rerouter.submit(call, ticket, self._sequence)
                return ticket
        while True:
            with self._order:
                if len(self._queued) < e.RING_CAPACITY - 1:
                    return self._enqueue(self._ticket(call, timeout_s))
                oldest = self._queued[0]
            # The ring is full. Its owner needs the lock to take the oldest off, so wait without it.
            oldest.finished.wait(oldest.timeout_s)

    def _enqueue(self, ticket: Ticket) -> Ticket:
        """Hand a ticket to the engine's thread; the caller holds the lock and has seen that the ring has room."""
        if ticket.job is None:
            ticket.finished.set()
            return ticket
        ring = self._ready_ring()
        ring[e.RING_SLOTS + int(ring[e.RING_SUBMITTED]) % e.RING_CAPACITY] = ticket.job.address
        self._queued.append(ticket)
        ring[e.RING_SUBMITTED] += 1
        os.eventfd_write(self._wake_fd, 1)
        return ticket

    def wait(self, ticket: Ticket, timeout_s: float | None = None) -> bool:
        """Wait for a started collective; ``False``: it is still under way after ``timeout_s``.

        Raises:
            CommunicationError: it failed.
        """
        if not (ticket.job is not None and ticket.job.done) and not ticket.finished.wait(timeout_s):
            return False
        if ticket.error is not None:
            raise ticket.error
        return True

    def when_done(self, ticket: Ticket, callback: Callable[[Ticket], None]) -> None:
        """Call ``callback`` once the collective is over; at once where it is."""
        if self._rerouter is not None and self._rerouter.when_done(ticket, callback):
            return
        with self._order:
            if not ticket.finished.is_set() and ticket.job is not None and ticket in self._queued:
                ticket.callbacks.append(callback)
                return
        callback(ticket)

    def _ticket(self, call: Call, timeout_s: float | None) -> Ticket:
        """The job of a call; a ticket without a job where there is nothing to move."""
        return self._begin(call, self._next_attempt(call, timeout_s), self._sequence)

    def _next_attempt(self, call: Call, timeout_s: float | None) -> Attempt:
        """Give a call its number."""
        if self._closed:
            raise CommunicationError("the process group has been destroyed")
        if self._faults.cause is not None:
            raise self._faults.again()
        self._sequence += 1
        limit = self.timeout_s if timeout_s is None else timeout_s
        return self._attempt(f"{call.title or call.name} #{self._sequence}", limit, (self._sequence, 0, 0))

    def _attempt(self, what: str, limit_s: float, header: tuple[int, int, int]) -> Attempt:
        deadline = time.monotonic() + limit_s - self._faults.grace_s(limit_s)
        return Attempt(what=what, timeout_s=limit_s, deadline=deadline, header=header)

    def _begin(self, call: Call, attempt: Attempt, sequence: int) -> Ticket:
        called_ns = time.monotonic_ns()
        num_bytes = call.num_elements * call.item_bytes
        if num_bytes == 0 and call.knows_all:
            return Ticket(job=None, attempt=attempt)
        choice = self.planner.choice(call.name, call.root, num_bytes) if call.knows_all else self._direct
        plan = _METHODS.index(choice.method) << 5 | choice.piece_bytes.bit_length()
        op = None if call.average else call.reduce_op
        kind = pack_kind(call.title or call.name, call.dtype, op, call.root, plan)
        attempt.header = (sequence, kind, num_bytes)
        if not attempt.is_committing:
            self._faults.recent.append(attempt.header)
        try:
            prepared = self.planner.prepared(
                call, choice, lambda plan, program, elements: self._lay_out(program, call, choice, attempt)
            )
            name = (call.name, call.root, choice.method)
            self._pacer.adapt(name, self.planner.plan(*name).schedule, choice.seconds, self._sockets)
        except CommunicationError as error:
            self._hang_up()
            self._write_down(error)
            raise
        job = Job(
            prepared,
            bases=(call.input_address, call.output_address),
            dtype=call.dtype,
            reduce_op=call.reduce_op,
            divisor=self.size if call.average else 0,
            header=(sequence, kind),
            deadline_ns=self._faults.first_look_ns(attempt),
            keep=call.keep,
        )
        if self._flight is not None:
            self._flight.note(prepared.traffic, called_ns, job.fields)
        return Ticket(job=job, attempt=attempt)

    def _drive(self, ticket: Ticket) -> None:
        job = ticket.job
        if job is None:
            return
        try:
            while (status := e.execute(job.address)) != e.DONE:
                self._judge(status, ticket, job)
        except (CommunicationError, LinksFailed):
            raise
        except BaseException:  # Ctrl-C, most likely: half a collective is on the wires, and the others wait
            self.abort(f"interrupted in {ticket.what}")
            raise

    def _judge(self, status: int, ticket: Ticket, job: Job) -> None:
        try:
            self._faults.judge(status, job, ticket.attempt)
        except CommunicationError as error:
            self._hang_up()
            self._write_down(error)
            raise

    def _run_once(self, call: Call, ticket: Ticket, sequence: int, is_committing: bool) -> None:
        """Run a call of a group that goes on when links fail; see ``mycel.runtime.reroute``."""
        if self._faults.cause is not None:
            raise self._faults.again()
        attempt = self._attempt(ticket.what, ticket.timeout_s, (sequence, 0, 0))
        attempt.is_committing = is_committing
        self._drive(self._begin(call, attempt, sequence))

    def _go_on(self, failed: LinksFailed) -> None:
        """Replace schedules and channels by those of the fabric without the failed links.

        Raises:
            CommunicationError: nothing is left to go on with.
        """
        self._hang_up()
        try:
            topology = without_links(self.topology, failed.links)
        except TopologyError:
            raise self._faults.poison(
                "timeout", f"{failed}; the ranks cannot all reach each other without it, so the group cannot go on"
            ) from None
        self._sockets.clear()
        for sock in self._open:
            sock.close()
        self._open.clear()
        self.planner.forget()
        self.topology = topology
        self._faults.next_epoch(topology)
        if self.rank == 0:
            _log.warning("%s; the group goes on without it, from collective #%d", failed, failed.resume)

    def _write_down(self, error: CommunicationError) -> None:
        """Have the last calls written to a file, once, whose place becomes a note of the error."""
        if self._flight is not None:
            self._flight.failed(error)

    def _hang_up(self) -> None:
        """Shut the data channels down, so that peers wait for this rank no longer.

        They are closed later: the engine's thread may still look at their descriptors.
        """
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    # -- the threads --------------------------------------------------------------------------------------

    def _ready_ring(self) -> npt.NDArray[np.int64]:
        if self._ring is None:
            self._ring = np.zeros(e.RING_SLOTS + e.RING_CAPACITY, dtype=np.int64)
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
            self._done_fd = os.eventfd(0, os.EFD_CLOEXEC)
            for target, name in ((self._serve, "serve"), (self._complete, "complete")):
                thread = threading.Thread(target=target, name=f"mycel-{name}", daemon=True)
                thread.start()
                self._threads.append(thread)
        return self._ring

    def _serve(self) -> None:
        """Body of the engine's thread: compiled code, but for trouble."""
        ring = self._ring
        if ring is None:
            return
        while (status := e.serve(ring.ctypes.data, self._wake_fd, self._done_fd)) != e.DONE:
            ticket = self._queued[0]
            if ticket.job is None or ticket.job.done:
                # The completing thread has not taken finished tickets out yet: the one at fault is further back.
                ticket = next(t for t in tuple(self._queued) if t.job is not None and not t.job.done)
            try:
                if ticket.job is not None:
                    self._judge(status, ticket, ticket.job)
            except MycelError as error:
                self._fail_queue(ring, error)

    def _fail_queue(self, ring: npt.NDArray[np.int64], error: MycelError) -> None:
        """Give every unfinished ticket the error and take it off the ring."""
        with self._order:
            for ticket in self._queued:
                if ticket.job is not None and not ticket.job.done:
                    ticket.error = error
            ring[e.RING_COMPLETED] = ring[e.RING_SUBMITTED]
        os.eventfd_write(self._done_fd, 1)

    def _complete(self) -> None:
        """Body of the completing thread: tells waiters and runs callbacks."""
        while True:
            os.eventfd_read(self._done_fd)
            while True:
                with self._order:
                    if not self._queued:
                        break
                    ticket = self._queued[0]
                    if ticket.error is None and not (ticket.job is not None and ticket.job.done):
                        break
                    self._queued.popleft()
                    callbacks = tuple(ticket.callbacks)
                ticket.finished.set()
                for callback in callbacks:
                    try:
                        callback(ticket)
                    except Exception:
                        _log.exception("a callback after %s failed", ticket.what)
            if self._closed and not self._queued:
                return

    # -- the end ------------------------------------------------------------------------------------------

    def abort(self, why: str = "aborted by the user") -> None:
        """Fail whatever is under way, here and on the other ranks."""
        self._faults.poison("failed", f"rank {self.rank}: {why}")
        self._hang_up()

    def disagree(self, message: str) -> CommunicationError:
        """Fail the group, for ranks have called different things; the cause, to be raised."""
        cause = self._faults.poison("mismatch", message)
        self._hang_up()
        self._write_down(cause)
        return cause

    def finish(self) -> None:
        """Wait for what is queued to be over, right or wrong."""
        with self._order:
            pending = tuple(self._queued)
        for ticket in pending:
            ticket.finished.wait(ticket.timeout_s + 5.0)

    def close(self) -> None:
        """Leave: finish what is queued, say goodbye, close everything. Idempotent."""
        with self._order:
            if self._closed:
                return
            self._closed = True
        self.finish()
        if self._ring is not None:
            self._ring[e.RING_STOP] = 1
            os.eventfd_write(self._wake_fd, 1)
            os.eventfd_write(self._done_fd, 1)
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join(5.0)
            os.close(self._wake_fd)
            os.close(self._done_fd)
        if self._rerouter is not None:
            self._rerouter.close()
        if self._flight is not None:
            self._flight.close()
        self._control.close()
        for sock in self._open:
            sock.close()
        self._open.clear()
        self._rendezvous.close()
        self.planner.forget()


def _machines(hosts: Sequence[str]) -> tuple[int, ...]:
    """A number for the machine of each rank; its network namespaces share its processors.

    Examples:
        >>> _machines(["a/net:[1]", "b", "a/net:[2]"])
        (0, 1, 0)
    """
    names = [host.partition("/")[0] for host in hosts]
    known = list(dict.fromkeys(names))
    return tuple(known.index(name) for name in names)
