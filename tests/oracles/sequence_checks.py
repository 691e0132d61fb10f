"""What every operation along divided sequences is compared with, on ranks that are threads: one small case at a time.

A case has the layout by which tensors are cut and the one that the operation is told, which are the same where
nothing is wrong. An error is a number; what is refused raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from tests.oracles.attention import expected, tensors
from tests.oracles.sequences import decayed, nodes_for
from tests.rank_threads import on_ranks
from torch import Tensor, nn

from mycel.planning.sequence import Layout, Mask
from mycel.sequence import LocalizedFiltering, SequenceContext, apply, attention, linear_attention

__all__ = ["CHECKS", "Case"]

WIDTH, WORDS = 4, 97
#: Of one number each: as many as divide over any number of ranks here.
HEADS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What an operation is called with.

    Attributes:
        layout: by which tensors are cut.
        told: what the operation is told.
        mask, way: of attention.
        seed: of random numbers.
    """

    layout: Layout
    told: Layout
    mask: Mask
    way: Any
    seed: int


def together(case: Case, parts: list[Tensor], dim: int) -> Tensor:
    """What ranks have, in the order of the whole batch, as the operation's layout has it."""
    order = torch.cat([torch.from_numpy(case.told.indices(rank)) for rank in range(case.told.num_ranks)])
    whole = torch.cat(parts, dim)
    return torch.empty_like(whole).index_copy_(dim, order, whole)


def cut(case: Case, rank: int, whole: Tensor, dim: int) -> Tensor:
    return whole.index_select(dim, torch.from_numpy(case.layout.indices(rank)))


def farthest(found: list[Tensor], right: list[Tensor]) -> float:
    """Infinity where it is no number."""
    errors = [float((a - b).abs().max()) if b.numel() else 0.0 for a, b in zip(found, right, strict=True)]
    return max(error if error == error else float("inf") for error in errors)


def softmax(case: Case) -> float:
    """Two calls, whose backward passes come one after the other: the second's keys are no longer there."""
    first = tensors(case.layout, (12, 4, 4, 4))
    wholes = [first, [-x.roll(1, 2) for x in first]]
    rights = [expected(case.layout, case.mask, whole, 0.4) for whole in wholes]

    def work(rank: int, group: dist.ProcessGroup) -> list[list[Tensor]]:
        context = SequenceContext(case.told, group)
        leaves = [[cut(case, rank, x, 2).requires_grad_() for x in whole[:3]] for whole in wholes]
        outs = [attention(*mine, context, mask=case.mask, scale=0.4, way=case.way) for mine in leaves]
        for out, whole in zip(outs, wholes, strict=True):
            out.backward(cut(case, rank, whole[3], 2))
        return [[o.detach(), *(x.grad for x in mine)] for o, mine in zip(outs, leaves, strict=True)]

    ranks = on_ranks(case.layout.num_ranks, work)
    return max(
        farthest([together(case, [of[call][i] for of in ranks], 2) for i in range(4)], right)
        for call, right in enumerate(rights)
    )


