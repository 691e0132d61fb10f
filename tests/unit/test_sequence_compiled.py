"""Compiled models on divided sequences: torch's compiler leaves alone what goes over ranks, in any layout."""

from __future__ import annotations

import pytest
import torch
from tests.effort import long
from tests.unit.test_sequence_apply import WORDS, Block, Net
from torch import Tensor, nn

from mycel.sequence import apply


class Few(nn.Module):
    """As little as has attention and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(WORDS, 8), Block()

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.block(self.embed(ids))
        return out


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch's compiler, which looks at every tensor
@pytest.mark.parametrize(
    ("model", "recomputes"), [(Few, False), *(pytest.param(Net, again, marks=long) for again in (False, True))]
)
def test_compiled_models_are_what_they_are_whole(model: type[nn.Module], recomputes: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = model().double()
    if recomputes:
        net.recomputes = True  # type: ignore[assignment]
    ids = torch.randint(0, WORDS, (2, 12))
    layouts = ([5, 7], [12])
    rights = []
    for lengths in layouts:
        net.zero_grad()
        out = torch.cat([net(part) for part in ids.split(lengths, 1) if part.shape[1]], 1)
        out.square().sum().backward()
        rights.append([out.detach(), *(p.grad for p in net.parameters())])
    with apply(net) as handle:
        compiled = torch.compile(net, backend="aot_eager")
        for lengths, (out, *gradients) in zip((*layouts, layouts[0]), (*rights, rights[0]), strict=True):
            net.zero_grad()
            seen = compiled(handle.shard(ids, documents=lengths))
            seen.square().sum().backward()
            assert float((seen - out).detach().abs().max()) < 1e-12
            for p, right in zip(net.parameters(), gradients, strict=True):
                assert p.grad is not None and right is not None and float((p.grad - right).abs().max()) < 1e-11
