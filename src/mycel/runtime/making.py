"""What the engine runs for a call: the schedule that is chosen, the program of this rank, its arrays, and the job.

Nothing is begun here, and no channel opened: a job whose channels are not open yet says so when its turn comes, and
then gets them (``attach``).
"""

from __future__ import annotations

import time
from functools import partial

from mycel.collectives.cost import Choice
from mycel.collectives.lower import RankTemplate
from mycel.collectives.plan_programs import PlanPart
from mycel.collectives.synth import SYNTHESIZERS
from mycel.collectives.synth.classics import CLASSICS
from mycel.runtime.calls import Call, Ticket
from mycel.runtime.channels import Channels
from mycel.runtime.control import Control
from mycel.runtime.faults import Attempt, Faults
from mycel.runtime.flight import FlightLog
from mycel.runtime.forms import Form, Workspace
from mycel.runtime.headers import pack_kind
from mycel.runtime.pacing import Pacer
from mycel.runtime.plan_forms import PlanForm
from mycel.runtime.planner import Planner
from mycel.runtime.prepared import Ints, Job, Part, Prepared, origin_of

__all__ = ["METHODS", "Maker"]

#: What a choice's method is numbered in.
METHODS = (*SYNTHESIZERS, *CLASSICS)


class Maker:
    """Makes the jobs of one group's rank.

    Args:
        size: of the group.
        planner: schedules and choices.
        direct: the choice of a rank that does not know the lengths of others' blocks, and so cannot choose.
        channels, control: of the group.
        faults: when a run is looked at for the first time.
        pacer: of the channels.
        asking: what jobs know together of how long asking a ring pays; see ``prepared.asking``.
        flight: keeps the last calls; ``None``: nobody does.
        numbers_address: of the last number that was given.
    """

    def __init__(
        self,
        *,
        size: int,
        planner: Planner[Prepared],
        direct: Choice,
        channels: Channels,
        control: Control,
        faults: Faults,
        pacer: Pacer,
        asking: Ints,
        flight: FlightLog | None,
        numbers_address: int,
    ) -> None:
        self._size, self._planner, self._direct = size, planner, direct
        self._channels, self._control, self._faults = channels, control, faults
        self._pacer, self._asking, self._flight = pacer, asking, flight
        self._numbers_address = numbers_address
        self._forms: dict[Part, Form | PlanForm] = {}
        self._workspace = Workspace()

    def make(self, call: Call, attempt: Attempt, number: int) -> Ticket:
        """A ticket with a job; without one where there is nothing to move.

        Args:
            call: what is to run.
            attempt: its run, whose header is completed.
            number: of the call; 0: the next when it begins.

        Raises:
            CommunicationError: the program is not right, and the group has failed.
        """
        called_ns = time.monotonic_ns()
        num_bytes = call.num_elements * call.item_bytes
        if num_bytes == 0 and call.knows_all:
            return Ticket(job=None, attempt=attempt, is_through=True)
        planner = self._planner
        choice = planner.choice_for(call) if call.knows_all else self._direct
        plan = planner.registered.number(choice.method, METHODS) << 5 | choice.piece_bytes.bit_length()
        element = call.dtype if call.element is None else call.element
        op = None if call.average else call.reduce_op
        kind = pack_kind(call.title or call.name, element, op, call.root, plan)
        attempt.header = (attempt.header[0], kind, num_bytes)
        limit_ns = max(1, self._faults.first_look_ns(attempt) - called_ns)
        lay_out = partial(self._lay_out, call=call, choice=choice)
        if (part := planner.part(choice.method)) is not None:
            prepared = planner.prepared_part(part, call, choice, lay_out)
        else:
            prepared = planner.prepared(call, choice, lay_out)
            name = (call.name, call.root, choice.method)
            self._pacer.adapt(name, planner.plan(*name).schedule, choice.seconds, self._channels.descriptors)
        job = Job(
            prepared,
            bases=(call.input_address, call.output_address),
            dtype=call.dtype,
            reduce_op=call.reduce_op,
            divisor=self._size if call.average else 0,
            header=(number, kind),
            limit_ns=limit_ns,
            keep=call.keep,
            numbers_address=self._numbers_address,
        )
        if self._flight is not None:
            self._flight.note(prepared.traffic, called_ns, job.fields)
        return Ticket(job=job, attempt=attempt)

    def _lay_out(self, plan: RankTemplate | PlanPart, elements: int, call: Call, choice: Choice) -> Prepared:
        form = self._forms.get(plan)
        if form is None:
            given = (self._channels.lines(plan.channels), self._control.descriptors, self._asking, self._workspace)
            form = PlanForm(plan, *given) if isinstance(plan, PlanPart) else Form(plan, *given)
            self._forms[plan] = form
        return form.prepare(
            call.num_elements,
            elements,
            call.item_bytes,
            call.block_elements,
            states_channel_bytes=not call.knows_all,
            origin=origin_of(call.name, call.root, choice.method, choice.piece_bytes, call.block_elements is None),
        )

    def attach(self, job: Job) -> None:
        """Give a job the channels that have been opened for it, and those that will be made of the same plan."""
        plan = job.prepared.plan
        lines = self._channels.lines(plan.channels)
        job.prepared.attach(lines)
        if (form := self._forms.get(plan)) is not None:
            form.attach(lines)
        self._pacer.extend(self._channels.descriptors)

    def forget(self) -> None:
        """Begin anew: channels are closed, or nobody calls any more."""
        self._forms.clear()
