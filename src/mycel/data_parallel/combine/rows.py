"""Combining the changes of a few rows of a large table: only rows that a rank has touched travel.

Row ``i`` belongs to rank ``i mod W``, so that rows sorted by how often they occur are spread evenly. Every rank sends
its touched rows to their owners, owners combine what they got in the order of the ranks, and everybody gets what came
out: ``k`` touched rows of ``d`` float32 numbers, ``u`` of them in the union over the ranks, cost a rank at most
``(k + u) (4 d + 4) (W-1)/W`` bytes, where an all-reduce costs ``8 n d (W-1)/W`` for all ``n`` rows.

References:
    G. Gill et al., arXiv 1909.03359 (GraphWord2Vec): masters and mirrors of embeddings.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.data_parallel.combine.model_combiner import fold
from mycel.errors import UsageError
from mycel.names import spelled

__all__ = ["ROW_COMBINERS", "combine_rows"]

#: How an owner takes one more rank's rows: what there is, ``[rows, width]``, and the next.
_Step = Callable[[Tensor, Tensor], Tensor]

#: Step of each kind, and whether the result is divided by the number of ranks.
ROW_COMBINERS: dict[str, tuple[_Step, bool]] = {
    "model": (fold, False),
    "sum": (torch.add, False),
    "mean": (torch.add, True),
}


@torch.no_grad()
def combine_rows(
    rows: Tensor, changes: Tensor, group: dist.ProcessGroup, *, combiner: str = "model"
) -> tuple[Tensor, Tensor]:
    """What all ranks' changes of a table's rows amount to.

    Args:
        rows: numbers of the rows this rank has changed, each once, ``int64`` below 2^31, shape ``[k]``.
        changes: how, float32 or float64, shape ``[k, d]``.
        group: the ranks; all call this at the same time.
        combiner: ``model`` (see ``model_combiner``), ``sum``, or ``mean`` over all ranks of the group, where a rank
            that has not touched a row counts as zero, as when whole tables are averaged.

    Returns:
        Rows that any rank has changed, ``[u]``, and the combined changes, ``[u, d]``; the same on every rank.

    Raises:
        UsageError: an unknown combiner, or shapes that do not belong together.

    Examples:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> changes = torch.tensor([[1.0, 1.0], [3.0, 0.0]])
        >>> rows, combined = combine_rows(torch.tensor([7, 2]), changes, dist.group.WORLD)
        >>> rows.tolist(), combined.tolist()
        ([2, 7], [[3.0, 0.0], [1.0, 1.0]])
        >>> dist.destroy_process_group()
    """
    combiner = spelled(combiner, ROW_COMBINERS, "combiner of rows")
    if rows.dim() != 1 or changes.dim() != 2 or len(rows) != len(changes):
        raise UsageError(f"rows {tuple(rows.shape)} and changes {tuple(changes.shape)}: expected [k] and [k, d]")
    size = dist.get_world_size(group)
    step, divided = ROW_COMBINERS[combiner]
    sources = _to_owners(rows, changes, size, group)
    owned = torch.unique(torch.cat([numbers for numbers, _ in sources]))
    total = changes.new_zeros(len(owned), changes.shape[1])
    for numbers, values in sources:
        places = torch.searchsorted(owned, numbers)
        total[places] = step(total[places], values)
    if divided:
        total /= size
    return _to_all(owned, total, group)


def _to_owners(rows: Tensor, changes: Tensor, size: int, group: dist.ProcessGroup) -> list[tuple[Tensor, Tensor]]:
    """This rank's rows, by the rank they come from."""
    owner = rows % size
    order = torch.argsort(owner, stable=True)
    sent = torch.bincount(owner, minlength=size)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    outgoing, incoming = sent.tolist(), received.tolist()
    numbers = torch.empty(sum(incoming), dtype=torch.int32, device=rows.device)
    dist.all_to_all_single(numbers, rows[order].int(), incoming, outgoing, group=group)
    values = changes.new_empty(sum(incoming), changes.shape[1])
    dist.all_to_all_single(values, changes[order].contiguous(), incoming, outgoing, group=group)
    return list(zip(torch.split(numbers.long(), incoming), torch.split(values, incoming), strict=True))


def _to_all(rows: Tensor, changes: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """All ranks' rows and changes, one rank's behind the other's."""
    size = dist.get_world_size(group)
    count = torch.tensor([len(rows)], device=rows.device)
    counts = [torch.empty_like(count) for _ in range(size)]
    dist.all_gather(counts, count, group=group)
    lengths = [int(c) for c in counts]
    longest = max(lengths)
    numbers = rows.new_zeros(longest, dtype=torch.int32)
    numbers[: len(rows)] = rows.int()
    values = changes.new_zeros(longest, changes.shape[1])
    values[: len(rows)] = changes
    all_numbers = [torch.empty_like(numbers) for _ in range(size)]
    all_values = [torch.empty_like(values) for _ in range(size)]
    dist.all_gather(all_numbers, numbers, group=group)
    dist.all_gather(all_values, values, group=group)
    return (
        torch.cat([n[:length] for n, length in zip(all_numbers, lengths, strict=True)]).long(),
        torch.cat([v[:length] for v, length in zip(all_values, lengths, strict=True)]),
    )
