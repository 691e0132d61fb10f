"""Placement while training: watches the loads of a model's placed layers and moves experts when told to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mycel.errors import UsageError
from mycel.moe.placement.dispatcher import PlacedDispatcher
from mycel.moe.placement.move import Moved, move_experts
from mycel.moe.slots import RoutingResult
from mycel.planning.placement import Policy, make_policy

__all__ = ["Rebalancer"]


class Rebalancer:
    """Counts what routers choose, and at each ``step`` lets a policy change the placements.

    Loads are moving averages over steps, of all ranks' tokens, so that all ranks decide alike.

    Args:
        model: with layers that were made with a ``PlacedDispatcher``.
        policy: of placement, or its name.
        optimizers: those that update the experts: their state moves along.
        memory: what the past keeps of the average at each step; 0: the tokens since the last step alone.

    Raises:
        UsageError: no layer has a placement, no such policy, or a memory that is no part.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: str | Policy,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        *,
        memory: float = 0.7,
    ) -> None:
        if not 0 <= memory < 1:
            raise UsageError(f"memory {memory}; expected at least 0 and below 1")
        self.policy = make_policy(policy) if isinstance(policy, str) else policy
        self.optimizers, self.memory = list(optimizers), memory
        self.layers = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(getattr(layer, "dispatcher", None), PlacedDispatcher)
        }
        if not self.layers:
            raise UsageError(f"no layer of {type(model).__name__} was made with a PlacedDispatcher")
        self._hooks: list[RemovableHandle] = []
        self.seen: dict[str, Tensor] = {}
        #: Moving averages by layer; what the policy sees.
        self.loads: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            router: Any = layer.router
            self._hooks.append(router.register_forward_hook(self._hook(name)))

    def _hook(self, name: str) -> Any:
        def count(module: nn.Module, inputs: Any, output: RoutingResult) -> None:
            counts = output.tokens_per_expert.detach()
            self.seen[name] = counts if name not in self.seen else self.seen[name] + counts

        return count

    def close(self) -> None:
        """Stop counting; experts stay where they are."""
        for hook in self._hooks:
            hook.remove()

    def step(self) -> dict[str, Moved]:
        """After an optimizer step, on all ranks: what moved, by layer.

        One all_reduce of counts for each layer, then the moves. A layer that saw nothing since the last time keeps
        its loads.
        """
        moved = {}
        for name, layer in self.layers.items():
            dispatcher: Any = layer.dispatcher
            counts = self.seen.pop(name, torch.zeros(dispatcher.placement.num_experts, dtype=torch.int64))
            if not dispatcher.same_tokens:
                dist.all_reduce(counts := counts.clone(), group=dispatcher.group)
            fresh = counts.to("cpu", torch.float64)
            if name not in self.loads:
                self.loads[name] = fresh
            elif fresh.any():
                self.loads[name] = self.memory * self.loads[name] + (1 - self.memory) * fresh
            wanted = self.policy(self.loads[name].tolist(), dispatcher.placement)
            if wanted != dispatcher.placement:
                moved[name] = move_experts(layer, wanted, self.optimizers)
        return moved
