"""Torch's pipelining, and the one place that knows its private names.

Torch carries an order out in ``_PipelineScheduleRuntime``: a loop over a rank's actions that calls, for each kind of
action, a function that has been registered for it. ``ListRuntime`` registers one for every kind that computes or
communicates, and so keeps what is torch's: splitting the batch, gathering and freeing the parameters of sharded
stages, the ranges in profiles, merging outputs. ``TorchStage`` keeps torch's forward and backward of a stage, which
know of DDP and FSDP2, and of backwards in two halves.

All of that may be called otherwise in the next release. ``missing_names`` says which name is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining import stage as stage_module

from mycel.comm.sharded import param_groups
from mycel.errors import UsageError
from mycel.parallel.gradients import sum_gradients
from mycel.pipeline.order import Action, Kind

__all__ = [
    "ListRuntime",
    "TorchStage",
    "buffers_of",
    "is_compiled",
    "keeps_receive_buffers",
    "leaves_of",
    "missing_names",
    "torch_schedule",
]

_Runtime: Any = getattr(schedules, "_PipelineScheduleRuntime", schedules.PipelineScheduleMulti)

#: What is used of torch and not promised by it, by where it is.
_PRIVATE: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (schedules, ("_PipelineScheduleRuntime", "_Action", "_ComputationType")),
    (
        _Runtime,
        (
            "register_custom_function",
            "_assert_unsharded",
            "_initialize_stages",
            "_step_microbatches",
            "_update_losses",
        ),
    ),
    (
        pipelining.PipelineStage,
        ("forward_maybe_with_nosync", "backward_maybe_with_nosync", "perform_reduce_grad", "clear_runtime_states"),
    ),
    (FSDPModule, ("_get_fsdp_state",)),
)

#: The kinds that torch itself carries out well: they move no message and know FSDP2 from inside.
_TORCHS_OWN = (Kind.UNSHARD, Kind.RESHARD)


def missing_names() -> tuple[str, ...]:
    """Names of torch's own that are used here and that this torch does not have.

    Examples:
        >>> missing_names()
        ()
    """
    return tuple(
        f"{getattr(owner, '__name__', owner)}.{name}"
        for owner, names in _PRIVATE
        for name in names
        if not hasattr(owner, name)
    )


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` has made a module one operation, whose backward cannot be cut in two.

    Args:
        module: of a stage; wrapped by DDP or not.
    """
    made = getattr(module, "_compiled_call_impl", None)  # by module.compile(), which changes the module in place
    inner = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
    return made is not None or isinstance(inner, torch._dynamo.OptimizedModule)


def torch_schedule(
    name: str,
    stages: Sequence[pipelining.PipelineStage],
    num_micro_batches: int,
    loss: Callable[..., Tensor] | None,
    *,
    scale_grads: bool,
) -> Any:
    """One of torch's own schedules, by its class's name.

    Args:
        name: such as ``1F1B``.
        stages: of this rank.
        num_micro_batches: of a batch.
        loss: of the last stage's output and the target.
        scale_grads: whether gradients are divided by the number of micro-batches.
    """
    kind = pipelining.schedules.get_schedule_class(name)
    is_single = issubclass(kind, schedules.PipelineScheduleSingle)
    return kind(stages[0] if is_single else list(stages), num_micro_batches, loss_fn=loss, scale_grads=scale_grads)


class _SharedKind(str):
    """The kind of action that torch has no word for; its loop asks for ``value`` and looks for a function."""

    @property
    def value(self) -> str:
        return str(self)


def _torch_action(action: Action) -> Any:
    """A torch action that prints alike."""
    if action.kind is Kind.SHARED:
        kind: Any = _SharedKind(f"{Kind.SHARED.value}[{action.block}]")
    else:
        kind = schedules._ComputationType(action.kind.value)
    parts = tuple(_torch_action(part) for part in action.parts) or None
    return schedules._Action(action.stage, kind, action.micro_batch, parts)


