"""Direct feedback equals a loop in numpy, however the model is divided; bytes are those computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.distributed.checks import direct_feedback as checks
from tests.effort import long
from torch import Tensor, nn

from mycel.errors import UsageError
from mycel.parallel.direct_feedback import DirectFeedback, feedback_bytes, feedback_matrix
from mycel.parallel.direct_feedback.errors import ErrorForm
from mycel.wire.noise import uniform

RunRanks = Callable[..., list[Any]]
Array = np.ndarray[Any, Any]


def by_hand(classes: int, error_of: Callable[[Array], Array] = lambda e: e) -> list[Array]:
    """Gradients from the formula, layer by layer."""
    x, target = (t.numpy() for t in checks.data(classes))
    weights = [(m.weight.detach().numpy(), m.bias.detach().numpy()) for m in checks.layers(classes) if is_linear(m)]
    inputs, outputs = [x], []
    for w, b in weights[:-1]:
        outputs.append(np.tanh(inputs[-1] @ w.T + b))
        inputs.append(outputs[-1])
    logits = inputs[-1] @ weights[-1][0].T + weights[-1][1]
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    e = (shifted / shifted.sum(1, keepdims=True) - np.eye(classes)[target]) / len(x)
    columns = min(classes, max(checks.WIDTHS[1:]))
    sent = e if columns == classes else e @ feedback_matrix(checks.SEED, -1, classes, columns).numpy()
    sent = error_of(sent)
    found: list[Array] = []
    for block, (h_in, h_out) in enumerate(zip(inputs, outputs, strict=False)):
        delta = (sent @ feedback_matrix(checks.SEED, block, columns, h_out.shape[1]).numpy()) * (1 - h_out**2)
        found += [delta.T @ h_in, delta.sum(0)]
    return [*found, e.T @ inputs[-1], e.sum(0)]


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def in_three_values(e: Array) -> Array:
    """By the definition, in the first step: a row's largest size, or 0, as chance has it, and the sign."""
    chances = uniform(checks.SEED * 1_000_003 + 1, e.size).numpy().reshape(e.shape)
    found = np.zeros_like(e)
    for row, own, drawn in zip(found, e, chances, strict=True):
        kept = drawn < np.abs(own) / np.abs(own).max()
        row[kept] = np.sign(own[kept]) * np.abs(own).max()
    return found


def agree(found: list[Tensor], expected: list[Array]) -> None:
    assert len(found) == len(expected)
    for own, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(own.numpy(), wanted, atol=2e-6, rtol=1e-4)


CASES = [(4, 1, "float32"), (4, 3, "float32"), (20, 2, "float32"), (4, 2, "ternary")]


@pytest.mark.parametrize(("classes", "micro_batches", "error"), CASES)
def test_one_process_has_the_formulas_gradients(classes: int, micro_batches: int, error: str) -> None:
    with checks.alone():
        found = checks.gradients(0, 1, classes, micro_batches, error)
    agree(found["grads"], by_hand(classes, in_three_values if error == "ternary" else lambda e: e))


@pytest.mark.parametrize(
    ("world_size", "backend"),
    [(3, "mycel"), pytest.param(2, "gloo", marks=long), pytest.param(4, "gloo", marks=long)],
)
def test_any_division_has_the_same_gradients(run_ranks: RunRanks, world_size: int, backend: str) -> None:
    answers = run_ranks(world_size, "direct_feedback", "everything", backend=backend)
    for classes, micro, error in CASES:
        key = f"{classes} {micro} {error}"
        agree(
            [grad for one in answers for grad in one[key]["grads"]],
            by_hand(classes, in_three_values if error == "ternary" else lambda e: e),
        )
        per = max(1, 5 // world_size)
        for rank, one in enumerate(answers):
            last = rank == world_size - 1
            assert one[key]["columns"] == min(classes, max(checks.WIDTHS[1:]))
            assert one[key]["sent"]["error"] == (one[key]["expected"] * (world_size - 1) if last else 0)
            forward = 0 if last else 4 * checks.EXAMPLES * checks.WIDTHS[per * (rank + 1)]
            assert one[key]["sent"]["forward"] == forward
            assert one[key]["waited"] and (one[key]["loss"] is None) != last
    for one in answers:
        lacking, other = one["complaints"]
        assert lacking == f"rank {world_size - 1} has the end of the model and no loss; give DirectFeedback one"
        assert other.startswith("rank 1 was given (micro_batches, ternary, seed) (2, 0, 0), rank 0 (1, 0, 0)")


def test_a_ternary_error_keeps_a_scale_a_row_and_its_mean() -> None:
    error = torch.randn(7, 13, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 0, 7).unsqueeze(1)
    form = ErrorForm(name="ternary")
    largest = error.abs().amax(1, keepdim=True)
    total, draws = torch.zeros(7, 13, dtype=torch.float64), 4000
    for seed in range(draws):
        payload = form.encode(error, seed)
        assert payload.numel() == feedback_bytes(7, 13, 99, "ternary") == 4 * 7 + -(-7 * 13 // 5)
        decoded = form.decode(payload, 7, 13)
        assert bool(((decoded == 0) | (decoded == error.sign() * largest)).all())
        total += decoded
    # Five standard deviations of the mean of so many draws, which are at most half the scale each.
    assert float(((total / draws - error) / largest).abs().max()) < 5 * 0.5 / draws**0.5


def test_alignment_falls_below_a_right_angle() -> None:
    """The weights learn to make the random feedback useful: its angle to the true gradient becomes acute."""
    made = torch.Generator().manual_seed(5)
    x = torch.randn(64, 10, generator=made)
    target = (x[:, :2].sum(1) > 0).long()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))

    def cosine() -> float:
        own = [p.grad.clone() for p in model[0].parameters() if p.grad is not None]
        true = torch.autograd.grad(nn.functional.cross_entropy(model(x), target), list(model[0].parameters()))
        a, b = (torch.cat([g.reshape(-1) for g in some]) for some in (own, true))
        return float(nn.functional.cosine_similarity(a, b, dim=0))

    with checks.alone():
        trainer = DirectFeedback(model, nn.functional.cross_entropy, seed=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(100):
            optimizer.zero_grad()
            trainer.step(x, target=target)
            optimizer.step()
        optimizer.zero_grad()
        trainer.step(x, target=target)
        assert cosine() > 0.2
        assert float((model(x).argmax(1) == target).float().mean()) > 0.95


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda t: t.step(target=torch.zeros(2)), "rank 0 has an end of the model: step needs a batch there"),
        (lambda t: t.step(torch.ones(2, 4)), "step needs a target there"),
        (
            lambda t: t.step(torch.ones(3, 4), target=torch.zeros(3)),
            "batch of 3 examples: cannot be cut into 2 equal",
        ),
        (lambda t: DirectFeedback(nn.Linear(2, 2), nn.functional.mse_loss, error="2 bits"), "unknown form of errors"),
        (
            lambda t: DirectFeedback(nn.Linear(2, 2), nn.functional.mse_loss, micro_batches=0),
            "micro_batches: 0 is not at least 1",
        ),
    ],
)
def test_what_makes_no_sense_is_said(call: Callable[[DirectFeedback], Any], says: str) -> None:
    with checks.alone():
        trainer = DirectFeedback(nn.Linear(4, 2), nn.functional.cross_entropy, micro_batches=2)
        with pytest.raises(UsageError, match=says):
            call(trainer)
