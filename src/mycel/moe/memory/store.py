"""Experts of many layers in far memory, some of them near: one store for every way of deciding which."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from mycel.comm.pending import Pending
from mycel.errors import UsageError
from mycel.memory.tiers import Link

__all__ = ["ExpertStore", "stacked"]

#: One expert's tensors: both weights, then both biases where there are any.
Weights = tuple[Tensor, ...]


def stacked(experts: nn.Module) -> list[nn.Parameter]:
    """A layer's parameters with a row for each expert here: both weights, then both biases if there are any."""
    foreign = getattr(experts, "mycel_experts", None)  # of a Hugging Face model, whose own order may be another
    names = [name for name, _ in experts.named_parameters(recurse=False)] if foreign is None else foreign.names
    return [experts.get_parameter(name) for name in names]


class ExpertStore:
    """Keeps experts far, brings them near, and counts.

    Buffers in near memory hold one expert each and are used again; as many exist as were ever needed at once.

    Args:
        stacks: experts of each layer that this rank has, whole ones; numbered by their place here.
        link: from far to near.
        device: where near is.

    Attributes:
        resident: experts that have a buffer now: near, or on their way.
        peak: the largest ``resident`` so far.
        fetched: experts brought so far.
        fetched_bytes: of them.
        waited_s: seconds for which computation stood still.

    Raises:
        UsageError: no layers, layers whose experts have different sizes, or slices of experts.
    """

    def __init__(self, stacks: Sequence[nn.Module], link: Link, device: torch.device | str = "cpu") -> None:
        if not stacks:
            raise UsageError("a store needs at least one layer of experts")
        tensors = [stacked(stack) for stack in stacks]
        shapes = {tuple(p.shape[1:] for p in some) for some in tensors}
        if len(shapes) != 1:
            raise UsageError(f"layers have experts of different sizes: {sorted(shapes)}")
        if any(getattr(stack, "shard", (0, 1))[1] > 1 for stack in stacks):
            raise UsageError("this rank has slices of experts; a store is for whole ones: tensor_shards=1")
        self.link, self.device = link, torch.device(device)
        self.far: list[list[Weights]] = []
        for some in tensors:
            with torch.inference_mode(False):
                for parameter in some:
                    parameter.data = link.far(parameter.detach())  # and no second copy in the module
            parameters = [parameter.detach() for parameter in some]
            self.far.append([tuple(rows) for rows in zip(*(p.unbind(0) for p in parameters), strict=True)])
        like = [p[0] if len(p) else p.new_empty(p.shape[1:]) for p in tensors[0]]
        self._like = tuple(t.detach() for t in like)
        self.expert_bytes = sum(t.numel() * t.element_size() for t in self._like)
        self._free: list[Weights] = []
        self._near: list[dict[int, Weights]] = [{} for _ in stacks]
        self._coming: list[dict[int, Pending[None]]] = [{} for _ in stacks]
        self.resident = self.peak = self.fetched = self.fetched_bytes = 0
        self.waited_s = 0.0

    @property
    def num_layers(self) -> int:
        """Layers of experts."""
        return len(self.far)

    @property
    def num_experts(self) -> int:
        """Of all layers together."""
        return sum(len(layer) for layer in self.far)

    def every(self, layer: int) -> range:
        """All experts of a layer."""
        return range(len(self.far[layer]))

    def start(self, layer: int, experts: Iterable[int]) -> None:
        """Bring these experts of a layer, except those that are near or on their way; does not wait."""
        missing = [expert for expert in experts if expert not in self._near[layer]]
        copies = []
        for expert in missing:
            buffer = self._buffer()
            self._near[layer][expert] = buffer
            copies += list(zip(self.far[layer][expert], buffer, strict=True))
        if not copies:
            return
        transfer = self.link.fetch(copies)
        self._coming[layer] |= dict.fromkeys(missing, transfer)
        self.fetched += len(missing)
        self.fetched_bytes += len(missing) * self.expert_bytes

    def take(self, layer: int, experts: Sequence[int]) -> list[Weights]:
        """These experts of a layer, near; brings those that are missing, and waits for what is on its way."""
        self.start(layer, experts)
        begin = time.perf_counter()
        for expert in experts:
            transfer = self._coming[layer].pop(expert, None)
            if transfer is not None:
                transfer.wait()
        self.waited_s += time.perf_counter() - begin
        return [self._near[layer][expert] for expert in experts]

    def drop(self, layer: int) -> None:
        """Give the buffers of a layer's experts to others, whose contents the link brings later."""
        self._free += self._near[layer].values()
        self.resident -= len(self._near[layer])
        self._near[layer] = {}
        self._coming[layer] = {}

    def _buffer(self) -> Weights:
        self.resident += 1
        self.peak = max(self.peak, self.resident)
        if self._free:
            return self._free.pop()
        return tuple(torch.empty_like(t, device=self.device, pin_memory=False) for t in self._like)
