"""Weights of tasks equal those of independent solvers; what methods promise holds; strange gradients end well."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear, minimize
from tests.rank_threads import on_ranks

from mycel.data_parallel.combine.tasks import (
    FAMO,
    IMTLG,
    MGDA,
    AlignedMTL,
    CAGrad,
    GradNorm,
    GradVac,
    NashMTL,
    PCGrad,
    UncertaintyWeighting,
    UPGrad,
)
from mycel.data_parallel.combine.tasks.base import shares_of_tasks
from mycel.data_parallel.combine.tasks.by_gram import _spread
from mycel.data_parallel.combine.tasks.quadratic import Matrix, Vector
from mycel.errors import UsageError

try:
    from torchjd import aggregation as torchjd
except ImportError:  # what it is asked about is solved by other means as well, below
    torchjd = None
needs_torchjd = pytest.mark.skipif(torchjd is None, reason="torchjd is not installed: an oracle for development only")

KINDS = ("random", "conflicting", "parallel", "zeros")
BY_GRAM = (MGDA, PCGrad, CAGrad, IMTLG, NashMTL, AlignedMTL, UPGrad, GradVac)


def jacobian(kind: str, size: int, seed: int = 0) -> Matrix:
    """Gradients of ``size`` tasks, ``[size, 40]``."""
    made = np.random.default_rng([size, seed]).normal(size=(size, 40))
    if kind == "conflicting":
        made[1:] -= 1.5 * made[0]
    if kind == "parallel":
        made[1:] = np.arange(2, size + 1)[:, None] * made[0] * np.where(np.arange(size - 1) % 2, -1, 1)[:, None]
    if kind == "zeros":
        made[-1] = 0
    return made


def cases() -> list[tuple[str, int]]:
    return list(product(KINDS, range(2, 9)))


def simplex(size: int, parts: int) -> Iterator[Vector]:
    """A grid over weights of sum 1."""
    for counts in product(range(parts + 1), repeat=size - 1):
        if sum(counts) <= parts:
            yield np.array([*counts, parts - sum(counts)]) / parts


# -- beside torchjd ---------------------------------------------------------------------------------------------


@needs_torchjd
@pytest.mark.parametrize(("kind", "size"), cases())
def test_weights_are_those_of_torchjd(kind: str, size: int) -> None:
    """Closed forms. Its UPGrad needs solvers that are not installed with it: see below."""
    made = jacobian(kind, size)
    gram = made @ made.T
    given = torch.tensor(gram)
    for ours, theirs in [(IMTLG(), torchjd.IMTLG()), (AlignedMTL(), torchjd.AlignedMTL())]:
        wanted = theirs.gramian_weighting(given).numpy()
        assert np.abs(ours.weights(gram) - wanted).max() < 1e-6, type(ours).__name__


@needs_torchjd
@pytest.mark.parametrize(("kind", "size"), cases())
def test_mgda_is_no_longer_than_torchjds(kind: str, size: int) -> None:
    """Frank-Wolfe creeps: where it has arrived weights are equal, and elsewhere ours are better."""
    made = jacobian(kind, size)
    gram = made @ made.T
    theirs = torchjd.MGDA(epsilon=1e-12, max_iters=1000).gramian_weighting(torch.tensor(gram)).numpy()
    ours = MGDA().weights(gram)
    assert ours @ gram @ ours <= theirs @ gram @ theirs + 1e-9 * np.trace(gram)
    if kind == "random" and size < 5:
        assert np.abs(ours - theirs).max() < 1e-6


@needs_torchjd
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_projections_with_torchjds_order_are_torchjds(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = jacobian("conflicting", size)
    gram = made @ made.T
    others = [[j for j in range(size) if j != own] for own in range(size)]
    monkeypatch.setattr(torch, "randperm", lambda n, **_: torch.arange(n))
    for ours, theirs in [(PCGrad(), torchjd.PCGrad()), (GradVac(decay=0.5), torchjd.GradVac(beta=0.5))]:
        monkeypatch.setattr(ours, "orders", lambda _: others)
        for step in range(3):
            wanted = theirs.gramian_weighting(torch.tensor(gram)).numpy()
            assert np.abs(ours.weights(gram) - wanted).max() < 1e-6, (type(ours).__name__, step)


# -- beside solvers that are always there -----------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "size"), cases())
def test_the_nearest_point_is_optimal(kind: str, size: int) -> None:
    """Optimality of a convex problem: no vertex is less along the gradient than the point itself."""
    made = jacobian(kind, size)
    gram = made @ made.T
    for method in (MGDA(), MGDA(normalised=True)):
        weights = method.weights(gram)
        if method.normalised:
            lengths = np.sqrt(np.diag(gram))
            there = lengths > 0
            assert np.all(weights[~there] == 0)
            made_there = made[there] / lengths[there, None]
            point, hull = made.T @ weights, made_there
            if there.all():
                assert np.all(hull @ point >= point @ point - 1e-9)
            continue
        assert abs(weights.sum() - 1) < 1e-12
        assert (weights >= 0).all()
        point = made.T @ weights
        assert np.all(made @ point >= point @ point - 1e-9 * np.trace(gram))


@pytest.mark.parametrize(("kind", "size"), [(k, s) for k in KINDS for s in (2, 3)])
def test_no_point_of_a_grid_is_better(kind: str, size: int) -> None:
    made = jacobian(kind, size)
    gram = made @ made.T
    mean = np.full(size, 1 / size)
    reach = 0.5 * float(np.sqrt(float(mean @ gram @ mean)))

    def worst(weights: Vector) -> float:
        return float(weights @ gram @ mean + reach * np.sqrt(max(float(weights @ gram @ weights), 0.0)))

    nearest, moved = MGDA().weights(gram), CAGrad(0.5).weights(gram) - mean
    least = moved / moved.sum() if moved.sum() > 1e-9 else mean
    for weights in simplex(size, 60):
        assert nearest @ gram @ nearest <= weights @ gram @ weights + 1e-9
        if moved.sum() > 1e-9:
            assert worst(least) <= worst(weights) + 1e-7 * np.trace(gram)


@pytest.mark.parametrize(("kind", "size"), [(k, s) for k in ("random", "conflicting") for s in (2, 4, 8)])
def test_cagrad_equals_a_general_solver(kind: str, size: int) -> None:
    made = jacobian(kind, size)
    gram = made @ made.T / 40
    mean = np.full(size, 1 / size)
    reach = 0.4 * np.sqrt(mean @ gram @ mean)

    def worst(weights: Vector) -> float:
        return float(weights @ gram @ mean + reach * np.sqrt(weights @ gram @ weights + 1e-16))

    found = minimize(
        worst,
        mean,
        bounds=[(0, 1)] * size,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 500},
    )
    ours = CAGrad(0.4).weights(gram) - mean
    ours /= ours.sum()
    assert worst(ours) <= worst(found.x) + 1e-12
    assert np.abs(ours - found.x).max() < 1e-4  # the function is flat there, and the general solver the less exact


@pytest.mark.parametrize(("kind", "size"), [(k, s) for k in ("random", "conflicting", "zeros") for s in range(2, 9)])
def test_the_bargain_holds(kind: str, size: int) -> None:
    made = jacobian(kind, size)
    gram = made @ made.T
    weights = NashMTL(max_norm=None).weights(gram)
    taking_part = np.diag(gram) > 0
    assert (weights[taking_part] > 0).all()
    assert (weights[~taking_part] == 0).all()
    assert np.abs((gram @ weights)[taking_part] * weights[taking_part] - 1).max() < 1e-6
    step = made.T @ NashMTL().weights(gram)
    assert np.linalg.norm(step) < 1 + 1e-9


@pytest.mark.parametrize(("kind", "size"), cases())
def test_upgrad_equals_bounded_least_squares(kind: str, size: int) -> None:
    """Each projection as the published programme on the gradients themselves, by another method (BVLS)."""
    made = jacobian(kind, size)
    projected = []
    for own in np.eye(size):
        found = lsq_linear(made.T, np.zeros(made.shape[1]), (own, np.inf), method="bvls", tol=1e-14, max_iter=500)
        projected.append(found.x)
    wanted, weights = np.mean(projected, axis=0), UPGrad().weights(made @ made.T)
    assert np.abs(made.T @ (weights - wanted)).max() < 1e-6 * np.abs(made).max()
    if kind in ("random", "conflicting"):  # elsewhere several weights give one vector
        assert np.abs(weights - wanted).max() < 1e-6


@pytest.mark.parametrize(("kind", "size"), cases())
def test_pcgrad_equals_the_explicit_form(kind: str, size: int) -> None:
    """The published algorithm on whole vectors."""
    made = jacobian(kind, size)
    method = PCGrad(seed=3)
    total = np.zeros(made.shape[1])
    for own, others in enumerate(method.orders(size)):
        vector = made[own].copy()
        for other in others:
            along = float(vector @ made[other])
            if along < 0:
                vector -= along / float(made[other] @ made[other]) * made[other]
        total += vector
    assert np.abs(made.T @ method.weights(made @ made.T) - total).max() < 1e-9 * (1 + np.abs(made).max())


@pytest.mark.parametrize(("kind", "size"), cases())
def test_no_conflict_is_left_where_that_is_promised(kind: str, size: int) -> None:
    made = jacobian(kind, size)
    gram = made @ made.T
    for method in (MGDA(), UPGrad()) if size > 2 else (MGDA(), UPGrad(), PCGrad()):
        assert (gram @ method.weights(gram) >= -1e-8 * np.trace(gram)).all(), type(method).__name__
    lengths = np.sqrt(np.diag(gram))
    if kind in ("random", "conflicting"):
        along = gram @ IMTLG().weights(gram) / lengths
        assert np.abs(along - along[0]).max() < 1e-8 * np.abs(lengths).max()


@pytest.mark.parametrize("method", BY_GRAM)
def test_equal_and_missing_gradients(method: type) -> None:
    """Of one gradient K times there is a multiple of it; of zeros there are zeros; always finite."""
    for size in (1, 2, 5):
        made = np.tile(np.arange(1.0, 6.0), (size, 1))
        found = made.T @ method().weights(made @ made.T)
        assert np.abs(found / found[0] - made[0]).max() < 1e-6, (method.__name__, size)
        assert found[0] > 0
        assert np.isfinite(method().weights(np.zeros((size, size)))).all()


def test_the_order_is_of_the_step_and_of_the_seed() -> None:
    orders = []
    for seed, step in [(0, 0), (0, 0), (0, 1), (1, 0)]:
        method = PCGrad(seed=seed)
        method.step = step
        orders.append(method.orders(8))
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != orders[3]


# -- by losses ---------------------------------------------------------------------------------------------------


def test_famo_goes_the_way_of_its_equations() -> None:
    """Written again from the published equations, with torch's Adam and autograd."""
    losses = np.abs(np.random.default_rng(0).normal(size=(6, 3))) + 0.1
    after = losses * np.random.default_rng(1).uniform(0.5, 1.1, size=losses.shape)
    ours = FAMO(rate=0.1, decay=0.01)
    xi = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([xi], lr=0.1, weight_decay=0.01)
    for step in range(6):
        told = after[step - 1] if step else np.full(3, -1.0)
        found = ours.update(np.stack([losses[step], told], axis=1))
        if step:
            delta = torch.tensor(np.log(losses[step - 1]) - np.log(after[step - 1]))
            (xi.grad,) = torch.autograd.grad(torch.softmax(xi, 0), xi, grad_outputs=delta)
            adam.step()
        z = torch.softmax(xi.detach(), 0).numpy()
        wanted = z / losses[step] / (z / losses[step]).sum()
        assert np.abs(found - wanted).max() < 1e-10


