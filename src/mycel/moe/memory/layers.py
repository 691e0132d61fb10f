"""Layers of experts as memory sees them: ours, and those of Hugging Face models, by one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mycel.errors import UsageError
from mycel.moe.expert_mlp import ApartWeights
from mycel.moe.hugging_face.applied import applied_to
from mycel.moe.hugging_face.blocks import Block, router_of
from mycel.moe.hugging_face.routers import answers_by
from mycel.moe.layer import MoE
from mycel.moe.memory.pre_gate import PreGate
from mycel.moe.slots import RoutingResult, routing_from_slots

__all__ = ["Layer", "layers_of"]

Far = Callable[[torch.dtype], ApartWeights]
Undo = Callable[[], None]


class Layer(ABC):
    """One layer of a model.

    Attributes:
        experts: the module with their parameters.
        num_experts: of the layer, here and elsewhere.
    """

    experts: Any
    num_experts: int

    @property
    @abstractmethod
    def owned(self) -> Sequence[int]:
        """Experts of this rank."""

    @property
    @abstractmethod
    def group(self) -> dist.ProcessGroup | None:
        """Ranks that they are divided over."""

    @property
    @abstractmethod
    def pre_gate(self) -> PreGate | None:
        """What stands in the place of its router."""

    @abstractmethod
    def replace(self, kind: Callable[[Any, Far], nn.Module], far: Far) -> Undo:
        """Have experts compute with far weights."""

    @abstractmethod
    def listen(self, heard: Callable[[RoutingResult], None]) -> Undo:
        """Be told of every routing."""

    @abstractmethod
    def gate(self) -> nn.Module:
        """Its router, as a function of tokens; the parameters stay where they are."""

    @abstractmethod
    def bias(self) -> Tensor | None:
        """What its policies add to scores where experts are chosen, if the gate does not know it."""

    @abstractmethod
    def put(self, gate: PreGate) -> Undo:
        """In the place of its router."""


class OwnLayer(Layer):
    """A ``MoE``."""

    def __init__(self, layer: MoE) -> None:
        self.layer, self.experts, self.num_experts = layer, layer.experts, layer.num_experts

    @property
    def owned(self) -> Sequence[int]:
        """See ``Layer``."""
        return self.layer.routed.owned

    @property
    def group(self) -> dist.ProcessGroup | None:
        """See ``Layer``."""
        return self.layer.routed.group

    @property
    def pre_gate(self) -> PreGate | None:
        """See ``Layer``."""
        return self.layer.router if isinstance(self.layer.router, PreGate) else None

    def replace(self, kind: Callable[[Any, Far], nn.Module], far: Far) -> Undo:
        """See ``Layer``."""
        before, after = self.layer.experts, kind(self.layer.experts, far)
        setattr(self.layer, "experts", after)  # noqa: B010  (of another class)
        return lambda: setattr(self.layer, "experts", before)

    def listen(self, heard: Callable[[RoutingResult], None]) -> Undo:
        """See ``Layer``."""
        return self.layer.router.register_forward_hook(lambda module, inputs, routing: heard(routing)).remove

    def gate(self) -> nn.Module:
        """See ``Layer``."""
        return self.layer.router

    def bias(self) -> Tensor | None:
        """See ``Layer``."""
        return self.layer._selection_bias()

    def put(self, gate: PreGate) -> Undo:
        """See ``Layer``."""
        before, self.layer.router = self.layer.router, gate
        return lambda: setattr(self.layer, "router", before)


class ForeignLayer(Layer):
    """A block of a Hugging Face model to which ``mycel.moe.apply`` was applied."""

    def __init__(self, model: nn.Module, block: Block) -> None:
        self.block, self.experts = block, block.experts
        self.held: Any = self.experts.mycel_experts
        self.num_experts = self.held.num_experts
        if self.held.router is None:  # asked once: later something else may stand in its place
            self.held.router = block.router or router_of(model, block, self.num_experts)
        self._router: nn.Module = self.held.router

    @property
    def owned(self) -> Sequence[int]:
        """See ``Layer``."""
        return tuple(self.held.owned)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """See ``Layer``."""
        group: dist.ProcessGroup | None = self.held.routed.group
        return group

    @property
    def pre_gate(self) -> PreGate | None:
        """See ``Layer``."""
        found = getattr(self._router, "mycel_gate", None)
        return None if found is None else found[0]

    def replace(self, kind: Callable[[Any, Far], nn.Module], far: Far) -> Undo:
        """See ``Layer``."""
        self.held.far = far
        return lambda: setattr(self.held, "far", None)

    def listen(self, heard: Callable[[RoutingResult], None]) -> Undo:
        """See ``Layer``."""
        return self._router.register_forward_hook(lambda module, inputs, answer: heard(_routing(answer))).remove

    def gate(self) -> nn.Module:
        """See ``Layer``."""
        return _ForeignGate(self._router)

    def bias(self) -> Tensor | None:
        """See ``Layer``."""
        return None

    def put(self, gate: PreGate) -> Undo:
        """See ``Layer``."""

        def answer(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            routing: RoutingResult = gate(x.reshape(-1, x.shape[-1]))
            return routing.router_logits, routing.top_k_weights, routing.top_k_index

        undo = answers_by(self._router, answer)
        router: Any = self._router
        router.mycel_gate = (gate,)  # in a tuple: its parameters are other modules'

        def take_back() -> None:
            undo()
            del router.mycel_gate

        return take_back


class _ForeignGate(nn.Module):
    """A router of Hugging Face's as ours answer; no parameters of its own."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self._router = (router,)
        self._answer = getattr(type(router), "mycel_own", type(router)).forward

    def forward(self, x: Tensor, *, top_k: int | None = None, bias: Tensor | None = None) -> RoutingResult:
        return _routing(self._answer(self._router[0], x))


def _routing(answer: tuple[Tensor, Tensor, Tensor]) -> RoutingResult:
    logits, weights, index = answer
    return routing_from_slots(index, weights, logits, logits, logits.shape[-1], full=True)


def layers_of(model: nn.Module) -> list[Layer]:
    """Layers of experts, in the model's order.

    Raises:
        UsageError: there are none, or a Hugging Face model's routers are not understood.
    """
    own: list[Layer] = [OwnLayer(module) for module in model.modules() if isinstance(module, MoE)]
    if own:
        return own
    try:
        applied = applied_to(model)
    except UsageError:
        raise UsageError(
            f"{type(model).__name__}: no MoE layers in it; call mycel.moe.apply on a model of Hugging Face first"
        ) from None
    return [ForeignLayer(model, block) for block in applied.blocks]
