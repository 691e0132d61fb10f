"""The ways in which attention over ranks is carried out, as data, and what each makes of a layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from mycel.brief import brief
from mycel.errors import UsageError
from mycel.planning.sequence import Layout, Mask, Segment
from mycel.sequence.context import SequenceContext
from mycel.sequence.softmax.attended import Carrier, attended
from mycel.sequence.softmax.blocks import Block, blocks_of
from mycel.sequence.softmax.delivery import Delivery, deliveries
from mycel.sequence.softmax.gathered import Gathered
from mycel.sequence.softmax.ring import Ring
from mycel.sequence.softmax.ulysses import Heads, gather_tokens, scatter_tokens

__all__ = ["Between", "MeetingRanks", "Way", "attend_by", "carrier", "check_way", "meeting_ranks"]

#: How keys and values come to queries between ranks, or between groups of them.
Between = Literal["gathered", "needed", "ring"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way; the same on all ranks. Results differ by rounding only.

    Attributes:
        between: how keys and values come: ``gathered`` to all ranks, by all_gather; only where they are ``needed``,
            by an uneven all_to_all; or round a ``ring``.
        slices: into how many they are cut, each on its way while the one before is computed; of a ring 1.
        groups: sets of ranks that exchange heads for tokens first, equally many in each; then ``between`` is between
            these. Empty: nobody does. One group of all ranks: there is nothing left between.

    Raises:
        UsageError: what makes no sense together.

    Examples:
        >>> Way(between="gathered", slices=8).name, Way(between="needed", groups=((0, 1), (2, 3))).name
        ('all_gather in 8 slices', 'ulysses over 2 ranks, needed between')
    """

    between: Between
    slices: int = 1
    groups: tuple[tuple[int, ...], ...] = ()

    __repr__ = brief

    def __post_init__(self) -> None:
        if self.between not in get_args(Between):
            raise UsageError(f"way {self.between!r}: one of {', '.join(get_args(Between))}")
        if self.slices < 1 or (self.slices > 1 and self.between == "ring"):
            raise UsageError(f"{self.slices} slices: at least 1, and of a ring 1")
        sizes = {len(group) for group in self.groups}
        if len(sizes) > 1 or 0 in sizes:
            raise UsageError(
                f"groups of {', '.join(map(str, sorted(sizes)))} ranks: equally many in each, at least 1"
            )
        if self.between == "gathered" and len(self.groups) > 1:
            raise UsageError("all_gather is over all ranks: between groups that exchange heads, needed or ring")

    @property
    def degree(self) -> int:
        """How many ranks exchange heads."""
        return len(self.groups[0]) if self.groups else 1

    @property
    def name(self) -> str:
        """For people."""
        usual = {"gathered": "all_gather", "needed": "needed tokens", "ring": "ring"}[self.between]
        sliced = f" in {self.slices} slices" if self.slices > 1 else ""
        if not self.groups:
            return usual + sliced
        return f"ulysses over {self.degree} ranks" + (
            f", {self.between} between{sliced}" if len(self.groups) > 1 else ""
        )


def check_way(way: Way, context: SequenceContext, heads: int) -> None:
    """Whether a way is one for these ranks and heads.

    Args:
        way: which.
        context: the ranks.
        heads: of the queries.

    Raises:
        UsageError: groups are not all ranks, each once, or do not divide the heads.
    """
    if not way.groups:
        return
    members = sorted(rank for group in way.groups for rank in group)
    if members != list(range(context.num_ranks)):
        raise UsageError(
            f"groups that exchange heads have ranks {members}; each of the {context.num_ranks} once is expected"
        )
    if heads % way.degree:
        fitting = [d for d in range(1, heads + 1) if heads % d == 0 and context.num_ranks % d == 0]
        raise UsageError(
            f"{heads} heads do not divide over {way.degree} ranks: ulysses goes over {', '.join(map(str, fitting))} "
            "of these ranks, any other way over all"
        )


