"""A layout bound to ranks: what is sharded comes back, what is exchanged arrives where it should, with gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.rank_threads import on_ranks

from mycel.errors import MismatchError, UsageError
from mycel.planning.sequence import Layout, Segment, contiguous, per_document_zigzag
from mycel.sequence import SequenceContext


def bare(length: int) -> Layout:
    """All of a document on the last of three ranks."""
    return Layout(
        documents=(length,),
        ranks=((), (Segment(document=0, start=0, stop=0),), (Segment(document=0, start=0, stop=length),)),
    )


@pytest.mark.parametrize("layout", [contiguous([5, 0, 1], 3), per_document_zigzag([7, 3], 3), bare(4)])
@pytest.mark.parametrize("dim", [0, 1])
def test_shards_come_together_again(layout: Layout, dim: int) -> None:
    whole = torch.randn((layout.num_tokens, 2) if dim == 0 else (2, layout.num_tokens, 3), dtype=torch.float64)

    def work(rank: int, group: dist.ProcessGroup) -> None:
        context = SequenceContext(layout, group)
        context.agree()
        leaf = whole.clone().requires_grad_()
        here = context.shard(leaf, dim)
        again = context.unshard(here, dim)
        assert here.shape[dim] == layout.tokens[rank] and torch.equal(again, whole)
        again.sum().backward()
        expected = torch.zeros(layout.num_tokens, dtype=torch.float64)
        expected[context.indices] = 3.0
        assert torch.equal(leaf.grad.movedim(dim, 0).reshape(layout.num_tokens, -1)[:, 0], expected)

    on_ranks(3, work)


def test_rows_arrive_where_they_should_and_their_gradients_at_their_owners() -> None:
    counts = torch.tensor([[1, 0, 2], [3, 0, 0], [0, 0, 1]])

    def work(rank: int, group: dist.ProcessGroup) -> None:
        context = SequenceContext(contiguous([6], 3), group)
        parts = [torch.full((int(n), 2), 10.0 * rank + to, requires_grad=True) for to, n in enumerate(counts[rank])]
        for _ in range(2):
            got = context.exchange_with_gradient(parts, counts[:, rank].tolist())
            assert [g.unique().tolist() for g in got] == [[10.0 * r + rank] * bool(counts[r, rank]) for r in range(3)]
            (sum(g.sum() * (1 + r) for r, g in enumerate(got)) * (1 + rank)).backward()
        assert all(part.grad.eq(2.0 * (1 + to) * (1 + rank)).all() for to, part in enumerate(parts))

    on_ranks(3, work)


def test_ranks_that_differ_are_named() -> None:
    layouts = [contiguous([6], 3), contiguous([6], 3), contiguous([5, 1], 3)]
    with pytest.raises(MismatchError, match="rank 2 has layout"):
        on_ranks(3, lambda rank, group: SequenceContext(layouts[rank], group).agree())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="no process group"):
        SequenceContext(contiguous([6], 3))
    with pytest.raises(UsageError, match="the layout has 3 ranks and the group 2"):
        on_ranks(2, lambda rank, group: SequenceContext(contiguous([6], 3), group))
    alone = SequenceContext(contiguous([6], 1))
    with pytest.raises(UsageError, match="a batch has 7 tokens in dimension 1; the layout has 6"):
        alone.shard(torch.zeros(1, 7))
    with pytest.raises(UsageError, match="2 parts to send"):
        alone.exchange([torch.zeros(1)] * 2, [1])
