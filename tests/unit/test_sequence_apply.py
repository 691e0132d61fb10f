"""Unchanged models on divided sequences: torch's own calls, what is refused, what is given back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.rank_threads import on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mycel.errors import MismatchError, UsageError
from mycel.sequence import AppliedSequence, apply

WIDTH, WORDS = 8, 32


class Block(nn.Module):
    """Attention by torch's function, and a causal convolution by its module."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.conv(x.mT)[..., : x.shape[1]].mT.tanh()


class Net(nn.Module):
    """Also a convolution after zeros, and torch's encoder layer."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.filters = nn.Parameter(torch.randn(WIDTH, 1, 4))
        self.recomputes = recomputes

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        x = x + F.conv1d(F.pad(x.mT, (3, 0)), self.filters, groups=WIDTH).mT
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.head(self.encoder(x, src_mask=mask, is_causal=True))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def whole(net: nn.Module, ids: Tensor, lengths: list[int]) -> dict[str, Tensor]:
    """Gradients of one process, each document by itself."""
    net.zero_grad()
    sum(net(part).square().sum() for part in ids.split(lengths, 1) if part.shape[1]).backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def summed(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([of[name] for of in ranks]).sum(0) for name in ranks[0]}


def farthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert set(found) == set(wanted)
    return max(float((found[n] - g).abs().max() / (1 + g.abs().max())) for n, g in wanted.items())


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(("size", "lengths"), [(1, [19]), (2, [19]), (3, [7, 1, 11]), (3, [2]), (4, [1, 1, 9])])
def test_torch_models_on_ranks_are_what_they_are_whole(
    net: Net, size: int, lengths: list[int], recomputes: bool
) -> None:
    ids = torch.randint(0, WORDS, (2, sum(lengths)))
    wanted = whole(net, ids, lengths)
    out = torch.cat([net(part) for part in ids.split(lengths, 1)], 1).detach()

    def work(rank: int, group: Any) -> tuple[Tensor, dict[str, Tensor]]:
        model = copy.deepcopy(net)
        model.zero_grad()
        model.recomputes = recomputes
        handle = apply(model, group)
        seen = model(handle.shard(ids, documents=lengths))
        together = handle.unshard(seen).detach()
        loss = seen.square().sum() if handle.context.num_tokens else seen.sum() * 0
        if recomputes:
            handle.shard(ids[:, :1])  # another layout is the last by the time of the backward pass
        loss.backward()
        return together, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    ranks = on_ranks(size, work)
    assert all(float((together - out).abs().max()) < 1e-12 for together, _ in ranks)
    assert farthest(summed([gradients for _, gradients in ranks]), wanted) < 1e-12


def test_two_layouts_of_one_model_are_alive_together(net: Net) -> None:
    ids = torch.randint(0, WORDS, (1, 12))
    first, second = whole(net, ids, [12]), whole(net, ids, [5, 7])

    def work(rank: int, group: Any) -> dict[str, Tensor]:
        model = copy.deepcopy(net)
        model.zero_grad()
        model.recomputes = True
        handle = apply(model, group)
        batches = [handle.shard(ids, documents=lengths) for lengths in ([12], [5, 7])]
        losses = [model(batch).square().sum() for batch in batches]  # by the tensors, not by the last call of shard
        for loss in losses:
            loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    wanted = {name: first[name] + second[name] for name in first}
    assert farthest(summed(on_ranks(2, work)), wanted) < 1e-12


def test_a_model_beside_it_and_the_model_itself_afterwards_are_untouched(net: Net) -> None:
    other = copy.deepcopy(net)
    ids = torch.randint(0, WORDS, (1, 9))
    before, hooks = net(ids), {name: dict(m._forward_hooks) for name, m in net.named_modules()}
    with apply(net) as handle:
        net(handle.shard(ids, documents=[4, 5]))
        assert other(ids).equal(before)
        assert not net(handle.shard(ids, documents=[4, 5])).equal(before)
        assert "attention or convolutions of torch" in handle.explain() and "2 documents" in handle.explain()
    assert net(ids).equal(before)
    assert {name: dict(m._forward_hooks) for name, m in net.named_modules()} == hooks
    handle.close()
    apply(net).close()


def test_a_copy_of_an_applied_model_is_applied(net: Net) -> None:
    ids = torch.randint(0, WORDS, (1, 9))
    handle = apply(net)
    batch = handle.shard(ids, documents=[4, 5])
    assert copy.deepcopy(net)(batch).equal(net(batch))


# -- what is refused --------------------------------------------------------------------------------------------


class Lines(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Masked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        keep = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=keep)


class Dropped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)


class Parts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x[..., :2, :], x[..., :2, :])


class Seen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x)[0]
        return out


class Ahead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x.mT)
        return out.mT


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Masked, "an attention mask of .* contradicts the layout"),
        (Dropped, "dropout of attention weights"),
        (Parts, "attention of 6 queries to 2 keys, where this rank holds 6 tokens"),
        (Seen, "need_weights=True"),
        (Ahead, "only causal convolutions are understood"),
    ],
)
def test_calls_that_would_be_wrong_are_refused(model: type[nn.Module], said: str) -> None:
    made = model()
    x = torch.randn(1, 6, 4)
    with apply(made) as handle, pytest.raises(UsageError, match=said):
        made(handle.shard(x))
    made(x)  # nothing of it is left


def test_models_that_cannot_be_applied(net: Net) -> None:
    with pytest.raises(UsageError, match="no attention, scan or convolution to attach to"):
        apply(Lines())
    with pytest.raises(UsageError, match=r"1 \(LSTM\) has a state along the sequence that is not understood"):
        apply(nn.Sequential(nn.Conv1d(2, 2, 3), nn.LSTM(2, 2)))
    handle = apply(net)
    with pytest.raises(UsageError, match="apply was called on it before"):
        apply(net)
    with pytest.raises(UsageError, match=r"apply was called on it before \(at 0\)"):
        apply(nn.Sequential(net))
    handle.close()
    with pytest.raises(UsageError, match="layout 'even': one of per_document_zigzag"):
        apply(net, layout="even")
    with pytest.raises(UsageError, match="dim='cp' is of a mesh, and none was given"):
        apply(net, dim="cp")
    apply(net).close()  # and what failed left nothing behind


def test_calls_out_of_their_time(net: Net) -> None:
    ids = torch.randint(0, WORDS, (1, 6))
    handle = apply(net)
    with pytest.raises(UsageError, match=r"handle\.shard\(batch\)"):
        net(ids)
    loss = net(handle.shard(ids)).sum()
    handle.close()
    with pytest.raises(UsageError, match="backward after close"):
        loss.backward()
    with pytest.raises(UsageError, match="its handle is closed"):
        handle.shard(ids)


def test_ranks_with_other_tokens_or_documents_are_named(net: Net) -> None:
    def work(other: Callable[[int, AppliedSequence], object]) -> Callable[[int, Any], str]:
        def on_rank(rank: int, group: Any) -> str:
            with apply(copy.deepcopy(net), group) as handle, pytest.raises(MismatchError) as caught:
                other(rank, handle)
            return str(caught.value)

        return on_rank

    def documents(rank: int, handle: AppliedSequence) -> None:
        handle.shard(torch.zeros(1, 6, dtype=torch.int64), documents=[6] if rank else [2, 4])

    def tokens(rank: int, handle: AppliedSequence) -> None:
        handle.shard(torch.full((1, 6), rank))

    assert all("has layout" in said for said in on_ranks(2, work(documents)))
    assert all("has other tokens than" in said for said in on_ranks(2, work(tokens)))
