"""DeMo and 1-bit Adam in one process: the papers' algorithms written plainly, what is kept, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from mycel.data_parallel import DeMo, OneBitAdam
from mycel.errors import UsageError


def gradients(shape: tuple[int, ...], steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps)]


def run(optimizer: Any, weight: Tensor, seen: list[Tensor]) -> Tensor:
    for gradient in seen:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


def wave(length: int, frequency: int) -> Tensor:
    """One row of the orthonormal DCT-II, from its definition."""
    scale = math.sqrt((1 if frequency == 0 else 2) / length)
    return torch.tensor(
        [scale * math.cos(math.pi * frequency * (2 * i + 1) / (2 * length)) for i in range(length)],
        dtype=torch.float64,
    )


def strongest(momentum: Tensor, heights: list[int], widths: list[int], top_k: int) -> Tensor:
    """What DeMo takes off a matrix that its chunks divide: each chunk's projection on its strongest waves."""
    found = torch.zeros_like(momentum)
    top = 0
    for height in heights:
        left = 0
        for width in widths:
            chunk = momentum[top : top + height, left : left + width]
            waves = [torch.outer(wave(height, a), wave(width, b)) for a in range(height) for b in range(width)]
            strengths = [float((chunk * w).sum()) for w in waves]
            for i in sorted(range(len(waves)), key=lambda i: -abs(strengths[i]))[:top_k]:
                found[top : top + height, left : left + width] += strengths[i] * waves[i]
            left += width
        top += height
    return found


@pytest.mark.parametrize(
    ("shape", "heights", "widths"), [((4, 9), [4], [3, 3, 3]), ((8, 4), [4, 4], [4]), ((6,), [1], [3, 3])]
)
def test_demo_is_the_papers_algorithm(shape: tuple[int, ...], heights: list[int], widths: list[int]) -> None:
    weight = nn.Parameter(torch.ones(shape, dtype=torch.float64))
    x, m = torch.ones(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    optimizer = DeMo([weight], lr=0.1, momentum=0.9, chunk=4, top_k=2, weight_decay=0.01)
    seen = gradients(shape, 4)
    run(optimizer, weight, seen)
    for gradient in seen:
        m = 0.9 * m + gradient
        q = strongest(m.view(sum(heights), sum(widths)), heights, widths, 2).view(shape)
        m = m - q
        x = x - 0.1 * 0.01 * x - 0.1 * q.sign()
    assert torch.allclose(weight.detach(), x, rtol=0, atol=1e-12)
    assert torch.allclose(optimizer.state[weight]["momentum"], m, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(7, 11), (5, 3, 3), (1, 1), (13,), ()])
def test_demo_owes_what_it_has_not_told_whatever_the_shape(shape: tuple[int, ...]) -> None:
    (gradient,) = gradients(shape, 1)
    weight = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    few = DeMo([weight], momentum=0.0, chunk=4, top_k=1)
    run(few, weight, [gradient])
    owed = few.state[weight]["momentum"]
    assert float(owed.norm()) <= float(gradient.norm())
    everything = DeMo([weight], momentum=0.0, chunk=4, top_k=99)
    run(everything, weight, [gradient])
    assert float(everything.state[weight]["momentum"].abs().max()) < 1e-12


def test_one_bit_adam_is_adamw_until_it_is_warm_and_then_keeps_second_moments() -> None:
    seen = gradients((3, 4), 7)
    weight, same = (nn.Parameter(torch.ones(3, 4, dtype=torch.float64)) for _ in range(2))
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.1}
    optimizer = OneBitAdam([weight], warm_up=3, **options)
    run(optimizer, weight, seen[:3])
    assert torch.equal(weight, run(torch.optim.AdamW([same], **options), same, seen[:3]))
    m = sum(0.2 * 0.8 ** (2 - i) * g for i, g in enumerate(seen[:3]))
    v = sum(0.1 * 0.9 ** (2 - i) * g**2 for i, g in enumerate(seen[:3])) / (1 - 0.9**3)  # type: ignore[operator]
    x = weight.detach().clone()
    for step, gradient in enumerate(seen[3:], start=4):
        m = 0.8 * m + 0.2 * gradient
        x = x - 0.1 * 0.1 * x - 0.1 * m / (1 - 0.8**step) / (v.sqrt() + 1e-8)  # type: ignore[union-attr]
    assert torch.allclose(run(optimizer, weight, seen[3:]), x, rtol=0, atol=1e-12)


def test_second_moments_of_nothing_do_not_throw_a_weight_away() -> None:
    half, never = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = OneBitAdam([half, never], lr=0.1, warm_up=2)
    for step in range(8):
        half.grad = torch.tensor([1.0, 0.0 if step < 4 else 1.0])
        never.grad = torch.full((2,), 0.0 if step < 5 else 1.0)
        optimizer.step()
    assert optimizer.state[half]["exp_avg_sq"].tolist() == pytest.approx([1.0, 0.5])
    assert optimizer.state[never]["step"] == 4  # a warm-up in which nothing came begins again
    assert float(half.detach().abs().max()) < 1 and 0 < float(never.detach().abs().max()) < 1


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (DeMo, {"chunk": 300}, "sides of 1 to 256"),
    (DeMo, {"top_k": 0}, "at least 1"),
    (DeMo, {"momentum": 1.0}, "momentum"),
    (OneBitAdam, {"warm_up": 0}, "warm_up 0"),
]


@pytest.mark.parametrize(("kind", "options", "words"), REFUSED)
def test_refuses_by_name(kind: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        kind([nn.Parameter(torch.zeros(4))], **options)


def test_sharded_parameters_are_sent_elsewhere() -> None:
    weight: Any = nn.Parameter(torch.zeros(4, 4))
    weight.placements = (Shard(0),)
    for kind, options in ((DeMo, {}), (OneBitAdam, {"warm_up": 3})):
        with pytest.raises(UsageError, match=r"layer\.weight is sharded.*Dion or Muon"):
            kind([("layer.weight", weight)], **options)
