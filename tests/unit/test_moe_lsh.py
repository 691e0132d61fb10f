"""Centroids in place of rows: the formula, its gradients, the radius, and what is left when nothing is alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mycel.errors import UsageError
from mycel.moe import ExpertParallel, MoE
from mycel.moe.dispatch import LocalDispatcher
from mycel.moe.lsh import LSHDispatcher
from mycel.moe.slots import RoutingResult, routing_from_slots

EXPERTS = 4


def routing_of(index: Tensor, weights: Tensor) -> RoutingResult:
    nothing = torch.zeros(len(index), EXPERTS)
    return routing_from_slots(index, weights, nothing, nothing, EXPERTS, full=bool((index < EXPERTS).all()))


def apply(lsh: LSHDispatcher, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Experts that are not linear: ``x`` to the third, times one and the number of the expert."""
    arrived = lsh.dispatch(x, routing_of(index, weights))
    expert = torch.arange(EXPERTS).repeat_interleave(arrived.tokens_per_expert)
    return lsh.combine(arrived.rows[: len(expert)] ** 3 * (1.0 + expert).unsqueeze(1).to(x.dtype), arrived)


def wanted(lsh: LSHDispatcher, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, int]:
    """Row by row from the text of the docstring; the rotations are the dispatcher's own. And rows sent."""
    turns = lsh._rotation(x.shape[1], x.device).view(x.shape[1], lsh.num_hashes, -1).permute(1, 0, 2)
    buckets: dict[tuple[int, tuple[object, ...]], list[int]] = {}
    for t, token in enumerate(x.detach().float()):
        code = []
        for turn in turns:
            turned = (token @ turn).tolist()
            code.append(max((abs(v), i, v < 0) for i, v in enumerate(turned))[1:])
        for e in index[t].tolist():
            if e < EXPERTS:
                buckets.setdefault((e, tuple(code)), []).append(t)
    y = [torch.zeros_like(token) for token in x]
    sent = 0
    for (e, _), tokens in buckets.items():
        c = torch.stack([x[t] for t in tokens]).mean(dim=0)
        near = [t for t in tokens if lsh.radius is None or (x[t] - c).norm() <= lsh.radius * x[t].norm()]
        sent += bool(near) + len(tokens) - len(near)
        for t in tokens:
            weight = weights[t][index[t] == e].sum()
            row = c**3 * (1.0 + e) + (x[t] - c if lsh.residuals else 0)
            y[t] = y[t] + weight * (row if t in near else x[t] ** 3 * (1.0 + e))
    return torch.stack(y) if y else torch.zeros_like(x), sent


