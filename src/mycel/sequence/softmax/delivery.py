"""Keys and values of some ranks on the ranks whose queries see them, and their gradients back: what goes where.

Two ways. Gathered: every rank gets the tokens of all, in one all_gather padded to the most that a rank has, which
the fabric's forests serve at the rate of its slowest cut. Needed: every rank gets only the tokens that its queries
see, in one uneven all_to_all: less where windows or borders of documents keep ranks apart, more where all see all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mycel.comm import Pending
from mycel.sequence.context import SequenceContext
from mycel.sequence.softmax.blocks import Block, within

__all__ = ["Delivery", "deliveries", "needed"]

#: First and one after the last of some tokens of a rank.
Span = tuple[int, int]
#: For each rank whose queries, and each whose keys, the blocks in which they meet.
Meetings = Sequence[Sequence[Sequence[Block]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One exchange of keys and values between some ranks of a context.

    Attributes:
        peers: ranks of the context that take part, in the order of the numbers below.
        place: of this rank among them.
        sent: for each of them, which of its own tokens this rank sends there, ascending.
        taken: of each of them, how many tokens come.
        blocks: of each of them, the blocks with the tokens that come.
        gathers: whether all get all, by all_gather.
        span: of this rank's tokens, those that travel at all.
    """

    peers: tuple[int, ...]
    place: int
    sent: tuple[tuple[Span, ...], ...]
    taken: tuple[int, ...]
    blocks: tuple[tuple[Block, ...], ...]
    gathers: bool
    span: Span

    def start(self, rows: Tensor, context: SequenceContext, name: str) -> Pending[tuple[Tensor, ...]]:
        """Begin to send rows.

        Args:
            rows: of this rank's tokens, shape (tokens, ...).
            context: whose ranks these are.
            name: under which bytes are counted.

        Returns:
            Of each of ``peers``, the rows that come.
        """
        if self.gathers:
            most = max(self.taken)
            if not most:
                return Pending.done((rows[:0],) * len(self.peers))
            own = rows[slice(*self.span)]
            under_way = context.start_gather(_filled(own, most), name)
            return Pending(
                lambda: tuple(
                    p[:n]
                    for p, n in zip(
                        under_way.wait().split_with_sizes([most] * len(self.peers)), self.taken, strict=True
                    )
                )
            )
        empty = rows[:0]
        own = torch.cat([empty, *(rows[slice(*span)] for span in self.sent[self.place])])
        if len(self.peers) == 1:
            return Pending.done((own,))
        parts = [empty] * context.num_ranks
        gets = [0] * context.num_ranks
        for place, peer in enumerate(self.peers):
            if place != self.place:
                parts[peer] = torch.cat([empty, *(rows[slice(*span)] for span in self.sent[place])])
                gets[peer] = self.taken[place]
        arriving = context.start_exchange(parts, gets, name)

        def finish() -> tuple[Tensor, ...]:
            arrived = arriving.wait()
            return tuple(own if place == self.place else arrived[peer] for place, peer in enumerate(self.peers))

        return Pending(finish)

    def room(self, like: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Where gradients of the rows that come are put: zeros, and of each of ``peers`` its part of them.

        Args:
            like: some rows.
        """
        most = max(self.taken)
        counts = [most] * len(self.peers) if self.gathers else list(self.taken)
        whole = like.new_zeros(sum(counts), *like.shape[1:])
        return whole, tuple(p[:n] for p, n in zip(whole.split_with_sizes(counts), self.taken, strict=True))

    def start_back(self, gradients: Tensor, num_tokens: int, context: SequenceContext, name: str) -> Pending[Tensor]:
        """Begin to send gradients of rows back to whose they are.

        Args:
            gradients: the first of what ``room`` gave, filled.
            num_tokens: of this rank.
            context, name: as for ``start``.

        Returns:
            Gradients of this rank's rows, added up over ranks, shape (tokens, ...).
        """
        shape = gradients.shape[1:]
        if self.gathers:
            if not len(gradients):
                return Pending.done(gradients.new_zeros(num_tokens, *shape))
            reducing = context.start_scatter(gradients, name)

            def summed() -> Tensor:
                own = reducing.wait()
                whole = own.new_zeros(num_tokens, *shape)
                whole[slice(*self.span)] = own[: self.span[1] - self.span[0]]
                return whole

            return Pending(summed)
        by_place = gradients.split_with_sizes(list(self.taken))
        counts = [sum(stop - start for start, stop in spans) for spans in self.sent]
        parts = [gradients[:0]] * context.num_ranks
        gets = [0] * context.num_ranks
        for place, peer in enumerate(self.peers):
            if place != self.place:
                parts[peer], gets[peer] = by_place[place], counts[place]
        alone = len(self.peers) == 1
        arriving = Pending.done(()) if alone else context.start_exchange(parts, gets, name)

        def finish() -> Tensor:
            arrived = arriving.wait()
            whole = gradients.new_zeros(num_tokens, *shape)
            for place, peer in enumerate(self.peers):
                brought, at = by_place[place] if place == self.place else arrived[peer], 0
                for start, stop in self.sent[place]:
                    whole[start:stop] += brought[at : at + stop - start]
                    at += stop - start
            return whole

        return Pending(finish)


def deliveries(
    meetings: Meetings, tokens: Sequence[int], peers: Sequence[int], place: int, *, gathers: bool, parts: int = 1
) -> tuple[Delivery, ...]:
    """What is to be exchanged, in parts: of each rank's tokens first one part, then the next.

    Args:
        meetings: blocks between any two of the ranks.
        tokens: of each.
        peers: which ranks of the context they are.
        place: of this one among them.
        gathers: whether all get all; they have to be all ranks of the context then.
        parts: how many.
    """
    found = []
    for part in range(parts):
        bounds = [(count * part // parts, count * (part + 1) // parts) for count in tokens]
        cut = [[_cut(meetings[a][b], bounds[b]) for b in range(len(peers))] for a in range(len(peers))]
        spans = [
            [((bounds[b],) if gathers else needed(cut[a][b])) for b in range(len(peers))] for a in range(len(peers))
        ]
        found.append(
            Delivery(
                peers=tuple(peers),
                place=place,
                sent=tuple(spans[a][place] for a in range(len(peers))),
                taken=tuple(sum(stop - start for start, stop in spans[place][b]) for b in range(len(peers))),
                blocks=tuple(_moved(cut[place][b], spans[place][b]) for b in range(len(peers))),
                gathers=gathers,
                span=bounds[place],
            )
        )
    return tuple(found)


def needed(blocks: Sequence[Block]) -> tuple[Span, ...]:
    """Which keys some blocks have, ascending and apart."""
    spans: list[Span] = []
    for start, stop in sorted((b.key, b.key + b.num_keys) for b in blocks):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(stop, spans[-1][1]))
        else:
            spans.append((start, stop))
    return tuple(spans)


def _cut(blocks: Sequence[Block], bounds: Span) -> list[Block]:
    return [part for block in blocks for part in within(block, *bounds)]


def _moved(blocks: Sequence[Block], spans: Sequence[Span]) -> tuple[Block, ...]:
    """Blocks with keys counted among the tokens that come."""
    moved = []
    for block in blocks:
        at = 0
        for start, stop in spans:
            if start <= block.key < stop:
                moved.append(replace(block, key=at + block.key - start))
                break
            at += stop - start
    return tuple(moved)


def _filled(rows: Tensor, most: int) -> Tensor:
    """So many rows, with zeros at the end."""
    missing = most - len(rows)
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows.contiguous()
