"""Linear attention over the ranks of a layout: local chunks, one scan of states, and what they add."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from mycel.errors import UsageError
from mycel.planning.sequence import Layout
from mycel.sequence.context import SequenceContext, for_good
from mycel.sequence.linear.chunks import decay_chunks, delta_chunks
from mycel.sequence.linear.fused import fused_decay_chunks, is_taken
from mycel.sequence.linear.table import Table, table_of
from mycel.sequence.scan import attached, start_scan
from mycel.sequence.scan.maps import applied_to_states, composed
from mycel.sequence.scan.ways import Nodes

__all__ = ["linear_attention"]

#: Tokens of a chunk, where decays are a number a token, and where they are one for each key: then a chunk holds
#: its length squared times the keys.
_CHUNK, _CHUNK_OF_KEYS = 64, 16


@lru_cache(maxsize=256)
def _table(layout: Layout, rank: int, chunk: int) -> Table:
    return for_good(lambda: table_of(tuple(layout.borders(rank).tolist()), chunk))


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: SequenceContext,
    *,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float = 1.0,
    chunk: int | None = None,
    way: str = "auto",
    nodes: Nodes | None = None,
) -> Tensor:
    """``o_i = scale S_i^T q_i`` with ``S_i = e^(g_i) S_(i-1) + k_i v_i^T``, or by the gated delta rule.

    States begin at zero with each document. Ranks work on their own tokens while states travel; what crosses ranks
    does not depend on how long the sequences are.

    Args:
        q, k: of shape (batch, heads, tokens here, keys).
        v: of shape (batch, value heads, tokens here, values); as many heads, or a multiple.
        context: whose tokens.
        decay: log decays, 0 or less: of shape (value heads,) for constants (LASP, RetNet, lightning attention),
            (batch, value heads, tokens here) for one a token (Mamba2, gated delta rule), with keys behind for one a
            key (GLA, KDA). ``None``: none.
        beta: of shape (batch, value heads, tokens here): then by the delta rule, ``S = e^g S``, ``S = S + k (beta (v
            - S^T k))^T``.
        scale: of the outputs.
        chunk: tokens that are worked on at once.
        way: of the scan, as for ``scan``.
        nodes: ranks of each node, as for ``scan``.

    Returns:
        Of shape (batch, value heads, tokens here, values) and the type of ``v``. Sums are held in float32 at least.

    Raises:
        UsageError: shapes that do not fit each other or the tokens here.

    References:
        Sun et al., "Linear Attention Sequence Parallelism", arXiv 2404.02882; ``decay_chunks``, ``delta_chunks``.

    Examples:
        >>> from mycel.planning.sequence import contiguous
        >>> context = SequenceContext(contiguous([2, 1], 1))
        >>> one = torch.ones(1, 1, 3, 1)
        >>> linear_attention(one, one, one, context, decay=torch.tensor([0.5]).log()).flatten().tolist()
        [1.0, 1.5, 1.0]
    """
    _check(q, k, v, decay, beta, context)
    kind = torch.promote_types(v.dtype, torch.float32)
    heads, here = v.shape[1], v.shape[2]
    if decay is None:
        decay = v.new_zeros(heads)
    g = decay[None, :, None].expand(v.shape[0], heads, here) if decay.dim() == 1 else decay
    length = chunk or (_CHUNK_OF_KEYS if g.dim() == 4 else _CHUNK)
    table = _table(context.layout, context.rank, length)

    def cut(x: Tensor) -> Tensor:
        """(batch, heads, tokens, ...) in chunks, zeros where they end early."""
        if x.shape[1] != heads:
            x = x.repeat_interleave(heads // x.shape[1], 1)
        padded = torch.cat([x.to(kind), x.new_zeros(*x.shape[:2], 1, *x.shape[3:], dtype=kind)], 2)
        index = table.index.to(x.device)
        return padded.index_select(2, index.flatten()).view(*x.shape[:2], *index.shape, *x.shape[3:])

    parts = cut(q), cut(k), cut(v), cut(g)
    if beta is not None:
        chunks = delta_chunks(*parts, cut(beta))
    else:
        chunks = (fused_decay_chunks if is_taken(*parts[1:]) else decay_chunks)(*parts)
    order = chunks.transition.dim() - 3
    takers = [n for n, s in enumerate(context.segments) if len(s) and s.start]
    states, update = _folded(chunks.transition, chunks.update, table, order)
    transition = _products(chunks.transition, table, takers, len(context.segments), order)
    coming = start_scan(transition, _by_segment(update, table, len(context.segments)), context, way=way, nodes=nodes)
    outputs, queries = chunks.outputs(states)
    found = outputs.flatten(2, 3).index_select(2, table.place.to(v.device))
    incoming = coming.wait()
    found = attached(found, incoming)
    if takers:
        found = found + _of_incoming(chunks.transition, queries, incoming, table, takers, order)
    return (found * scale).to(v.dtype)


def _check(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, context: SequenceContext
) -> None:
    if q.dim() != 4 or q.shape != k.shape or v.dim() != 4 or v.shape[::2] != k.shape[::2]:
        raise UsageError(
            f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)}: (batch, heads, tokens, "
            f"width), queries like keys, and values of the same batch and tokens"
        )
    if v.shape[1] % k.shape[1]:
        raise UsageError(f"{v.shape[1]} heads of values for {k.shape[1]} of keys: as many, or a multiple")
    if v.shape[2] != context.num_tokens:
        raise UsageError(f"{v.shape[2]} tokens; rank {context.rank} holds {context.num_tokens}")
    whole = tuple(v.shape[:3])
    fitting = [tuple(v.shape[1:2]), whole, (*whole, k.shape[3])]
    if decay is not None and tuple(decay.shape) not in fitting:
        raise UsageError(f"decays of shape {tuple(decay.shape)}: one of {', '.join(map(str, fitting))}")
    if beta is not None and tuple(beta.shape) != whole:
        raise UsageError(f"beta of shape {tuple(beta.shape)}: {whole}, one for each head and token")


def _folded(transition: Tensor, update: Tensor, table: Table, order: int) -> tuple[Tensor, Tensor]:
    """States before each chunk where each segment begins at zero, and those after segments, in the table's order."""
    state = torch.zeros_like(update[:, :, : table.sizes[0] if table.sizes else 0])
    if not table.sizes:
        return update, state
    before, after = [], []
    ms, us = transition.split_with_sizes(table.sizes, 2), update.split_with_sizes(table.sizes, 2)
    for m, u in zip(ms, us, strict=True):
        if u.shape[2] < state.shape[2]:
            after.append(state[:, :, u.shape[2] :])
            state = state[:, :, : u.shape[2]]
        before.append(state)
        state = applied_to_states(m, state, order) + u
    after.append(state)
    return torch.cat(before, 2), torch.cat(after[::-1], 2)


