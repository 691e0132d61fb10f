"""Communicator: a group of ranks that run collectives over verified schedules. Knows addresses, not tensors.

Collectives of a communicator run one after the other in the order they were started, which must be the same on
every rank. A blocking call runs in the caller's thread, with the interpreter lock released. Others go through a ring
to a thread that stays in compiled code, so that a main thread busy in Python delays neither their start nor their
progress.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

from mycel.collectives.cost import Choice, choose, longest_piece
from mycel.collectives.program import Channel
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import CollectiveName
from mycel.cost import Costs
from mycel.errors import CommunicationError, TopologyError
from mycel.names import spelled
from mycel.runtime import engine as e
from mycel.runtime import job_fields as j
from mycel.runtime.calls import Call, Ticket
from mycel.runtime.channels import Channels
from mycel.runtime.control import Control
from mycel.runtime.faults import Attempt, Faults, LinksFailed
from mycel.runtime.flight import FlightLog
from mycel.runtime.forks import let_go_in_children
from mycel.runtime.job_queue import JobQueue
from mycel.runtime.making import METHODS, Maker
from mycel.runtime.p2p_lines import Lines
from mycel.runtime.pacing import Pacer, is_unpaced, path_pace
from mycel.runtime.planner import Planner, sends_directly, sends_parts_directly, verified_schedules
from mycel.runtime.prepared import Ints, Job, Prepared, asking
from mycel.runtime.proof import Proofs
from mycel.runtime.reroute import Rerouter
from mycel.runtime.shortcut import Pool, Shortcut
from mycel.runtime.timeouts import bounded_s
from mycel.runtime.transport.address import machine_numbers
from mycel.runtime.transport.rendezvous import Rendezvous
from mycel.runtime.turns import Result, Turns
from mycel.runtime.verdict import without_links
from mycel.runtime.watch import Watched, watch
from mycel.topology.model import Topology

__all__ = ["PACE", "Call", "Communicator", "Ticket"]

_log = logging.getLogger(__name__)

#: Channels are paced at this part of their path's bandwidth: what TCP/IP headers leave of it is 0.956 with 1,500-byte
#: packets.
PACE = 0.97


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
        members: global ranks, in group order; all of the job if not given.
        in_memory: whether ranks of a node exchange data in memory that they share.

    Attributes:
        planner: this group's schedules and choices; ``reroutes`` is as given.
        is_local: all ranks are on one machine, and nothing is paced.
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
        members: Sequence[int] | None = None,
        in_memory: bool = True,
    ) -> None:
        self.rank, self.size, self.reroutes = rank, size, reroutes
        self.topology = topology
        self._timeout_s = bounded_s(timeout_s)
        self._rendezvous = rendezvous
        self._address_of = address_of
        self._paced = paced
        self.is_local = is_local = rendezvous.is_one_host and is_unpaced(topology, paced)
        machines = machine_numbers([address.host for address in rendezvous.addresses])
        self._methods = methods and tuple(spelled(m, METHODS, "method of MYCEL_METHODS") for m in methods)
        self._control = Control.open(rendezvous, timeout_s, len(topology.vertices))
        self._faults = Faults(
            rank=rank,
            size=size,
            control=self._control,
            dtype_names=dtype_names,
            topology=topology,
            channels=lambda: dict(self._channels.descriptors),
            reroutes=reroutes,
        )
        self._channels = Channels(
            rank, rendezvous, address_of, self._pace, self._faults, self.abort, in_memory=in_memory
        )
        # Where a call that fails is run again, its array is written to while others may still be at it.
        arena = (0, 0) if reroutes else self._channels.arena
        asks = asking(machines.count(machines[rank]), self._channels.bell, arena)
        self._watched = Watched(
            self._faults.hearing,
            members or range(size),
            [address.host for address in rendezvous.addresses],
            [(address.ip, address.port) for address in rendezvous.addresses],
        )
        watch(self._watched)
        self.proofs = Proofs(rank, self._faults.poison)
        self.planner: Planner[Prepared] = Planner(
            rank,
            self._make_schedules,
            partial(choose, piece_bytes=piece_bytes, is_local=is_local, costs=costs or Costs(), machines=machines),
            self.proofs.require,
            lambda name, weights: self._make_schedules(name, None, weights),
        )
        self._flight = flight
        if flight is not None:
            flight.watch(self._channels.descriptors)
        self._queue = JobQueue(self._judge, self._internal)
        self._maker = Maker(
            size=size,
            planner=self.planner,
            direct=Choice(method="direct", piece_bytes=piece_bytes or longest_piece(is_local=is_local), seconds=0.0),
            channels=self._channels,
            control=self._control,
            faults=self._faults,
            pacer=Pacer(rank, paced),
            asking=asks,
            flight=flight,
            numbers_address=self._queue.numbers_address,
        )
        self._turns = Turns(
            self._queue,
            prepare=self._ticket,
            judge=self._judge,
            count=self._count,
            abort=self.abort,
            internal=self._internal,
        )
        self._rerouter = (
            Rerouter(rank, self._run_once, self._go_on, self._queue.take, self._internal) if reroutes else None
        )
        self._pool: Pool | None = None
        self._last = 0  # the number that is known to have been given last
        #: Works whose futures are about to be done; see ``mycel.runtime.work``.
        self.telling: deque[Any] = deque()
        #: Place of the last work that the caller knows to be over, and so all before it.
        self.known_over = -1
        self._closed = self._forked = False
        let_go_in_children(self)

    @property
    def timeout_s(self) -> float:
        """Time-out of calls that name none."""
        return self._timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._timeout_s = bounded_s(seconds)

    @property
    def number(self) -> int:
        """How many collectives have been called so far, the same on every rank."""
        return self._queue.number if self._rerouter is None else self._rerouter.number

    @property
    def is_inherited(self) -> bool:
        """Whether this process has been forked from the one that the group belongs to."""
        return self._forked

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
        if not self._turns.order.acquire(blocking=False):
            return False
        try:
            self._queue.take()
            return self._queue.oldest is None
        finally:
            self._turns.order.release()

    # -- schedules ----------------------------------------------------------------------------------------

    def _make_schedules(
        self, name: CollectiveName, root: int | None, weights: tuple[int, ...] | None = None
    ) -> dict[str, Schedule]:
        made = verified_schedules(self.topology, name, root, self._methods, weights)
        _log.debug("rank %d: schedules of %s: %s", self.rank, name, {m: s.depth for m, s in made.items()})
        return made

    @cached_property
    def exchanges_directly(self) -> bool:
        """Whether ranks send the parts of an uneven all_to_all themselves; see ``sends_directly``."""
        if self._rerouter is not None:  # the answer would change with the fabric, while calls are under way
            return False
        return sends_directly(self.planner.schedules("all_to_all"))

    def sends_parts_directly(self, name: CollectiveName, root: int) -> bool:
        """Whether a gather or scatter of parts goes straight from rank to rank; see ``sends_parts_directly``."""
        return sends_parts_directly(self.planner.schedules(name, root))

    def _pace(self, channel: Channel) -> int | None:
        return path_pace(self.topology, channel, self._paced)

    # -- calls --------------------------------------------------------------------------------------------

    def run(self, call: Call, *, timeout_s: float | None = None, settle: Callable[[], None] | None = None) -> Ticket:
        """Run a collective to its end.

        A signal handler that runs meanwhile may call collectives too: they come after this one. What it raises is
        raised when this one is over, but for KeyboardInterrupt, which fails the group.

        Args:
            call: what to run.
            timeout_s: from when it begins; ``None``: the group's.
            settle: puts the results to where the caller wants them.

        Returns:
            Its ticket, which is finished.

        Raises:
            CommunicationError: it failed; the group cannot be used any more.
        """
        if self._rerouter is None:
            ticket = self._turns.run(call, timeout_s, settle)
        else:
            ticket = self._reroute(self._rerouter, call, timeout_s, settle)
        if not ticket.is_finished:
            self.wait(ticket)
        return ticket

    def shortcut(self, ticket: Ticket) -> Shortcut | None:
        """What ``run_again`` takes for calls like one that has gone well; ``None``: they take the long way."""
        if self._rerouter is not None or ticket.job is None or ticket.timeout_s != self._timeout_s:
            return None
        return Shortcut(ticket)

    def run_again(self, shortcut: Shortcut, addresses: tuple[int, int], keep: tuple[object, ...]) -> bool:
        """Run a call to its end that was run before, with other arrays in place of the first.

        Args:
            shortcut: the call.
            addresses: of INPUT, 0 where it has none, and OUTPUT.
            keep: objects that own them.

        Returns:
            Whether it was run; ``False``: nothing was begun, it has to go the long way.

        Raises:
            CommunicationError: it failed; the group cannot be used any more.
        """
        if (
            self._forked
            or self._closed
            or self.telling
            or self._faults.cause is not None
            or shortcut.timeout_s != self._timeout_s
        ):
            return False
        number = self._turns.run_again(shortcut, self._place_of, addresses, keep)
        if number > 0:
            self._last = number
            self._faults.recent.append((number, *shortcut.header))
        return number != 0

    def _place_of(self, shortcut: Shortcut) -> tuple[Ints, int]:
        """Where the job of a shortcut may stand, which the flight recorder knows."""
        if self._pool is None:
            self._pool = Pool(64 if self._flight is None else self._flight.capacity + 64)
        fields, address = self._pool.take()
        if self._flight is not None:
            self._flight.note(shortcut.traffic, time.monotonic_ns(), fields)
        return fields, address

    def start(
        self, call: Call, *, timeout_s: float | None = None, settle: Callable[[], None] | None = None
    ) -> Ticket:
        """Start a collective; it proceeds by itself. Arguments as for ``run``.

        Raises:
            CommunicationError: the group has failed before.
        """
        if self._rerouter is None:
            return self._turns.start(call, timeout_s, settle)
        return self._reroute(self._rerouter, call, timeout_s, settle)

    def together(self, work: Callable[[], Result]) -> Result:
        """Make a call that takes several collectives, by ``work``: what signal handlers call comes after all."""
        return self._turns.together(work)

    def _reroute(
        self, rerouter: Rerouter, call: Call, timeout_s: float | None, settle: Callable[[], None] | None
    ) -> Ticket:
        with self._turns.order:
            self._check()
            attempt = self._attempt(call.title or call.name, self._limit_s(timeout_s), (0, 0, 0))
            ticket = Ticket(job=None, attempt=attempt, settle=settle)
            rerouter.submit(call, ticket)
            self._queue.hold(ticket)
            return ticket

    def wait(self, ticket: Ticket, timeout_s: float | None = None) -> bool:
        """Wait for a started collective; ``False``: it is still under way after ``timeout_s``.

        Raises:
            CommunicationError: it failed.
        """
        if not ticket.is_finished and not self._queue.wait(ticket, timeout_s):
            return False
        if ticket.error is not None:
            raise ticket.error
        return True

    def is_finished(self, ticket: Ticket) -> bool:
        """Whether a collective is over, right or wrong, and its results where they belong."""
        if not ticket.is_finished:
            self._queue.take()
        return ticket.is_finished

    def when_done(self, ticket: Ticket, callback: Callable[[Ticket], None]) -> None:
        """Call ``callback``, which returns at once, when the collective is finished; at once where it is."""
        self._queue.when_finished(ticket, callback)

    def _check(self) -> None:
        """Raises where the group cannot be used."""
        if self._forked:
            raise self._not_ours()
        if self._closed:
            raise CommunicationError("the process group has been destroyed")
        if self._faults.cause is not None:
            raise self._faults.again()

    def _not_ours(self) -> CommunicationError:
        return CommunicationError(
            f"this process was forked from rank {self.rank}, and the process group is that one's: its connections "
            "carry its parent's collectives. A child may destroy_process_group() and make a group of its own; or "
            "start it with spawn or forkserver instead of fork"
        )

    def _limit_s(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else bounded_s(timeout_s)

    def _attempt(self, what: str, limit_s: float, header: tuple[int, int, int]) -> Attempt:
        deadline = time.monotonic() + limit_s - self._faults.grace_s(limit_s)
        return Attempt(what=what, timeout_s=limit_s, deadline=deadline, header=header)

    def _ticket(self, call: Call, timeout_s: float | None, settle: Callable[[], None] | None) -> Ticket:
        """The job of a call, not begun; a ticket without a job where there is nothing to move.

        Its number is the engine's to give: a signal handler that interrupts this may call something before it.
        """
        self._check()
        likely = self._last + 1
        attempt = self._attempt(f"{call.title or call.name} #{likely}", self._limit_s(timeout_s), (likely, 0, 0))
        ticket = self._prepare(call, attempt, 0)
        ticket.settle = settle
        return ticket

    def _prepare(self, call: Call, attempt: Attempt, number: int) -> Ticket:
        """A ticket with a job of this number; 0: the next when it begins."""
        try:
            return self._maker.make(call, attempt, number)
        except CommunicationError as error:
            self._channels.shut_down()
            self._write_down(error)
            raise

    def _count(self, ticket: Ticket) -> None:
        """Write down the header of a call that has its number."""
        if ticket.job is not None:
            self._last = self._rename(ticket.attempt, ticket.job)
            self._faults.recent.append(ticket.attempt.header)

    def _rename(self, attempt: Attempt, job: Job) -> int:
        """The number that a job has got; its attempt gets it too, if it is not the likely one."""
        number = int(job.fields[j.J_HEADER + 1])
        if number != attempt.header[0]:
            attempt.header = (number, *attempt.header[1:])
            attempt.what = f"{attempt.what.rpartition('#')[0]}#{number}"
        return number

    def _judge(self, status: int, ticket: Ticket) -> None:
        """Decide what a run's status means: return to let it go on, or raise, which is the ticket's error then."""
        job, attempt = ticket.job, ticket.attempt
        if job is None or status == j.INTERRUPTED:
            return
        self._rename(attempt, job)
        begun_s = int(job.fields[j.J_STARTED_NS]) / 1e9
        attempt.deadline = begun_s + attempt.timeout_s - self._faults.grace_s(attempt.timeout_s)
        try:
            if status == j.UNOPENED:
                self._open(job, attempt)
            else:
                self._faults.judge(status, job, attempt)
        except CommunicationError as error:
            ticket.error = error
            self._channels.shut_down()
            self._write_down(error)
            raise
        except LinksFailed as failed:
            ticket.error = failed
            raise

    def _open(self, job: Job, attempt: Attempt) -> None:
        """Open the channels that a run needs and that no call before has needed."""
        self._channels.require(job.prepared.plan.channels, attempt)
        self._maker.attach(job)

    def _internal(self, error: BaseException, where: str) -> CommunicationError:
        """The group's failure for an error that nobody has thought of; never raises."""
        cause = CommunicationError(text := f"rank {self.rank}: {where} failed: {type(error).__name__}: {error}")
        try:
            _log.error("%s", text, exc_info=error)
            cause = self._faults.poison("failed", text)
            self._channels.shut_down()
            self._write_down(cause)
        except Exception:
            _log.exception("rank %d could not tell the others", self.rank)
        return cause

    def _run_once(self, call: Call, ticket: Ticket, number: int, is_committing: bool) -> None:
        """Run a call of a group that goes on when links fail; see ``mycel.runtime.reroute``."""
        if self._faults.cause is not None:
            raise self._faults.again()
        attempt = self._attempt(ticket.what, ticket.timeout_s, (number, 0, 0))
        attempt.is_committing = is_committing
        once = self._prepare(call, attempt, number)
        while once.job is not None and not once.is_over:
            if (status := e.execute(once.job.address)) != j.DONE:
                self._judge(status, once)
        if not is_committing:
            self._count(once)

    def _go_on(self, failed: LinksFailed) -> None:
        """Replace schedules and channels by those of the fabric without the failed links.

        Raises:
            CommunicationError: nothing is left to go on with.
        """
        self._channels.shut_down()
        try:
            topology = without_links(self.topology, failed.links)
        except TopologyError:
            raise self._faults.poison(
                "timeout", f"{failed}; the ranks cannot all reach each other without it, so the group cannot go on"
            ) from None
        self._channels.close()
        self._maker.forget()
        self.planner.forget()
        self.topology = topology
        self._faults.next_epoch(topology)
        if self._flight is not None:
            self._flight.links_lost += len(failed.links)
        if self.rank == 0:
            _log.warning("%s; the group goes on without it, from collective #%d", failed, failed.resume)
        self.planner.registered.drop(is_said=self.rank == 0)

    def _write_down(self, error: CommunicationError) -> None:
        """Have the last calls written to a file, once, whose place becomes a note of the error."""
        if self._flight is not None:
            self._flight.failed(error)

    # -- messages between two ranks -----------------------------------------------------------------------

    def lines(self) -> Lines:
        """What messages between two ranks need of the group."""
        return Lines(
            topology=self.topology,
            rendezvous=self._rendezvous,
            address_of=self._address_of,
            pace_of=self._pace,
            failure=lambda: self._faults.cause,
            give_up=self.give_up,
            control=self._control,
            in_memory=self._channels.in_memory,
        )

    def give_up(self, kind: str, message: str) -> CommunicationError:
        """Fail the group on all ranks, for a reason of a kind (``Faults.poison``); the cause, to be raised."""
        cause = self._faults.poison(kind, message)
        self._channels.shut_down()
        self._write_down(cause)
        return cause

    # -- the end ------------------------------------------------------------------------------------------

    def abort(self, why: str = "aborted by the user") -> None:
        """Fail whatever is under way, here and on the other ranks."""
        if self._forked:
            return
        self._faults.poison("failed", f"rank {self.rank}: {why}")
        self._channels.shut_down()

    def disagree(self, message: str) -> CommunicationError:
        """Fail the group, for ranks have called different things; the cause, to be raised."""
        return self.give_up("mismatch", message)

    def finish(self) -> None:
        """Wait for what is queued to be over, right or wrong."""
        while (oldest := self._queue.oldest) is not None:
            if not self._queue.wait(oldest, oldest.timeout_s):
                return  # it is late, and the next one to wait for it will say so

    def close(self) -> None:
        """Leave: finish what is queued, say goodbye, close everything. Idempotent; nothing in a forked child."""
        with self._turns.order:
            if self._closed or self._forked:
                return
            self._turns.finish_interrupted()
            self._closed = True
        is_idle = self._queue.close()
        if self._rerouter is not None:
            self._rerouter.close()
        if self._flight is not None:
            self._flight.close()
        self._watched.close()
        self._control.close()
        self._channels.end(is_idle=is_idle)
        self._rendezvous.close()
        self._maker.forget()
        self.planner.forget()

    def after_fork_in_child(self) -> None:
        """Let go of the parent's connections, and fail what is under way, here and without a word to anybody."""
        self._forked = True
        self._turns.give_up()
        self.telling.clear()
        self._queue.give_up(self._not_ours())
        self._channels.end()
