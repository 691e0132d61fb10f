"""A gate that chooses the experts of the next block."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mycel.errors import UsageError
from mycel.moe.recompute import Keepsake, Passes, hold, recomputing
from mycel.moe.slots import RoutingResult

__all__ = ["PreGate", "Routes"]


class Routes:
    """Routing of each layer in the pass under way; copies and pickles begin empty, since graphs are neither.

    Attributes:
        of: each layer's, of the latest pass.
        kept: the same, for recomputation.
        passes: of each layer, those whose backward pass may come.
    """

    def __init__(self, num_layers: int) -> None:
        self.of: list[RoutingResult | None] = [None] * num_layers
        self.kept: list[Keepsake[RoutingResult] | None] = [None] * num_layers
        self.passes: list[Passes[RoutingResult]] = [Passes() for _ in range(num_layers)]
        #: Without gradients no graph holds what a pass needs.
        self.frozen: deque[Keepsake[RoutingResult]] = deque(maxlen=4 * num_layers)

    def __reduce__(self) -> tuple[Any, ...]:
        return Routes, (len(self.of),)


class PreGate(nn.Module):
    """In place of a layer's router: routes the tokens of the next layer, and returns what the layer before routed.

    Args:
        place: of the layer in its stack.
        routes: shared by the stack.
        own: router of this layer; of the first one only.
        ahead: router of the next layer; ``None`` in the last one.
        bias_ahead: the next layer's bias for the choice.

    Attributes:
        listeners: called with a layer's place and its routing as soon as that is known.
    """

    def __init__(
        self,
        place: int,
        routes: Routes,
        *,
        own: nn.Module | None,
        ahead: nn.Module | None,
        num_experts: int,
        bias_ahead: Callable[[], Tensor | None] | None = None,
    ) -> None:
        super().__init__()
        self.place, self.routes, self.num_experts = place, routes, num_experts
        self.own, self.ahead = own, ahead
        self.bias_ahead = bias_ahead
        self.listeners: list[Callable[[int, RoutingResult], None]] = []

    def forward(self, x: Tensor, *, top_k: int | None = None, bias: Tensor | None = None) -> RoutingResult:
        """This layer's routing; as a side effect that of the next layer.

        Args:
            x: tokens of this layer, shape ``[T, D]``.
            top_k: experts a token, of both layers.
            bias: of this layer's choice; used by the first layer's own router.

        Raises:
            UsageError: the layer before has not routed as many tokens, or reentrant activation checkpointing, which
                has no graph in which routes of the layer before could reach this one.
        """
        again = recomputing() and torch.is_grad_enabled()
        if self.own is not None:
            routing: RoutingResult | None = self.own(x, top_k=top_k, bias=bias)
            if routing is not None and not again:
                self._set(self.place, routing)
        elif again:
            routing = self._recalled(x)
        else:
            routing = self.routes.of[self.place]
            self._note(x)
        if routing is None or routing.top_k_index.shape[0] != x.shape[0]:
            routed = "none" if routing is None else str(routing.top_k_index.shape[0])
            raise UsageError(
                f"pre-gated layer {self.place} has {x.shape[0]} tokens, the layer before routed {routed}; layers of "
                "a pre-gated stack run in order, on the same tokens"
            )
        if self.ahead is not None:
            following = None if self.bias_ahead is None else self.bias_ahead()
            chosen = self.ahead(x, top_k=top_k, bias=following)
            if not again:
                self._set(self.place + 1, self._keep(self.place + 1, chosen))
        return routing

    def _keep(self, place: int, routing: RoutingResult) -> RoutingResult:
        """Have the graph of this pass hold the routes that a later layer uses, for when that is computed again."""
        self.routes.kept[place] = None
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return routing
        kept = self.routes.kept[place] = Keepsake(_without_graph(routing))
        if not routing.top_k_weights.requires_grad:
            self.routes.frozen.append(kept)
            return routing
        return routing._replace(top_k_weights=hold(kept, routing.top_k_weights))

    def _note(self, x: Tensor) -> None:
        kept = self.routes.kept[self.place]
        if kept is not None:
            self.routes.passes[self.place].note(kept, x)

    def _recalled(self, x: Tensor) -> RoutingResult:
        routing = self.routes.passes[self.place].again(x, f"pre-gated layer {self.place}")
        if routing is None:
            raise UsageError(
                f"pre-gated layer {self.place} is computed again, and its pass kept no graph, through which "
                "gradients reach the gate of the layer before; checkpoint with use_reentrant=False"
            )
        return routing

    def _set(self, place: int, routing: RoutingResult) -> None:
        self.routes.of[place] = routing
        for listener in self.listeners:
            listener(place, routing)


def _without_graph(routing: RoutingResult) -> RoutingResult:
    """Values that want gradients where those of the pass did: recomputation then saves the same tensors."""
    bare = [part.detach().requires_grad_(part.requires_grad) for part in routing[1:4]]
    return routing._replace(top_k_weights=bare[0], router_logits=bare[1], scores=bare[2])
