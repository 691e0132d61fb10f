"""Muon: momentum, made orthonormal by Newton and Schulz's iteration; each rank does a share of the matrices.

The iteration takes most of the time and gives the same on every rank, so a matrix has an owner. Where gradients are
averaged, owners hand out what they found; where rows lie over ranks, owners are sent the rows first, and give rows
back.

References:
    Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024 (the iteration and its
    coefficients); Liu et al., "Muon is Scalable for LLM Training", 2025, arXiv 2502.16982, section 2.3 (over ranks).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.data_parallel.compress.rounds import AllGather, AllToAll, Conversation, Outcome
from mycel.data_parallel.exchange import exchange
from mycel.data_parallel.optimizers.entries import Change, Entry, Ranks
from mycel.data_parallel.stats import CommStats

__all__ = ["changes", "newton_schulz", "owners"]

#: Jordan's: singular values come near to 1 (0.7 to 1.2) in few steps, rather than to it in many.
_A, _B, _C = 3.4445, -4.7750, 2.0315


def changes(entries: Sequence[Entry], ranks: Ranks, stats: CommStats) -> list[Change]:
    """A change for each entry."""
    momenta = [
        torch.add(entry.gradient, entry.kept("momentum"), alpha=entry.options["momentum"]) for entry in entries
    ]
    sought = [
        torch.add(entry.gradient, m, alpha=entry.options["momentum"]) if entry.options["nesterov"] else m
        for entry, m in zip(entries, momenta, strict=True)
    ]
    if ranks.shards is not None:
        updates = _by_rows(entries, sought, ranks.shards, stats)
    elif ranks.replicas is not None:
        updates = _by_matrix(entries, sought, ranks.replicas, stats)
    else:
        updates = [_orthonormal(entry, matrix) for entry, matrix in zip(entries, sought, strict=True)]
    return [_change(entry, m, update) for entry, m, update in zip(entries, momenta, updates, strict=True)]


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """An approximate polar factor: the same singular vectors, singular values near 1.

    Examples:
        >>> [round(x) for x in newton_schulz(torch.diag(torch.tensor([3.0, -0.5])), 5).diagonal().tolist()]
        [1, -1]
    """
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / torch.linalg.matrix_norm(x).clamp_min(torch.finfo(x.dtype).tiny)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def owners(shapes: Sequence[Sequence[int]], world_size: int) -> list[int]:
    """The rank that works on each matrix: the longest first, each to the rank with the least work so far.

    Examples:
        >>> owners([(8, 8), (16, 16), (8, 8)], 2)
        [1, 0, 1]
    """
    load = [0] * world_size
    found = [0] * len(shapes)
    costs = [rows * columns * min(rows, columns) for rows, columns in shapes]
    for i in sorted(range(len(shapes)), key=lambda i: (-costs[i], i)):
        found[i] = min(range(world_size), key=lambda rank: (load[rank], rank))
        load[found[i]] += costs[i]
    return found


def _orthonormal(entry: Entry, matrix: Tensor) -> Tensor:
    return newton_schulz(matrix, entry.options["newton_schulz_steps"])


def _by_matrix(
    entries: Sequence[Entry], matrices: Sequence[Tensor], group: dist.ProcessGroup, stats: CommStats
) -> list[Tensor]:
    """Whole matrices, the same on all ranks: an all_gather of what each rank found."""
    size, own = group.size(), group.rank()
    owner = owners([m.shape for m in matrices], size)
    wires = [entry.options["wire"] or m.dtype for entry, m in zip(entries, matrices, strict=True)]
    by_rank = [[i for i in range(len(matrices)) if owner[i] == rank] for rank in range(size)]
    lengths = [wire.itemsize * m.numel() for wire, m in zip(wires, matrices, strict=True)]
    parts = [_as_bytes(_orthonormal(entries[i], matrices[i]).to(wires[i])) for i in by_rank[own]]
    sent = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=matrices[0].device)
    asked = _gathered(sent, [sum(lengths[i] for i in members) for members in by_rank])
    found: dict[int, Tensor] = {}
    for members, outcome in zip(by_rank, exchange([asked], group, stats)[0], strict=True):
        for i, piece in zip(members, outcome.mean.split_with_sizes([lengths[i] for i in members]), strict=True):
            found[i] = _from_bytes(piece, wires[i]).to(matrices[i].dtype).view(matrices[i].shape)
    return [found[i] for i in range(len(matrices))]


def _by_rows(
    entries: Sequence[Entry], rows: Sequence[Tensor], group: dist.ProcessGroup, stats: CommStats
) -> list[Tensor]:
    """Rows over ranks: to the owners, and back; each way one all_to_all."""
    size, own = group.size(), group.rank()
    shapes = [tuple(entry.parameter.shape) for entry in entries]
    owner = owners(shapes, size)
    wires = [entry.options["wire"] or r.dtype for entry, r in zip(entries, rows, strict=True)]
    heights = [[_height(shape[0], rank, size) for rank in range(size)] for shape in shapes]
    mine = [i for i in range(len(rows)) if owner[i] == own]
    others = [[i for i in range(len(rows)) if owner[i] == rank] for rank in range(size)]

    def length(i: int, rank: int) -> int:
        return heights[i][rank] * shapes[i][1] * wires[i].itemsize

    heard = _swap(
        [[rows[i].to(wires[i]) for i in others[r]] for r in range(size)],
        [[length(i, r) for i in mine] for r in range(size)],
        group,
        stats,
        rows[0].device,
    )
    done: dict[int, list[Tensor]] = {}
    for j, i in enumerate(mine):
        pieces = [
            rows[i].to(wires[i]) if r == own else _from_bytes(heard[r][j], wires[i]).view(-1, shapes[i][1])
            for r in range(size)
        ]
        whole = _orthonormal(entries[i], torch.cat(pieces).to(rows[i].dtype))
        done[i] = list(whole.to(wires[i]).split_with_sizes(heights[i]))
    back = _swap(
        [[done[i][r] for i in mine] for r in range(size)],
        [[length(i, own) for i in others[r]] for r in range(size)],
        group,
        stats,
        rows[0].device,
    )
    found = {i: done[i][own] for i in mine}
    for r in range(size):
        for i, piece in zip(others[r] if r != own else (), back[r], strict=True):
            found[i] = _from_bytes(piece, wires[i]).view(rows[i].shape)
    return [found[i].to(rows[i].dtype) for i in range(len(rows))]


def _swap(
    pieces: list[list[Tensor]],
    sizes: list[list[int]],
    group: dist.ProcessGroup,
    stats: CommStats,
    device: torch.device,
) -> list[list[Tensor]]:
    """Bytes of what the other ranks sent.

    Args:
        pieces: by receiver; what is for this rank itself does not travel.
        sizes: bytes of what each rank sends, by sender.
        group: all of them.
        stats: counts bytes.
        device: of the bytes; a rank may have no piece for anybody.
    """
    own = group.rank()
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    parts = [torch.cat([nothing, *(_as_bytes(p) for p in ps if r != own)]) for r, ps in enumerate(pieces)]
    lengths = [sum(s) if r != own else 0 for r, s in enumerate(sizes)]
    heard = exchange([_swapped(parts, lengths)], group, stats)[0]
    return [
        list(h.mean.split_with_sizes(s)) if r != own else []
        for r, (h, s) in enumerate(zip(heard, sizes, strict=True))
    ]


def _height(rows: int, rank: int, size: int) -> int:
    """Rows of a rank, as torch cuts: all but the last have the same number."""
    each = -(-rows // size)
    return max(0, min(each, rows - rank * each))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _from_bytes(piece: Tensor, dtype: torch.dtype) -> Tensor:
    return piece.clone().view(dtype)  # a part of a message need not begin where numbers of its type may


def _gathered(tensor: Tensor, sizes: list[int]) -> Conversation:
    heard: list[Tensor] = yield AllGather(tensor=tensor, sizes=sizes)
    return [Outcome(mean=part) for part in heard]


def _swapped(parts: list[Tensor], sizes: list[int]) -> Conversation:
    heard: list[Tensor] = yield AllToAll(parts=parts, sizes=sizes)
    return [Outcome(mean=part) for part in heard]


def _change(entry: Entry, momentum: Tensor, update: Tensor) -> Change:
    def apply() -> None:
        entry.kept("momentum").copy_(momentum)
        entry.move(lambda x, factor: x.add_(update, alpha=factor), entry.scale)

    return Change(values=update, apply=apply)
