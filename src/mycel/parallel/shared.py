"""Blocks that several ranks carry out together, as actions of an order: embeddings and heads divided over all ranks,
the block in which branches meet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from mycel.errors import UsageError
from mycel.parallel.stages import Stage
from mycel.parallel.torch_pipelining import ListRuntime

__all__ = ["SharedBlock", "Step"]


class SharedBlock(Protocol):
    """What a shared block is: something to call, on each of its ranks, once a micro-batch.

    Between the ranks it communicates itself, by collectives of the step's group or of groups of its own. Orders put
    all shared blocks of a rank into one sequence, the same on all ranks, so that their collectives meet.

    A head whose columns are divided over all ranks, to which rank 3 brings what its stage has computed::

        def head(step, micro_batch):
            hidden = step.outputs(3, micro_batch)[0] if step.has_stage(3) else torch.empty(shape)
            dist.broadcast(hidden, src=3, group=step.group)
            mine = hidden.requires_grad_() @ columns
            ...
    """

    def __call__(self, step: Step, micro_batch: int) -> None:
        """Carry out the block.

        Args:
            step: the step, for what stages of this rank hold.
            micro_batch: which.
        """
        ...


class Step:
    """A step of training, as shared blocks see it from their rank.

    Args:
        runtime: which carries out the step.
        stages: of this rank.
        group: the ranks of the pipeline.

    A block gets one at each call; here it brings a stage its input::

        def embedding(step, micro_batch):
            if step.has_stage(0):
                step.set_input(0, micro_batch, table(step.args(micro_batch)[0]))
    """

    def __init__(self, runtime: ListRuntime, stages: Mapping[int, Stage], group: dist.ProcessGroup) -> None:
        self._runtime, self._stages = runtime, stages
        self.group = group
        #: Losses of micro-batches that are known on this rank.
        self.losses: dict[int, Tensor] = {}

    @property
    def trains(self) -> bool:
        """Whether there are backwards in this step."""
        return self._runtime.has_backward

    def args(self, micro_batch: int) -> tuple[Any, ...]:
        """The micro-batch's part of what this rank's ``step`` was given.

        Args:
            micro_batch: which.
        """
        return self._runtime.args[micro_batch]

    def kwargs(self, micro_batch: int) -> Mapping[str, Any]:
        """The micro-batch's part of the named arguments that this rank's ``step`` was given.

        Args:
            micro_batch: which.
        """
        return self._runtime.kwargs[micro_batch]

    def target(self, micro_batch: int) -> Any:
        """The micro-batch's part of this rank's target.

        Args:
            micro_batch: which.

        Raises:
            UsageError: this rank was given none.
        """
        if self._runtime.targets is None:
            raise UsageError("a shared block needs a target on this rank: step(..., target=...)")
        return self._runtime.targets[micro_batch]

    def has_stage(self, stage: int) -> bool:
        """Whether a stage is on this rank.

        Args:
            stage: from 0 on.
        """
        return stage in self._stages

    def set_input(self, stage: int, micro_batch: int, *tensors: Tensor) -> None:
        """Give a stage of this rank its input. Its gradient can be had after the stage's backward.

        Args:
            stage: from 0 on.
            micro_batch: which.
            tensors: of the input; taken out of whatever graph they are in.
        """
        leaves = tuple(t.detach().requires_grad_(self.trains and t.is_floating_point()) for t in tensors)
        self._stages[stage].give_input(micro_batch, leaves)

    def input_grads(self, stage: int, micro_batch: int) -> tuple[Tensor | None, ...]:
        """Gradients of the input that ``set_input`` gave; may be asked for once.

        Args:
            stage: from 0 on.
            micro_batch: which.
        """
        return self._stages[stage].take_input_grads(micro_batch)

    def outputs(self, stage: int, micro_batch: int) -> tuple[Tensor, ...]:
        """What a stage of this rank has computed, without a graph.

        Args:
            stage: from 0 on.
            micro_batch: which.
        """
        return tuple(output.detach() for output in self._stages[stage].outputs(micro_batch))

    def set_output_grads(self, stage: int, micro_batch: int, *grads: Tensor | None) -> None:
        """Give a stage of this rank the gradients of its outputs.

        Args:
            stage: from 0 on.
            micro_batch: which.
            grads: one for each output.
        """
        self._stages[stage].give_output_grads(micro_batch, grads)

    def set_loss(self, micro_batch: int, loss: Tensor) -> None:
        """Say what the loss of a micro-batch is, where a shared block computes it.

        Args:
            micro_batch: which.
            loss: a scalar.
        """
        self.losses[micro_batch] = loss.detach()