def attend_by(
    way: Way,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: SequenceContext,
    mask: Mask,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention in one way; shapes as ``mycel.sequence.attention`` has them."""
    of = meeting_ranks(context, way.groups, mask)
    if of.order is None or of.back is None:
        return attended(q, k, v, carrier(way, k.shape[1], context, mask, scale), sinks)
    share = None
    if way.degree > 1:
        share = Heads(context=context, inside=way.groups[of.own], heads=q.shape[1], key_heads=k.shape[1])
        q, k, v = gather_tokens(q, k, v, share)
        sinks = None if sinks is None else sinks[share.queries(share.inside.index(context.rank))]
    q, k, v = (x.index_select(2, of.order.to(x.device)) for x in (q, k, v))
    out = attended(q, k, v, carrier(way, k.shape[1], context, mask, scale), sinks)
    out = out.index_select(2, of.back.to(out.device))
    return out if share is None else scatter_tokens(out, share)


def meeting_ranks(context: SequenceContext, groups: tuple[tuple[int, ...], ...], mask: Mask) -> MeetingRanks:
    """Who meets whom in attention once groups have exchanged heads for tokens; worked out once for a context.

    Args:
        context: the ranks.
        groups: sets of ranks; empty: nobody exchanges heads.
        mask: inside documents.
    """
    if context.num_ranks == 1:
        groups = ((0,),)
    return context.remember(("attention", groups, mask), lambda: MeetingRanks(context, groups, mask))


class MeetingRanks:
    """Ranks as they meet in attention: those of a context, or one for each group that has exchanged heads.

    Attributes:
        layout: of these ranks; a group is one that has all of its tokens, in order of the documents.
        peers: which ranks of the context they are: of each group that at this rank's place.
        own: which of them this one is.
        blocks: of any two of them, the blocks in which queries of the first and keys of the second meet.
        order, back: of a group, where its tokens in order of the documents stand among those of its ranks, and the
            other way round; ``None`` where nobody exchanges heads.
    """

    def __init__(self, context: SequenceContext, groups: tuple[tuple[int, ...], ...], mask: Mask) -> None:
        self.layout, self.own = context.layout, context.rank
        self.peers = tuple(range(context.num_ranks))
        self.order: Tensor | None = None
        self.back: Tensor | None = None
        self._delivered: dict[tuple[bool, int], tuple[Delivery, ...]] = {}
        if groups:
            self.own = next(i for i, group in enumerate(groups) if context.rank in group)
            place = groups[self.own].index(context.rank)
            self.peers = tuple(group[place] for group in groups)
            held = [[s for rank in group for s in context.layout.ranks[rank]] for group in groups]
            self.layout = Layout(documents=context.layout.documents, ranks=tuple(_joined(mine) for mine in held))
            self.order = _sorted_tokens(held[self.own])
            self.back = torch.empty_like(self.order)
            self.back[self.order] = torch.arange(len(self.order))
        self.blocks = blocks_of(self.layout, mask)

    def deliveries(self, *, gathers: bool, parts: int) -> tuple[Delivery, ...]:
        """How keys and values come, in so many parts of each rank's tokens."""
        if (gathers, parts) not in self._delivered:
            made = deliveries(self.blocks, self.layout.tokens, self.peers, self.own, gathers=gathers, parts=parts)
            self._delivered[gathers, parts] = made
        return self._delivered[gathers, parts]


def carrier(way: Way, key_heads: int, context: SequenceContext, mask: Mask, scale: float) -> Carrier:
    """How a way brings keys to queries, once groups have exchanged heads for tokens.

    Args:
        way: which.
        key_heads: that a rank has then.
        context: the ranks.
        mask: inside documents.
        scale: of products.
    """
    of = meeting_ranks(context, way.groups, mask)
    if way.between == "ring" and len(of.peers) > 1:
        order, tokens = of.peers, of.layout.tokens
        blocks: tuple[tuple[Block, ...], ...] = of.blocks[of.own]
        return Ring(context=context, order=order, tokens=tokens, blocks=blocks, place=of.own, scale=scale, mask=mask)
    gathers = way.between == "gathered" and not way.groups and context.num_ranks > 1
    head_slices = min(way.slices, key_heads)
    made = of.deliveries(gathers=gathers, parts=-(-way.slices // head_slices))
    return Gathered(context=context, deliveries=made, head_slices=head_slices, scale=scale, mask=mask)


def _joined(held: list[Segment]) -> tuple[Segment, ...]:
    """Segments in order of their tokens, those that follow each other as one."""
    found: list[Segment] = []
    for segment in sorted(s for s in held if len(s)):
        if found and found[-1].document == segment.document and found[-1].stop == segment.start:
            found[-1] = Segment(document=segment.document, start=found[-1].start, stop=segment.stop)
        else:
            found.append(segment)
    return tuple(found)


def _sorted_tokens(held: list[Segment]) -> Tensor:
    """Where each token of ``_joined`` stands among those held, int64."""
    starts, at = [], 0
    for segment in held:
        starts.append((segment, at))
        at += len(segment)
    ordered = sorted((pair for pair in starts if len(pair[0])), key=lambda pair: pair[0])
    return torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(a, a + len(s)) for s, a in ordered)])
