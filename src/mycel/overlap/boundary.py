"""``send_slices`` and ``receive_slices``: a tensor from the ranks of one pipeline stage to those of the next.

Ranks of a tensor-parallel stage have the same result, or parts of a sum. Sending it whole from each rank to its like
in the next stage takes as many copies of it over the links between the stages as there are ranks. Here each sends the
slice that it has summed, and the next stage's ranks gather: one copy crosses. In tiles, sums, messages and gathering
of different tiles go on at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mycel.comm.meter import ByteMeter
from mycel.comm.pending import Pending
from mycel.comm.start import group_or_all
from mycel.errors import UsageError
from mycel.overlap.exchanges import Across, padded
from mycel.overlap.rows import SpanTile, span_tiles

__all__ = ["receive_slices", "send_slices"]

#: Bytes of a tile of which all ranks of a stage send a slice: below, messages cost more than overlap gains.
_TILE_BYTES = 1 << 20
_MOST = 8


def _tiles(shape: Sequence[int], item_bytes: int, tiles: int | None) -> int:
    """As given, or by bytes alone: both stages have to come to the same, and see different links."""
    if tiles is not None:
        if tiles < 1:
            raise UsageError(f"{tiles} tiles: one, which is everything at once, is the least")
        return tiles
    num_bytes = item_bytes
    for length in shape:
        num_bytes *= length
    return min(_MOST, max(1, num_bytes // _TILE_BYTES))


def _overlaps(tile: SpanTile, others: int, own: tuple[int, int]) -> list[tuple[int, int, int]]:
    """Which of another group's ranks share rows with this rank's, and which rows of the array."""
    each = -(-(tile.stop - tile.start) // others)
    theirs = SpanTile(start=tile.start, stop=tile.stop, each=each)
    found = []
    for rank in range(others):
        begin, stop = theirs.own(rank)
        begin, stop = max(begin, own[0]), min(stop, own[1])
        if begin < stop:
            found.append((rank, begin, stop))
    return found


@torch.no_grad()
def send_slices(
    x: Tensor,
    to: Sequence[int],
    *,
    group: dist.ProcessGroup | None = None,
    between: dist.ProcessGroup | None = None,
    is_sum: bool = True,
    tiles: int | None = None,
    meter: ByteMeter | None = None,
) -> None:
    """Send a tensor of this stage's ranks to those of another, each rank a slice of its rows.

    Every rank of ``group`` calls it, and every rank of ``to`` calls ``receive_slices``. Gradients come back the same
    way: the other stage sends, this one receives.

    Args:
        x: shape ``[rows, ...]``; this rank's part of a sum, or what all ranks of the stage have alike.
        to: ranks of the other stage, as numbers in ``between``, in the order of its group; any number of them.
        group: ranks of this stage; all if not given.
        between: in which ranks of both stages are; all if not given.
        is_sum: the stage's ranks have parts of a sum, which is formed on the way.
        tiles: in how many parts; if not given, by the length. The same on both sides.
        meter: counts bytes, as ``send_slices``.

    Examples:
        On ranks 0 and 1, of which each has a part of a sum, to ranks 2 and 3::

            send_slices(partial, to=[2, 3], group=first_stage)

        and there::

            x = receive_slices((1024, 512), of=[0, 1], group=second_stage)

    References:
        A. Jangda et al., ASPLOS 2022, section 2.3 (CoCoNet's all_reduce, send and computation of pipelines).
    """
    group = group_or_all(group, "send_slices")
    between = group_or_all(between, "send_slices")
    across = Across.of(group, "send_slices", meter)
    x = x.contiguous()
    cuts = span_tiles(x.shape[0], across.size, _tiles(x.shape, x.element_size(), tiles))
    sums: list[tuple[SpanTile, Pending[Tensor] | None]] = []
    for tile in cuts:
        blocks = None
        if is_sum:
            filled = padded(x[tile.start : tile.stop], across.size * tile.each)
            blocks = across.scatter(filled.view(across.size, tile.each, *x.shape[1:]))
        sums.append((tile, blocks))
    works: list[Any] = []
    kept: list[Tensor] = []  # until they are sent
    for tile, summed in sums:
        own = tile.own(across.rank)
        mine = x[own[0] : own[1]] if summed is None else summed.wait()
        for rank, begin, stop in _overlaps(tile, len(to), own):
            part = mine[begin - own[0] : stop - own[0]].contiguous()
            kept.append(part)
            works.append(dist.isend(part, group=between, group_dst=to[rank]))
            if meter is not None:
                meter.sent["send_slices", dist.get_global_rank(between, to[rank])] += part.nbytes
    for work in works:
        work.wait()
    del kept


@torch.no_grad()
def receive_slices(
    shape: Sequence[int],
    of: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    group: dist.ProcessGroup | None = None,
    between: dist.ProcessGroup | None = None,
    tiles: int | None = None,
    meter: ByteMeter | None = None,
) -> Tensor:
    """Receive what the ranks of another stage send by ``send_slices``; all ranks of this one get all of it.

    Args:
        shape: of the whole tensor.
        of: ranks of the other stage, as numbers in ``between``, in the order of its group.
        dtype: of the elements.
        device: where to put them; the processor if not given.
        group: ranks of this stage; all if not given.
        between: in which ranks of both stages are; all if not given.
        tiles: as of the other side.
        meter: counts bytes, as ``receive_slices``.

    Returns:
        The tensor.

    Examples:
        On ranks 2 and 3, from ranks 0 and 1, which call ``send_slices``::

            x = receive_slices((1024, 512), of=[0, 1], group=second_stage)
    """
    group = group_or_all(group, "receive_slices")
    between = group_or_all(between, "receive_slices")
    across = Across.of(group, "receive_slices", meter)
    whole = torch.empty(*shape, dtype=dtype, device=device or torch.device("cpu"))
    cuts = span_tiles(shape[0], len(of), _tiles(shape, dtype.itemsize, tiles))
    arriving: list[tuple[SpanTile, Tensor, list[Any]]] = []
    for tile in cuts:
        each = -(-(tile.stop - tile.start) // across.size)
        mine = SpanTile(start=tile.start, stop=tile.stop, each=each)
        own = mine.own(across.rank)
        part = whole.new_zeros(each, *shape[1:])
        works: list[Any] = []
        for rank in range(len(of)):
            begin, stop = tile.own(rank)
            begin, stop = max(begin, own[0]), min(stop, own[1])
            if begin < stop:
                place = part[begin - own[0] : stop - own[0]]
                works.append(dist.irecv(place, group=between, group_src=of[rank]))
        arriving.append((mine, part, works))
    gathers = []
    for tile, part, works in arriving:
        for work in works:
            work.wait()
        is_full = tile.stop - tile.start == across.size * tile.each
        into = whole[tile.start : tile.stop].view(across.size, *part.shape) if is_full else None
        gathers.append((tile, across.gather(part, into)))
    for tile, pending in gathers:
        arrived, span = pending.wait(), whole[tile.start : tile.stop]
        if arrived.data_ptr() != span.data_ptr():
            span.copy_(arrived.view(-1, *shape[1:])[: tile.stop - tile.start])
    return whole
