"""A stage of a pipeline: what it holds of each micro-batch, from its input's arrival to its weights' gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from mycel.parallel.messages import Shape
from mycel.parallel.torch_pipelining import TorchStage, leaves_of

__all__ = ["Stage"]


@dataclass(slots=True)
class _Held:
    """What a stage holds of one micro-batch.

    Attributes:
        given: inputs that have come or were handed over, not yet used.
        inputs: those of the forward, of which gradients may be asked.
        outputs: of the forward.
        output_grads: that have come or were handed over.
        input_grads: that the stage before has not got yet.
        rest: of a backward whose second half is to come.
    """

    given: tuple[Tensor, ...] | None = None
    inputs: list[Tensor] = field(default_factory=list)
    outputs: tuple[Any, ...] = ()
    output_grads: tuple[Tensor | None, ...] | None = None
    input_grads: tuple[Tensor | None, ...] | None = None
    rest: Any = None


class Stage(TorchStage):
    """A stage, and what it holds of each micro-batch that is under way.

    Args:
        module: the stage's part of the model.
        index: the stage.
        num_stages: of the whole model.
        device: where its tensors are.
        group: the ranks of the pipeline.

    Attributes:
        num_visits: micro-batches that visit it in a step.
        is_split: some backward of it comes in two halves.
    """

    def __init__(
        self, module: nn.Module, index: int, num_stages: int, device: torch.device, group: dist.ProcessGroup
    ) -> None:
        super().__init__(module, index, num_stages, device, group)
        self.num_visits, self.is_split = 0, False
        self._held: dict[int, _Held] = {}
        self._kept: dict[int, Any] = {}
        self._done = 0

    def restart(self) -> None:
        """Before a step: nothing is under way."""
        self._held.clear()
        self._kept.clear()
        self._done = 0

    def _of(self, micro_batch: int) -> _Held:
        return self._held.setdefault(micro_batch, _Held())

    # -- what others give it and take from it ---------------------------------------------------------------

    def give_input(self, micro_batch: int, tensors: tuple[Tensor, ...]) -> None:
        """An input for the next forward of a micro-batch: leaves of a graph of their own."""
        self._of(micro_batch).given = tensors

    def give_output_grads(self, micro_batch: int, grads: tuple[Tensor | None, ...]) -> None:
        """Gradients of the outputs, for the backward of a micro-batch."""
        self._of(micro_batch).output_grads = grads

    def outputs(self, micro_batch: int) -> tuple[Any, ...]:
        """Of the forward of a micro-batch whose backward is still to come."""
        return self._of(micro_batch).outputs

    def output_shapes(self, micro_batch: int) -> tuple[Shape, ...]:
        """Of the outputs of a micro-batch whose backward is still to come."""
        return tuple(Shape.of(output) for output in self._of(micro_batch).outputs)

    def take_input_grads(self, micro_batch: int) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs of a micro-batch whose backward, or its first half, is over; held no longer."""
        held = self._of(micro_batch)
        grads, held.input_grads = held.input_grads, None
        if held.rest is None:
            self._held.pop(micro_batch)
        return grads or ()

    # -- computing ------------------------------------------------------------------------------------------

    def forward(self, micro_batch: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, trains: bool) -> Any:
        """The module's output, as it comes.

        Args:
            micro_batch: which.
            args: of the batch, where nothing comes before the stage.
            kwargs: for the module.
            trains: whether a backward will follow.
        """
        held = self._of(micro_batch)
        given, held.given = held.given, None
        inputs: tuple[Any, ...] = args if given is None else given
        output = self.run(inputs, kwargs)
        if trains and self.is_split:  # torch cuts the graph off at outputs after the first half, which no view allows
            output = tree_map(_no_view, output)
        held.outputs = output if isinstance(output, tuple) else tuple(output) if type(output) is list else (output,)
        # Positional arguments first: only their gradients go back.
        held.inputs = leaves_of((*inputs, *kwargs.values())) if trains else []
        return output

    def forget(self, micro_batch: int) -> None:
        """No backward will follow: nothing of the micro-batch is held any longer."""
        self._held.pop(micro_batch, None)

    def keep_output(self, micro_batch: int, output: Any) -> None:
        """Keep what ``step`` returns, without the graph, which would hold the input until the step's end."""
        self._kept[micro_batch] = _detached(output)

    def in_order(self) -> None:
        """Hand what was kept to torch, by micro-batch and not by when it was computed."""
        self.output_chunks = [self._kept[m] for m in sorted(self._kept)]
        self._kept.clear()

    def backward(self, micro_batch: int, loss: Tensor | None) -> None:
        """The whole backward of a micro-batch.

        Args:
            micro_batch: which.
            loss: to begin at, where nothing comes after the stage.
        """
        held = self._of(micro_batch)
        root, grads = self._root(held, loss)
        found = self.whole_backward(root, grads, held.inputs, is_last=self._is_last())
        self._let_go(held, found)
        if held.input_grads is None:
            self._held.pop(micro_batch)

    def input_half(self, micro_batch: int, loss: Tensor | None) -> None:
        """The first half of a backward: gradients of the inputs."""
        held = self._of(micro_batch)
        root, grads = self._root(held, loss)
        if any(value.requires_grad for value in held.inputs):
            found, rest = self.input_backward(root, grads, held.inputs)
            self._let_go(held, found)
            held.rest = (False, rest)
        else:  # there is no first half: all is the weights'
            held.rest = (True, (root, grads, held.inputs))
            self._let_go(held, ())

    def weight_half(self, micro_batch: int) -> None:
        """The second half of a backward: gradients of the weights."""
        held = self._of(micro_batch)
        is_whole, rest = held.rest
        held.rest = None
        if is_whole:
            self.whole_backward(*rest, is_last=self._is_last())
        else:
            self.weight_backward(rest, is_last=self._is_last())
        if held.input_grads is None:
            self._held.pop(micro_batch)

    def reduce(self, divisor: float) -> None:
        """Sum the parameters' gradients over replicas, where there are some, and divide by the micro-batches."""
        if self._averages_itself():
            self.average()
        super().reduce(divisor)

    def _averages_itself(self) -> bool:
        """Whether DDP's own averaging would miss gradients."""
        return self.is_split and isinstance(self.submod, DistributedDataParallel)

    def _is_last(self) -> bool:
        self._done += 1
        return self._done == self.num_visits and not self._averages_itself()

    def _root(self, held: _Held, loss: Tensor | None) -> tuple[Any, tuple[Tensor | None, ...] | None]:
        return (loss, None) if loss is not None else (held.outputs, held.output_grads)

    def _let_go(self, held: _Held, grads: tuple[Tensor | None, ...]) -> None:
        held.inputs, held.outputs, held.output_grads = [], (), None
        held.input_grads = grads if any(grad is not None for grad in grads) else None


def _detached(output: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)


def _no_view(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) and leaf._is_view() else leaf