def crowd(num_tokens: int, width: int, seed: int) -> Tensor:
    """Tokens around a few points, some far out."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(3, width, generator=generator, dtype=torch.float64)
    which = torch.randint(0, 3, (num_tokens,), generator=generator)
    noise = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64)
    return centres[which] + noise * torch.rand(num_tokens, 1, generator=generator, dtype=torch.float64) * 0.8


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 24),
    st.integers(0, 2**16),
    st.sampled_from([None, 0.0, 0.2, 0.5, 1.0]),
    st.booleans(),
    st.booleans(),
)
def test_the_formula(num_tokens: int, seed: int, radius: float | None, residuals: bool, full: bool) -> None:
    x = crowd(num_tokens, 6, seed).requires_grad_()
    generator = torch.Generator().manual_seed(seed)
    choices = [torch.randperm(EXPERTS + 1 - full, generator=generator)[:2] for _ in range(num_tokens)]
    index = torch.stack(choices) if choices else torch.zeros(0, 2, dtype=torch.int64)
    weights = torch.rand(num_tokens, 2, generator=generator, dtype=torch.float64)
    weights = weights.masked_fill(index == EXPERTS, 0.0).requires_grad_()
    lsh = LSHDispatcher(
        LocalDispatcher(EXPERTS), num_hashes=1, directions=2, radius=radius, residuals=residuals, seed=seed
    )
    y = apply(lsh, x, index, weights)
    want, sent = wanted(lsh, x, index, weights)
    assert torch.allclose(y, want, rtol=1e-10, atol=1e-12)
    assert lsh.sent == (sent, int((index < EXPERTS).sum()))
    if num_tokens:
        factor = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        for got, other in zip(
            torch.autograd.grad((y * factor).sum(), (x, weights)),
            torch.autograd.grad((want * factor).sum(), (x, weights)),
            strict=True,
        ):
            assert torch.allclose(got, other, rtol=1e-9, atol=1e-11)


def test_gradients_by_differences() -> None:
    index = torch.tensor([[0, 1]] * 9 + [[2, EXPERTS]] * 3)
    weights = torch.rand(12, 2, dtype=torch.float64).masked_fill(index == EXPERTS, 0.0)
    lsh = LSHDispatcher(LocalDispatcher(EXPERTS), num_hashes=1, directions=2, radius=0.5)
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(3, 5, generator=generator, dtype=torch.float64)[torch.arange(12) % 3]
    x = points + 0.05 * torch.randn(12, 5, generator=generator, dtype=torch.float64)
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: apply(lsh, x, index, weights), (x,))
    assert 3 <= lsh.sent[0] < lsh.sent[1] == 21


def test_alike_tokens_travel_once_and_unlike_ones_alone() -> None:
    torch.manual_seed(0)
    points = torch.randn(5, 32)
    x = points[torch.arange(100) % 5] * (1 + 0.01 * torch.randn(100, 1))
    index, weights = torch.full((100, 1), 2), torch.ones(100, 1)
    lsh = LSHDispatcher(LocalDispatcher(EXPERTS))
    apply(lsh, x, index, weights)
    assert lsh.sent == (5, 100)
    noise = torch.randn(100, 32)
    alone = LSHDispatcher(LocalDispatcher(EXPERTS), radius=0.0)
    assert torch.allclose(apply(alone, noise, index, weights), 3 * noise**3)
    assert alone.sent == (100, 100)


def test_no_row_is_served_from_beyond_the_radius() -> None:
    x = crowd(300, 16, 5)
    index, weights = torch.arange(300).remainder(EXPERTS).unsqueeze(1), torch.ones(300, 1, dtype=torch.float64)
    shares = []
    for radius in (0.1, 0.3, 0.6):
        lsh = LSHDispatcher(LocalDispatcher(EXPERTS), num_hashes=1, directions=4, radius=radius, residuals=False)
        arrived = lsh.dispatch(x, routing_of(index, weights))
        served = lsh.combine(arrived.rows, arrived)  # experts that change nothing show what stood for each row
        assert ((served - x).norm(dim=1) <= radius * x.norm(dim=1) * (1 + 1e-12)).all()
        shares.append(lsh.sent[0])
    assert 300 >= shares[0] > shares[1] > shares[2] > 12


def test_a_layer_learns_through_it_in_every_type() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        layer = MoE(
            8, 8, EXPERTS, 2, parallel=ExpertParallel(dispatcher=LSHDispatcher(LocalDispatcher(EXPERTS))), dtype=dtype
        )
        layer(torch.randn(3, 7, 8, dtype=dtype)).square().sum().backward()
        assert all(p.grad is not None and p.grad.any() and p.grad.isfinite().all() for p in layer.parameters())


def test_a_token_that_is_not_a_number_harms_no_other() -> None:
    x = torch.ones(4, 6)
    x[2, 0] = float("nan")
    y = apply(LSHDispatcher(LocalDispatcher(EXPERTS)), x, torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1))
    assert y[2].isnan().any() and torch.equal(y[[0, 1, 3]], torch.ones(3, 6))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_hashes": 0}, "LSH: 0 hashes of 16 directions; both must be at least 1"),
        ({"radius": -0.5}, "LSH: radius -0.5; expected a part"),
        ({"radius": float("nan")}, "LSH: radius nan; expected a part"),
    ],
)
def test_settings_that_make_no_sense_are_named(options: dict[str, float], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        LSHDispatcher(LocalDispatcher(EXPERTS), **options)  # type: ignore[arg-type]
