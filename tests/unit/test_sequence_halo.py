"""Tokens before segments, convolutions and localized filtering over ranks equal those of whole documents."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.oracles.sequences import random_layout
from tests.rank_threads import on_ranks
from torch import Tensor, nn
from torch.nn import functional

from mycel.errors import UsageError
from mycel.planning.sequence import Layout, Segment, contiguous, per_document_zigzag, zigzag
from mycel.sequence import SequenceContext
from mycel.sequence.convolution import LocalizedFiltering, causal_conv1d
from mycel.sequence.halo import halo

WIDTH = 4


def of_one_token(num_ranks: int) -> Layout:
    """One document, a token a rank: a halo of several needs several ranks."""
    parts = tuple((Segment(document=0, start=r, stop=r + 1),) for r in range(num_ranks))
    return Layout(documents=(num_ranks,), ranks=parts)


def layouts_of(size: int) -> list[Layout]:
    known = [
        contiguous([5, 0, 1, 12], size),
        zigzag([9], size),
        per_document_zigzag([6, 7], size),
        of_one_token(size),
    ]
    return known + [random_layout(10 * size + seed, size) for seed in range(3)]


def far(got: Tensor, want: Tensor) -> float:
    return float((got.detach() - want.detach()).abs().max()) if want.numel() else 0.0


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("width", [1, 3])
def test_what_comes_before_is_what_is_there(size: int, width: int) -> None:
    for layout in layouts_of(size):
        whole = torch.randn(2, layout.num_tokens, 3, dtype=torch.float64)
        weights = [torch.randn(2, len(mine), width, 3, dtype=torch.float64) for mine in layout.ranks]
        leaf = whole.clone().requires_grad_()
        loss = leaf.sum() * 0
        expected = []
        for mine, weight in zip(layout.ranks, weights, strict=True):
            found = torch.zeros(2, len(mine), width, 3, dtype=torch.float64)
            for number, s in enumerate(mine):
                count = min(width, s.start) if len(s) else 0
                first = int(layout.offsets[s.document]) + s.start
                found[:, number, width - count :] = whole[:, first - count : first]
                loss = loss + (leaf[:, first - count : first] * weight[:, number, width - count :]).sum()
            expected.append(found)
        loss.backward()

        def work(rank: int, group: dist.ProcessGroup, *now: Any) -> None:
            layout, whole, weights, expected, leaf = now
            context = SequenceContext(layout, group)
            mine = context.shard(whole).requires_grad_()
            for _ in range(2):
                found = halo(mine, context, width)
                (found * weights[rank]).sum().backward()
            assert torch.equal(found, expected[rank])
            assert far(mine.grad / 2, context.shard(leaf.grad)) < 1e-12
            last = halo(mine.movedim(1, 2), context, width, dim=-1)
            assert torch.equal(last.movedim((2, 3), (1, 2)), expected[rank])

        now = (layout, whole, weights, expected, leaf)
        on_ranks(size, lambda rank, group, now=now: work(rank, group, *now))


def compare(layout: Layout, module: nn.Module, alone: Callable[[Tensor], Tensor]) -> None:
    """A module over ranks, and each document alone in one process."""
    whole = torch.randn(2, layout.num_tokens, WIDTH, dtype=torch.float64)
    leaf = whole.clone().requires_grad_()
    pieces = [p for p in leaf.split_with_sizes(list(layout.documents), 1) if p.shape[1]]
    out = torch.cat([alone(piece) for piece in pieces], 1)
    weight = torch.randn_like(out)
    module.zero_grad()
    (out * weight).sum().backward()
    expected = {name: p.grad.clone() for name, p in module.named_parameters()}

    def work(rank: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
        context = SequenceContext(layout, group)
        mine = context.shard(whole).requires_grad_()
        own = deepcopy(module)
        own.zero_grad()
        found = own(mine, context)
        (found * context.shard(weight)).sum().backward()
        assert far(found, context.shard(out)) < 1e-12
        assert far(mine.grad, context.shard(leaf.grad)) < 1e-12
        return {name: p.grad for name, p in own.named_parameters()}

    found = on_ranks(layout.num_ranks, work)
    for name, want in expected.items():
        grads = [of_rank[name] for of_rank in found]
        assert all(g is not None for g in grads), "every rank joins the sum of a parameter's gradients"
        assert far(sum(grads), want) < 1e-11, name


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_localized_filtering_is_that_of_whole_documents(size: int) -> None:
    torch.manual_seed(size)
    module = LocalizedFiltering(WIDTH).double()
    for layout in layouts_of(size):
        compare(layout, module, module)
    wide = LocalizedFiltering(WIDTH, kernel=3).double()
    compare(of_one_token(size), wide, wide)


def test_the_bias_before_a_document_is_no_token() -> None:
    """Two tokens of zeros before a document, filtered like tokens, would give another first token."""
    module = LocalizedFiltering(WIDTH).double()
    x = torch.randn(1, 3, WIDTH, dtype=torch.float64)
    padded = module.conv2(module.conv1(functional.pad(x.mT, (2, 0)))).mT
    right, wrong = module(x), module.norm(x + padded)
    assert far(right[:, 0], wrong[:, 0]) > 1e-3 and far(right[:, 1:], wrong[:, 1:]) < 1e-12


class Convolved(nn.Module):
    def __init__(self, kernel: int, groups: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, 6 if groups == 1 else WIDTH, kernel, groups=groups, dilation=dilation)

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        c = self.conv
        weight = c.weight[:, 0] if c.groups == WIDTH else c.weight
        options = {} if c.groups == WIDTH else {"groups": c.groups}
        return causal_conv1d(x.mT, weight, c.bias, context, dilation=c.dilation[0], **options).mT

    def alone(self, x: Tensor) -> Tensor:
        back = (self.conv.kernel_size[0] - 1) * self.conv.dilation[0]
        return self.conv(functional.pad(x.mT, (back, 0))).mT


@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize(("kernel", "groups", "dilation"), [(1, 1, 1), (4, WIDTH, 1), (3, 2, 2)])
def test_convolutions_are_those_of_whole_documents(size: int, kernel: int, groups: int, dilation: int) -> None:
    module = Convolved(kernel, groups, dilation).double()
    for layout in layouts_of(size):
        compare(layout, module, module.alone)


def test_batches_of_any_length_meet_few_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's on CPUs keep a kernel for each length that they meet, and memory would grow with every batch."""
    met: set[int] = set()
    really = functional.conv1d

    def noted(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        met.add(x.shape[-1])
        return really(x, *arguments, **options)

    monkeypatch.setattr(functional, "conv1d", noted)
    filtering, convolved = LocalizedFiltering(WIDTH), Convolved(4, WIDTH, 1)
    for length in range(500, 1500, 7):
        context = SequenceContext(contiguous([length - 100, 100], 1))
        for module in (filtering, convolved):
            assert module(torch.randn(1, length, WIDTH), context).shape[1] == length
    assert len(met) <= 2 * 16 + 2
    assert max(met) <= 1500 * 17 / 16


def test_bytes_of_a_boundary() -> None:
    """Two tokens for each border of ranks inside a document there, and two back, whatever the length."""

    def work(rank: int, group: dist.ProcessGroup) -> tuple[int, int, int]:
        found = []
        for length in (40, 4000):
            context = SequenceContext(contiguous([length, length], 4), group)
            x = torch.randn(3, context.num_tokens, WIDTH, requires_grad=True)
            LocalizedFiltering(WIDTH)(x, context).sum().backward()
            found.append((context.meter.total(["halo"]), context.meter.total(["halo.backward"])))
        assert found[0] == found[1]
        inside = SequenceContext(contiguous([5] * 4, 4), group)
        LocalizedFiltering(WIDTH)(torch.randn(1, 5, WIDTH), inside)
        return (*found[0], inside.meter.total())

    token = 3 * WIDTH * 4
    there = [2 * token, 0, 2 * token, 0]
    back = [0, 2 * token, 0, 2 * token]
    assert on_ranks(4, work) == [(a, b, 0) for a, b in zip(there, back, strict=True)]


def test_what_does_not_fit_is_refused() -> None:
    context = SequenceContext(contiguous([4], 1))
    with pytest.raises(UsageError, match="a tensor has 3 tokens in dimension 1; rank 0 holds 4"):
        halo(torch.ones(1, 3), context, 1)
    with pytest.raises(UsageError, match="tokens: -1 is not at least 0"):
        halo(torch.ones(1, 4), context, -1)
    with pytest.raises(UsageError, match="in 1 groups"):
        causal_conv1d(torch.ones(1, 2, 4), torch.ones(2, 3, 2), None, context)
    with pytest.raises(UsageError, match="width 5: an even one"):
        LocalizedFiltering(5)
