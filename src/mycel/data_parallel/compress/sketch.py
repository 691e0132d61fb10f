"""Count sketches that add up, and give back what was added exactly as long as they are not too full.

Each index belongs to three counters, one in each third of the sketch, chosen by hashing, with a sign; in large
sketches to three of one block, so that taking them apart stays inside a cache. A sketch of a sum is the sum of
sketches. Where it is known which indices hold something (a bitmap, or-ed over ranks), a counter with one such index
is its value; taken out of its other two counters, that leaves more counters with one index, and so on. With three
counters an index, this *peeling* takes almost surely everything out while indices are fewer than 0.818 times the
counters, and almost surely stops in the middle above. What is left is estimated by the median.

Peeling is done in integers, multiples of about 2^-38 of the largest counter, so that all ranks get the same bits in
whatever order a device adds, and nothing is lost to rounding that the sums themselves have not lost.

Loops are compiled for CPU tensors and torch operations for tensors elsewhere.

References:
    M. Charikar, K. Chen, M. Farach-Colton, "Finding Frequent Items in Data Streams", ICALP 2002 (count sketch).
    M. Molloy, "Cores in random hypergraphs and Boolean formulas", Random Structures & Algorithms 27, 2005 (0.818).
    H. Li et al., "Accelerating Distributed Deep Learning using Lossless Homomorphic Compression",
    arXiv 2402.07529, section 3 (bitmap and sketch).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mycel.compiled import compiled_without_lock
from mycel.wire.noise import GOLDEN, mixed, mixed_one

__all__ = ["LOAD_LIMIT", "insert", "num_counters", "peel"]

#: Indices a counter up to which a large sketch peels.
LOAD_LIMIT = 0.818
_ROWS = 3
#: Bits after the point while peeling; the sum of all indices of a counter fits as well.
_FRACTION_BITS = 38
_GOLDEN = np.uint64(GOLDEN & (1 << 64) - 1)
_31_BITS = 0x7FFFFFFF
#: Counters of a block in each row. With fewer, more pairs of indices have all three counters in common, which nothing
#: takes apart: here about one in 2,000 full blocks has such a pair.
_BLOCK_WIDTH = 4096
#: Bits of a counter's record that hold its indices; how many they are is above.
_COUNT_SHIFT = 40


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
    if counters and values.is_cpu:
        _insert(indices.numpy(), values.numpy(), np.uint64(seed), *_blocks(counters), sketch.numpy())
    elif counters:
        places, signs = _hashed(indices, counters, seed)
        sketch.index_add_(0, places.view(-1), (signs * values).view(-1))
    return sketch


def peel(sketch: Tensor, indices: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """The values at these indices, which must be all that any of the added vectors held.

    Returns:
        float32 by index, and the places in ``indices`` (``int64``, rising) whose values are estimates only: what is
        left when no counter has one index.
    """
    largest = float(sketch.abs().max()) if len(sketch) else 0.0
    if not len(indices) or largest == 0 or not math.isfinite(largest):
        fill = 0.0 if largest == 0 else float("nan")
        return torch.full((len(indices),), fill, device=sketch.device), indices.new_zeros(0)
    unit = math.ldexp(1.0, math.frexp(largest)[1] - _FRACTION_BITS)  # a power of two: nothing is rounded
    found, is_left = (_peeled if sketch.is_cpu else _peeled_by_torch)(sketch, unit, indices, seed)
    return (found.double() * unit).float(), is_left.nonzero().view(-1)


def _peeled(sketch: Tensor, unit: float, indices: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Values in units, and which of them are estimates."""
    found, is_done = torch.zeros_like(indices), torch.zeros(len(indices), dtype=torch.bool)
    third, blocks, width = _blocks(len(sketch))
    order, ends = np.empty(len(indices), dtype=np.int64), np.zeros(blocks + 1, dtype=np.int64)
    keys = np.uint64(seed)
    _sort_by_block(indices.numpy(), keys, blocks, order, ends)
    _peel(
        sketch.numpy(), 1.0 / unit, indices.numpy(), keys, third, width, order, ends, found.numpy(), is_done.numpy()
    )
    return found, ~is_done


