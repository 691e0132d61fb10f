"""A product and a collective in tiles: the loops that all operators are made of, without gradients.

Every rank starts the same collectives in the same order, whatever its own speed: nothing is decided by what has
arrived. One tile is the plain program: the collective, then the product, or the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mycel.comm.pending import Pending
from mycel.overlap.exchanges import Across, padded
from mycel.overlap.rows import SpanTile, block_tiles, span_tiles

__all__ = ["Finish", "gather_product", "product_everywhere", "product_scatter", "spread_product"]

#: What is done to rows of a result when their sum is there: rows, which are changed in place, and the first and last
#: of them, counted in this rank's slice (``product_scatter``) or in the whole array (``product_everywhere``).
Finish = Callable[[Tensor, int, int], None]


def gather_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    across: Across,
    *,
    rows: Sequence[int],
    tiles: int,
    keep: bool,
    at_once: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The rows of all ranks times a matrix.

    With several tiles, this rank's own rows are multiplied while the first tile travels, and every other tile while
    the next one does.

    Args:
        x: this rank's rows, shape ``[rows[rank], inner]``.
        weight: shape ``[inner, columns]``.
        bias: shape ``[columns]``.
        across: the ranks.
        rows: of each rank.
        tiles: in how many parts every rank's rows travel.
        keep: whether the gathered rows are wanted as well.
        at_once: multiply when all rows are there: this rank's business alone, ranks need not agree on it.

    Returns:
        The product, ``[sum(rows), columns]``, and the gathered rows, ``[sum(rows), inner]``.
    """
    x = x.contiguous()
    num_rows, own = sum(rows), sum(rows[: across.rank])
    cuts = block_tiles(rows, tiles)
    if across.size == 1:
        return _product(x, weight, bias), x if keep else None
    if len(cuts) == 1 and cuts[0].is_even:
        whole = across.gather(x).wait().view(num_rows, x.shape[1])
        return _product(whole, weight, bias), whole if keep else None
    product = x.new_empty(num_rows, weight.shape[1])
    everything = x.new_empty(num_rows, x.shape[1]) if keep or at_once else None
    begins = [tile.starts[across.rank] - own for tile in cuts]
    sent = (
        padded(x[begin : begin + tile.counts[across.rank]], tile.most)
        for begin, tile in zip(begins, cuts, strict=True)
    )
    under_way = [across.gather(part) for part in sent]
    if not at_once:
        _product(x, weight, bias, product[own : own + x.shape[0]])
    if everything is not None:
        everything[own : own + x.shape[0]] = x
    for tile, pending in zip(cuts, under_way, strict=True):
        arrived = pending.wait()
        for rank, (start, count) in enumerate(zip(tile.starts, tile.counts, strict=True)):
            if rank == across.rank or not count:
                continue
            part = arrived[rank, :count]
            if not at_once:
                _product(part, weight, bias, product[start : start + count])
            if everything is not None:
                everything[start : start + count] = part
    if at_once:
        assert everything is not None
        _product(everything, weight, bias, product)
    return product, everything if keep else None


def product_scatter(
    x: Tensor,
    weight: Tensor | None,
    across: Across,
    *,
    rows: Sequence[int],
    tiles: int,
    finish: Finish | None = None,
    beside: Callable[[], None] | None = None,
    bias: Tensor | None = None,
    at_once: bool = False,
) -> Tensor:
    """This rank's rows of the ranks' sum of products.

    Args:
        x: shape ``[sum(rows), inner]``; each rank has columns of its own.
        weight: shape ``[inner, columns]``; each rank has rows of its own. ``None``: ``x`` itself is summed.
        across: the ranks.
        rows: of the result on each rank.
        tiles: in how many parts every rank's rows are made and sent.
        finish: of the rows of a tile, when they are there, while the next tile travels; on every rank as often, also
            where it has no rows of the tile.
        beside: what else to compute, once, while the last tile travels.
        bias: shape ``[columns]``, this rank's, added to its product before the sum.
        at_once: multiply all rows before any is sent: this rank's business alone, ranks need not agree on it.

    Returns:
        Shape ``[rows[rank], columns]``.
    """
    own, columns = rows[across.rank], (x if weight is None else weight).shape[1]
    cuts = block_tiles(rows, tiles)
    if across.size == 1:
        out = _product(x, weight, bias)
        if beside is not None:
            beside()
        if finish is not None:
            finish(out, 0, own)
        return out
    if at_once:
        x, weight, bias = _product(x, weight, bias), None, None
    out = x.new_empty(own, columns)
    offset = sum(rows[: across.rank])
    under_way: list[tuple[int, int, Pending[Tensor]]] = []
    for tile in cuts:
        if len(cuts) == 1 and tile.is_even:
            blocks = _product(x, weight, bias).view(across.size, tile.most, columns)
        else:
            blocks = x.new_empty(across.size, tile.most, columns)
            for rank, (start, count) in enumerate(zip(tile.starts, tile.counts, strict=True)):
                _product(x[start : start + count], weight, bias, blocks[rank, :count])
                blocks[rank, count:] = 0
        begin, count = tile.starts[across.rank] - offset, tile.counts[across.rank]
        # What is finished in place is no longer what arrived, which activation checkpointing may keep.
        place = out[begin : begin + count] if count == tile.most and finish is None else None
        under_way.append((begin, count, across.scatter(blocks, place)))
        if finish is not None and len(under_way) > 1:
            _land(under_way.pop(0), out, finish)
    if beside is not None:
        beside()
    for landing in under_way:
        _land(landing, out, finish)
    return out


