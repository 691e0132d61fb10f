"""Inference with experts in far memory: a model's layers compute with what a store brings near."""

# ruff: noqa: N803  (the shape suffixes are capitals on purpose)
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mycel.errors import UsageError
from mycel.memory.tiers import Link
from mycel.moe.expert_mlp import ApartWeights, ExpertWeights
from mycel.moe.experts import ExpertCall, Experts
from mycel.moe.memory.layers import Layer, layers_of
from mycel.moe.memory.policies import FetchPolicy, make_fetch_policy
from mycel.moe.memory.store import ExpertStore, stacked
from mycel.moe.slices import WeightUse
from mycel.moe.slots import RoutingResult

__all__ = ["Offload", "OffloadedExperts"]


class OffloadedExperts(nn.Module):
    """In place of a layer's ``Experts``: the same way and result, one active expert after the other.

    Args:
        experts: whose parameters the store has.
        far: their weights, for a type.
    """

    def __init__(self, experts: Experts, far: Callable[[torch.dtype], ApartWeights]) -> None:
        super().__init__()
        self.owned, self.kind = experts.owned, experts.kind._replace(fused=None)
        self.route, self.far = experts.route, far

    def forward(self, x_TD: Tensor, call: ExpertCall) -> Tensor:
        """As ``Experts``, without gradients.

        Raises:
            UsageError: gradients are wanted, or the call cuts experts apart.
        """
        return self.route(self, x_TD, call.routing, call.schedule, call.beside)

    def weights(self, use: WeightUse) -> ApartWeights:
        """See ``HeldExperts``."""
        if use.gather is not None:
            raise UsageError(
                "experts in far memory are whole; weights of other ranks cannot be put together with them"
            )
        return self.far(use.dtype)


class _FarWeights:
    """``ApartWeights`` of a store.

    Args:
        store: of all layers' experts.
        place: of the layer in the store.
        policy: when they come and go.
        transposed: matrices are stored ``[in, out]``.
        dtype: to compute in.
    """

    def __init__(
        self, store: ExpertStore, place: int, policy: FetchPolicy, transposed: bool, dtype: torch.dtype
    ) -> None:
        self.store, self.place, self.policy = store, place, policy
        self.transposed, self.dtype = transposed, dtype

    @contextmanager
    def near(self, experts: Sequence[int]) -> Iterator[Sequence[ExpertWeights]]:
        brought = self.store.take(self.place, experts)
        yield [self._weights(one) for one in brought]
        self.policy.left(self.store, self.place)

    def _weights(self, one: Sequence[Tensor]) -> ExpertWeights:
        gate_up, down, *biases = (tensor.to(self.dtype).unsqueeze(0) for tensor in one)
        if self.transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        return ExpertWeights(gate_up, down, *biases)

    def split(self, parts: Sequence[range]) -> list[ExpertWeights]:
        raise UsageError("experts in far memory cannot be taken in parts; partition by tokens")


def _is_far(experts: Any) -> bool:
    return getattr(getattr(experts, "mycel_experts", None), "far", None) is not None


class Offload:
    """Moves a model's experts to far memory, for inference, until it is closed.

    Buffers exist for as many experts as the policy has near at once; ``store`` counts them. Layers must run in the
    order of ``model.modules()``. On a GPU, give ``CudaLink(device)``. Of experts that are divided over ranks, each
    rank keeps its own far; a policy that brings them early hears of all ranks' tokens by a small all_reduce a layer.

    Args:
        model: with ``MoE`` layers; or of Hugging Face, after ``mycel.moe.apply``.
        link: from far to near memory.
        policy: a key of ``mycel.moe.memory.FETCH_POLICIES``, or one made before.
        device: where the rest of the model is.

    Raises:
        UsageError: no layers, or layers that a store cannot keep.

    Examples:
        >>> from mycel.moe import MoE
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
        self.layers = layers_of(model)
        self.kept: list[Any] = [layer.experts for layer in self.layers]
        if any(isinstance(e, OffloadedExperts) or _is_far(e) for e in self.kept):
            raise UsageError("the experts are in far memory already; close that first")
        self.devices = [stacked(experts)[0].device for experts in self.kept]
        for experts in self.kept:
            experts.cpu()
        self.store = self._make_store(link, device)
        self.policy = make_fetch_policy(policy) if isinstance(policy, str) else policy
        self._undo: list[Callable[[], None]] = []
        for place, layer in enumerate(self.layers):
            transposed = bool(getattr(layer.experts, "is_transposed", False))
            far = partial(self._far_weights, self.store, place, self.policy, transposed)
            self._undo.append(layer.replace(OffloadedExperts, far))
            self._listen(place, layer)
        self.policy.begin(self.store)

    _far_weights: Callable[..., ApartWeights] = _FarWeights

    def _make_store(self, link: Link, device: torch.device | str) -> ExpertStore:
        return ExpertStore(self.kept, link, device)

    def _listen(self, place: int, layer: Layer) -> None:
        if type(self.policy).routed is FetchPolicy.routed:
            return  # nobody wants to know
        gate = layer.pre_gate
        if gate is not None:
            listeners = gate.listeners
            listeners.append(self._routed)
            self._undo.append(lambda: listeners.remove(self._routed))
            return
        self._undo.append(layer.listen(partial(self._routed, place)))

    def _routed(self, place: int, routing: RoutingResult) -> None:
        layer, counts = self.layers[place], routing.tokens_per_expert
        if layer.group is not None:
            counts = counts.clone()
            dist.all_reduce(counts, group=layer.group)
        needed = counts.tolist()
        self.policy.routed(
            self.store, place, [here for here, expert in enumerate(layer.owned) if expert >= 0 and needed[expert]]
        )

    def close(self) -> None:
        """The model as it was. The link stays open."""
        for undo in self._undo:
            undo()
        self._undo = []
        for experts, device in zip(self.kept, self.devices, strict=True):
            experts.to(device)

    def __enter__(self) -> Offload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