def test_grad_norm_balances_lengths() -> None:
    method = GradNorm(alpha=0.0, rate=0.02)
    lengths = np.array([1.0, 4.0, 0.5])
    for _ in range(2000):
        weights = method.update(np.stack([np.ones(3), lengths], axis=1))
    assert weights.sum() == pytest.approx(3)
    assert weights * lengths == pytest.approx(np.full(3, (weights * lengths).mean()), rel=0.2)


def test_uncertainty_settles_at_half_the_inverse_loss() -> None:
    method = UncertaintyWeighting(rate=0.05)
    for _ in range(2000):
        weights = method.update(np.array([[2.0], [0.1]]))
    assert weights == pytest.approx([0.25, 5.0], rel=0.02)


@pytest.mark.parametrize("method", [FAMO, GradNorm, UncertaintyWeighting, GradVac, PCGrad])
def test_what_was_learned_goes_on(method: type, tmp_path: object) -> None:
    def heard(step: int) -> Matrix:
        made = np.random.default_rng(step).uniform(0.5, 2.0, size=(3, 2))
        return made @ made.T if method in (GradVac, PCGrad) else made

    def go(combiner: Any, step: int) -> Vector:
        combiner.step = step
        found: Vector = getattr(combiner, "update" if hasattr(combiner, "update") else "weights")(heard(step))
        return found

    straight = method()
    for step in range(4):
        go(straight, step)
    state = straight.state_dict()
    torch.save(state, f"{tmp_path}/state")
    resumed = method()
    resumed.load_state_dict(torch.load(f"{tmp_path}/state", weights_only=True))
    assert resumed.step == 3
    assert (go(resumed, 4) == go(straight, 4)).all()


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="without gaps"):
        MGDA(tasks=(0, 2))
    with pytest.raises(UsageError, match="2 ranks were given, and the group has 3"):
        shares_of_tasks((0, 1), 3)
    for make in (
        lambda: CAGrad(-1.0),
        lambda: NashMTL(max_norm=0.0),
        lambda: GradVac(decay=2.0),
        lambda: FAMO(rate=0.0),
        lambda: GradNorm(alpha=-1.0),
        lambda: UncertaintyWeighting(rate=-1.0),
        lambda: PCGrad(seed=-1),
    ):
        with pytest.raises(UsageError):
            make()


@pytest.mark.parametrize("length", [1, 7])
def test_shares_of_several_versions_even_where_a_rank_has_none(length: int) -> None:
    versions = torch.arange(6.0 * length).view(6, length)  # two of each of three ranks
    found = on_ranks(3, lambda rank, group: _spread(list(versions[2 * rank : 2 * rank + 2].unbind()), group))
    assert torch.equal(torch.cat(found, dim=1), versions)
    assert [len(rows) for rows in found] == [6, 6, 6]
