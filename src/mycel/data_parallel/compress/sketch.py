"""Count sketches that add up, and give back what was added exactly as long as they are not too full.

Each index belongs to three counters, one in each third of the sketch, chosen by hashing, with a sign. A sketch of a
sum is the sum of sketches. Where it is known which indices hold something (a bitmap, or-ed over ranks), a counter
with one such index is its value; taken out of its other two counters, that leaves more counters with one index, and
so on. With three counters an index, this *peeling* takes almost surely everything out while indices are fewer than
0.818 times the counters, and almost surely stops in the middle above. What is left is estimated by the median.

Peeling is done in integers, multiples of about 2^-38 of the largest counter, so that all ranks get the same bits in
whatever order a device adds, and nothing is lost to rounding that the sums themselves have not lost.

References:
    M. Charikar, K. Chen, M. Farach-Colton, "Finding Frequent Items in Data Streams", ICALP 2002 (count sketch).
    M. Molloy, "Cores in random hypergraphs and Boolean formulas", Random Structures & Algorithms 27, 2005 (0.818).
    H. Li et al., "Accelerating Distributed Deep Learning using Lossless Homomorphic Compression",
    arXiv 2402.07529, section 3 (bitmap and sketch).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mycel.wire.noise import GOLDEN, mixed

__all__ = ["LOAD_LIMIT", "insert", "num_counters", "peel"]

#: Indices a counter up to which a large sketch peels.
LOAD_LIMIT = 0.818
_ROWS = 3
#: Bits after the point while peeling; the sum of all indices of a counter fits as well.
_FRACTION_BITS = 38


def num_counters(count: int, ratio: float) -> int:
    """Counters of a sketch of ``count`` elements: ``count / ratio``, in three equal parts.

    Examples:
        >>> num_counters(1000, 2.0), num_counters(0, 2.0), num_counters(1, 8.0)
        (501, 0, 3)
    """
    return _ROWS * math.ceil(count / (_ROWS * ratio))


def insert(indices: Tensor, values: Tensor, counters: int, seed: int) -> Tensor:
    """The sketch of a sparse vector.

    Args:
        indices: ``int64``, 1-D, each once.
        values: float32, as many.
        counters: of the sketch, a multiple of 3.
        seed: of the hash functions; sketches of one seed may be added.

    Returns:
        float32 of ``counters``.
    """
    sketch = values.new_zeros(counters)
    if counters:
        places, signs = _hashed(indices, counters, seed)
        sketch.index_add_(0, places.view(-1), (signs * values).view(-1))
    return sketch


def peel(sketch: Tensor, indices: Tensor, seed: int) -> tuple[Tensor, int]:
    """The values at these indices, which must be all that any of the added vectors held.

    Returns:
        float32 by index, and how many of them are estimates only.
    """
    largest = float(sketch.abs().max()) if len(sketch) else 0.0
    if not len(indices) or largest == 0 or largest != largest or largest == float("inf"):
        fill = 0.0 if largest == 0 else float("nan")
        return torch.full((len(indices),), fill, device=sketch.device), 0
    unit = math.ldexp(1.0, math.frexp(largest)[1] - _FRACTION_BITS)  # a power of two: nothing is rounded
    left = (sketch.double() / unit).round().long()
    places, signs = _hashed(indices, len(sketch), seed)
    found = torch.zeros_like(indices)
    counts = torch.zeros_like(left).index_add_(0, places.view(-1), torch.ones_like(places).view(-1))
    waiting = torch.arange(len(indices), device=indices.device)
    while len(waiting):
        alone = counts[places[:, waiting]] == 1
        ready = alone.any(dim=0)
        if not bool(ready.any()):
            break
        row = alone.to(torch.int8).argmax(dim=0)[ready]
        done = waiting[ready]
        value = left[places[row, done]] * signs[row, done].long()
        found[done] = value
        left.index_add_(0, places[:, done].reshape(-1), -(signs[:, done].long() * value).reshape(-1))
        counts.index_add_(0, places[:, done].reshape(-1), -torch.ones_like(places[:, done]).reshape(-1))
        waiting = waiting[~ready]
    if len(waiting):
        estimates = left[places[:, waiting]] * signs[:, waiting].long()
        found[waiting] = estimates.median(dim=0).values
    return (found.double() * unit).float(), len(waiting)


def _hashed(indices: Tensor, counters: int, seed: int) -> tuple[Tensor, Tensor]:
    """Counters and signs of each index, each of shape ``[3, indices]``."""
    third = counters // _ROWS
    rows = torch.arange(_ROWS, device=indices.device)[:, None]
    z = mixed((indices[None, :] * _ROWS + rows + 1) * GOLDEN + seed)
    places = ((z >> 1) & ((1 << 62) - 1)) % third + rows * third
    return places, 1.0 - 2.0 * (z & 1).float()
