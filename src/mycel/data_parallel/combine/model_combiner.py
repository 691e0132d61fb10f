"""Model combiners: of every further vector, only the part that is orthogonal to what is there already is added.

Ranks that have learned the same keep it once, as in a mean; ranks that have learned different things keep all of it,
as in a sum. Of vectors ``g_1 ... g_W`` the fold begins with ``a = g_1`` and, in the order of the ranks, takes
``a + g_i - (a.g_i / |a|^2) a`` for ``a``. A vector here is a row of a matrix, such as the embedding of one word, or a
whole one-dimensional tensor.

References:
    G. Gill et al., "Distributed Training of Embeddings using Graph Analytics" (GraphWord2Vec), IPDPS 2021, arXiv
    1909.03359, section on model combiners; S. Maleki et al., "Semantics-Preserving Parallelization of Stochastic
    Gradient Descent", IPDPS 2018.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm.background import InBackground
from mycel.comm.bundle import Bundle
from mycel.comm.pending import Pending

__all__ = ["ModelCombiner", "fold"]


def fold(total: Tensor, further: Tensor) -> Tensor:
    """One step of the fold, for every row.

    Args:
        total: what has been combined so far, ``[rows, width]``.
        further: the next rank's rows, of the same shape.

    Returns:
        ``total + further - projection of further on total``, a new tensor. A row of zeros is replaced.

    Examples:
        >>> fold(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0]])).tolist()
        [[1.0, 0.0], [1.0, 2.0]]
    """
    square = (total * total).sum(-1, keepdim=True)
    along = (total * further).sum(-1, keepdim=True) / square.clamp_min(torch.finfo(total.dtype).tiny)
    return total + further - along * total


@dataclass(frozen=True, slots=True)
class ModelCombiner:
    """The fold over all ranks, for each row of each matrix.

    Every rank folds a share of the rows: it gets all ranks' versions of them, and everybody gets its result. Bytes a
    rank: ``(W-1)/W`` times the bundle to send shares away, and as many again for the results if shares are equal.

    Examples:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> own = torch.tensor([1.0, 2.0])
        >>> ModelCombiner().start(Bundle.over(own, [own]), dist.group.WORLD).wait()
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
    cuts = _cuts(bundle, size)
    lengths = [end - begin for begin, end in pairwise(cuts)]
    own = lengths[rank]
    versions = flat.new_empty(size * own)
    dist.all_to_all_single(versions, flat, [own] * size, lengths, group=group)
    longest = max(lengths)
    padded = flat.new_zeros(longest)
    for rows, width, begin in _rows_between(bundle, cuts[rank], cuts[rank + 1]):
        of_rank = [versions[s * own + begin :][: rows * width].view(rows, width) for s in range(size)]
        total = of_rank[0]
        for further in of_rank[1:]:
            total = fold(total, further)
        padded[begin : begin + rows * width] = total.reshape(-1)
    results = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(results, padded, group=group)
    for result, begin, length in zip(results, cuts, lengths, strict=False):
        flat[begin : begin + length] = result[:length]


def _matrices(bundle: Bundle) -> Iterator[tuple[int, int, int]]:
    """First index, rows and width of each part."""
    begin = 0
    for part in bundle.parts:
        rows = part.shape[0] if part.dim() > 1 else 1
        if part.numel():
            yield begin, rows, part.numel() // rows
        begin += part.numel()


def _cuts(bundle: Bundle, size: int) -> list[int]:
    """Where the ranks' shares begin, and the end: between rows, as equal as rows allow."""
    ends = torch.cat([begin + width * torch.arange(1, rows + 1) for begin, rows, width in _matrices(bundle)])
    ends = torch.cat([ends.new_zeros(1), ends])
    wanted = torch.arange(size + 1) * bundle.flat.numel() / size
    after = torch.searchsorted(ends, wanted).clamp_max(len(ends) - 1)
    before = (after - 1).clamp_min(0)
    nearer = torch.where(wanted - ends[before] < ends[after] - wanted, ends[before], ends[after])
    nearer[0], nearer[-1] = 0, bundle.flat.numel()
    return [int(cut) for cut in nearer]


def _rows_between(bundle: Bundle, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Rows, width and place after ``begin`` of each matrix's whole rows in a range."""
    for first, rows, width in _matrices(bundle):
        low, high = max(first, begin), min(first + rows * width, end)
        if low < high:
            yield (high - low) // width, width, low - begin
