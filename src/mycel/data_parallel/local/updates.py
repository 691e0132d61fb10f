"""Local updates: ranks train alone for some steps, then synchronise."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mycel.arguments import the
from mycel.comm.bundle import Packed
from mycel.comm.handle import Handle
from mycel.comm.sharded import is_sharded
from mycel.comm.start import agree, group_or_all
from mycel.data_parallel.combine.base import Combiner
from mycel.data_parallel.combine.mean import Mean
from mycel.data_parallel.compress.base import Compressor
from mycel.data_parallel.feedback import is_finite
from mycel.data_parallel.local.carriers import Carriers, as_policy, take_change
from mycel.data_parallel.local.checks import check, check_members, check_parts, named, own_group, unwrapped
from mycel.data_parallel.local.meetings import Meetings
from mycel.data_parallel.local.members import Members, View, hand_on, look_round
from mycel.data_parallel.local.outer import MakeOuter
from mycel.data_parallel.local.parts import Meeting, Part, Said
from mycel.data_parallel.local.saved import by_name, load_parts, state_of_parts
from mycel.data_parallel.local.scaler import watch_scaler
from mycel.data_parallel.local.state import load_tensors, local_part
from mycel.data_parallel.local.streaming import Streaming, divide
from mycel.data_parallel.local.synchronizer import Synchronizer, check_synchronizer, check_total
from mycel.data_parallel.policy import CompressionPolicy
from mycel.data_parallel.rehearsal import rehearse
from mycel.data_parallel.stats import CommStats
from mycel.errors import UsageError

__all__ = ["LocalUpdates", "OptimizerState"]

_log = logging.getLogger(__name__)

#: What a synchronisation does with the local optimizer's state.
OptimizerState = Literal["keep", "average", "reset"]
#: Ranks that are lost while the group is formed anew: so often it is tried again.
_ATTEMPTS = 5


class LocalUpdates(Handle):
    """Local updates at work; made by ``local_updates``.

    Attributes:
        step: optimizer steps so far, those that a scaler left out among them.
        rounds: synchronisations so far; with fragments, of one of them each.
        skipped: of these, how many came to something that was not finite, and changed nothing.
        num_bytes: of changes and averages so far, before compression.
        stats: bytes of changes that were sent.

    Examples:
        >>> from mycel.data_parallel.local import Periodic, local_updates
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with local_updates(optimizer, Periodic(2), model=model) as updates:
        ...     for _ in range(3):
        ...         model(torch.ones(1, 2)).sum().backward()
        ...         optimizer.step()
        ...     updates.step, updates.rounds, updates.in_step
        (3, 1, False)
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        synchronizer: Synchronizer | Streaming,
        *,
        model: nn.Module,
        outer: MakeOuter | None,
        combiner: Combiner | None,
        compressor: Compressor | CompressionPolicy | None,
        feedback: bool | None,
        seed: int,
        total_steps: int | None,
        average_buffers: bool,
        optimizer_state: OptimizerState,
        scaler: Any,
        uneven: bool,
        members: Members | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._optimizer = the(torch.optim.Optimizer, unwrapped(optimizer), "the optimizer of this rank")
        the(nn.Module, model, "the model")
        check_synchronizer(synchronizer)
        check_total(synchronizer, total_steps, ends=uneven or members is not None)
        check_parts(outer, combiner)
        self._synchronizer = synchronizer
        self._streaming = synchronizer if isinstance(synchronizer, Streaming) else None
        self._total_steps = total_steps
        self._optimizer_state = optimizer_state
        self._members = members
        inner = getattr(model, "_orig_mod", model)
        self._ddp = inner if isinstance(inner, DistributedDataParallel) else None
        module: nn.Module = self._ddp.module if self._ddp is not None else inner
        self._names, self._parameters = named(self._optimizer, module)
        self._targets = [local_part(p) for p in self._parameters]
        self._buffers = [local_part(b) for b in module.buffers() if b.is_floating_point()] if average_buffers else []
        delayed, compressed = synchronizer.delayed, compressor is not None
        check(self._parameters, combiner, group, optimizer_state, delayed=delayed, compressed=compressed)
        if members is not None:
            has_buffers, is_wrapped = bool(self._buffers), self._ddp is not None
            check_members(self._parameters, group, optimizer_state, is_wrapped=is_wrapped, has_buffers=has_buffers)
        if group is None and self._ddp is not None:
            group = self._ddp.process_group
        self.step = self.rounds = self.num_bytes = self.skipped = 0
        self.stats = CommStats()
        self._round_begin = self._trained = 0
        self._round_length: int | None = None
        self._rate = 1.0
        self._diverged = self._ddp is None
        self._exchanged = True
        self._has_state = self._finished = self._wanted = self._is_over = False
        self._repeats = self._before = self._given_up = 0
        tells = uneven or members is not None
        if compressor is not None:
            rehearse(as_policy(compressor).compressors(), self._targets[0].device)
        first = group_or_all(group, "local_updates") if members is not None else own_group(group, delayed=delayed)
        self._meetings = Meetings(first, in_background=delayed, tells=tells)
        if members is None:
            agree([*self._targets, *self._buffers], first)
        self._averages = Packed(self._targets)
        self._parts: list[Part] = []
        if outer is not None or delayed or compressed or tells or not isinstance(combiner or Mean(), Mean):
            carriers = Carriers(combiner or Mean(), compressor, feedback=feedback, seed=seed, stats=self.stats)
            self._parts = self._divided(outer or take_change, carriers)
        awaited = self._regroup() if members is not None else 0
        self._hooks: list[Any] = [
            self._optimizer.register_step_pre_hook(lambda *_: self._begin_round()),
            self._optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]
        if self._ddp is not None:
            self._hooks.append(self._ddp.register_forward_pre_hook(lambda *_: self._before_forward()))
        self._release_scaler: Callable[[], None] | None = None
        if scaler is not None:
            self._release_scaler = watch_scaler(scaler, self._optimizer, lambda: self.step, self._step_left_out)
        if awaited:
            self._meet(last=awaited == 2)

    # -- rounds -----------------------------------------------------------------------------------------------

    @property
    def in_step(self) -> bool:
        """Whether all ranks have the same parameters now: a good time to save or to evaluate."""
        return self.step == self._round_begin

    @property
    def _is_at_end(self) -> bool:
        return self._total_steps is not None and self.step >= self._total_steps

    def synchronize(self) -> None:
        """Synchronise now and use everything that is under way. All ranks of the group call it at the same step."""
        if not self.in_step or self._meetings.open:
            self._meet(last=True)

    def finish(self) -> None:
        """This rank has no more batches: take part in the others' rounds without a change, until all have finished.

        Every rank calls it after its last step. Afterwards all have the same parameters. Changes are divided by the
        number of all ranks to the end, as DDP's ``join`` does with gradients: every batch weighs the same.

        Raises:
            UsageError: ranks were not said to be ``uneven``, or DDP exchanges gradients in this round.
        """
        if not self._meetings.tells:
            raise UsageError("finish: pass uneven=True (or members) to local_updates, so that ranks tell each other")
        if self._is_over or (self._is_at_end and self.in_step):
            return
        self._finished = True
        while not self._is_over:
            if self._streaming is not None and not self._is_at_end:
                self.step += 1
            self._meet(last=self._is_at_end)

    def close(self) -> None:
        """Stop watching the optimizer; DDP averages gradients again. Call ``synchronize`` first."""
        for hook in self._hooks:
            hook.remove()
        if self._release_scaler is not None:
            self._release_scaler()
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = True

    def _before_forward(self) -> None:
        """DDP decides at the forward pass whether the backward pass exchanges gradients."""
        if torch.is_grad_enabled():
            self._begin_round()
            self._choose_gradients()

    def _begin_round(self) -> None:
        if self._round_length is not None:
            return
        self._rate = float(self._optimizer.param_groups[0]["lr"])
        length = self._synchronizer.period(self.step, self._rate)
        if self._total_steps is not None and self.step < self._total_steps:
            length = min(length, self._total_steps - self.step)
        self._round_length = length
        self._diverged |= not self._exchanges_gradients()

    def _exchanges_gradients(self) -> bool:
        """Whether DDP exchanges gradients in this round, after which there is nothing to synchronise."""
        return self._ddp is not None and not self._parts and self._round_length == 1

    def _choose_gradients(self) -> None:
        """Set DDP before every forward pass: ``no_sync`` around one puts back, at its end, what it found before.

        Where gradients were exchanged before and are now, DDP is left alone, since the user may be accumulating.
        """
        assert self._ddp is not None
        if not self._exchanges_gradients():
            self._ddp.require_backward_grad_sync = False
        elif not self._exchanged:
            self._ddp.require_backward_grad_sync = True

    def _step_left_out(self) -> None:
        self._begin_round()
        self._after_step()

    def _after_step(self) -> None:
        self.step += 1
        self._trained += 1
        if self._streaming is not None or self.step - self._round_begin >= (self._round_length or 1):
            self._meet(last=self._is_at_end)

    @torch.no_grad()
    def _meet(self, *, last: bool) -> None:
        """What there is to do after a step that ends a round; with fragments, after each."""
        if self._streaming is not None:
            last = self._stream(self._streaming, last=last)
        elif self._parts:
            last = self._exchange_changes(last=last)
        elif self._diverged:
            self._average(self._averages, self._targets)
        if self._streaming is None or last:
            self._end_round(last=last)
        if self._wanted and not last:
            self._wanted = False
            self._regroup()

    def _end_round(self, *, last: bool) -> None:
        if self._diverged and (last or not self._synchronizer.delayed):
            self._average(Packed(self._buffers), self._buffers)
            self._settle_optimizer_state()
        if self._ddp is not None:
            self._choose_gradients()
            self._exchanged = self._exchanges_gradients()
        self.rounds += len(self._parts) if self._streaming is not None else 1
        self._round_begin, self._round_length = self.step, None
        self._is_over |= last and self._meetings.tells

    def _exchange_changes(self, *, last: bool) -> bool:
        """Have this round's changes combined, and use those that are due; whether it was the last round."""
        (part,) = self._parts
        due = self._meetings.open[:]
        if not self._synchronizer.delayed:
            self._hold(last=last)
            return last or self._ends(self._meetings.said)
        measured = part.measure() if self._meetings.tells or not self.in_step else None
        for meeting in due:
            self._used(meeting)
        begun = self._begin(part, measured, last=last) if measured is not None else None
        if begun is not None and self._finished:
            last = last or self._ends(self._heard(begun))
        part.give()
        if last:
            self._used(begun)
            part.give()
        return last

    def _stream(self, rule: Streaming, *, last: bool) -> bool:
        """Begin the meetings of this step and use those that are due; whether it was the last one."""
        if not last:
            for fragment, part in enumerate(self._parts):
                if rule.meets(fragment, self.step, self._total_steps):
                    self._rate = float(self._optimizer.param_groups[0]["lr"])
                    begun = self._begin(part, part.measure(), last=False)
                    self.rounds += 1
                    if begun is not None:
                        begun.lands_at = self.step + rule.overlap
                        if rule.own == "since" and rule.overlap:
                            begun.since = [target.clone() for target in part.targets]
                        else:
                            begun.mixing = rule.mixing if rule.overlap else 0.0
                        last |= self._finished and self._ends(self._heard(begun))
        for meeting in self._meetings.open[:]:
            if last or meeting.lands_at <= self.step:
                self._used(meeting)
        if last:
            self._hold(last=True)
            for part in self._parts:
                part.give()
        return last

    def _ends(self, said: Said) -> bool:
        return self._meetings.tells and bool(said.last or not said.trains)

    # -- meetings ---------------------------------------------------------------------------------------------

    def _begin(self, part: Part, measured: Meeting, *, last: bool) -> Meeting | None:
        self.num_bytes += part.shared.num_bytes
        own = Said(
            trains=int(not self._finished),
            changed=int(self._trained != part.trained),
            last=int(last),
            wanted=int(self._members is not None and self._members.is_wanted),
        )
        part.trained = self._trained
        return self._meetings.begin(measured, own)

    def _hold(self, *, last: bool) -> None:
        """Have all parts meet, again if a rank is lost meanwhile."""
        self._repeats = 2 if last else 1
        while True:
            self._before = self._meetings.begun
            begun = [self._begin(part, part.measure(), last=last) for part in self._parts]
            used = [self._used(meeting) for meeting in begun]  # all of them, whatever becomes of the first
            if all(used):
                break
        self._repeats = 0

    def _heard(self, meeting: Meeting) -> Said:
        """What was said with a meeting; if it failed, that will be seen where it is to be used."""
        try:
            return meeting.pending.wait()
        except RuntimeError:
            if self._members is None:
                raise
            return Said()

    def _used(self, meeting: Meeting | None) -> bool:
        """Use what a meeting came to; whether it took place: a rank may be lost instead."""
        if meeting is None or meeting.is_used:
            return True
        try:
            said = meeting.pending.wait()
        except RuntimeError as error:
            if self._members is None or not self._members.has_failed(error) or self._given_up >= _ATTEMPTS:
                raise
            self._given_up += 1
            _log.warning("local updates: meeting %d has failed: %s", meeting.number, error)
            self._regroup()
            return meeting.is_used
        self._use(meeting, said)
        self._given_up = 0
        return True

    def _use(self, meeting: Meeting, said: Said) -> None:
        part = meeting.part
        self._meetings.open.remove(meeting)
        meeting.is_used = True
        is_sound = self._is_sound(meeting.means) if said.changed else False
        part.carrier.settle(keep=is_sound)
        if is_sound:
            part.apply(meeting.means, self._rate)
            part.give(meeting.mixing, meeting.since)
        elif said.changed:
            self.skipped += 1
            _log.warning("local updates: meeting %d came to numbers that are not finite: left out", meeting.number)
            self._return(part)
        self._wanted |= bool(said.wanted)

    def _return(self, part: Part) -> None:
        """After a meeting that did not count: this rank has a part's shared parameters again.

        If it was this rank that ran away, it has those of all parts, and its optimizer begins anew: what is no number
        in one place leads all others away.
        """
        ran_away = not all(other.is_sound for other in self._parts)
        part.give()
        if ran_away:
            _log.warning("local updates: this rank's parameters were not finite; its optimizer begins anew")
            self._optimizer.state.clear()
            for other in self._parts:
                other.give()

    def _is_sound(self, means: Packed) -> bool:
        """Whether all means are finite, those of the other shards among them: the same on all ranks."""
        is_bad = not all(is_finite(bundle.flat) for bundle in means.bundles)
        sharded = next((p for p in self._parameters if is_sharded(p)), None)
        if sharded is None:
            return not is_bad
        flag = torch.tensor([is_bad], dtype=torch.uint8, device=local_part(sharded).device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=sharded.device_mesh.get_group())
        return not bool(flag)

    def _average(self, packed: Packed, tensors: list[Tensor]) -> None:
        packed.copy_from(tensors)
        self.num_bytes += packed.num_bytes
        for pending in [Mean().start(bundle, self._meetings.group) for bundle in packed.bundles]:
            pending.wait()
        packed.copy_to(tensors)

    def _settle_optimizer_state(self) -> None:
        if self._optimizer_state == "reset":
            self._optimizer.state.clear()
        elif self._optimizer_state == "average":
            entries = [(self._optimizer.state[p], t) for p, t in zip(self._parameters, self._targets, strict=True)]
            moments = [
                local_part(v)
                for entry, target in entries
                for v in entry.values()
                if isinstance(v, Tensor) and v.is_floating_point() and local_part(v).shape == target.shape
            ]
            self._average(Packed(moments), moments)

    def _divided(self, make_outer: MakeOuter, carriers: Carriers) -> list[Part]:
        rule = self._streaming
        places = [list(range(len(self._names)))]
        if rule is not None:
            places = divide(self._names, [p.numel() for p in self._parameters], rule.fragments, rule.pattern)
        return [
            Part(
                [self._names[i] for i in mine],
                [self._parameters[i] for i in mine],
                [self._targets[i] for i in mine],
                make_outer,
                carriers.make({self._names[i]: self._targets[i] for i in mine}),
                num_buffers=2 if self._synchronizer.delayed and rule is None else 1,
                keeps_changes=self._members is not None,
            )
            for mine in places
        ]

    # -- members ----------------------------------------------------------------------------------------------

    def _regroup(self) -> int:
        """Form the group anew, come to terms about meetings under way, and give newcomers what they need.

        Returns:
            Not 0 where this rank is new, and the others wait for it in a meeting; 2: in the last one.
        """
        assert self._members is not None
        self._meetings.drain()
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._meetings.group = self._members.form(self.step if self._has_state else -1)
                return self._come_to_terms()
            except RuntimeError as error:
                if attempt == _ATTEMPTS or not self._members.has_failed(error):
                    raise
                _log.warning("local updates: a rank was lost while the group was formed: %s", error)
        raise AssertionError("not reached")

    @torch.no_grad()
    def _come_to_terms(self) -> int:
        meetings, is_new = self._meetings, not self._has_state
        views = look_round(
            View(
                has_state=int(self._has_state),
                step=self.step,
                begun=self._before if self._repeats else meetings.begun,
                committed=meetings.committed,
                repeats=self._repeats,
                **asdict(meetings.said),
            ),
            meetings.group,
        )
        holders = [view for view in views if view.has_state]
        if not holders:
            agree([*self._targets], meetings.group)
            for part in self._parts:
                part.shared.copy_from(part.targets)
            self._has_state = True
            return 0
        newest = max(holders, key=lambda view: view.committed)
        for meeting in meetings.open[:]:
            if meeting.number <= newest.committed:
                assert meeting.is_held  # whoever has committed it has heard that all hold it
                self._use(meeting, newest.said)
            else:
                meetings.drop(meeting)
        meetings.committed, meetings.said = newest.committed, newest.said
        # A meeting that some rank has begun and that failed is dropped on all; those that are held again count anew.
        meetings.skip_until = max(view.begun for view in holders)
        if self._repeats:
            meetings.begun = max(self._before, newest.committed)
        leading = max(holders, key=lambda view: view.step)
        if len(holders) < len(views):
            source = views.index(leading)
            state = hand_on(None if is_new else self._for_newcomers(), source, meetings.group)
            if is_new:
                self._take_over(state)
        self._has_state, self._wanted = True, False
        is_held = leading.repeats and newest.committed < leading.begun + len(self._parts)
        return leading.repeats if is_new and is_held else 0

    def _for_newcomers(self) -> dict[str, Any]:
        updates = state_of_parts(self._parts, self._meetings.group, own=True)
        own = {"step": self.step, "rounds": self.rounds, "rate": self._rate, "begun": self._meetings.begun}
        return {**own, "parts": updates, "optimizer": self._optimizer.state_dict()}

    def _take_over(self, state: dict[str, Any]) -> None:
        self.step, self.rounds, self._rate = state["step"], state["rounds"], state["rate"]
        self._round_begin, self._round_length = self.step, None
        self._meetings.begun = state["begun"]
        state["parts"]["residuals"] = {}  # what another rank is owed
        load_parts(self._parts, state["parts"], self._meetings.group)
        for part in self._parts:
            part.give()
        self._optimizer.load_state_dict(state["optimizer"])

    # -- checkpoints ------------------------------------------------------------------------------------------

    def state_dict(self, *, own: bool = False) -> dict[str, Any]:
        """Everything that a restart needs beside the model and its optimizer, by parameters' names.

        Plain containers of tensors and numbers. Waits for what is under way and takes its result along, which every
        rank has; no rank needs another one for it, but for compressed changes with feedback: then all ranks call it.
        Right after a synchronisation (``in_step``) all ranks' states are the same, and one of them restarts any
        number of ranks. In between, a rank's parameters are its own: call ``synchronize`` before saving one rank's
        for all.

        Args:
            own: this rank's own residuals, with which a run of the same ranks goes on bit for bit; each saves its
                own. Otherwise their mean, for any number of ranks.
        """
        state: dict[str, Any] = {
            "step": self.step,
            "rounds": self.rounds,
            "round_begin": self._round_begin,
            "round_length": self._round_length,
            "rate": self._rate,
            "diverged": self._diverged,
            "pending": [],
        }
        self._meetings.drain()
        for meeting in self._meetings.open[:]:
            said = meeting.pending.wait()
            if not self._is_sound(meeting.means):
                self._use(meeting, said)
                continue
            meeting.part.carrier.settle(keep=True)
            entry: dict[str, Any] = {"lands_at": meeting.lands_at, "mixing": meeting.mixing}
            if meeting.since is not None:
                entry["since"] = by_name(meeting.part, meeting.since)
            state["pending"].append({**entry, "means": by_name(meeting.part, meeting.means.parts)})
        return {**state, **state_of_parts(self._parts, self._meetings.group, own=own)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was called; model and optimizer are loaded by their own.

        Raises:
            UsageError: the state is that of another model or of other settings.
        """
        if bool(state["shared"]) != bool(self._parts) or (state["pending"] and not self._synchronizer.delayed):
            raise UsageError(
                "the saved local updates had other settings: an outer optimizer, a combiner or delayed rounds that "
                "these have not, or the other way round"
            )
        self.step, self.rounds = state["step"], state["rounds"]
        self._round_begin, self._round_length = state["round_begin"], state["round_length"]
        self._rate, self._diverged = state["rate"], state["diverged"]
        load_parts(self._parts, state, self._meetings.group)
        self._meetings.open.clear()
        for saved in state["pending"]:
            part = next((part for part in self._parts if set(part.names) == set(saved["means"])), None)
            if part is None:
                raise UsageError("the saved local updates had other fragments under way: pass the same Streaming")
            meeting = part.measure()
            load_tensors("changes under way", saved["means"], part.names, meeting.means.parts)
            meeting.lands_at, meeting.mixing = saved["lands_at"], saved["mixing"]
            if "since" in saved:
                meeting.since = [target.clone() for target in part.targets]
                load_tensors("parameters under way", saved["since"], part.names, meeting.since)
            self._meetings.open.append(meeting)
