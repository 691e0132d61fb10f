"""Local updates: ranks train alone for some steps, then synchronise."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from mycel.comm.bundle import Packed
from mycel.comm.pending import Pending
from mycel.comm.start import agree, group_or_all
from mycel.data_parallel.combine.base import Combiner
from mycel.data_parallel.combine.mean import Mean
from mycel.data_parallel.handle import Handle
from mycel.data_parallel.local.outer import MakeOuter
from mycel.data_parallel.local.state import as_saved, load_tensors, local_part, read_optimizer, write_optimizer
from mycel.data_parallel.local.synchronizer import Synchronizer
from mycel.errors import UsageError

__all__ = ["LocalUpdates", "local_updates"]

#: What a synchronisation does with the local optimizer's state.
OptimizerState = Literal["keep", "average", "reset"]


def local_updates(
    optimizer: torch.optim.Optimizer,
    synchronizer: Synchronizer,
    *,
    model: nn.Module,
    outer: MakeOuter | None = None,
    combiner: Combiner | None = None,
    total_steps: int | None = None,
    average_buffers: bool = True,
    optimizer_state: OptimizerState = "keep",
    group: dist.ProcessGroup | None = None,
) -> LocalUpdates:
    """Let ranks train alone and synchronise when ``synchronizer`` says; the training loop stays as it is.

    The optimizer is watched by hooks, so learning-rate schedulers and trainers see the object that they know. All
    ranks of the group call this together, after the model has its weights: those of the first rank become
    everybody's.

    A model wrapped by DDP averages gradients no longer, except in rounds of a single step without outer optimizer,
    which then cost what DDP costs. Of an FSDP2 model, sharded over a one-dimensional mesh, each rank's shards are
    synchronised with those of ``group``, the replicas of the same shard.

    Args:
        optimizer: the local one; what accelerate has wrapped is found.
        synchronizer: when to synchronise, for example ``QSR(alpha=0.2)`` or ``Delayed(Periodic(48))``.
        model: has the optimizer's parameters; plain, or wrapped by DDP or ``fully_shard``.
        outer: makes the optimizer of the shared parameters, for example ``diloco()``; none: they become what the
            combiner makes of the changes.
        combiner: how the ranks' changes become one; by default their mean.
        total_steps: of the training; the last round ends there, and with it everything that was under way.
        average_buffers: average floating-point buffers, such as running statistics of batch norms, every time,
            with delayed rounds only at the last.
        optimizer_state: what a synchronisation does with the local optimizer's state, such as momentum.
        group: the ranks that synchronise; by default those of DDP or all.

    Returns:
        The handle: ``synchronize``, ``state_dict``, ``close``.

    Raises:
        UsageError: a combination that cannot work; the message says which.

    Examples:
        >>> from mycel.data_parallel import QSR, diloco
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> updates = local_updates(optimizer, QSR(alpha=0.2), model=model, outer=diloco())
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> updates.step, updates.rounds  # rounds have (0.2 / 0.1)^2 = 4 steps
        (1, 0)
        >>> updates.close()
        >>> dist.destroy_process_group()
    """
    return LocalUpdates(
        optimizer,
        synchronizer,
        model=model,
        outer=outer,
        combiner=Mean() if combiner is None else combiner,
        total_steps=total_steps,
        average_buffers=average_buffers,
        optimizer_state=optimizer_state,
        group=group,
    )


class LocalUpdates(Handle):
    """Local updates at work; made by ``local_updates``.

    Attributes:
        step: optimizer steps so far.
        rounds: synchronisations so far.
        num_bytes: handed to combiners so far; what travels depends on the combiner.

    Examples:
        >>> from mycel.data_parallel.local.synchronizer import Periodic
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
        synchronizer: Synchronizer,
        *,
        model: nn.Module,
        outer: MakeOuter | None,
        combiner: Combiner,
        total_steps: int | None,
        average_buffers: bool,
        optimizer_state: OptimizerState,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._optimizer = _unwrapped(optimizer)
        self._synchronizer = synchronizer
        self._combiner = combiner
        self._total_steps = total_steps
        self._optimizer_state = optimizer_state
        inner = getattr(model, "_orig_mod", model)
        self._ddp = inner if isinstance(inner, DistributedDataParallel) else None
        module: nn.Module = self._ddp.module if self._ddp is not None else inner
        self._names, self._parameters = _named(self._optimizer, module)
        _check(self._parameters, combiner, group, optimizer_state, delayed=synchronizer.delayed)
        self._targets = [local_part(p) for p in self._parameters]
        self._buffers = [local_part(b) for b in module.buffers() if b.is_floating_point()] if average_buffers else []
        self._group = self._own_group(group)
        self.step = self.rounds = self.num_bytes = 0
        self._round_begin = 0
        self._round_length: int | None = None
        self._rate = 1.0
        self._diverged = self._ddp is None
        self._exchanged = True
        self._pending: tuple[Packed, list[Pending[None]]] | None = None
        self._shared = Packed(self._targets)
        self._outer: torch.optim.Optimizer | None = None
        self._changes: list[Packed] = []
        self._agree()
        if outer is not None or synchronizer.delayed or not isinstance(combiner, Mean):
            self._changes = [Packed(self._targets) for _ in range(2 if synchronizer.delayed else 1)]
            self._outer_parameters = [nn.Parameter(part) for part in self._shared.parts]
            self._outer = (outer or _take_change)(self._outer_parameters)
        self._hooks = [
            self._optimizer.register_step_pre_hook(lambda *_: self._begin_round()),
            self._optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]
        if self._ddp is not None:
            self._hooks.append(self._ddp.register_forward_pre_hook(lambda *_: self._before_forward()))

    # -- rounds -----------------------------------------------------------------------------------------------

    @property
    def in_step(self) -> bool:
        """Whether all ranks have the same parameters now: a good time to save or to evaluate."""
        return self.step == self._round_begin

    def synchronize(self) -> None:
        """Synchronise now and use everything that is under way. All ranks of the group call it at the same step."""
        if not self.in_step or self._pending is not None:
            self._end_round(last=True)

    def close(self) -> None:
        """Stop watching the optimizer; DDP averages gradients again. Call ``synchronize`` first."""
        for hook in self._hooks:
            hook.remove()
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
        return self._ddp is not None and self._outer is None and self._round_length == 1

    def _choose_gradients(self) -> None:
        """Set DDP before every forward pass: ``no_sync`` around one puts back, at its end, what it found before.

        Where gradients were exchanged before and are now, DDP is left alone, since the user may be accumulating.
        """
        assert self._ddp is not None
        if not self._exchanges_gradients():
            self._ddp.require_backward_grad_sync = False
        elif not self._exchanged:
            self._ddp.require_backward_grad_sync = True

    def _after_step(self) -> None:
        self.step += 1
        if self.step - self._round_begin >= (self._round_length or 1):
            self._end_round(last=self._total_steps is not None and self.step >= self._total_steps)

    @torch.no_grad()
    def _end_round(self, *, last: bool) -> None:
        if self._outer is None:
            if self._diverged:
                self._average(self._shared, self._targets)
        else:
            self._exchange_changes(last=last)
            self._shared.copy_to(self._targets)
        if self._diverged and (last or not self._synchronizer.delayed):
            self._average(Packed(self._buffers), self._buffers)
            self._settle_optimizer_state()
        if self._ddp is not None:
            self._choose_gradients()
            self._exchanged = self._exchanges_gradients()
        self.rounds += 1
        self._round_begin, self._round_length = self.step, None

    def _exchange_changes(self, *, last: bool) -> None:
        """Have this round's changes combined, and apply those that are due."""
        due, self._pending = self._pending, None
        if not self.in_step:
            changes = self._changes[0]
            changes.copy_from(self._targets)
            for bundle, shared in zip(changes.bundles, self._shared.bundles, strict=True):
                bundle.flat.neg_().add_(shared.flat)
            self._pending = (changes, self._start(changes))
            self._changes.reverse()
        if due is not None:
            self._apply(*due)
        if self._pending is not None and (last or not self._synchronizer.delayed):
            pending, self._pending = self._pending, None
            self._apply(*pending)

    def _apply(self, changes: Packed, pending: list[Pending[None]]) -> None:
        assert self._outer is not None
        for combined in pending:
            combined.wait()
        for group in self._outer.param_groups:
            if "local_lr" in group:
                group["local_lr"] = self._rate
        for parameter, change in zip(self._outer_parameters, changes.parts, strict=True):
            parameter.grad = change
        self._outer.step()
        for parameter in self._outer_parameters:
            parameter.grad = None

    def _start(self, packed: Packed, combiner: Combiner | None = None) -> list[Pending[None]]:
        self.num_bytes += packed.num_bytes
        return [(combiner or self._combiner).start(bundle, self._group) for bundle in packed.bundles]

    def _average(self, packed: Packed, tensors: list[Tensor]) -> None:
        packed.copy_from(tensors)
        for pending in self._start(packed, Mean()):
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

    # -- groups and first values ------------------------------------------------------------------------------

    def _own_group(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        """The ranks that synchronise; a group of our own where messages travel while others do."""
        if group is None and self._ddp is not None:
            group = self._ddp.process_group
        if self._synchronizer.delayed:
            ranks = None if group is None else dist.get_process_group_ranks(group)
            made = dist.new_group(ranks, use_local_synchronization=ranks is not None)
            assert isinstance(made, dist.ProcessGroup)
            return made
        return group_or_all(group, "local_updates")

    @torch.no_grad()
    def _agree(self) -> None:
        """The first rank's parameters and buffers become everybody's, and the shared ones."""
        agree([*self._targets, *self._buffers], self._group)
        self._shared.copy_from(self._targets)

    # -- checkpoints ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that a restart needs beside the model and its optimizer, by parameters' names.

        Plain containers of tensors and numbers. Waits for what is under way and takes its result along, which every
        rank has; no rank needs another one for it. Right after a synchronisation (``in_step``) all ranks' states are
        the same, and one of them restarts any number of ranks. In between, a rank's parameters are its own: call
        ``synchronize`` before saving one rank's for all.
        """
        state: dict[str, Any] = {
            "step": self.step,
            "rounds": self.rounds,
            "round_begin": self._round_begin,
            "round_length": self._round_length,
            "rate": self._rate,
            "diverged": self._diverged,
            "shared": {},
            "outer": {},
            "pending": {},
        }
        if self._outer is not None:
            state["shared"] = self._by_name(self._shared)
            state["outer"] = read_optimizer(self._outer, self._names, self._parameters)
        if self._pending is not None:
            changes, pending = self._pending
            for combined in pending:
                combined.wait()
            self._pending = (changes, [])
            state["pending"] = self._by_name(changes)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was called; model and optimizer are loaded by their own.

        Raises:
            UsageError: the state is that of another model or of other settings.
        """
        if bool(state["shared"]) != (self._outer is not None) or (state["pending"] and len(self._changes) < 2):
            raise UsageError(
                "the saved local updates had other settings: an outer optimizer, a combiner or delayed rounds that "
                "these have not, or the other way round"
            )
        self.step, self.rounds = state["step"], state["rounds"]
        self._round_begin, self._round_length = state["round_begin"], state["round_length"]
        self._rate, self._diverged = state["rate"], state["diverged"]
        if self._outer is not None:
            load_tensors("shared parameters", state["shared"], self._names, self._shared.parts)
            write_optimizer(self._outer, self._names, state["outer"])
        self._pending = None
        if state["pending"]:
            load_tensors("changes under way", state["pending"], self._names, self._changes[0].parts)
            self._pending = (self._changes[0], [])
            self._changes.reverse()

    def _by_name(self, packed: Packed) -> dict[str, Tensor]:
        entries = zip(self._names, packed.parts, self._parameters, strict=True)
        return {name: as_saved(part, parameter) for name, part, parameter in entries}


def _take_change(parameters: Any) -> torch.optim.Optimizer:
    """The outer optimizer that just takes the change."""
    return torch.optim.SGD(parameters, lr=1.0)


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer whose ``step`` runs in the end; accelerate wraps it."""
    inner = getattr(optimizer, "optimizer", None)
    return _unwrapped(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def _named(optimizer: torch.optim.Optimizer, module: nn.Module) -> tuple[list[str], list[Tensor]]:
    """Names and parameters that the optimizer trains, in the model's order."""
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [(name, p) for name, p in module.named_parameters() if id(p) in trained and p.requires_grad]
    strangers = trained - {id(p) for p in module.parameters()}
    if strangers or not found:
        raise UsageError(
            f"local_updates: {len(strangers)} of the optimizer's {len(trained)} parameters are not the model's; "
            "pass the model that the optimizer was made for"
        )
    return [name.replace("_orig_mod.", "") for name, _ in found], [p for _, p in found]


def _check(
    parameters: list[Tensor], combiner: Combiner, group: dist.ProcessGroup | None, state: str, *, delayed: bool
) -> None:
    if state not in ("keep", "average", "reset"):
        raise UsageError(f"optimizer_state {state!r} is none of: keep, average, reset")
    if delayed and state != "keep":
        raise UsageError(f"optimizer_state={state!r} needs rounds whose results are not delayed")
    sharded = [p for p in parameters if isinstance(p, DTensor)]
    if not sharded:
        return
    if group is None:
        raise UsageError('the model is sharded: pass the replicas of a shard, group=mesh["replicate"].get_group()')
    if any(isinstance(placement, Replicate) for p in sharded for placement in p.placements):
        raise UsageError('FSDP2 averages gradients over replicas itself: fully_shard(model, mesh=mesh["shard"])')
    if not isinstance(combiner, Mean):
        raise UsageError(f"{type(combiner).__name__} needs whole layers, and each rank has a shard only; use Mean()")
