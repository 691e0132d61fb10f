"""Dion and Muon in one process: the papers' algorithms written plainly. All optimizers: resuming, what is refused."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mycel.data_parallel import DeMo, Dion, Muon, OneBitAdam, matrix_groups
from mycel.data_parallel.optimizers.dion_update import gram_turns
from mycel.data_parallel.optimizers.muon_update import newton_schulz
from mycel.errors import UsageError


def gradients(shape: tuple[int, int], steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(steps)]


def run(optimizer: Any, weight: Tensor, seen: list[Tensor]) -> Tensor:
    for gradient in seen:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("shape", [(12, 7), (7, 12), (9, 9)])
@pytest.mark.parametrize("rank", [0.25, 3, 1.0])
def test_dion_is_the_papers_algorithm(shape: tuple[int, int], rank: float) -> None:
    seen = gradients(shape, 6)
    weight = nn.Parameter(torch.ones(shape, dtype=torch.float64))
    optimizer = Dion([weight], lr=0.1, rank=rank, momentum=0.9, weight_decay=0.01)
    run(optimizer, weight, seen[:1])
    # After its first step, from the state that it has then: first directions are chance.
    x, m, q = weight.detach().clone(), *(optimizer.state[weight][key].clone() for key in ("momentum", "q"))
    for gradient in seen[1:]:
        b = m + gradient
        p, _ = torch.linalg.qr(b @ q)
        r = b.T @ p
        m = b - (1 - 0.9) * p @ r.T
        q = r / r.norm(dim=0)
        x = x - 0.1 * 0.01 * x - 0.1 * (shape[0] / shape[1]) ** 0.5 * p @ q.T
    assert torch.allclose(run(optimizer, weight, seen[1:]), x, rtol=1e-9, atol=1e-12)


def test_dions_first_step_has_orthonormal_columns_and_owes_the_rest() -> None:
    (gradient,) = gradients((10, 6), 1)
    weight = nn.Parameter(torch.zeros(10, 6, dtype=torch.float64))
    optimizer = Dion([weight], lr=1.0, rank=2, momentum=0.0)
    step = run(optimizer, weight, [gradient])
    left, values, _ = torch.linalg.svd(step)
    assert int((values > 1e-9).sum()) == 2
    sent = left[:, :2] @ left[:, :2].T @ gradient  # the gradient in the directions of the update
    assert torch.allclose(optimizer.state[weight]["momentum"], gradient - sent, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_is_the_published_algorithm(nesterov: bool) -> None:
    seen = gradients((8, 5), 4)
    weight = nn.Parameter(torch.ones(8, 5, dtype=torch.float64))
    x, m = torch.ones(8, 5, dtype=torch.float64), torch.zeros(8, 5, dtype=torch.float64)
    for gradient in seen:
        m = 0.9 * m + gradient
        u = gradient + 0.9 * m if nesterov else m
        u = u / u.norm()
        for _ in range(5):
            u = 3.4445 * u - 4.775 * (u @ u.T) @ u + 2.0315 * (u @ u.T) @ (u @ u.T) @ u
        x = x - 0.1 * (8 / 5) ** 0.5 * u
    found = run(Muon([weight], lr=0.1, momentum=0.9, nesterov=nesterov), weight, seen)
    assert torch.allclose(found, x, rtol=1e-9)


def test_newton_and_schulz_come_near_to_the_polar_factor() -> None:
    (matrix,) = gradients((6, 20), 1)
    values = torch.linalg.svdvals(newton_schulz(matrix, 5))
    assert bool((values > 0.6).all()) and bool((values < 1.3).all())


def test_gram_turns_take_columns_that_depend_on_each_other() -> None:
    (p,) = gradients((20, 3), 1)
    for odd in (p * 1e-9, torch.cat([p, p[:, :1]], dim=1), torch.cat([p, 0 * p], dim=1)):
        turned = odd @ gram_turns([odd.T @ odd])[0]
        projection = turned @ turned.T
        assert torch.allclose(projection @ projection, projection, atol=1e-6)
        assert torch.allclose(projection @ p, p, atol=1e-6)
    assert bool(gram_turns([torch.full((2, 2), torch.nan, dtype=torch.float64)])[0].isnan().all())


def test_a_matrix_without_gradient_for_a_while_finds_its_directions_again() -> None:
    weight = nn.Parameter(torch.zeros(6, 6))
    optimizer = Dion([weight], lr=0.1, rank=2)
    run(optimizer, weight, [torch.zeros(6, 6)])
    assert not weight.any()
    run(optimizer, weight, [torch.eye(6)])
    assert int(torch.linalg.matrix_rank(weight)) == 2


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 24)
        self.down = nn.Linear(24, 8, bias=False)
        self.unused = nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.table(tokens)
        return (x + self.down(self.up(x).relu())) @ self.table.weight.T


def trained(make: Any, steps: int, resume_at: int | None = None) -> tuple[Small, Any]:
    torch.manual_seed(0)
    model = Small()
    optimizer = make(model)
    for step in range(steps):
        if step == resume_at:
            saved = io.BytesIO()
            torch.save(optimizer.state_dict(), saved)
            saved.seek(0)
            optimizer = make(model)
            optimizer.load_state_dict(torch.load(saved, weights_only=True))
        tokens = torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    return model, optimizer


MAKERS: dict[str, Any] = {
    "dion": lambda model: Dion(matrix_groups(model, adamw_options={"lr": 1e-3}), lr=0.02, weight_decay=0.1),
    "muon": lambda model: Muon(matrix_groups(model, adamw_options={"lr": 1e-3}), lr=0.02, weight_decay=0.1),
    "demo": lambda model: DeMo(model.parameters(), lr=1e-3, top_k=4, weight_decay=0.1),
    "one-bit adam": lambda model: OneBitAdam(model.parameters(), lr=1e-3, warm_up=2, weight_decay=0.1),
}


@pytest.mark.parametrize("name", MAKERS)
def test_resumes_bit_for_bit_and_leaves_unused_parameters(name: str) -> None:
    whole, optimizer = trained(MAKERS[name], 6)
    again, _ = trained(MAKERS[name], 6, resume_at=3)
    for a, b in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    torch.manual_seed(0)
    assert torch.equal(whole.unused.weight, Small().unused.weight)
    assert whole.unused.weight not in {p: s for p, s in optimizer.state.items() if s}
    assert optimizer.stats.steps == 6


def test_the_rest_moves_as_by_torchs_adamw() -> None:
    table = nn.Parameter(torch.ones(4, 3))
    same = nn.Parameter(torch.ones(4, 3))
    ours = Dion([{"params": [table], "algorithm": "adamw", "lr": 0.1, "weight_decay": 0.2}], betas=(0.8, 0.9))
    torchs = torch.optim.AdamW([same], lr=0.1, weight_decay=0.2, betas=(0.8, 0.9))
    for step in range(4):
        for parameter, optimizer in ((table, ours), (same, torchs)):
            parameter.grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            optimizer.step()
    assert torch.equal(table, same)


def test_groups_mix_algorithms() -> None:
    first, second = nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.zeros(6, 4))
    optimizer = Dion([{"params": [first], "rank": 1}, {"params": [second], "algorithm": "muon"}], lr=0.1)
    first.grad, second.grad = gradients((6, 4), 1)[0].float(), gradients((6, 4), 1)[0].float()
    optimizer.step()
    assert [int(torch.linalg.matrix_rank(p)) for p in (first, second)] == [1, 4]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_changes_nothing(
    name: str, bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = trained(MAKERS[name], 2)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model.table.weight.grad[3, 1] = bad  # type: ignore[index]
    with caplog.at_level(logging.WARNING):
        optimizer.step()
    assert optimizer.skipped == 1 and "not finite" in caplog.text
    after = (model.state_dict(), optimizer.state_dict())
    old, new = tree_leaves(before), tree_leaves(after)
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(old, new, strict=True))


def test_pickles_and_copies() -> None:
    model, optimizer = trained(MAKERS["dion"], 2)
    twin = pickle.loads(pickle.dumps(optimizer))
    assert twin.skipped == 0 and len(twin.param_groups) == 2
    assert [g["rank"] for g in twin.param_groups] == [0.25, 0.25]
    del model


REFUSED: list[tuple[dict[str, Any], tuple[int, ...], torch.dtype, str]] = [
    ({}, (4,), torch.float32, "no matrix"),
    ({}, (2, 3, 4), torch.float32, "no matrix"),
    ({}, (4, 4), torch.bfloat16, "bfloat16"),
    ({}, (4, 4), torch.complex64, "complex64"),
    ({"rank": 0}, (4, 4), torch.float32, "rank 0"),
    ({"rank": 1.5}, (4, 4), torch.float32, "rank 1.5"),
    ({"momentum": 1.0}, (4, 4), torch.float32, "momentum"),
    ({"lr": -1.0}, (4, 4), torch.float32, "negative"),
    ({"wire": torch.float16}, (4, 4), torch.float32, "bfloat16"),
]


@pytest.mark.parametrize(("options", "shape", "dtype", "words"), REFUSED)
def test_refuses_by_name(options: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Dion([("layer.weight", nn.Parameter(torch.zeros(shape, dtype=dtype)))], **options)


def test_refuses_algorithms_and_sparse_gradients() -> None:
    with pytest.raises(UsageError, match="'lion'"):
        Muon([{"params": [nn.Parameter(torch.zeros(2, 2))], "algorithm": "lion"}])
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = Dion([{"params": [("table.weight", table.weight)], "algorithm": "adamw"}])
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match=r"table\.weight.*sparse"):
        optimizer.step()
