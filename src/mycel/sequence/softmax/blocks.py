"""Which queries of a rank meet which keys of another, cut into blocks that a kernel takes in one call."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mycel.planning.sequence import Layout, Mask, Segment, meetings

__all__ = ["Block", "blocks_of", "within"]

#: Queries of a window's block: as many as the window is wide, between these. A wider block computes more of what
#: nobody sees, a narrower one has more calls.
_LEAST_ROWS, _MOST_ROWS = 128, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Queries and keys that follow each other, of which some see each other.

    Attributes:
        query, num_queries: the first among the tokens of its rank, and how many.
        key, num_keys: likewise, of the keys' rank.
        query_position, key_position: of the first ones in their document.
        sees: ``all`` keys; of a square the ``triangle`` up to its own; or ``some``, as the mask says.
    """

    query: int
    num_queries: int
    key: int
    num_keys: int
    query_position: int
    key_position: int
    sees: str

    def visible(self, mask: Mask, device: torch.device) -> Tensor:
        """Which queries see which keys, booleans of shape (queries, keys)."""
        queries = torch.arange(self.query_position, self.query_position + self.num_queries)
        keys = torch.arange(self.key_position, self.key_position + self.num_keys)
        first = torch.from_numpy(mask.first_key(queries.numpy()))
        seen = keys >= first[:, None]
        return (seen if mask.kind == "full" else seen & (keys <= queries[:, None])).to(device)


def blocks_of(layout: Layout, mask: Mask) -> tuple[tuple[tuple[Block, ...], ...], ...]:
    """For each rank's queries and each rank's keys, the blocks in which they meet.

    Args:
        layout: of the documents.
        mask: of attention.

    Examples:
        >>> from mycel.planning.sequence import CAUSAL, contiguous
        >>> found = blocks_of(contiguous([6], 2), CAUSAL)
        >>> [[(b.num_queries, b.num_keys, b.sees) for b in blocks] for blocks in found[1]]
        [[(3, 3, 'all')], [(3, 3, 'triangle')]]
    """
    borders = [layout.borders(r).tolist() for r in range(layout.num_ranks)]
    found: list[list[list[Block]]] = [[[] for _ in layout.ranks] for _ in layout.ranks]
    for meeting in meetings(layout, mask):
        queries = layout.ranks[meeting.query_rank][meeting.query]
        keys = layout.ranks[meeting.key_rank][meeting.key]
        whole = Block(
            query=borders[meeting.query_rank][meeting.query],
            num_queries=len(queries),
            key=borders[meeting.key_rank][meeting.key],
            num_keys=len(keys),
            query_position=queries.start,
            key_position=keys.start,
            sees="all",
        )
        blocks = [whole] if meeting.is_whole else _cut(whole, queries, keys, mask)
        found[meeting.query_rank][meeting.key_rank] += blocks
    return tuple(tuple(map(tuple, of_rank)) for of_rank in found)


def _cut(whole: Block, queries: Segment, keys: Segment, mask: Mask) -> list[Block]:
    """Blocks of two segments of which some see each other. Segments are the same one, or the keys come first."""
    if mask.kind == "causal":
        return [replace(whole, sees="triangle")]
    width = mask.width or 1
    found, at = [], queries.start
    while at < queries.stop:
        if mask.kind == "chunked":
            stop = min(queries.stop, (at // width + 1) * width)
        else:
            stop = min(queries.stop, at + min(max(width, _LEAST_ROWS), _MOST_ROWS))
        first = max(keys.start, at // width * width if mask.kind == "chunked" else at - width + 1)
        last = min(keys.stop, stop)
        # Queries of a window that see none of these keys any more are not computed.
        seen_until = min(stop, keys.stop - 1 + width) if mask.kind == "window" else stop
        if first < last and at < seen_until:
            block = Block(
                query=whole.query + at - queries.start,
                num_queries=seen_until - at,
                key=whole.key + first - keys.start,
                num_keys=last - first,
                query_position=at,
                key_position=first,
                sees="some",
            )
            found.append(replace(block, sees=_kind(block, mask)))
        at = stop
    return found


def _kind(block: Block, mask: Mask) -> str:
    """Whether a block needs no mask, or one that kernels know."""
    last_query = block.query_position + block.num_queries - 1
    last_key = block.key_position + block.num_keys - 1
    begins_early = mask.kind == "chunked" or last_query - (mask.width or 1) + 1 <= block.key_position
    if begins_early and last_key <= block.query_position:
        return "all"
    if begins_early and block.query_position == block.key_position and block.num_queries == block.num_keys:
        return "triangle"
    return "some"


def within(block: Block, start: int, stop: int) -> list[Block]:
    """What of a block has its keys among the tokens ``start`` to ``stop`` of their rank.

    Examples:
        >>> whole = Block(
        ...     query=0, num_queries=4, key=0, num_keys=4, query_position=0, key_position=0, sees="triangle"
        ... )
        >>> [(b.query, b.num_queries, b.num_keys, b.sees) for b in within(whole, 1, 3)]
        [(1, 2, 2, 'triangle'), (3, 1, 2, 'all')]
    """
    first, last = max(block.key, start), min(block.key + block.num_keys, stop)
    if first >= last:
        return []
    skipped, count = first - block.key, last - first
    part = replace(block, key=first, num_keys=count, key_position=block.key_position + skipped)
    if block.sees != "triangle":
        return [part]
    corner = replace(
        part, query=block.query + skipped, query_position=block.query_position + skipped, num_queries=count
    )
    below = block.num_queries - skipped - count
    rest = replace(
        part,
        query=corner.query + count,
        query_position=corner.query_position + count,
        num_queries=below,
        sees="all",
    )
    return [corner, rest] if below else [corner]
