"""Attention with sinks over ranks is one softmax that has a column more: outputs and all gradients, in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.effort import long
from tests.oracles.attention import got, scattered, tensors, visible, ways_over, worst
from tests.rank_threads import on_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mycel.errors import UsageError
from mycel.planning.sequence import CAUSAL, FULL, Layout, Mask, contiguous, per_document_zigzag
from mycel.sequence import SequenceContext, attention

DOCUMENTS = (13, 0, 1, 9, 6)
MASKS = (CAUSAL, FULL, Mask(kind="window", width=4), Mask(kind="chunked", width=3))


def with_column(layout: Layout, mask: Mask, whole: list[Tensor], sinks: Tensor, scale: float) -> list[Tensor]:
    """Output, gradients of queries, keys and values, and of the sinks: a column beside the scores, dropped later."""
    leaves = [x.double().clone().requires_grad_() for x in (*whole[:3], sinks)]
    q, k, v, s = leaves
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~visible(layout, mask), -torch.inf)
    column = s[None, :, None, None].expand(len(q), -1, q.shape[2], 1)
    out = torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v
    return [out.detach(), *torch.autograd.grad(out, leaves, whole[3].double())]


#: Of the number of ranks and the mask, those that are tried by default.
USUAL = ((1, "causal"), (2, "window"), (3, "full"), (4, "causal"))


@pytest.mark.parametrize(
    ("num_ranks", "mask"),
    [
        pytest.param(n, mask, id=f"{n} {mask.kind}", marks=() if (n, mask.kind) in USUAL else long)
        for n in (1, 2, 3, 4, 6)
        for mask in MASKS
    ],
)
def test_every_way_with_sinks_is_a_softmax_with_one_more_column(num_ranks: int, mask: Mask) -> None:
    form = ((12, 12, 4, 4), (12, 4, 4, 6), (12, 1, 6, 4), (12, 3, 5, 5))[num_ranks % 4]
    for layout in (per_document_zigzag(DOCUMENTS, num_ranks), scattered(DOCUMENTS, num_ranks, seed=5, leave_out=1)):
        whole = tensors(layout, form)
        # From one that changes nothing to one that takes nearly all.
        scores = torch.linspace(-40.0, 12.0, form[0], dtype=torch.float64)
        right = with_column(layout, mask, whole, scores, 0.37)

        def work(rank: int, group: dist.ProcessGroup) -> list[tuple[Any, float, Tensor]]:
            context, found = SequenceContext(layout, group), []  # noqa: B023 - used before the next
            for way in ways_over(num_ranks):
                own = scores.clone().requires_grad_()  # noqa: B023
                call = partial(attention, mask=mask, scale=0.37, sinks=own, way=way)
                error = worst(context, got(context, whole, call), right[:4])  # noqa: B023
                assert own.grad is not None  # also of a rank without tokens, which joins DDP's sum
                found.append((way, error, own.grad))
            return found

        for of_way in zip(*on_ranks(num_ranks, work), strict=True):
            assert max(error for _, error, _ in of_way) < 1e-12, of_way[0][0]
            summed = torch.stack([gradient for *_, gradient in of_way]).sum(0)
            assert float((summed - right[4]).abs().max()) < 1e-11, of_way[0][0]


def test_sinks_in_recomputation_and_in_half_precision() -> None:
    layout, form = contiguous([17, 4], 2), (4, 2, 8, 8)
    whole = tensors(layout, form, torch.bfloat16)
    right = with_column(layout, CAUSAL, whole, torch.ones(4), 0.3)

    def work(rank: int, group: dist.ProcessGroup) -> tuple[float, Tensor]:
        context = SequenceContext(layout, group)
        sinks = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)

        def attend(*leaves: Any) -> Tensor:
            seen: Tensor = checkpoint(partial(attention, scale=0.3, sinks=sinks), *leaves, use_reentrant=False)
            return seen

        error = worst(context, got(context, whole, attend), right[:4])
        assert sinks.grad is not None
        return error, sinks.grad.double()

    ranks = on_ranks(2, work)
    assert max(error for error, _ in ranks) < 0.05
    assert float((ranks[0][1] + ranks[1][1] - right[4]).abs().max()) < 0.05 * float(right[4].abs().max())


def test_sinks_of_another_shape_are_refused() -> None:
    context = SequenceContext(contiguous([5], 1))
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    with pytest.raises(UsageError, match=r"sinks of shape \(3,\): one for each of the 2 heads"):
        attention(q, k, v, context, sinks=torch.zeros(3))
