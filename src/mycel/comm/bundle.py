"""Fused flat buffers: many tensors as one vector that travels in one message, and views of it in their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Bundle", "Packed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """One vector and its layers.

    Attributes:
        flat: shape ``[n]``, contiguous.
        parts: views of ``flat`` one behind the other, in the layers' shapes; together they are all of it.
    """

    flat: Tensor
    parts: tuple[Tensor, ...]

    @staticmethod
    def like(tensors: Sequence[Tensor], dtype: torch.dtype) -> Bundle:
        """Zeros, with a part for each tensor; all tensors are on one device."""
        flat = torch.zeros(sum(t.numel() for t in tensors), dtype=dtype, device=tensors[0].device)
        return Bundle.over(flat, tensors)

    @staticmethod
    def over(flat: Tensor, tensors: Sequence[Tensor]) -> Bundle:
        """Views of a vector that is as long as all tensors together."""
        pieces = torch.split(flat, [t.numel() for t in tensors])
        return Bundle(flat=flat, parts=tuple(p.view(t.shape) for p, t in zip(pieces, tensors, strict=True)))


class Packed:
    """Copies of tensors in as few bundles as their devices and types allow.

    Numbers are held in float32 at least: an average of half-precision weights that is rounded at every hop would
    lose what a small learning rate has changed.

    Args:
        tensors: what is copied, always in this order; floating-point.

    Attributes:
        parts: a view for each tensor, in the tensors' order.
        bundles: one for each device and type.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, tensor in enumerate(tensors):
            kinds.setdefault((tensor.device, torch.promote_types(tensor.dtype, torch.float32)), []).append(index)
        views: dict[int, Tensor] = {}
        bundles = []
        for (_, dtype), indices in kinds.items():
            bundles.append(Bundle.like([tensors[i] for i in indices], dtype))
            views.update(zip(indices, bundles[-1].parts, strict=True))
        self.bundles = tuple(bundles)
        self.parts = [views[index] for index in range(len(tensors))]

    @property
    def num_bytes(self) -> int:
        """Of all bundles."""
        return sum(bundle.flat.numel() * bundle.flat.element_size() for bundle in self.bundles)

    @torch.no_grad()
    def copy_from(self, tensors: Sequence[Tensor]) -> None:
        """Take the tensors' values."""
        if self.parts:
            torch._foreach_copy_(self.parts, list(tensors))

    @torch.no_grad()
    def copy_to(self, tensors: Sequence[Tensor]) -> None:
        """Give the tensors these values, rounded to their types."""
        if self.parts:
            torch._foreach_copy_(list(tensors), self.parts)
