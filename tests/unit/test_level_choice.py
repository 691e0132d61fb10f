"""Choosing levels by layer: optimal against brute force and against a mixed-integer programme."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from mycel.data_parallel.level_choice import choose_levels
from mycel.errors import UsageError

Table = list[list[tuple[int, float]]]

tables = st.lists(
    st.lists(st.tuples(st.integers(0, 60), st.floats(0, 10)), min_size=1, max_size=4), min_size=1, max_size=5
)


def split(table: Table) -> tuple[list[list[int]], list[list[float]]]:
    return [[size for size, _ in row] for row in table], [[error for _, error in row] for row in table]


@given(table=tables, share=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_no_choice_is_better(table: Table, share: float) -> None:
    sizes, errors = split(table)
    least, most = sum(map(min, errors)), sum(map(max, errors))
    budget = least + share * (most - least)
    within = [
        sum(size for size, _ in choice)
        for choice in itertools.product(*table)
        if sum(error for _, error in choice) <= budget * (1 - 1e-9)
    ]
    found = choose_levels(sizes, errors, budget, tolerance=0.0)
    assert found.is_optimal
    assert found.error <= budget * (1 + 1e-9)
    assert found.num_bytes == sum(row[level] for row, level in zip(sizes, found.levels, strict=True))
    assert found.error == pytest.approx(sum(row[level] for row, level in zip(errors, found.levels, strict=True)))
    assert found.num_bytes <= min(within, default=found.num_bytes)


@pytest.mark.parametrize("tiny", [1e-310, 1.3e-253, 1e-160, 1e-30])
def test_errors_of_any_magnitude_are_told_apart(tiny: float) -> None:
    assert choose_levels([[0, 1]], [[tiny, 0.0]], 0.0).levels == (1,)
    assert choose_levels([[0, 1], [0, 1]], [[tiny, 0.0], [3.0, 0.0]], 0.0).levels == (1, 1)
    assert choose_levels([[0, 1], [0, 1]], [[tiny, 0.0], [3.0, 0.0]], tiny).levels == (0, 1)
    assert choose_levels([[0, 1]], [[tiny, 0.0]], 1e308).levels == (0,)
    assert choose_levels([[2, 1]], [[1e308, 1e308]], 1.5e308).levels == (1,)


def by_milp(sizes: list[list[int]], errors: list[list[float]], budget: float) -> float:
    cost = np.concatenate([np.asarray(row, float) for row in sizes])
    layer = np.concatenate([np.full(len(row), number) for number, row in enumerate(sizes)])
    one_each = (layer[None, :] == np.arange(len(sizes))[:, None]).astype(float)
    limits = [LinearConstraint(one_each, 1, 1), LinearConstraint(np.concatenate(errors)[None, :], 0, budget)]
    solved = milp(cost, constraints=limits, integrality=np.ones(len(cost)), bounds=Bounds(0, 1))
    assert solved.success
    return float(solved.fun)


def layers(count: int, seed: int) -> tuple[list[list[int]], list[list[float]]]:
    """Sizes and errors such as layers of a network have at 10 ranks."""
    rng = np.random.default_rng(seed)
    ranks = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32])
    rows, columns, weight, decay = (
        rng.integers(16, 512, count),
        rng.integers(16, 512, count),
        rng.lognormal(0, 1, count),
        rng.uniform(0.3, 1.5, count),
    )
    sizes = 4 * (rows + columns)[:, None] * ranks
    errors = (weight * rows * columns)[:, None] * ranks ** -decay[:, None]
    return sizes.tolist(), errors.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_as_few_bytes_as_a_mixed_integer_programme_finds(seed: int) -> None:
    sizes, errors = layers(12, seed)
    budget = sum(row[3] for row in errors)
    assert choose_levels(sizes, errors, budget, tolerance=0.0).num_bytes == round(by_milp(sizes, errors, budget))


def test_five_hundred_layers() -> None:
    sizes, errors = layers(500, 0)
    budget = sum(row[4] for row in errors)
    found = choose_levels(sizes, errors, budget)
    assert found.error <= budget
    assert found.bound <= found.num_bytes <= 1.0005 * found.bound
    assert found.num_bytes < sum(row[4] for row in sizes)


def test_with_few_states_the_result_is_valid_and_its_distance_known() -> None:
    sizes, errors = layers(30, 1)
    budget = sum(row[4] for row in errors)
    exact = choose_levels(sizes, errors, budget, tolerance=0.0)
    rough = choose_levels(sizes, errors, budget, tolerance=0.0, max_states=2)
    assert not rough.is_optimal
    assert rough.error <= budget
    assert rough.bound <= exact.num_bytes <= rough.num_bytes


def test_equal_levels_and_no_budget_at_all() -> None:
    assert choose_levels([[5, 3, 3]], [[0.0, 0.0, 0.0]], 0.0).num_bytes == 3
    assert choose_levels([[5, 0]], [[0.0, 1.0]], 0.0).levels == (0,)


@pytest.mark.parametrize(
    ("sizes", "errors", "budget", "message"),
    [
        ([], [], 1.0, "at least one layer"),
        ([[1]], [[0.1], [0.2]], 1.0, "1 layers and errors of 2"),
        ([[1, 2]], [[0.1]], 1.0, "layer 0 has 2 sizes and 1 errors"),
        ([[1], [2]], [[0.1], [float("nan")]], 1.0, "layer 1"),
        ([[1, 2]], [[3.0, 2.0]], 1.0, "below 2; the budget is 1"),
    ],
)
def test_what_makes_no_sense_is_refused(
    sizes: list[list[int]], errors: list[list[float]], budget: float, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        choose_levels(sizes, errors, budget)
