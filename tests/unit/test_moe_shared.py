"""The shared expert computes while tokens travel, forward and backward, and once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mycel.comm.meter import ByteMeter
from mycel.moe import ExpertParallel, MoE
from mycel.moe.dispatch import LocalDispatcher, TokenDispatcher
from mycel.moe.dispatch.base import Dispatched, Steps
from mycel.moe.slots import RoutingResult

DIM, EXPERTS = 8, 4


class Travelling(TokenDispatcher):
    """Tokens that stay here, though it says that they are under way."""

    def __init__(self, words: list[str]) -> None:
        self.words, self.local = words, LocalDispatcher(EXPERTS)
        self.num_ranks, self.experts, self.meter = 1, range(EXPERTS), ByteMeter()

    def dispatch(self, x_TD: Tensor, routing: RoutingResult) -> Dispatched:  # noqa: N803
        return self.local.dispatch(x_TD, routing)

    def combine(self, rows_RD: Tensor, dispatched: Dispatched) -> Tensor:  # noqa: N803
        return self.local.combine(rows_RD, dispatched)

    def dispatch_steps(self, x_TD: Tensor, routing: RoutingResult) -> Steps[Dispatched]:  # noqa: N803
        x = _Said.apply(self.words, "sent", x_TD)  # type: ignore[no-untyped-call]
        yield
        x = _Said.apply(self.words, "arrived", x)  # type: ignore[no-untyped-call]
        return self.local.dispatch(x, routing)


class _Said(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, words: list[str], word: str, x: Tensor) -> Tensor:
        ctx.words, ctx.word = words, word
        words.append(word)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.words.append(f"{ctx.word} backward")
        return None, None, grads[0]


@pytest.mark.parametrize("degree", [1, 3])
def test_it_computes_between_sending_and_arriving(degree: int) -> None:
    torch.manual_seed(0)
    plain = MoE(DIM, 12, EXPERTS, 2, shared_hidden=6)
    words: list[str] = []
    parallel = ExpertParallel(dispatcher=Travelling(words), degree=degree)
    layer = MoE(DIM, 12, EXPERTS, 2, shared_hidden=6, parallel=parallel)
    layer.load_state_dict(plain.state_dict())
    shared: Any = layer.shared

    def said(module: Any, args: Any, output: Tensor) -> Tensor:
        spoken: Tensor = _Said.apply(words, "shared", output)  # type: ignore[no-untyped-call]
        return spoken

    shared.register_forward_hook(said)
    x = torch.randn(9, DIM, requires_grad=True)
    y = layer(x)
    assert words == ["sent"] * degree + ["shared"] + ["arrived"] * degree
    words.clear()
    y.square().sum().backward()
    # Each chunk's tokens go on their way back before the shared expert's gradients, and are waited for after them.
    assert words == ["arrived backward"] * degree + ["shared backward"] + ["sent backward"] * degree
    grads = [p.grad for p in layer.parameters()]
    plain(x.detach()).square().sum().backward()
    assert all(torch.allclose(g, p.grad, atol=1e-5) for g, p in zip(grads, plain.parameters(), strict=True))
