"""Attention over the ranks of a context, by name or as the fabric wants it."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from mycel.errors import UsageError
from mycel.planning.sequence import CAUSAL, Mask
from mycel.sequence.context import SequenceContext
from mycel.sequence.softmax.choose import explain, shape_of
from mycel.sequence.softmax.fabric import fabric_of
from mycel.sequence.softmax.predict import slices_for
from mycel.sequence.softmax.ways import Way, attend_by, check_way

__all__ = ["WayName", "attention", "way_of"]

#: Names of ways, each with what it makes of the ranks at hand.
WayName = Literal["auto", "ring", "all_gather", "sliced", "needed", "ulysses", "usp"]


#: What ``sliced`` takes at most beside a rank's own tokens, in keys and values of one rank.
_SLICED_TIMES = 2.5


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: SequenceContext,
    *,
    mask: Mask = CAUSAL,
    scale: float | None = None,
    sinks: Tensor | None = None,
    way: Way | WayName = "auto",
) -> Tensor:
    """Softmax attention of the tokens here to all tokens of their documents, on whichever rank.

    Every rank of the context calls it, forward and backward, also one without tokens. Documents never see each
    other. Gradients are exact, and right in recomputation.

    Args:
        q: shape (batch, heads, tokens here, width).
        k: shape (batch, key heads, tokens here, width); key heads divide heads.
        v: shape (batch, key heads, tokens here, value width).
        context: the ranks and what each holds.
        mask: which keys a query sees inside its document.
        scale: of products; one over the root of ``width`` if not given.
        sinks: scores that join every row's softmax and belong to no key, shape (heads,), the same on all ranks; their
            gradients here are of the rows here, and are added up over ranks as those of any parameter.
        way: how keys come to queries: a ``Way``, or ``ring``, ``all_gather`` (all at once), ``sliced`` (by slices,
            each on its way while the one before is computed, in the memory of a ring), ``needed`` (only tokens that
            are seen), ``ulysses`` (all tokens of some heads), ``usp`` (that inside nodes, needed tokens between
            them); ``auto``: what ``mycel.sequence.explain`` says is best here.

    Returns:
        Shape (batch, heads, tokens here, value width).

    Raises:
        UsageError: shapes do not go together or have other tokens than the context; heads do not divide over the
            ranks of a forced ``ulysses``; the way is unknown.

    Examples:
        >>> import torch
        >>> from mycel.planning.sequence import contiguous
        >>> from mycel.sequence import SequenceContext
        >>> context = SequenceContext(contiguous([3, 2], 1))
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
        >>> attention(q, k, v, context)[:, :, 3].equal(v[:, :, 3])  # the first token of a document sees itself
        True

    References:
        S. Li, F. Xue, C. Baranwal, Y. Li, Y. You, "Sequence Parallelism: Long Sequence Training from System
        Perspective", ACL 2023; and those of each way in ``mycel.sequence.softmax``.
    """
    _check(q, k, v, context)
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise UsageError(f"sinks of shape {tuple(sinks.shape)}: one for each of the {q.shape[1]} heads of queries")
    chosen = way if isinstance(way, Way) else way_of(way, q, k, v, context, mask)
    check_way(chosen, context, q.shape[1])
    return attend_by(chosen, q, k, v, context, mask, q.shape[-1] ** -0.5 if scale is None else scale, sinks)


def way_of(name: WayName, q: Tensor, k: Tensor, v: Tensor, context: SequenceContext, mask: Mask) -> Way:
    """The way that a name stands for.

    Raises:
        UsageError: an unknown name.
    """
    size = context.num_ranks
    if name == "auto":
        return explain(context, shape_of(q, k, v), mask=mask, device=q.device).way
    if name == "ring":
        return Way(between="ring")
    if name == "all_gather":
        return Way(between="gathered")
    if name == "sliced":
        return Way(between="gathered", slices=slices_for(size, _SLICED_TIMES))
    if name == "needed":
        return Way(between="needed")
    if name == "ulysses":
        return Way(between="needed", groups=(tuple(range(size)),))
    if name == "usp":
        return _inside_nodes(q, context)
    raise UsageError(f"way {name!r}: a Way, or one of {', '.join(get_args(WayName))}")


def _inside_nodes(q: Tensor, context: SequenceContext) -> Way:
    """Heads for tokens inside nodes; where all ranks are in one, or nobody says, inside the smaller part of them."""
    size = context.num_ranks
    fabric = None if context.group is None else fabric_of(context.group, q.device)
    nodes = (tuple(range(size)),) if fabric is None else fabric.nodes
    if len({len(node) for node in nodes}) != 1:
        sizes = ", ".join(str(len(node)) for node in nodes)
        raise UsageError(
            f"usp: nodes have {sizes} ranks, and groups are to be equal: give a Way with groups of yours"
        )
    if len(nodes) == 1:
        fitting = [d for d in range(1, size + 1) if size % d == 0 and q.shape[1] % d == 0 and d * d <= size]
        degree = fitting[-1]
        nodes = tuple(tuple(range(first, first + degree)) for first in range(0, size, degree))
    return Way(between="needed", groups=nodes)


def _check(q: Tensor, k: Tensor, v: Tensor, context: SequenceContext) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4 or k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        raise UsageError(f"attention over ranks: {shapes}; expected (batch, heads, tokens, width) of one batch")
    if q.shape[-1] != k.shape[-1] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise UsageError(f"attention over ranks: {shapes}; q and k have one width, and key heads divide heads")
    if {x.shape[2] for x in (q, k, v)} != {context.num_tokens}:
        raise UsageError(
            f"attention over ranks: {shapes}; rank {context.rank} holds {context.num_tokens} tokens of the layout: "
            "give what context.shard gave"
        )