class TorchStage(pipelining.PipelineStage):
    """A stage with torch's forward and backward, and nothing of torch's messages.

    Args:
        module: the stage's part of the model.
        index: the stage.
        num_stages: of the whole model.
        device: where its tensors are.
        group: the ranks of the pipeline.

    Attributes:
        begins: some micro-batch begins here; torch gives it the batch.
        ends: some micro-batch ends here; torch takes outputs from it.
    """

    def __init__(
        self, module: nn.Module, index: int, num_stages: int, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        super().__init__(module, index, num_stages, device, group=group)
        self.begins, self.ends = index == 0, index == num_stages - 1

    @property
    def is_first(self) -> bool:
        """As torch asks: whether no stage comes before."""
        return self.begins

    @property
    def is_last(self) -> bool:
        """As torch asks: whether no stage comes after."""
        return self.ends

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 shards the parameters."""
        return isinstance(self.submod, FSDPModule)

    def check_halves(self) -> None:
        """Refuse what of FSDP2 would lose gradients whose backward comes in two halves.

        A parameter that is given back after the forward, or whose module is a root of its own, has its hooks where
        the first half is, and what the second half finds stays behind.

        Raises:
            UsageError: the stage is sharded so.
        """
        sharded = [(name, m) for name, m in self.submod.named_modules() if isinstance(m, FSDPModule)]
        if sharded and not self.is_sharded:
            raise UsageError(
                f"stage {self.stage_index}: FSDP2 shards its module {sharded[0][0]!r} and not the stage, and the "
                "order has its backward in two halves: call fully_shard on the stage as well"
            )
        if given_back := [name for name, m in sharded if _is_given_back(m, is_root=not name)]:
            what = f"the parameters of its module {given_back[0]!r}" if given_back[0] else "its parameters"
            raise UsageError(
                f"stage {self.stage_index}: FSDP2 gives {what} back after the forward, and the "
                "order has its backward in two halves, whose gradients would be lost: shard with "
                "reshard_after_forward=False, or use an order of whole backwards (B)"
            )

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The module's output."""
        return self.forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]

    def whole_backward(
        self, outputs: Any, grads: tuple[Tensor | None, ...] | None, inputs: list[Tensor], *, is_last: bool
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs; those of parameters are added to theirs."""
        given = {"stage_output": outputs, "output_grads": grads, "input_values": inputs}
        return tuple(self.backward_maybe_with_nosync("full", given, last_backward=is_last)[0])

    def input_backward(
        self, outputs: Any, grads: tuple[Tensor | None, ...] | None, inputs: list[Tensor]
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        """Gradients of the inputs alone, and what ``weight_backward`` needs to add those of parameters."""
        kept = (outputs,) if isinstance(outputs, Tensor) else outputs
        given = {"stage_output": kept, "output_grads": grads, "input_values": inputs}
        found, groups = self.backward_maybe_with_nosync("input", given, last_backward=False)
        for value in inputs:
            value.grad = None  # torch leaves it there, and would add to it
        return tuple(found), (kept, groups)

    def weight_backward(self, rest: Any, *, is_last: bool) -> None:
        """The second half of a backward."""
        kept, groups = rest
        given = {"stage_output": kept, "param_groups": groups}
        self.backward_maybe_with_nosync("weight", given, last_backward=is_last)

    def average(self) -> None:
        """The mean over DDP's ranks of all gradients that are there.

        Second halves of backwards add to gradients beside autograd's nodes, where DDP's hooks would see it.

        Raises:
            UsageError: DDP is to exchange them in another way.
        """
        ddp: Any = self.submod
        if getattr(ddp, "_comm_hooks", ()):
            raise UsageError(
                f"stage {self.stage_index}: its DDP has a communication hook, and the order has its backward in two "
                "halves, of which the hook sees nothing: use an order with whole backwards (B)"
            )
        sum_gradients(ddp._module_parameters, ddp.process_group, divisor=ddp.process_group.size())

    def reduce(self, divisor: float) -> None:
        """Sum the parameters' gradients over replicas, where there are some, and divide by the micro-batches."""
        self.perform_reduce_grad(divisor)  # type: ignore[arg-type]  # torch divides by it, whatever number it is


class _Carried(BaseException):
    """Carries an error past torch's loop, which would print every action of every rank for it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class ListRuntime(_Runtime):  # type: ignore[misc]
    """Torch's runtime over lists of actions of ours.

    Args:
        stages: of this rank.
        rows: with messages in them, one a rank; torch prints all of them where an action fails.
        stage_ranks: on which rank each stage is.
        num_micro_batches: of a batch.
        loss: of an output and a target.
        scale_grads: whether gradients are divided by the number of micro-batches, or by which other number.
        perform: carries out one action, of those that are not torch's own.
        begin: called before the first action of a step.
        end: called after the last.

    Attributes:
        args: of each micro-batch, on the rank that was given some.
        kwargs: of each micro-batch.
        targets: of each micro-batch, or ``None``.
        loss_kwargs: for the loss function.
        keeps_outputs: whether ``step`` returns them.
    """

    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[Mapping[str, Any]]
    targets: Sequence[Any] | None
    loss_kwargs: Mapping[str, Any]
    keeps_outputs: bool

    def __init__(
        self,
        stages: Sequence[TorchStage],
        rows: Sequence[Sequence[Action]],
        stage_ranks: Sequence[int],
        num_micro_batches: int,
        loss: Callable[..., Tensor] | None,
        *,
        scale_grads: bool | float,
        perform: Callable[[Action], None],
        begin: Callable[[], None],
        end: Callable[[list[Tensor] | None], None],
    ) -> None:
        if missing := missing_names():
            raise UsageError(
                f"torch {torch.__version__} has no {missing[0]}, by which orders are run; torch 2.13 does. Orders "
                "that are torch's own, such as 1F1B, run all the same"
            )
        super().__init__(list(stages), num_micro_batches, loss_fn=loss, scale_grads=bool(scale_grads))
        self._divisor = scale_grads if type(scale_grads) is not bool else num_micro_batches if scale_grads else 1
        self.stage_index_to_group_rank = dict(enumerate(stage_ranks))
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
        self._ours: dict[Any, Action] = {}
        self._perform_ours, self._begin, self._end = perform, begin, end
        self.pipeline_order_with_comms = {rank: [self._known(a) for a in row] for rank, row in enumerate(rows)}

    def _known(self, action: Action) -> Any:
        theirs = _torch_action(action)
        if action.kind not in _TORCHS_OWN:
            self._ours[theirs] = action
            self._comp_type_to_function_map[theirs.computation_type] = self._perform_theirs
        return theirs

    def _perform_theirs(self, action: Any, _: Any) -> None:
        try:
            self._perform_ours(self._ours[action])
        except Exception as error:
            raise _Carried(error) from None

    @property
    def has_backward(self) -> bool:
        """Whether this step trains."""
        return bool(self._has_backward)

    @property
    def has_loss(self) -> bool:
        """Whether there is a loss function."""
        return self._loss_fn is not None

    @property
    def divisor(self) -> float:
        """Of gradients, at the end of a step."""
        return self._divisor

    def loss_of(self, output: Any, micro_batch: int) -> Tensor:
        """The loss of a micro-batch's output.

        Raises:
            UsageError: no target was given on this rank.
        """
        if self.targets is None:
            raise UsageError("the last stage is on this rank and needs a target: step(..., target=...)")
        loss = self._loss_fn(output, self.targets[micro_batch], **self.loss_kwargs)
        if not isinstance(loss, Tensor):
            raise UsageError(f"the loss of micro-batch {micro_batch} is a {type(loss).__name__}, not a tensor")
        return loss

    def await_parameters(self, stage: TorchStage) -> None:
        """Return when a sharded stage's parameters are gathered, as an action before has begun to do."""
        self._assert_unsharded(stage)

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        count = self._n_microbatches
        self.args = arg_mbs if arg_mbs is not None else [()] * count
        self.kwargs = kwarg_mbs if kwarg_mbs is not None else [{}] * count
        self.targets, self.loss_kwargs, self.keeps_outputs = target_mbs, loss_kwargs or {}, return_outputs
        self.unshard_ops.clear()  # what a step that failed has left
        self._begin()
        try:
            super()._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, **more)
        except _Carried as carried:
            raise carried.error from carried.error.__cause__

    def _initialize_stages(self, *_: Any, **__: Any) -> None:
        """Nothing: shapes come with each stage's first message, so no stage has to be run for them."""

    def _update_losses(self, _: Any, losses: list[Tensor] | None) -> None:
        """At the end of torch's step: losses by micro-batch, in whatever order they were computed."""
        self._end(losses)


