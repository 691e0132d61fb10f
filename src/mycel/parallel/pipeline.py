"""Carries an order out on a model in stages: ``Pipeline(order, modules, loss).step(batch, target=...)``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mycel.comm.start import group_or_all
from mycel.errors import MismatchError, UsageError
from mycel.parallel.faults import explained
from mycel.parallel.lists import Routes, answered, buffers_needed, receive_ahead
from mycel.parallel.messages import Messages
from mycel.parallel.record import Flight
from mycel.parallel.shared import SharedBlock, Step
from mycel.parallel.stages import Stage
from mycel.parallel.theirs import TheirSchedule, torch_name
from mycel.parallel.torch_pipelining import ListRuntime, is_compiled, keeps_receive_buffers, missing_names
from mycel.pipeline.check import check
from mycel.pipeline.lower import lower
from mycel.pipeline.order import Action, Kind, Order

__all__ = ["Pipeline"]

#: Carries out two parts of an action, of which it is given one function each.
Overlap = Callable[[Callable[[], None], Callable[[], None]], None]


class Pipeline:
    """A model in stages on the ranks of a group, which train it in a given order.

    What torch's own schedules promise holds here too: the batch is cut along its first dimension, gradients are
    those of the mean over micro-batches, stages may be wrapped by DDP or sharded by FSDP2, and inside of stages any
    group may compute in parallel. Besides, stages may be on any rank and any number of them, each micro-batch may
    take a route of its own past stages, several ranks may carry out a block together, and any stage may take its
    micro-batches in any sequence.

    Args:
        order: the action lists, with messages in them or without; the same on all ranks.
        modules: of this rank's stages, by stage.
        loss: of the last stage's output and a micro-batch's target; ``None``: forwards only.
        group: whose ranks hold the stages, in the order's numbering; ``None``: all ranks.
        device: where stages compute; ``None``: where their parameters are.
        shared: what the order's shared blocks do, by name.
        scale_grads: whether gradients are divided by the number of micro-batches, as a loss that is a mean wants; or
            by which other number, where other pipelines that train the same parameters have other micro-batches.
        receive_ahead: how many computations before its use a message may begin to come. More hides slower links and
            holds more buffers; 0 posts each receive where the order has it.
        timeout_s: longest wait for one message; ``None``: as long as the group waits.
        planned: when each action ought to begin and end, in seconds, by its text, for the flight record.
        overlap: how the two parts of an ``OVERLAP_F_B`` are carried out: called with a function for the forward and
            one for the backward, each of which it has to call once, from the step's own thread, such as under two
            CUDA streams; ``None``: one after the other, as torch does it.
        executor: ``mycel``, ``torch`` for torch's own class of that order, or ``auto``: torch's class only where
            this torch lacks what mycel's executor needs.

    Attributes:
        losses: of the last step's micro-batches, by number, where this rank has computed them.
        flight: record of the last step's actions.

    Raises:
        UsageError: modules, blocks, ranks or devices that do not fit the order.
        MismatchError: ranks have different orders.
        VerificationError: the order is wrong; the message names the action.
        ScheduleError: no such order can be carried out.

    Examples:
        One rank alone holds all stages here:

        >>> import tempfile
        >>> file = tempfile.NamedTemporaryFile()
        >>> dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        >>> order = Order.from_csv("0F0,1F0,0F1,1F1,1B1,0B1,1B0,0B0\\n")
        >>> stages = {0: nn.Linear(8, 8), 1: nn.Linear(8, 2)}
        >>> pipeline = Pipeline(order, stages, nn.functional.mse_loss)
        >>> outputs = pipeline.step(torch.ones(4, 8), target=torch.zeros(4, 2))
        >>> outputs.shape, sorted(pipeline.losses)
        (torch.Size([4, 2]), [0, 1])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        order: Order,
        modules: Mapping[int, nn.Module],
        loss: Callable[..., Tensor] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        shared: Mapping[str, SharedBlock] | None = None,
        scale_grads: bool | float = True,
        receive_ahead: int = 1,
        timeout_s: float | None = None,
        planned: Mapping[str, tuple[float, float]] | None = None,
        overlap: Overlap | None = None,
        executor: Literal["auto", "mycel", "torch"] = "auto",
    ) -> None:
        self.order = order
        self._group = group_or_all(group, "Pipeline")
        self._rank = dist.get_rank(self._group)
        self._check(modules, shared or {}, receive_ahead, timeout_s, scale_grads, executor)
        self._device = _device_of(modules, device)
        self.losses: dict[int, Tensor] = {}
        self.flight = Flight(self._rank, order.name, planned)
        self._shared = dict(shared or {})
        self._overlap = overlap
        self._theirs: TheirSchedule | None = None
        name = torch_name(order)
        if executor == "torch" or (executor == "auto" and missing_names() and name is not None):
            if type(scale_grads) is not bool:
                raise UsageError(
                    f"scale_grads is {scale_grads!r}, and torch's own schedules divide gradients by the number of "
                    "micro-batches or not at all: use executor='mycel'"
                )
            if name is None:
                raise UsageError(f"{order.name or 'the order'} is none of torch's own: use executor='mycel'")
            self._theirs = TheirSchedule(
                name, order, modules, loss, self._device, self._group, scale_grads=scale_grads
            )
            self._runtime: Any = self._theirs
            return
        self._build(modules, loss, scale_grads=scale_grads, ahead=receive_ahead, timeout_s=timeout_s)

    def _build(
        self,
        modules: Mapping[int, nn.Module],
        loss: Callable[..., Tensor] | None,
        *,
        scale_grads: bool | float,
        ahead: int,
        timeout_s: float | None,
    ) -> None:
        order = self.order
        self._routes = Routes(order)
        whole = order if order.has_communication else lower(order)
        rows = tuple(receive_ahead(row, ahead) for row in whole.rows)
        ranks = order.stage_ranks
        self._needed = buffers_needed(rows[self._rank])
        self._messages = Messages(
            self._group, self._device, answered(rows, self._routes, self._rank, ranks), timeout_s
        )
        self._stages: dict[int, Stage] = {}
        for index, module in sorted(modules.items()):
            stage = Stage(module, index, order.num_stages, self._device, self._group)
            stage.num_visits = self._routes.num_visits(index)
            stage.is_split = any(
                leaf.kind is Kind.INPUT and leaf.stage == index
                for action in rows[self._rank]
                for leaf in action.leaves
            )
            if stage.is_split:
                stage.check_halves()
            stage.begins, stage.ends = self._routes.begins(index), self._routes.ends(index)
            self._stages[index] = stage
        self._runtime = ListRuntime(
            list(self._stages.values()),
            rows,
            ranks,
            order.num_micro_batches,
            loss if loss is not None or not order.blocks else _no_loss,
            scale_grads=scale_grads,
            perform=self._perform,
            begin=self._begin,
            end=self._end,
        )
        self._step = Step(self._runtime, self._stages, self._group)
        self._roots: dict[int, Tensor] = {}

    # -- what is checked ------------------------------------------------------------------------------------

    def _check(
        self,
        modules: Mapping[int, nn.Module],
        shared: Mapping[str, SharedBlock],
        receive_ahead: int,
        timeout_s: float | None,
        scale_grads: bool | float,
        executor: str,
    ) -> None:
        order, size = self.order, dist.get_world_size(self._group)
        if len(order.rows) != size:
            raise UsageError(
                f"the order is for {len(order.rows)} ranks and the group has {size}: give a group of as many, or "
                f"make an order for {size}"
            )
        own = order.stages_of(self._rank)
        if not own:
            raise UsageError(f"rank {self._rank} has no stage in the order; every rank holds at least one")
        if sorted(modules) != list(own):
            raise UsageError(
                f"rank {self._rank} has stages {', '.join(map(str, own))} in the order and was given modules of "
                f"{', '.join(map(str, sorted(modules))) or 'none'}"
            )
        here = {action.block for action in order.rows[self._rank] if action.kind is Kind.SHARED}
        split = {
            leaf.stage
            for action in order.rows[self._rank]
            for leaf in action.leaves
            if leaf.kind in (Kind.INPUT, Kind.WEIGHT)
        }
        if whole := sorted(stage for stage in split if is_compiled(modules[stage])):
            raise UsageError(
                f"stage {whole[0]} is made by torch.compile, and the order has its backward in two halves "
                f"({whole[0]}I, {whole[0]}W), into which it cannot be cut: use an order with whole backwards (B), or "
                "compile parts of the stage"
            )
        if missing := sorted(here - set(shared)):
            raise UsageError(
                f"what does the shared block {missing[0]!r} do? Pipeline(..., shared={{{missing[0]!r}: ...}})"
            )
        if unknown := sorted(set(shared) - order.blocks):
            raise UsageError(f"the order has no shared block {unknown[0]!r}; it has {sorted(order.blocks) or 'none'}")
        if type(receive_ahead) is not int or receive_ahead < 0:
            raise UsageError(f"receive_ahead is {receive_ahead!r}; expected a number of computations from 0 on")
        if timeout_s is not None and not timeout_s > 0:
            raise UsageError(f"timeout_s is {timeout_s!r}; expected seconds above 0")
        if type(scale_grads) is not bool and not scale_grads > 0:
            raise UsageError(f"scale_grads is {scale_grads!r}; expected whether to, or a number above 0")
        if executor not in ("auto", "mycel", "torch"):
            raise UsageError(f"executor {executor!r}; there are auto, mycel and torch")
        check(order, executor="mycel")
        self._agree()

    def _agree(self) -> None:
        """All ranks have the same order: two that differ would wait for messages that nobody sends."""
        own = hashlib.sha256(json.dumps(self.order.to_json(), sort_keys=True).encode()).digest()[:8]
        device = torch.device("cuda") if dist.get_backend(self._group) == "nccl" else torch.device("cpu")
        mine = torch.tensor([int.from_bytes(own, "big", signed=True)], dtype=torch.int64, device=device)
        found = [torch.empty_like(mine) for _ in self.order.rows]
        dist.all_gather(found, mine, group=self._group)
        values = [int(value) for value in found]
        if other := [rank for rank, value in enumerate(values) if value != values[0]]:
            raise MismatchError(f"rank {other[0]} has another order than rank 0; all ranks carry out the same one")

    # -- what people call -----------------------------------------------------------------------------------

    @property
    def schedule(self) -> Any:
        """Torch's schedule under it, for what takes one."""
        return self._runtime if self._theirs is None else self._theirs.schedule

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """One step: all micro-batches forwards and backwards. Gradients are added to those that are there.

        Args:
            args: the batch, on ranks with a stage where micro-batches begin.
            target: on ranks with a stage where they end.
            losses: emptied, and filled with the losses that this rank has computed, by micro-batch.
            return_outputs: whether to return outputs, and hold them until then.
            loss_kwargs: for the loss function.
            kwargs: for the modules of this rank.

        Returns:
            The outputs of the whole batch, on the rank of the last stage; else ``None``.

        Raises:
            UsageError: a batch that does not divide; a target that is missing; shapes that change.
            PeerLostError: a rank is gone; the message names what of it was awaited.
            CollectiveTimeoutError: a message did not come in time; the message names it.
        """
        self._check_batch([*args, *kwargs.values(), target])
        output = self._runtime.step(
            *args,
            target=target,
            losses=losses,
            return_outputs=return_outputs,
            **({"loss_kwargs": dict(loss_kwargs)} if loss_kwargs else {}),
            **kwargs,
        )
        if self._theirs is not None:
            self.losses = self._theirs.losses
        return output

    def eval(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Any:
        """All micro-batches forwards only, in the order's sequence of forwards.

        Args:
            args: as of ``step``.
            target: as of ``step``; without one there are no losses.
            losses: as of ``step``.
            kwargs: as of ``step``.

        Returns:
            The outputs of the whole batch, on the rank of the last stage; else ``None``.
        """
        self._check_batch([*args, *kwargs.values(), target])
        with torch.no_grad():
            return self._runtime.eval(*args, target=target, losses=losses, **kwargs)

    def buffers(self) -> Mapping[str, int]:
        """Of the last step: receive buffers that existed at once, and what the order needs; sends under way.

        Returns:
            ``received``, ``received_bytes``, ``needed`` and ``sent``, the most at once of each. Torch's own classes
            do not say what they send. Up to 2.13 they hold all that they will ever receive; where a newer torch
            makes buffers as it receives, ``received`` and its bytes are not known and left out.
        """
        if self._theirs is not None:
            needed = buffers_needed(lower(self.order).rows[self._rank])
            if not keeps_receive_buffers():
                return {"needed": needed}
            held = self._theirs.buffers()
            size = sum(buffer.untyped_storage().nbytes() for buffer in held)
            return {"received": len(held), "received_bytes": size, "needed": needed}
        return {
            "received": self._messages.received.most,
            "received_bytes": self._messages.received.most_bytes,
            "needed": self._needed,
            "sent": self._messages.most_sent,
        }

    def write_flight(self, folder: Path | str) -> Path:
        """Write the flight record of the last step for ``mycel report``.

        Args:
            folder: of all ranks' records.

        Returns:
            The file.
        """
        return self.flight.write(Path(folder))

    def _check_batch(self, values: list[Any]) -> None:
        count = self.order.num_micro_batches
        for value in values:
            if isinstance(value, Tensor) and (value.dim() == 0 or value.shape[0] % count):
                size = value.shape[0] if value.dim() else "no rows"
                raise UsageError(
                    f"a batch of {size} does not divide into {count} micro-batches: the first dimension has to be a "
                    f"multiple of {count}"
                )

    # -- carrying it out ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._messages.restart()
        for stage in self._stages.values():
            stage.restart()
        self._roots.clear()
        self._step.losses = self.losses = {}
        self.flight.restart()

    def _end(self, losses: list[Tensor] | None) -> None:
        self._messages.finish()
        for stage in self._stages.values():
            stage.in_order()
        if losses is not None:
            losses[:] = [self.losses[m] for m in sorted(self.losses)]

    def _perform(self, action: Action) -> None:
        try:
            with self.flight.during(action):
                self._messages.let_go()
                if action.parts and self._overlap is not None:
                    self._both(action, self._overlap)
                else:
                    for leaf in action.leaves:
                        self._ACTIONS[leaf.kind](self, leaf)
        except UsageError:
            raise
        except Exception as error:
            better = explained(error, self.order, self._routes, self._rank, action)
            if better is None:
                raise
            raise better from error

    def _both(self, action: Action, overlap: Overlap) -> None:
        """The two parts of an action, as somebody else wants them."""
        called: list[Action] = []

        def part(leaf: Action) -> None:
            called.append(leaf)
            self._ACTIONS[leaf.kind](self, leaf)

        forward, backward = action.parts
        overlap(partial(part, forward), partial(part, backward))
        if sorted(map(str, called)) != sorted(map(str, action.parts)):
            did = ", ".join(map(str, called)) or "nothing"
            raise UsageError(f"{action}: overlap has to carry out both parts once, and did {did}")

    def _rank_of(self, stage: int) -> int:
        return self.order.rank_of(stage)

    def _send_forward(self, action: Action) -> None:
        trains = self._runtime.has_backward
        after, _ = self._routes.receiver(action)
        stage, m = self._stages[action.stage], _of(action)
        outputs = stage.outputs(m)
        self._messages.send_outputs(action, (action.stage, after), self._rank_of(after), outputs, trains=trains)
        if not trains:
            stage.forget(m)

    def _receive_forward(self, action: Action) -> None:
        before, _ = self._routes.sender(action)
        edge = (before, action.stage)
        self._messages.post(action, edge, self._rank_of(before), trains=self._runtime.has_backward)

    def _send_backward(self, action: Action) -> None:
        if self._runtime.has_backward:
            before, _ = self._routes.receiver(action)
            shapes = self._messages.shapes_from((before, action.stage), trains=True)
            grads = self._stages[action.stage].take_input_grads(_of(action))[: len(shapes)]
            self._messages.send_grads(action, self._rank_of(before), shapes, grads)

    def _receive_backward(self, action: Action) -> None:
        if self._runtime.has_backward:
            after, _ = self._routes.sender(action)
            self._messages.post(action, (action.stage, after), self._rank_of(after), trains=True)

    def _forward(self, action: Action) -> None:
        stage, m = self._stages[action.stage], _of(action)
        trains = self._runtime.has_backward
        before, after = self._routes.before(action.stage, m), self._routes.after(action.stage, m)
        if before is not None and before not in self._stages:
            edge = (before, action.stage)
            receive = Action(stage=action.stage, kind=Kind.RECV_F, micro_batch=m)
            with self.flight.waiting():
                given = self._messages.take(receive, self._rank_of(before), trains=trains)
            for tensor, shape in zip(given, self._messages.shapes_from(edge, trains=trains), strict=True):
                if tensor is not None:
                    tensor.requires_grad_(trains and shape.wants_grad)
            stage.give_input(m, tuple(tensor for tensor in given if tensor is not None))
            del given
        self._runtime.await_parameters(stage)
        output = stage.forward(m, self._runtime.args[m], self._runtime.kwargs[m], trains=trains)
        if after is not None:
            if after in self._stages:
                self._stages[after].give_input(m, tuple(_leaf(value, trains) for value in stage.outputs(m)))
                if not trains:
                    stage.forget(m)
        elif action.stage not in self._routes.into_blocks:
            if self._runtime.has_loss and (trains or self._runtime.targets is not None):
                loss = self._runtime.loss_of(output, m)
                self.losses[m] = loss.detach()
                if trains:
                    self._roots[m] = loss
            if self._runtime.keeps_outputs:
                stage.keep_output(m, output)
            if not trains:
                stage.forget(m)

    def _output_grads(self, action: Action) -> Tensor | None:
        """Give the stage its outputs' gradients, or return the loss to begin at."""
        stage, m = self._stages[action.stage], _of(action)
        after = self._routes.after(action.stage, m)
        if after is not None and after not in self._stages:
            receive = Action(stage=action.stage, kind=Kind.RECV_B, micro_batch=m)
            with self.flight.waiting():
                grads = self._messages.take(receive, self._rank_of(after), trains=True)
            stage.give_output_grads(m, grads)
        self._runtime.await_parameters(stage)
        return None if after is not None else self._roots.pop(m, None)

    def _hand_back(self, action: Action) -> None:
        """Give the stage before, where it is on this rank, the gradients of its outputs."""
        m = _of(action)
        before = self._routes.before(action.stage, m)
        if before in self._stages and before is not None:
            grads = self._stages[action.stage].take_input_grads(m)
            count = len(self._stages[before].outputs(m))
            self._stages[before].give_output_grads(m, grads[:count] if grads else (None,) * count)

    def _backward(self, action: Action) -> None:
        if self._runtime.has_backward:
            loss = self._output_grads(action)
            self._stages[action.stage].backward(_of(action), loss)
            self._hand_back(action)

    def _input_half(self, action: Action) -> None:
        if self._runtime.has_backward:
            loss = self._output_grads(action)
            self._stages[action.stage].input_half(_of(action), loss)
            self._hand_back(action)

    def _weight_half(self, action: Action) -> None:
        if self._runtime.has_backward:
            self._runtime.await_parameters(self._stages[action.stage])
            self._stages[action.stage].weight_half(_of(action))

    def _reduce(self, action: Action) -> None:
        if self._runtime.has_backward:
            self._stages[action.stage].reduce(self._runtime.divisor)

    def _do_shared(self, action: Action) -> None:
        self._shared[action.block](self._step, _of(action))

    _ACTIONS: Mapping[Kind, Callable[[Pipeline, Action], None]] = {
        Kind.FORWARD: _forward,
        Kind.BACKWARD: _backward,
        Kind.INPUT: _input_half,
        Kind.WEIGHT: _weight_half,
        Kind.SEND_F: _send_forward,
        Kind.RECV_F: _receive_forward,
        Kind.SEND_B: _send_backward,
        Kind.RECV_B: _receive_backward,
        Kind.REDUCE_GRAD: _reduce,
        Kind.SHARED: _do_shared,
    }


def _of(action: Action) -> int:
    if action.micro_batch is None:
        raise UsageError(f"{action}: no micro-batch")
    return action.micro_batch


def _leaf(value: Tensor, trains: bool) -> Tensor:
    return value.detach().requires_grad_(trains and value.requires_grad)


def _no_loss(*_: Any) -> Tensor:
    raise UsageError("the order ends in a stage, and Pipeline was given no loss")


def _device_of(modules: Mapping[int, nn.Module], device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    for module in modules.values():
        for parameter in module.parameters():
            return parameter.device
    return torch.device("cpu")
