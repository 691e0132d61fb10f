"""Combiners that need of the gradients only their inner products: one exchange of shares, ``K^2`` numbers, one more.

Every rank sends each other its share of what it has, so that of each share one rank holds all tasks' versions. What
these contribute to the Gram matrix is added up over the ranks in float64; every rank finds the weights of the tasks,
combines its share, and hands it to all. Bytes a rank: ``n (W-1)/W`` there and as many back, an all_reduce's, and the
Gram matrix. A number of the result is made by one rank alone, so that all ranks have the same bits.

A rank with several tasks sends away shares of all of its versions; what comes back is one.

Where each rank holds a shard of a model only, inner products are sums over its shards: one more sum of ``K^2``
numbers over the ranks that hold the others.

References:
    Y. Zhang, Q. Yang, "A Survey on Multi-Task Learning", TKDE 2021, and the methods' own papers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm.bundle import Bundle
from mycel.comm.messages import all_gather_single
from mycel.data_parallel.combine.tasks.base import TaskCombiner
from mycel.data_parallel.combine.tasks.quadratic import Matrix, Vector

__all__ = ["ByGram"]

#: Numbers of every version that are in float64 at once.
_COLUMNS = 1 << 18


class ByGram(TaskCombiner):
    """The combination ``sum w_i g_i`` with weights that follow from the Gram matrix ``G = [g_i . g_j]``."""

    @abstractmethod
    def weights(self, gram: Matrix) -> Vector:
        """Weights of the tasks, ``[K]``.

        Args:
            gram: inner products of the tasks' gradients, ``[K, K]``, finite.
        """

    def combine(self, versions: Sequence[Sequence[Bundle]], group: dist.ProcessGroup, shares: Matrix) -> None:
        """See ``TaskCombiner``."""
        bundles, spread = versions[0], torch.from_numpy(shares)
        held = [_spread([bundle.flat for bundle in same], group) for same in zip(*versions, strict=True)]
        gram = torch.zeros(len(shares), len(shares), dtype=torch.float64)
        for rows in held:
            gram += spread @ _inner_products(rows).cpu() @ spread.T
        gram = _summed(gram, bundles[0].flat.device, [group] if self.shards is None else [group, self.shards])
        found = gram.numpy()
        if np.isfinite(found).all():
            weights = self.weights((found + found.T) / 2)
        else:  # the mean is not finite either, and whoever looks at the result sees that
            weights = np.full(len(found), 1 / len(found))
        of_versions = torch.from_numpy(weights @ shares)
        for rows, bundle in zip(held, bundles, strict=True):
            _gather(_combined(rows, of_versions), bundle.flat, group)


def _share_sizes(length: int, size: int) -> list[int]:
    """Numbers of each rank's share: equal but for the last ones."""
    share = -(-length // size)
    return [max(0, min(share, length - rank * share)) for rank in range(size)]


def _spread(flats: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """All versions of this rank's share, those of rank 0 first, ``[V, share]``."""
    size = group.size()
    if size == 1:
        return torch.stack(list(flats))
    sizes = _share_sizes(flats[0].numel(), size)
    own = sizes[group.rank()]
    found = flats[0].new_empty(size, len(flats), own)
    for index, flat in enumerate(flats):
        heard = flat.new_empty(size * own)
        dist.all_to_all_single(heard, flat, [own] * size, sizes, group=group)
        found[:, index] = heard.view(size, own)
    return found.view(size * len(flats), own)


def _inner_products(rows: Tensor) -> Tensor:
    found = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for some in torch.split(rows, _COLUMNS, dim=1):
        exact = some.double()
        found += exact @ exact.T
    return found


def _summed(gram: Tensor, device: torch.device, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    total = gram.to(device)
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(total, group=group)
    return total.cpu()


def _combined(rows: Tensor, of_versions: Tensor) -> Tensor:
    found = torch.empty_like(rows[0])
    weights = of_versions.to(rows.device)
    for some, out in zip(torch.split(rows, _COLUMNS, dim=1), torch.split(found, _COLUMNS), strict=True):
        out.copy_(weights @ some.double())
    return found


def _gather(share: Tensor, flat: Tensor, group: dist.ProcessGroup) -> None:
    """All ranks' shares of the result, in place."""
    size = group.size()
    if size == 1:
        flat.copy_(share)
        return
    longest = -(-flat.numel() // size)
    padded = flat.new_zeros(longest)
    padded[: len(share)] = share
    gathered = flat.new_empty(size * longest)
    all_gather_single(gathered, padded, group=group)
    flat.copy_(gathered[: flat.numel()])  # only behind the end of the last share is there padding
