"""Gradients along directions are those of the whole matrix, small steps survive rounding, and layers are chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mycel.data_parallel import MASHA, RandomK, hd_pissa
from mycel.data_parallel.beyond_averaging.directions import move, principal_directions
from mycel.data_parallel.beyond_averaging.layers import Layer, choose
from mycel.errors import UsageError


def watched(linear: nn.Linear, count: int = 3) -> Layer:
    directions = principal_directions(linear.weight, count)
    layer = Layer(
        name="weight",
        modules=[linear],
        directions=directions,
        own=slice(1, count),
        change=nn.Parameter(torch.zeros_like(directions[1:])),
        residual=torch.zeros_like(linear.weight, dtype=torch.float32) if linear.weight.dtype.itemsize == 2 else None,
    )
    linear.weight.requires_grad_(False)
    linear.register_forward_hook(layer.watch, with_kwargs=True)
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 5, 6), (0, 6)])
def test_gradients_along_directions(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(6, 4, bias=bias).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def loss_of(again: bool) -> Tensor:
        def forward(x: Tensor) -> Tensor:
            return nn.functional.relu(linear(x), inplace=True)

        y: Tensor = checkpoint(forward, x, use_reentrant=False) if again else forward(x)
        return y.square().sum()

    loss_of(False).backward()
    whole, of_x = linear.weight.grad, x.grad
    assert whole is not None
    layer = watched(linear)
    linear.weight.grad, x.grad = None, None
    a, b = layer.directions[1:].split([6, 4], dim=1)
    want = torch.cat((b @ whole, (whole @ a.t()).t()), dim=1)
    for again in (False, True):
        loss_of(again).backward()
        assert linear.weight.grad is None
    assert layer.change.grad is not None and x.grad is not None and of_x is not None
    torch.testing.assert_close(layer.change.grad, 2 * want)  # added up over two passes
    torch.testing.assert_close(x.grad, 2 * of_x)
    with torch.no_grad():
        assert not linear(x).requires_grad


def test_gradients_are_derivatives_of_what_moves() -> None:
    torch.manual_seed(1)
    linear = nn.Linear(5, 7).double()
    x = torch.randn(9, 5, dtype=torch.float64)
    layer = watched(linear)
    linear(x).square().sum().backward()
    step = torch.randn_like(layer.change) * 1e-5
    losses = []
    for sign in (1, -1):
        moved = linear.weight.detach().clone()
        move(moved, layer.directions[1:], sign * step)
        losses.append(float(nn.functional.linear(x, moved, linear.bias).detach().square().sum()))
    assert layer.change.grad is not None
    assert (losses[0] - losses[1]) / 2 == pytest.approx(float((step * layer.change.grad).sum()), rel=1e-5)


def test_gradients_under_autocast() -> None:
    torch.manual_seed(2)
    linear = nn.Linear(32, 16)
    x = torch.randn(64, 32)
    exact = watched(linear)
    linear(x).square().mean().backward()
    want = exact.change.grad
    exact.change.grad = None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(x)
    assert y.dtype == torch.bfloat16
    y.float().square().mean().backward()
    assert want is not None and exact.change.grad is not None and exact.change.grad.dtype == torch.float32
    assert float((exact.change.grad - want).norm() / want.norm()) < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_smaller_than_rounding_arrive(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    linear = nn.Linear(16, 16).to(dtype)
    begin = linear.weight.detach().float().clone()
    exact = begin.clone()
    layer = watched(linear, count=4)
    step = torch.rand_like(layer.directions) * 1e-5
    naive = linear.weight.detach().clone()
    for _ in range(200):
        layer.move(step)
        move(exact, layer.directions, step)
        rounded = naive.float()
        move(rounded, layer.directions, step)
        naive.copy_(rounded)
    change = (exact - begin).norm()
    assert layer.residual is not None
    assert (linear.weight.detach().float() + layer.residual - exact).norm() < 1e-3 * change
    assert (linear.weight.detach().float() - exact).norm() < 0.5 * change  # rounded once
    assert (naive.float() - exact).norm() > 0.9 * change  # rounded every time: most of it is lost


def test_layers_are_chosen_by_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8, 4)
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
            self.twice = nn.Linear(4, 8)
            self.twice.weight = self.up.weight
            self.attention = nn.MultiheadAttention(4, 2)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied()
    found = choose(model, "*", ["head"])
    assert found == {"up.weight": [model.up, model.twice], "down.weight": [model.down]}
    assert list(choose(model, ("tw*", "none"), ())) == ["up.weight"]
    assert list(choose(nn.Linear(2, 2), "*", ())) == ["weight"]
    with pytest.raises(UsageError, match=r"embedding, a Embedding.*skip=\['head'\]"):
        choose(model, "*", ())
    model.requires_grad_(False)
    with pytest.raises(UsageError, match="there are up, down, twice, head"):
        choose(model, "*", ["head"])


def test_what_makes_no_sense_is_refused() -> None:
    parameter: Any = nn.Parameter(torch.zeros(2))
    named = [("p", parameter)]
    for attempt, text in (
        (lambda: MASHA(named, RandomK(0.5), lr=0.0), "lr 0.0"),
        (lambda: MASHA(named, RandomK(0.5), lr=0.1, probability=1.5), "probability 1.5"),
        (lambda: MASHA([parameter], RandomK(0.5), lr=0.1), "named_parameters"),
        (
            lambda: MASHA([{"params": named}, {"params": [("p", nn.Parameter(torch.zeros(1)))]}], RandomK(), lr=1),
            "own",
        ),
        (lambda: MASHA(named, RandomK(0.5), lr=0.1), "no process group"),
        (lambda: hd_pissa(nn.Linear(2, 2), torch.optim.SGD, rank=0), "0 directions"),
        (lambda: hd_pissa(nn.Linear(2, 2), torch.optim.SGD), "no process group"),
    ):
        with pytest.raises(UsageError, match=text):
            attempt()
