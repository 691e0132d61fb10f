"""examples/diffusion_schedule: steps that are left out are longer jumps, costs are counted, searches repeat."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

import denoiser
import search_schedule
from denoiser import BLOCKS, STEPS, Denoiser, Segment, uniform
from search_schedule import Settings

from mycel.errors import UsageError

SMALL = Settings(segments=5, budget=7.0, population=6, kept=3, generations=2, pictures=48)


@pytest.fixture(scope="module")
def model() -> Denoiser:
    return denoiser.train(60, 0)


def test_partial_steps_right_after_a_full_one_are_full_ones(model: Denoiser) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for branch in range(BLOCKS):
            whole, kept = model.full(x, 500, branch)
            assert torch.allclose(whole, model(x, 500), atol=1e-6)
            assert torch.allclose(model.partial(x, 500, branch, kept), whole, atol=1e-6)


def test_work_is_counted_in_multiplications(model: Denoiser) -> None:
    width = 96
    ends = 64 * width + 32 * width + width * 64
    assert model.work(0) == ends
    assert model.work() == ends + BLOCKS * 4 * width * width
    assert denoiser.cost(model, uniform(10)) == 10
    assert denoiser.cost(model, uniform(STEPS)) == STEPS
    mixed = (Segment(25, 3, 1), Segment(25, 1, 2))
    assert denoiser.cost(model, mixed) == pytest.approx(2 + 2 * model.work(1) / model.work())


def test_all_active_full_steps_are_the_teacher(model: Denoiser) -> None:
    noise = search_schedule.noise(8, 1)
    wanted = denoiser.sample(model, uniform(STEPS), noise)
    assert wanted.abs().max() <= 1.2
    assert not torch.allclose(denoiser.sample(model, uniform(10), noise), wanted, atol=1e-3)


def test_null_steps_are_one_longer_jump() -> None:
    """For a model whose prediction is the noise that there is, every schedule ends with the picture."""

    class Knowing(Denoiser):
        def full(self, x: torch.Tensor, level: int, branch: int) -> tuple[torch.Tensor, torch.Tensor]:
            left = denoiser.alphas()[level]
            return (x - left.sqrt() * picture) / (1 - left).sqrt(), x

    picture = torch.linspace(-0.9, 0.9, 64)
    start = denoiser.alphas()[-1]
    x = start.sqrt() * picture + (1 - start).sqrt() * torch.randn(2, 64, generator=torch.Generator().manual_seed(3))
    for schedule in (uniform(STEPS), uniform(7), (Segment(50, 1, 0),)):
        assert torch.allclose(denoiser.sample(Knowing(), schedule, x), picture.expand(2, -1), atol=5e-3)


def test_the_distance_of_normal_distributions_is_the_formula() -> None:
    random = np.random.default_rng(0)
    one = random.normal(size=(40_000, 2))
    assert denoiser.frechet(one, one) == pytest.approx(0, abs=1e-9)
    assert denoiser.frechet(one, one + np.array([3.0, 4.0])) == pytest.approx(25.0, abs=1e-9)
    assert denoiser.frechet(one, 2 * one) == pytest.approx(2.0, rel=0.05)  # (2 - 1)^2 in both directions


def test_searches_keep_to_the_budget_repeat_and_get_no_worse(model: Denoiser) -> None:
    found = search_schedule.search(model, SMALL)
    assert denoiser.cost(model, found.schedule) <= SMALL.budget
    assert sum(s.steps for s in found.schedule) == STEPS
    assert found.course == sorted(found.course, reverse=True)
    assert found.exchanged == found.judged > SMALL.population
    assert search_schedule.search(model, SMALL).schedule == found.schedule
    judged = search_schedule.scores(
        model,
        [found.schedule],
        search_schedule.noise(SMALL.pictures, 101),
        search_schedule.teacher(model, SMALL.pictures, 202),
    )
    assert judged == [found.distance]


def test_impossible_schedules_and_searches_are_refused(model: Denoiser) -> None:
    with pytest.raises(ValueError, match="0 active steps of 5"):
        Segment(5, 0, 0)
    with pytest.raises(ValueError, match="branch 4 of 4 blocks"):
        Segment(5, 1, 4)
    with pytest.raises(ValueError, match="segments of 5 steps; the teacher has 50"):
        denoiser.sample(model, (Segment(5, 1, 0),), torch.zeros(1, 64))
    with pytest.raises(UsageError, match="7 segments of 50 steps are not equal"):
        replace(SMALL, segments=7)
    with pytest.raises(UsageError, match=r"a budget of 2\.0 full steps"):
        replace(SMALL, budget=2.0)


def test_the_table_compares_with_uniform_steps(model: Denoiser) -> None:
    found = search_schedule.Found(tuple(Segment(10, 2, 1) for _ in range(5)))
    made = search_schedule.table(search_schedule.compare(model, found, seeds=2, pictures=40))
    assert made.count("\n") == 6 and "| searched |" in made and "| 10 uniform full steps | 10.00 | 1.00 |" in made
