"""L-GreCo: fewer bytes than the uniform level at no more error, for ranks and for bits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mycel.data_parallel.compress import Compressor, Context, PowerSGD, Quantised
from mycel.data_parallel.lgreco import LGreCo
from mycel.errors import UsageError


def gradients(seed: int = 0) -> dict[str, Tensor]:
    """Layers of different sizes, magnitudes and spectra, and a vector."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, rows, columns, decay, scale in (
        ("embedding", 256, 96, 1.5, 3.0),
        ("up", 96, 256, 0.2, 1.0),
        ("down", 256, 96, 0.5, 0.3),
        ("out", 96, 96, 1.0, 0.1),
    ):
        left, _ = torch.linalg.qr(torch.randn(rows, min(rows, columns), generator=generator))
        right, _ = torch.linalg.qr(torch.randn(columns, min(rows, columns), generator=generator))
        spectrum = torch.arange(1, min(rows, columns) + 1) ** -decay
        found[name] = scale * (left * spectrum) @ right.T
    return found | {"norm": torch.randn(96, generator=generator)}


def settle(policy: LGreCo, steps: int, *, begin: int = 0) -> dict[str, Compressor | None]:
    """As a training loop asks and tells."""
    chosen: dict[str, Compressor | None] = {}
    for step in range(begin, begin + steps):
        means = gradients()
        chosen = {name: policy.choose(name, mean.shape, step) for name, mean in means.items()}
        policy.observe(means, step)
    return chosen


@pytest.mark.parametrize("compressor", [PowerSGD(rank=8), Quantised(4, stochastic=False)], ids=["rank", "bits"])
def test_fewer_bytes_at_no_more_error_than_uniform(compressor: Compressor) -> None:
    policy = LGreCo(compressor, every=5, window=3)
    chosen = settle(policy, 6)
    assert chosen["norm"] is None
    assert policy.solution is not None and policy.solution.is_optimal
    matrices = {name: g for name, g in gradients().items() if g.dim() == 2}
    assert {row.name for row in policy.table} == set(matrices)
    uniform_bytes = sum(compressor.wire_bytes(g.shape) for g in matrices.values())
    uniform = math.sqrt(sum(compressor.error(g, policy.uniform) ** 2 for g in matrices.values()))
    error = math.sqrt(sum(compressor.error(g, row.level) ** 2 for row in policy.table for g in [matrices[row.name]]))
    num_bytes = sum(
        c.wire_bytes(matrices[name].shape) for name, c in chosen.items() if c is not None and name in matrices
    )
    assert num_bytes == policy.solution.num_bytes < uniform_bytes
    assert error <= uniform * (1 + 1e-3)


def test_until_the_first_choice_and_outside_the_rules_nothing_is_adapted() -> None:
    compressor, other = PowerSGD(rank=8), Quantised(8)
    policy = LGreCo(compressor, every=4, window=1, rules={"up": other, "out": None})
    assert all(c in (compressor, other, None) for c in settle(policy, 4).values())
    chosen = settle(policy, 1, begin=4)
    assert (chosen["up"], chosen["out"], chosen["norm"]) == (other, None, None)
    assert {row.name for row in policy.table} == {"embedding", "down"}
    assert {type(c) for c in policy.compressors()} == {PowerSGD, Quantised}


def test_choices_are_made_again_when_gradients_change() -> None:
    policy = LGreCo(PowerSGD(rank=8), every=2, window=1)
    settle(policy, 3)
    first = {row.name: row.level for row in policy.table}
    for step in (3, 4):
        swapped = gradients()
        swapped["embedding"], swapped["down"] = 0.01 * swapped["embedding"], 30 * swapped["down"]
        for name, mean in swapped.items():
            policy.choose(name, mean.shape, step)
        policy.observe(swapped, step)
    policy.choose("up", (96, 256), 6)
    second = {row.name: row.level for row in policy.table}
    assert second["down"] > first["down"]
    assert sum(second.values()) - second["down"] < sum(first.values()) - first["down"]


def test_the_table_speaks_of_every_layer() -> None:
    policy = LGreCo(PowerSGD(rank=8), every=2, window=1)
    assert "every layer has level 8" in policy.explain()
    settle(policy, 3)
    text = policy.explain()
    assert all(name in text for name in ("embedding", "up", "down", "out"))
    assert "times fewer" in text


def test_gradients_that_are_not_finite_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    policy = LGreCo(Quantised(4), every=1, window=1)
    policy.observe({"up": torch.full((64, 64), float("inf"))}, 0)
    assert policy.choose("up", (64, 64), 1) is policy.compressor
    assert "not finite" in caplog.text


def test_levels_that_are_given_and_a_family_without_the_level() -> None:
    policy = LGreCo(PowerSGD(rank=8), every=1, window=1, levels=(16, 8, 2))
    settle(policy, 2)
    assert {row.level for row in policy.table} <= {16.0, 8.0, 2.0}
    with pytest.raises(UsageError, match="has as many bytes"):
        LGreCo(PowerSGD(rank=7))
    with pytest.raises(UsageError, match="want 1 <= window"):
        LGreCo(PowerSGD(rank=8), every=5, window=6)


def test_levels_outlive_a_restart() -> None:
    policy = LGreCo(PowerSGD(rank=8), every=4, window=1)
    chosen = settle(policy, 5)
    again = LGreCo(PowerSGD(rank=8), every=4, window=1)
    again.load_state_dict(policy.state_dict())
    for name, gradient in gradients().items():
        before, after = chosen[name], again.choose(name, gradient.shape, 5)
        assert (before is None) == (after is None)
        assert before is None or after is None or before.wire_bytes((99, 99)) == after.wire_bytes((99, 99))
    with pytest.raises(UsageError, match="has level"):
        LGreCo(PowerSGD(rank=8), levels=(8, 4)).load_state_dict(policy.state_dict())


def test_new_ranks_begin_with_what_was_seen() -> None:
    policy = LGreCo(PowerSGD(rank=8), every=5, window=3)
    chosen = settle(policy, 6)
    changed = [row for row in policy.table if row.level != policy.uniform]
    assert changed
    for row in changed:
        compressor, gradient = chosen[row.name], gradients()[row.name]
        assert compressor is not None
        context = Context(name=row.name)
        found = compressor.decompress(compressor.compress(gradient, context), gradient.shape, context)
        assert float((found - gradient).norm()) <= 1.05 * row.error


def test_chosen_compressors_work() -> None:
    policy = LGreCo(Quantised(4, stochastic=False), every=1, window=1)
    settle(policy, 2)
    for name, gradient in gradients().items():
        compressor = policy.choose(name, gradient.shape, 2)
        if compressor is not None:
            context = Context(name=name)
            found = compressor.decompress(compressor.compress(gradient, context), gradient.shape, context)
            assert float((found - gradient).norm()) < float(gradient.norm())
