"""The tokens right before each segment of a layout, from whichever ranks hold them; none before a document begins."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mycel.arguments import whole_number
from mycel.errors import UsageError
from mycel.planning.sequence import predecessors
from mycel.sequence.context import SequenceContext
from mycel.sequence.scan.graph import attached

__all__ = ["Lengthened", "halo", "lengthened"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    """Who needs what, worked out once for a layout and a width.

    Attributes:
        gives: rows of the tokens here that each rank gets.
        gets: rows that come from each.
        source: of each place before each segment, (segments * width,), the row among those that came; one more than
            there are where no token is.
        travels: whether anything crosses ranks, here or elsewhere.
    """

    gives: tuple[Tensor, ...]
    gets: tuple[int, ...]
    source: Tensor
    travels: bool


def _route_of(context: SequenceContext, width: int) -> _Route:
    ranks = range(context.num_ranks)
    wanted = [predecessors(context.layout, rank, width) for rank in ranks]
    nothing = torch.zeros(0, dtype=torch.int64)
    gives = []
    for each in wanted:
        asked = [p for of in each for p in of if p.rank == context.rank]
        gives.append(torch.cat([nothing, *(torch.arange(p.first, p.first + p.count) for p in asked)]))
    gets = [sum(p.count for of in wanted[context.rank] for p in of if p.rank == rank) for rank in ranks]
    at = [sum(gets[:rank]) for rank in ranks]
    source = torch.full((len(context.segments), width), sum(gets), dtype=torch.int64)
    for number, (segment, pieces) in enumerate(zip(context.segments, wanted[context.rank], strict=True)):
        for piece in pieces:
            place = piece.position - (segment.start - width)
            source[number, place : place + piece.count] = torch.arange(at[piece.rank], at[piece.rank] + piece.count)
            at[piece.rank] += piece.count
    travels = any(p.rank != rank for rank, each in zip(ranks, wanted, strict=True) for of in each for p in of)
    return _Route(gives=tuple(gives), gets=tuple(gets), source=source.flatten(), travels=travels)


def _before(rows: Tensor, context: SequenceContext, width: int) -> tuple[Tensor, Tensor]:
    """What came, (rows, ...), and what is before each segment, (segments * width, ...), zeros where no token is."""
    route = context.remember(("halo", width), lambda: _route_of(context, width))
    parts = [rows.index_select(0, which.to(rows.device)) for which in route.gives]
    came = parts[context.rank]
    if route.travels:
        came = torch.cat(context.exchange_with_gradient(parts, route.gets, "halo"))
    padded = torch.cat([came, came.new_zeros(1, *came.shape[1:])])
    return came, padded.index_select(0, route.source.to(rows.device))


def _checked(x: Tensor, context: SequenceContext, tokens: int, dim: int) -> int:
    width = whole_number(tokens, "tokens", least=0)
    if x.shape[dim] != context.num_tokens:
        raise UsageError(
            f"a tensor has {x.shape[dim]} tokens in dimension {dim}; rank {context.rank} holds {context.num_tokens}"
        )
    return width


def halo(x: Tensor, context: SequenceContext, tokens: int, *, dim: int = 1) -> Tensor:
    """The tokens right before each segment here, with gradients at their owners.

    They come in one exchange, from several ranks where segments are shorter than what is asked for. All ranks call
    this, those without tokens too; so they do backwards.

    Args:
        x: the tokens here along ``dim``.
        context: whose tokens.
        tokens: how many before each segment.
        dim: which.

    Returns:
        With ``dim`` replaced by two, (segments here, tokens): zeros for what would be before a document.

    Raises:
        UsageError: other tokens than the rank holds, or fewer than none asked for.

    Examples:
        >>> from mycel.planning.sequence import Layout, Segment
        >>> parts = tuple(Segment(document=0, start=s, stop=e) for s, e in ((0, 3), (3, 4)))
        >>> context = SequenceContext(Layout(documents=(4,), ranks=(parts,)))
        >>> halo(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), context, 2).tolist()
        [[[0.0, 0.0], [2.0, 3.0]]]
    """
    width = _checked(x, context, tokens, dim)
    rows = x.movedim(dim, 0)
    came, before = _before(rows, context, width)
    found = attached(before.view(len(context.segments), width, *rows.shape[1:]), came)
    at = dim % x.dim()
    return found.movedim((0, 1), (at, at + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengthened:
    """Each segment with some tokens before it, one after the other.

    Attributes:
        rows: of shape (places, ...).
        came: for ``attached``: what the way back has to be joined for, whatever is done with ``rows``.
        own: int64 of shape (tokens here,): where the tokens here are among the places.
        is_token: bool of shape (places,): whether there is a token; before a document there is none.
    """

    rows: Tensor
    came: Tensor
    own: Tensor
    is_token: Tensor


def lengthened(x: Tensor, context: SequenceContext, tokens: int, *, dim: int = 1) -> Lengthened:
    """Each segment here that has tokens, with those right before it: what convolutions work on at once.

    Args:
        x, context, tokens, dim: as for ``halo``.

    Raises:
        UsageError: as for ``halo``.
    """
    width = _checked(x, context, tokens, dim)
    rows = x.movedim(dim, 0)
    came, before = _before(rows, context, width)
    index, own, is_token = context.remember(("lengthened", width), lambda: _places(context, width))
    together = torch.cat([before, rows]).index_select(0, index.to(x.device))
    return Lengthened(rows=together, came=came, own=own.to(x.device), is_token=is_token.to(x.device))


def _places(context: SequenceContext, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where each place is among those before all segments and the tokens; places of tokens; which are tokens."""
    nothing = torch.zeros(0, dtype=torch.int64)
    index, own, is_token, at = [nothing], [nothing], [nothing.bool()], 0
    first = len(context.segments) * width
    for number, segment in enumerate(context.segments):
        if not len(segment):
            continue
        start = context.borders[number]
        index += [
            torch.arange(number * width, (number + 1) * width),
            torch.arange(start, start + len(segment)) + first,
        ]
        own.append(torch.arange(at + width, at + width + len(segment)))
        is_token.append(torch.arange(segment.start - width, segment.stop) >= 0)
        at += width + len(segment)
    return torch.cat(index), torch.cat(own), torch.cat(is_token)