def linear(case: Case) -> float:
    """Linear attention with a decay for each token, so weak that nothing is forgotten within a case."""
    layout = case.layout
    chance = torch.Generator().manual_seed(case.seed)
    whole = [torch.randn(1, 2, layout.num_tokens, WIDTH, dtype=torch.float64, generator=chance) for _ in range(4)]
    decay = -0.2 * torch.rand(1, 2, layout.num_tokens, dtype=torch.float64, generator=chance)
    leaves = [x.clone().requires_grad_() for x in (*whole[:3], decay)]
    bounds = list(zip(layout.offsets[:-1].tolist(), layout.offsets[1:].tolist(), strict=True))
    out = torch.cat([decayed(*(x[:, :, start:stop] for x in leaves)) for start, stop in bounds], 2)
    out.backward(whole[3])
    right = [out.detach(), *(x.grad for x in leaves)]

    def work(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        context = SequenceContext(case.told, group)
        q, k, v, g = (cut(case, rank, x, 2).requires_grad_() for x in (*whole[:3], decay))
        seen = linear_attention(q, k, v, context, decay=g, chunk=3, way=case.way, nodes=nodes_for(layout.num_ranks))
        seen.backward(cut(case, rank, whole[3], 2))
        return [seen.detach(), *(x.grad for x in (q, k, v, g))]  # type: ignore[misc]

    ranks = on_ranks(layout.num_ranks, work)
    return farthest([together(case, [of[i] for of in ranks], 2) for i in range(5)], right)  # type: ignore[arg-type]


def filtering(case: Case) -> float:
    """Localized filtering: two convolutions, one halo of two tokens."""
    layout = case.layout
    torch.manual_seed(case.seed)
    module = LocalizedFiltering(WIDTH).double()
    x, weight = torch.randn(2, 1, layout.num_tokens, WIDTH, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    out = torch.cat([module(part) for part in leaf.split(list(layout.documents), 1) if part.shape[1]], 1)
    out.backward(weight)
    right = [out.detach(), leaf.grad]

    def work(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        here = cut(case, rank, x, 1).requires_grad_()
        seen = module(here, SequenceContext(case.told, group))
        (gradient,) = torch.autograd.grad(seen, here, cut(case, rank, weight, 1))
        return [seen.detach(), gradient]

    ranks = on_ranks(layout.num_ranks, work)
    return farthest([together(case, [of[i] for of in ranks], 1) for i in range(2)], right)  # type: ignore[arg-type]


class Model(nn.Module):
    """Positions, attention, a convolution, and a loss as models of transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, HEADS), nn.Embedding(256, HEADS)
        self.qkv, self.head = nn.Linear(HEADS, 3 * HEADS), nn.Linear(HEADS, WORDS)
        self.filters = nn.Parameter(torch.randn(HEADS, 1, 3))

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor, num_items_in_batch: Tensor
    ) -> Tensor:
        x = self.words(input_ids) + self.places(position_ids)
        q, k, v = (y.mT[..., None] for y in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[..., 0].mT
        x = x + F.conv1d(F.pad(x.mT, (2, 0)), self.filters, groups=HEADS).mT
        losses = F.cross_entropy(self.head(x).flatten(0, 1), shift_labels.flatten(), reduction="sum")
        return losses / num_items_in_batch


def loss(case: Case) -> float:
    """Loss and gradients of a whole model, averaged over ranks as DDP does."""
    layout, size = case.layout, case.layout.num_ranks
    torch.manual_seed(case.seed)
    model = Model().double()
    ids = torch.randperm(WORDS)[: layout.num_tokens][None]  # no two alike, so that no wrong label is right by chance
    parts = [part for part in ids.split(list(layout.documents), 1) if part.shape[1] > 1]
    count = torch.tensor(float(sum(part.shape[1] - 1 for part in parts)))
    whole = ids.new_zeros(()).double()
    for part in parts:
        nexts = torch.cat([part[:, 1:], part.new_full((1, 1), -100)], 1)
        whole = whole + model(part, torch.arange(part.shape[1])[None], nexts, count)
    right = [whole.detach(), *torch.autograd.grad(whole, list(model.parameters()))]
    positions = torch.cat([torch.arange(n) for n in layout.documents])[None]
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions}

    def work(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        own = Model().double()
        own.load_state_dict(model.state_dict())
        handle = apply(own, group, layout=lambda *_: layout, way=case.way)
        made = handle.shard(batch, documents=layout.documents)
        ours = own(
            **{name: made[name] for name in ("input_ids", "position_ids", "shift_labels", "num_items_in_batch")}
        )
        ours.backward()
        return [ours.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad for p in own.parameters())]

    averaged = [torch.stack(list(of)).mean(0) for of in zip(*on_ranks(size, work), strict=True)]
    return farthest(averaged, right)


CHECKS = {"softmax": softmax, "linear": linear, "filtering": filtering, "loss": loss}