def _peeled_by_torch(sketch: Tensor, unit: float, indices: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """The same, all counters of a round at once."""
    left = (sketch.double() / unit).round().long()
    places, signs = _hashed(indices, len(left), seed)
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
    is_left = torch.zeros(len(indices), dtype=torch.bool, device=indices.device)
    if len(waiting):
        estimates = left[places[:, waiting]] * signs[:, waiting].long()
        found[waiting] = estimates.median(dim=0).values
        is_left[waiting] = True
    return found, is_left


def _blocks(counters: int) -> tuple[int, int, int]:
    """Counters of a row, blocks they are cut into, and counters of a block in a row; a few may be left over.

    An index has all of its counters in one block, drawn by chance, so that a block is taken apart inside a cache.
    Blocks are so large that their loads differ by a per cent, far less than what is kept free.
    """
    third = counters // _ROWS
    blocks = max(1, third // _BLOCK_WIDTH)
    return third, blocks, third // blocks


def _hashed(indices: Tensor, counters: int, seed: int) -> tuple[Tensor, Tensor]:
    """Counters and signs of each index, each of shape ``[3, indices]``."""
    third, blocks, width = _blocks(counters)
    first, second = mixed((2 * indices + 1) * GOLDEN + seed), mixed((2 * indices + 2) * GOLDEN + seed)
    block = ((second >> 2) & _31_BITS) * blocks >> 31
    drawn = torch.stack([(first >> 33) & _31_BITS, (first >> 2) & _31_BITS, (second >> 33) & _31_BITS])
    rows = torch.arange(_ROWS, device=indices.device)[:, None]
    places = (drawn * width >> 31) + block * width + rows * third
    return places, 1.0 - 2.0 * torch.stack([first & 1, (first >> 1) & 1, second & 1]).float()


@compiled_without_lock
def _first_of(index: int, seed: Any) -> Any:
    return mixed_one(np.uint64(2 * index + 1) * _GOLDEN + seed)


@compiled_without_lock
def _second_of(index: int, seed: Any) -> Any:
    return mixed_one(np.uint64(2 * index + 2) * _GOLDEN + seed)


@compiled_without_lock
def _scaled(bits: Any, count: int) -> Any:
    """31 random bits to a number below ``count``."""
    return np.int64(((bits & np.uint64(_31_BITS)) * np.uint64(count)) >> np.uint64(31))


@compiled_without_lock
def _insert(indices: Any, values: Any, seed: Any, third: int, blocks: int, width: int, sketch: Any) -> None:
    for i in range(len(indices)):
        value = values[i]
        first, second = _first_of(indices[i], seed), _second_of(indices[i], seed)
        begin = _scaled(second >> np.uint64(2), blocks) * width
        place = begin + _scaled(first >> np.uint64(33), width)
        sketch[place] += -value if first & np.uint64(1) else value
        place = third + begin + _scaled(first >> np.uint64(2), width)
        sketch[place] += -value if first & np.uint64(2) else value
        place = 2 * third + begin + _scaled(second >> np.uint64(33), width)
        sketch[place] += -value if second & np.uint64(1) else value


@compiled_without_lock
def _sort_by_block(indices: Any, seed: Any, blocks: int, order: Any, ends: Any) -> None:
    """Places in ``indices``, those of one block together: block ``b`` has ``order[ends[b]:ends[b + 1]]``."""
    block_of = np.empty(len(indices), dtype=np.int32)
    for i in range(len(indices)):
        block = _scaled(_second_of(indices[i], seed) >> np.uint64(2), blocks)
        block_of[i] = block
        ends[block + 1] += 1
    for block in range(blocks):
        ends[block + 1] += ends[block]
    at = ends[:-1].copy()
    for i in range(len(indices)):
        order[at[block_of[i]]] = i
        at[block_of[i]] += 1


@compiled_without_lock
def _peel(
    sketch: Any,
    per_unit: float,
    indices: Any,
    seed: Any,
    third: int,
    width: int,
    order: Any,
    ends: Any,
    found: Any,
    is_done: Any,
) -> None:
    largest = 0
    for block in range(len(ends) - 1):
        largest = max(largest, ends[block + 1] - ends[block])
    codes = np.empty((largest, 3), dtype=np.int32)
    waiting = np.empty(3 * (width + largest), dtype=np.int32)
    values, known = np.empty(largest, dtype=np.int64), np.empty(largest, dtype=np.bool_)
    table = np.empty((3 * width, 2), dtype=np.int64)
    for block in range(len(ends) - 1):
        members = order[ends[block] : ends[block + 1]]
        for row in range(3):
            for i in range(width):
                table[row * width + i, 0] = np.int64(np.rint(sketch[row * third + block * width + i] * per_unit))
                table[row * width + i, 1] = 0
        for j in range(len(members)):
            first, second = _first_of(indices[members[j]], seed), _second_of(indices[members[j]], seed)
            codes[j, 0] = 2 * _scaled(first >> np.uint64(33), width) + np.int64(first & np.uint64(1))
            place = width + _scaled(first >> np.uint64(2), width)
            codes[j, 1] = 2 * place + np.int64((first >> np.uint64(1)) & np.uint64(1))
            codes[j, 2] = 2 * (2 * width + _scaled(second >> np.uint64(33), width)) + np.int64(second & np.uint64(1))
            known[j] = False
        _peel_block(table, codes, len(members), values, known, waiting)
        for j in range(len(members)):
            found[members[j]], is_done[members[j]] = values[j], known[j]


@compiled_without_lock
def _peel_block(table: Any, codes: Any, count: int, values: Any, known: Any, waiting: Any) -> None:
    """Takes an index out wherever a counter has it alone, until there is no such counter.

    Which of an index's counters is read may be another one than in ``_peeled_by_torch``, and with it, where float32
    has rounded sums, the last bits of a value.

    Args:
        table: by counter, what is left in it, and its record: the numbers of its indices xor-ed, which is the number
            where there is one, and above them how many there are.
        codes: by index, its counters; twice, and one more where the sign is negative.
        waiting: room for the counters that have one index.
    """
    one, size = np.int64(1) << _COUNT_SHIFT, 0
    for j in range(count):
        for row in range(3):
            place = codes[j, row] >> 1
            table[place, 1] = (table[place, 1] ^ j) + one
    for i in range(len(table)):
        waiting[size] = i
        size += table[i, 1] >> _COUNT_SHIFT == 1
    head = 0
    while head < size:  # first come, first served: the fewest sums before each value, so that rounding stays small
        at, record = waiting[head], table[waiting[head], 1]
        head += 1
        if record >> _COUNT_SHIFT != 1:
            continue  # its index has been taken out by way of another counter
        j = record & (one - 1)
        value = table[at, 0]
        row = at // (len(table) // 3)
        if codes[j, row] & 1:
            value = -value
        values[j], known[j] = value, True
        for row in range(3):
            place = codes[j, row] >> 1
            table[place, 0] += value if codes[j, row] & 1 else -value
            table[place, 1] = (table[place, 1] - one) ^ j
            waiting[size] = place
            size += table[place, 1] >> _COUNT_SHIFT == 1
    for j in range(count):
        if not known[j]:
            a, b, c = codes[j, 0], codes[j, 1], codes[j, 2]
            u = -table[a >> 1, 0] if a & 1 else table[a >> 1, 0]
            v = -table[b >> 1, 0] if b & 1 else table[b >> 1, 0]
            w = -table[c >> 1, 0] if c & 1 else table[c >> 1, 0]
            values[j] = max(min(u, v), min(max(u, v), w))
