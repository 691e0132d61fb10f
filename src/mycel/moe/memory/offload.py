"""Inference with experts in far memory: a model's layers compute with what a store brings near."""

# ruff: noqa: N803  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from mycel.errors import UsageError
from mycel.moe.expert_mlp import ApartWeights, ExpertWeights
from mycel.moe.experts import ExpertCall, Experts
from mycel.moe.layer import MoE
from mycel.moe.memory.link import Link
from mycel.moe.memory.policies import FetchPolicy, make_fetch_policy
from mycel.moe.memory.pre_gate import PreGate
from mycel.moe.memory.store import ExpertStore
from mycel.moe.slices import WeightUse
from mycel.moe.slots import RoutingResult

__all__ = ["Offload", "OffloadedExperts"]


class OffloadedExperts(nn.Module):
    """In place of a layer's ``Experts``: the same way and result, one active expert after the other.

    Args:
        experts: whose parameters the store has.
        place: of the layer in the store.
        store: of all layers' experts.
        policy: when they come and go.
    """

    def __init__(self, experts: Experts, place: int, store: ExpertStore, policy: FetchPolicy) -> None:
        super().__init__()
        self.owned, self.kind = experts.owned, experts.kind._replace(fused=None)
        self.route, self.place, self.store, self.policy = experts.route, place, store, policy

    def forward(self, x_TD: Tensor, call: ExpertCall) -> Tensor:
        """As ``Experts``, without gradients.

        Raises:
            UsageError: gradients are wanted, or the call cuts experts apart.
        """
        return self.route(self, x_TD, call.routing, call.schedule)

    def weights(self, use: WeightUse) -> ApartWeights:
        """See ``HeldExperts``."""
        if use.gather is not None:
            raise UsageError(
                "experts in far memory are whole; weights of other ranks cannot be put together with them"
            )
        return _FarWeights(self, use.dtype)


class _FarWeights:
    """``ApartWeights`` of a store."""

    def __init__(self, experts: OffloadedExperts, dtype: torch.dtype) -> None:
        self.experts, self.dtype = experts, dtype

    @contextmanager
    def near(self, experts: Sequence[int]) -> Iterator[Sequence[ExpertWeights]]:
        far = self.experts
        brought = far.store.take(far.place, experts)
        yield [ExpertWeights(*(tensor.to(self.dtype).unsqueeze(0) for tensor in one)) for one in brought]
        far.policy.left(far.store, far.place)

    def split(self, parts: Sequence[range]) -> list[ExpertWeights]:
        raise UsageError("experts in far memory cannot be taken in parts; partition by tokens")


class Offload:
    """Moves a model's experts to far memory, for inference, until it is closed.

    Buffers exist for as many experts as the policy has near at once; ``store`` counts them. Layers must run in the
    order of ``model.modules()``. On a GPU, give ``CudaLink(device)``.

    Args:
        model: with ``MoE`` layers, all of whose experts are on this rank.
        link: from far to near memory.
        policy: a key of ``mycel.moe.memory.FETCH_POLICIES``, or one made before.
        device: where the rest of the model is.

    Raises:
        UsageError: no layers, or layers that a store cannot keep.

    Examples:
        >>> from mycel.moe.memory import EmulatedLink
        >>> model = nn.Sequential(MoE(8, 16, 4, 1), MoE(8, 16, 4, 1))
        >>> with torch.inference_mode(), Offload(model, EmulatedLink(bandwidth_gbps=10), "on_demand") as offload:
        ...     _ = model(torch.randn(1, 8))
        >>> offload.store.peak, offload.store.num_experts
        (1, 8)
    """

    def __init__(
        self, model: nn.Module, link: Link, policy: str | FetchPolicy, device: torch.device | str = "cpu"
    ) -> None:
        self.layers = [module for module in model.modules() if isinstance(module, MoE)]
        stacks: list[Any] = [layer.experts for layer in self.layers]
        if any(isinstance(stack, OffloadedExperts) for stack in stacks):
            raise UsageError("the experts are in far memory already; close that first")
        self.kept: list[Experts] = stacks
        self.devices = [stack.gate_up_proj.device for stack in stacks]
        for stack in stacks:
            stack.cpu()
        self.store = ExpertStore(stacks, link, device)
        self.policy = make_fetch_policy(policy) if isinstance(policy, str) else policy
        self._undo: list[Callable[[], None]] = []
        for place, layer in enumerate(self.layers):
            gone: Any = OffloadedExperts(stacks[place], place, self.store, self.policy)
            layer.experts = gone
            self._listen(place, layer.router)
        self.policy.begin(self.store)

    def _listen(self, place: int, router: nn.Module) -> None:
        if isinstance(router, PreGate):
            listeners = router.listeners
            listeners.append(self._routed)
            self._undo.append(lambda: listeners.remove(self._routed))
            return

        def heard(module: nn.Module, inputs: Any, output: RoutingResult) -> None:
            self._routed(place, output)

        self._undo.append(router.register_forward_hook(heard).remove)

    def _routed(self, place: int, routing: RoutingResult) -> None:
        self.policy.routed(self.store, place, routing.tokens_per_expert.nonzero().flatten().tolist())

    def close(self) -> None:
        """The model as it was. The link stays open."""
        for undo in self._undo:
            undo()
        self._undo = []
        for layer, experts, device in zip(self.layers, self.kept, self.devices, strict=True):
            layer.experts = experts.to(device)

    def __enter__(self) -> Offload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