def keeps_receive_buffers() -> bool:
    """Whether torch's own stages hold all their receive buffers between steps, as torch 2.13 does; 2.15 does not.

    Examples:
        >>> isinstance(keeps_receive_buffers(), bool)
        True
    """
    return not hasattr(getattr(stage_module, "_RecvInfo", None), "allocate_buffer")


def buffers_of(stages: Iterable[pipelining.PipelineStage]) -> list[Tensor]:
    """The receive buffers that stages of torch's own hold between steps: one for every micro-batch and direction.

    Args:
        stages: that have taken a step.
    """
    infos = [
        info
        for stage in stages
        for received in (getattr(stage, "args_recv_info", {}), getattr(stage, "grad_recv_info", {}))
        for group in received.values()
        for info in group
    ]
    found = (getattr(info, "buffer", None) for info in infos)
    return [buffer for buffer in found if isinstance(buffer, Tensor)]


def _is_given_back(module: Any, *, is_root: bool) -> bool:
    """Whether FSDP2 frees a module's gathered parameters after its forward; of a root only where it was told to."""
    if is_root and module._get_fsdp_state()._auto_reshard_after_forward:
        return False
    return any(group.post_forward_mesh_info is not None for group in param_groups(module))


def leaves_of(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among a module's arguments, also inside of lists, tuples and dictionaries."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(list(values)) if isinstance(leaf, Tensor)]
