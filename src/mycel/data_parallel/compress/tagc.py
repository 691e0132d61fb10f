"""TAGC: the largest gradients in a sketch that adds up, with a bitmap that says where they are.

Each rank keeps the largest ``density`` of its elements. Bitmaps are or-ed, one bit an element (a sum of such bits
would carry into neighbours), then sketches are summed; the sum is taken apart without loss while the union of all
ranks' elements fits: see ``mycel.data_parallel.compress.sketch``. The union grows with the number of ranks, so the
density has to shrink with it, and does where none is given. What cannot be taken apart is not guessed: it counts as
not sent, error feedback keeps it, and the next step hashes it to other counters.

References:
    I. Polyakov, A. Dukhanov, E. Spirin, "TAGC: Optimizing Gradient Communication in Distributed Transformer
    Training", arXiv 2504.05638 (selection of layers, sparsification, reduction to owners). H. Li et al.,
    "Accelerating Distributed Deep Learning using Lossless Homomorphic Compression", arXiv 2402.07529.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mycel.arguments import real_number
from mycel.data_parallel.compress.aggregation import Aggregation, Gathered, Shapes
from mycel.data_parallel.compress.base import Compressor, numel
from mycel.data_parallel.compress.context import Context
from mycel.data_parallel.compress.rounds import AllReduce, Conversation, Item, Outcome
from mycel.data_parallel.compress.sketch import insert, num_counters, peel
from mycel.wire.buckets import bytes_of, floats_in, pack, packed_bytes
from mycel.wire.selection import largest_places, places_in

__all__ = ["TAGC", "heavy_layers"]

#: Load that is aimed at, where the density follows from it: sketches of a few hundred counters peel too.
_AIMED_LOAD = 0.7


class TAGC(Compressor):
    """One bit an element, and ``1 / ratio`` counters.

    A payload, where one has to stand alone, is the bitmap and then the sketch as bytes; ``added`` adds payloads.

    Args:
        ratio: elements a counter.
        density: part of the elements that each rank keeps; by default as many as nearly always fit,
            ``0.7 / (ratio W)`` for ``W`` ranks.

    Raises:
        UsageError: a ratio below 1, or a density that is not in (0, 1].

    Attributes:
        num_left: elements so far that were left out because a sketch was too full to take apart.
        num_decoded: elements that were in sketches in all.

    Examples:
        >>> TAGC(ratio=2.0).wire_bytes((1024, 3))  # 1536 counters of 4 bytes, 3072 bits
        6528
    """

    name: ClassVar[str] = "tagc"
    aggregation: ClassVar[Aggregation] = Gathered()
    is_contractive = True

    def __init__(self, ratio: float = 2.0, *, density: float | None = None) -> None:
        self.ratio = real_number(ratio, "TAGC's elements a counter", least=1)
        self.density = None if density is None else real_number(density, "TAGC's density", above=0, most=1)
        self.num_left, self.num_decoded = 0, 0

    def wire_bytes(self, shape: Sequence[int]) -> int:
        """See ``Compressor``."""
        count = numel(shape)
        return packed_bytes(count, 1) + 4 * num_counters(count, self.ratio)

    def sent_bytes(self, shapes: Shapes, *, rank: int, world_size: int) -> float:
        """See ``Compressor``: all_reduces of bitmaps and of sketches."""
        return 2 * (world_size - 1) / world_size * sum(self.wire_bytes(shape) for shape in shapes)

    def num_kept(self, count: int, world_size: int) -> int:
        """Elements that each rank keeps of ``count``."""
        density = _AIMED_LOAD / (self.ratio * world_size) if self.density is None else self.density
        return min(count, max(1, round(density * count))) if count else 0

    def compress(self, tensor: Tensor, context: Context) -> Tensor:
        """See ``Compressor``."""
        bitmap, sketch, _ = self._split(tensor, context)
        return torch.cat([bitmap, bytes_of(sketch)])

    def added(self, payloads: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """The payload of the sum of tensors of one shape, from theirs."""
        cut = packed_bytes(numel(shape), 1)
        bitmap, sketch = payloads[0][:cut].clone(), floats_in(payloads[0][cut:])
        for payload in payloads[1:]:
            bitmap |= payload[:cut]
            sketch += floats_in(payload[cut:])
        return torch.cat([bitmap, bytes_of(sketch)])

    def decompress(self, payload: Tensor, shape: Sequence[int], context: Context) -> Tensor:
        """See ``Compressor``."""
        cut = packed_bytes(numel(shape), 1)
        out, left = self._joined(payload[:cut], floats_in(payload[cut:]), shape, context)
        self.num_left += len(left)
        return out

    def accumulate_all(self, payloads: Sequence[Tensor], out: Tensor, contexts: Sequence[Context]) -> None:
        """Add what several ranks' payloads for one tensor stand for to ``out``.

        Their sum is taken apart at once. Where it is too full for that, each payload is alone, as its sender has
        done: what its sender finds in it arrives.

        Args:
            payloads: one or more.
            out: float32, contiguous.
            contexts: of the payloads.
        """
        total, cut = self.added(payloads, out.shape), packed_bytes(out.numel(), 1)
        together, left = self._joined(total[:cut], floats_in(total[cut:]), out.shape, contexts[0])
        if not len(left):
            out.add_(together)
            return
        for payload, context in zip(payloads, contexts, strict=True):
            self.accumulate(payload, out, context)

    def converse(self, items: Sequence[Item], *, keep_residual: bool) -> Conversation:
        """See ``Compressor``: or, then sum."""
        world_size = items[0].context.world_size
        parts = [self._split(item.tensor / world_size, item.context) for item in items]
        bits: Tensor = yield AllReduce(tensor=torch.cat([bitmap for bitmap, _, _ in parts]), op="or")
        total: Tensor = yield AllReduce(tensor=torch.cat([sketch for _, sketch, _ in parts]))
        bitmaps = bits.split_with_sizes([len(bitmap) for bitmap, _, _ in parts])
        sketches = total.split_with_sizes([len(sketch) for _, sketch, _ in parts])
        outcomes = []
        for item, bitmap, sketch, (_, _, kept) in zip(items, bitmaps, sketches, parts, strict=True):
            mean, left = self._joined(bitmap, sketch, item.tensor.shape, item.context)
            self.num_left += len(left)
            residual: Any = None
            if keep_residual:
                residual = item.tensor.clone()
                residual.view(-1)[kept] = 0
                residual.view(-1)[left] = item.tensor.view(-1)[left]
            outcomes.append(Outcome(mean=mean, residual=residual))
        return outcomes

    def _split(self, tensor: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Bitmap, sketch, and the indices that are in them."""
        flat = tensor.reshape(-1)
        kept = largest_places(flat, self.num_kept(len(flat), context.world_size))
        bits = torch.zeros(len(flat), dtype=torch.uint8, device=flat.device)
        bits[kept] = 1
        counters = num_counters(len(flat), self.ratio)
        return pack(bits, 1), insert(kept, flat[kept], counters, context.random_seed(shared=True)), kept

    def _joined(
        self, bitmap: Tensor, sketch: Tensor, shape: Sequence[int], context: Context
    ) -> tuple[Tensor, Tensor]:
        """What can be taken apart, and the indices of what cannot, which are zeros."""
        out = sketch.new_zeros(numel(shape))
        indices = places_in(bitmap, len(out))
        values, places = peel(sketch, indices, context.random_seed(shared=True))
        values[places] = 0.0
        out[indices] = values
        self.num_decoded += len(indices)
        return out.view(tuple(shape)), indices[places]


def heavy_layers(model: nn.Module, share: float = 0.8) -> list[str]:
    """Names of the largest matrices that together hold a share of the elements: the choice that pays most.

    In a transformer these are the embedding and the feed-forward layers; attention, small and sensitive, is left
    out. Matrices of one size stay together.

    Args:
        model: any module.
        share: of all elements of its matrices.

    Returns:
        Names of parameters, sorted; they serve as patterns in the rules of a ``CompressionPolicy``.

    Examples:
        >>> block = nn.ModuleDict({"up": nn.Linear(8, 32), "query": nn.Linear(8, 8), "down": nn.Linear(32, 8)})
        >>> heavy_layers(block, 0.8)
        ['down.weight', 'up.weight']
    """
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.dim() > 1 and p.requires_grad}
    wanted, taken, last = share * sum(sizes.values()), 0, 0
    chosen = []
    for name, count in sorted(sizes.items(), key=lambda pair: (-pair[1], pair[0])):
        if taken >= wanted and count != last:
            break
        chosen.append(name)
        taken, last = taken + count, count
    return sorted(chosen)