def _by_segment(values: Tensor, table: Table, count: int) -> Tensor:
    """(batch, heads, segments of the table, ...) as (segments, batch, heads, ...) by number, zeros for others."""
    moved = values.movedim(2, 0)
    padded = torch.cat([moved, moved.new_zeros(1, *moved.shape[1:])])
    place = {segment: at for at, segment in enumerate(table.segments)}
    chosen = [place.get(segment, len(table.segments)) for segment in range(count)]
    return padded.index_select(0, torch.tensor(chosen, dtype=torch.int64, device=values.device))


def _products(transition: Tensor, table: Table, takers: list[int], count: int, order: int) -> Tensor:
    """Transitions of segments, (segments, batch, heads, ...), of those into which a state comes; of others ones."""
    rows, sizes, chosen = table.rows(takers)
    shape = transition.movedim(2, 0).shape[1:]
    one = transition.new_ones(shape)
    if order == 2:
        one = torch.eye(shape[-1], dtype=transition.dtype, device=transition.device).expand(shape)
    found = [one] * count
    running: list[Tensor] = []
    chunks = transition.index_select(2, rows.to(transition.device))
    for part in chunks.split_with_sizes(sizes, 2) if sizes else ():
        for at, m in enumerate(part.unbind(2)):
            if at < len(running):
                running[at] = composed(m, running[at], order)
            else:
                running.append(m)
    for segment, m in zip(chosen, running, strict=True):
        found[segment] = m
    return attached(torch.stack(found), transition) if found else transition.movedim(2, 0)[:0]


def _of_incoming(
    transition: Tensor, queries: Tensor, incoming: Tensor, table: Table, takers: list[int], order: int
) -> Tensor:
    """What the states that come into segments add to the outputs of their tokens, (batch, heads, tokens, values)."""
    rows, sizes, chosen = table.rows(takers)
    device = transition.device
    rows = rows.to(device)
    state = incoming[list(chosen)].movedim(0, 2)
    added = []
    ms, qs = (x.index_select(2, rows).split_with_sizes(sizes, 2) for x in (transition, queries))
    for m, q in zip(ms, qs, strict=True):
        state = state[:, :, : q.shape[2]]
        added.append(q @ state)
        state = applied_to_states(m, state, order)
    flat = torch.cat(added, 2).flatten(2, 3)
    length = queries.shape[3]
    # Where the places of the chosen chunks are now; those of others lead to a zero.
    place = torch.full((table.index.numel(),), flat.shape[2], dtype=torch.int64, device=device)
    old = (rows[:, None] * length + torch.arange(length, device=device)).flatten()
    place[old] = torch.arange(len(old), device=device)
    padded = torch.cat([flat, flat.new_zeros(*flat.shape[:2], 1, flat.shape[3])], 2)
    return padded.index_select(2, place[table.place.to(device)])