def product_everywhere(
    x: Tensor, weight: Tensor, across: Across, *, tiles: int, finish: Finish | None = None
) -> Tensor:
    """The ranks' sum of products, on all of them.

    Without ``finish`` tiles are summed everywhere; with it each rank gets the sum of some rows, finishes them, and
    tells the others, so that the work of finishing is divided too.

    Args:
        x: shape ``[rows, inner]``; each rank has columns of its own.
        weight: shape ``[inner, columns]``; each rank has rows of its own.
        across: the ranks.
        tiles: in how many parts the rows are made and sent.
        finish: of some rows of the sum, in place.

    Returns:
        Shape ``[rows, columns]``.
    """
    num_rows, columns = x.shape[0], weight.shape[1]
    cuts = span_tiles(num_rows, across.size, tiles)
    if across.size == 1 or (finish is None and len(cuts) <= 1):
        out = across.total(_product(x, weight, None)).wait()
        if finish is not None:
            finish(out, 0, num_rows)
        return out
    out = x.new_empty(num_rows, columns)
    sums: list[Pending[Tensor]] = []
    gathers: list[Pending[Tensor]] = []
    for number, tile in enumerate(cuts):
        span = out[tile.start : tile.stop]
        _product(x[tile.start : tile.stop], weight, None, span)
        if finish is None:
            gathers.append(across.total(span))
            continue
        blocks = padded(span, across.size * tile.each).view(across.size, tile.each, columns)
        sums.append(across.scatter(blocks))
        if number:
            gathers.append(_spread(out, cuts[number - 1], sums[number - 1], finish, across))
    if finish is not None and cuts:
        gathers.append(_spread(out, cuts[-1], sums[-1], finish, across))
    for tile, pending in zip(cuts, gathers, strict=True):
        arrived, span = pending.wait(), out[tile.start : tile.stop]
        if arrived.data_ptr() != span.data_ptr():  # it came padded
            span.copy_(arrived.view(-1, columns)[: tile.stop - tile.start])
    return out


def spread_product(
    own: Sequence[Tensor],
    weight: Tensor,
    across: Across,
    *,
    num_rows: int,
    tiles: int,
    prepare: Callable[[Tensor, int, int], Tensor],
) -> tuple[Tensor, Tensor]:
    """Rows that ranks have finished, gathered and multiplied: the way back of ``product_everywhere``.

    Args:
        own: this rank's rows of each tile, as ``SpanTile.own`` has them.
        weight: shape ``[inner, columns]``.
        across: the ranks.
        num_rows: of the whole array.
        tiles: as of the way there.
        prepare: makes of gathered rows what is multiplied; gets the first and the last of them, too.

    Returns:
        The product, ``[num_rows, columns]``, and the gathered rows, ``[num_rows, inner]``.
    """
    inner = weight.shape[0]
    gathered = own[0].new_empty(num_rows, inner)
    product = own[0].new_empty(num_rows, weight.shape[1])
    cuts = span_tiles(num_rows, across.size, tiles)
    under_way = []
    for part, tile in zip(own, cuts, strict=False):  # without rows there is no tile
        is_full = tile.stop - tile.start == across.size * tile.each
        into = gathered[tile.start : tile.stop].view(across.size, tile.each, inner) if is_full else None
        under_way.append(across.gather(padded(part, tile.each), into))
    for tile, pending in zip(cuts, under_way, strict=True):
        arrived, span = pending.wait(), gathered[tile.start : tile.stop]
        if arrived.data_ptr() != span.data_ptr():
            span.copy_(arrived.view(-1, inner)[: tile.stop - tile.start])
        _product(prepare(span, tile.start, tile.stop), weight, None, product[tile.start : tile.stop])
    return product, gathered


def _spread(out: Tensor, tile: SpanTile, summed: Pending[Tensor], finish: Finish, across: Across) -> Pending[Tensor]:
    """Finish this rank's rows of a tile, and begin to gather the tile."""
    part, (begin, stop) = summed.wait().clone(), tile.own(across.rank)
    finish(part[: stop - begin], begin, stop)
    is_full = tile.stop - tile.start == across.size * tile.each
    # The rows' product stood there, and is not needed any more.
    into = out[tile.start : tile.stop].view(across.size, tile.each, -1) if is_full else None
    return across.gather(part, into)


def _land(landing: tuple[int, int, Pending[Tensor]], out: Tensor, finish: Finish | None) -> None:
    begin, count, pending = landing
    arrived, place = pending.wait(), out[begin : begin + count]
    if count and arrived.data_ptr() != place.data_ptr():  # it came padded
        place.copy_(arrived[:count])
    if finish is not None:
        finish(place, begin, begin + count)


def _product(x: Tensor, weight: Tensor | None, bias: Tensor | None, into: Tensor | None = None) -> Tensor:
    """Rows times a matrix, written where they belong; without a matrix the rows themselves, always copied."""
    if weight is None:
        return x.clone(memory_format=torch.contiguous_format) if into is None else into.copy_(x)
    if into is None:
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
    return torch.mm(x, weight, out=into) if bias is None else torch.addmm(bias, x, weight, out=into)
