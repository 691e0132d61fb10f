"""Adasum: adds what points in different directions, averages what points in the same one; layer by layer.

Two vectors become ``(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b``: their sum where they are orthogonal, their mean
where they are equal. More than two are combined in pairs, pairs of pairs and so on.

A pair of ranks never exchanges whole vectors. Each keeps one half of what it has, sends the other, and the next pair
is twice as far away: after ``log2 W`` rounds a rank has ``1/W`` of the result, and the way back gathers it. A layer
is then spread over the ranks of a block, so each round adds up three numbers a layer within its block, in float64,
by exchanges between the same partners. Both partners add the same two numbers, so all ranks have the same bits.

Where the world size is no power of two, ``2^k + r``, the last ``r`` ranks first combine with the first ``r``, whole,
and get the result back at the end.

References:
    S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021, arXiv 2006.02924, sections 3
    (the formula) and 4 (recursive vector halving).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm.background import InBackground
from mycel.comm.bundle import Bundle
from mycel.comm.messages import receive, send, swap
from mycel.comm.pending import Pending

__all__ = ["Adasum"]

#: A squared length below this counts as zero: dividing by it would give infinity for what is nothing.
TINY = float(torch.finfo(torch.float64).tiny) ** 0.5


@dataclass(frozen=True, slots=True)
class Adasum:
    """Adaptive summation, per layer, over any number of ranks.

    Bytes a rank: as an all-reduce by halving and doubling, ``2 (P-1)/P`` times the bundle for ``P = 2^k`` ranks, and
    ``24 k (k+1)/2`` bytes a layer; where the world size is no power of two, one bundle more each way for some ranks.

    Examples:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> own = torch.tensor([1.0, 2.0])
        >>> Adasum().start(Bundle.over(own, [own]), dist.group.WORLD).wait()
        >>> own.tolist()  # as two ranks with the same; [1.0, 0.0] and [0.0, 2.0] would come to this, too
        [1.0, 2.0]
        >>> dist.destroy_process_group()
    """

    _thread: InBackground = field(default_factory=InBackground, repr=False, compare=False)

    def start(self, bundle: Bundle, group: dist.ProcessGroup) -> Pending[None]:
        """See ``Combiner``."""
        return self._thread.start(lambda: _combine(bundle, group), bundle)


def _combine(bundle: Bundle, group: dist.ProcessGroup) -> None:
    flat, rank, size = bundle.flat, dist.get_rank(group), dist.get_world_size(group)
    if size == 1 or not flat.numel():
        return
    ends = _layer_ends(bundle)
    power = 1 << (size.bit_length() - 1)
    spare = size - power
    if rank >= power:
        send(flat, rank - power, group)
        receive(flat, rank - power, group)
        return
    if rank < spare:
        other = torch.empty_like(flat)
        receive(other, rank + power, group)
        _merge(flat, other, _products(flat, other, 0, ends), 0, ends)
    _halve_and_double(flat, ends, rank, power, group)
    if rank < spare:
        send(flat, rank + power, group)


def _halve_and_double(flat: Tensor, ends: list[int], rank: int, power: int, group: dist.ProcessGroup) -> None:
    """Combine over the first ``power`` ranks of the group."""
    begin, end = 0, flat.numel()
    kept: list[tuple[int, int, int]] = []  # partner, and the range it has in the end
    distance = 1
    while distance < power:
        partner = rank ^ distance
        middle = (begin + end) // 2
        mine, theirs = ((begin, middle), (middle, end)) if rank < partner else ((middle, end), (begin, middle))
        other = torch.empty_like(flat[mine[0] : mine[1]])
        swap(flat[theirs[0] : theirs[1]], other, partner, group)
        own = flat[mine[0] : mine[1]]
        lower, upper = (own, other) if rank < partner else (other, own)
        products = _products(lower, upper, mine[0], ends)
        _add_up(products, rank, 2 * distance, group)
        _merge(own, other, products if rank < partner else products[:, [0, 2, 1]], mine[0], ends)
        kept.append((partner, *theirs))
        begin, end = mine
        distance *= 2
    for partner, first, last in reversed(kept):
        swap(flat[begin:end], flat[first:last], partner, group)
        begin, end = min(begin, first), max(end, last)


def _layer_ends(bundle: Bundle) -> list[int]:
    ends, total = [], 0
    for part in bundle.parts:
        total += part.numel()
        ends.append(total)
    return ends


def _layers(begin: int, end: int, ends: list[int]) -> Iterator[tuple[int, slice]]:
    """Number and place, relative to ``begin``, of every layer that has numbers in a range."""
    start = 0
    for layer, stop in enumerate(ends):
        first, last = max(start, begin), min(stop, end)
        if first < last:
            yield layer, slice(first - begin, last - begin)
        start = stop


def _products(a: Tensor, b: Tensor, begin: int, ends: list[int]) -> Tensor:
    """``a.b``, ``|a|^2`` and ``|b|^2`` of the layers' shares in a range, ``[layers, 3]`` in float64."""
    products = torch.zeros(len(ends), 3, dtype=torch.float64, device=a.device)
    for layer, place in _layers(begin, begin + a.numel(), ends):
        x, y = a[place].double(), b[place].double()
        products[layer] = torch.stack((x @ y, x @ x, y @ y))
    return products


def _add_up(products: Tensor, rank: int, block: int, group: dist.ProcessGroup) -> None:
    """Sum over the block of ranks that hold one vector together."""
    other = torch.empty_like(products)
    distance = 1
    while distance < block:
        swap(products, other, rank ^ distance, group)
        products += other
        distance *= 2


def _merge(own: Tensor, other: Tensor, products: Tensor, begin: int, ends: list[int]) -> None:
    """The formula, in place in ``own``, whose products are the first of each pair."""
    dot, own_square, other_square = products.unbind(1)
    for_own = torch.where(own_square < TINY, 1.0, 1 - dot / (2 * own_square))
    for_other = torch.where(other_square < TINY, 1.0, 1 - dot / (2 * other_square))
    for layer, place in _layers(begin, begin + own.numel(), ends):
        own[place].mul_(for_own[layer].to(own.dtype)).add_(other[place] * for_other[layer].to(own.dtype))
