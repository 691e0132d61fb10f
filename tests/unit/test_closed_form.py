"""Ridge layers: any division of the examples gives one model, that of the formula; signs hang on no order."""

from __future__ import annotations

import io
import itertools
import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mycel.data_parallel import closed_form
from mycel.data_parallel.closed_form.over_ranks import exchange_numbers
from mycel.errors import UsageError

RIDGE = 0.05
WIDTH, OUTPUTS = 7, 3


def examples(num: int, activation: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(num, WIDTH, generator=made, dtype=torch.float64)
    z = x @ torch.randn(WIDTH, OUTPUTS, generator=made, dtype=torch.float64) / 4
    z += 0.3 * torch.randn(num, OUTPUTS, generator=made, dtype=torch.float64)
    return x, {"linear": z, "logistic": z.sigmoid(), "tanh": z.tanh()}[activation]


def by_formula(x: Tensor, d: Tensor, activation: str, *, bias: bool) -> np.ndarray[Any, Any]:
    """Least squares as a textbook has it: rows weighted by slopes, the ridge as further rows."""
    inputs, targets = x.numpy(), d.numpy()
    if bias:
        inputs = np.hstack([inputs, np.ones((len(inputs), 1))])
    columns = []
    for wanted in targets.T:
        if activation == "linear":
            z, slope = wanted, np.ones_like(wanted)
        elif activation == "logistic":
            z, slope = np.log(wanted / (1 - wanted)), wanted * (1 - wanted)
        else:
            z, slope = np.arctanh(wanted), 1 - wanted**2
        rows = np.vstack([inputs * slope[:, None], RIDGE**0.5 * np.eye(inputs.shape[1])])
        columns.append(np.linalg.lstsq(rows, np.concatenate([z * slope, np.zeros(inputs.shape[1])]), rcond=None)[0])
    return np.stack(columns, axis=1)


@pytest.mark.parametrize("activation", ["linear", "logistic", "tanh"])
@pytest.mark.parametrize("form", ["factors", "sums"])
@pytest.mark.parametrize("num", [4, 60])
def test_weights_are_the_formulas(activation: str, form: str, num: int) -> None:
    for bias in (False, True):
        x, d = examples(num, activation)
        parts = closed_form.ridge_parts(x, d, activation=activation, bias=bias, form=form)
        assert parts.form == form
        expected = by_formula(x, d, activation, bias=bias)
        np.testing.assert_allclose(closed_form.solve_ridge(parts, RIDGE).numpy(), expected, atol=1e-9)


@pytest.mark.parametrize("activation", ["linear", "logistic"])
@pytest.mark.parametrize("form", ["auto", "factors", "sums"])
def test_any_parts_in_any_order_are_one_model(activation: str, form: str) -> None:
    """1, 2, 3, 4 and 7 uneven parts, shuffled, at once and one by one."""
    x, d = examples(61, activation)
    whole = closed_form.solve_ridge(closed_form.ridge_parts(x, d, activation=activation, form="sums"), RIDGE)
    shuffled = random.Random(1)
    for count in (1, 2, 3, 4, 7):
        sizes = [3 + i for i in range(count - 1)]
        cuts = [*sizes, len(x) - sum(sizes)]
        parts = [
            closed_form.ridge_parts(a, b, activation=activation, form=form)
            for a, b in zip(x.split(cuts), d.split(cuts), strict=True)
        ]
        shuffled.shuffle(parts)
        at_once = closed_form.merge_parts(parts)
        one_by_one = parts[0]
        for part in parts[1:]:
            one_by_one = closed_form.merge_parts([one_by_one, part])
        assert at_once.num_examples == one_by_one.num_examples == len(x)
        for merged in (at_once, one_by_one):
            found = closed_form.solve_ridge(merged, RIDGE)
            torch.testing.assert_close(found, whole, atol=1e-9, rtol=0)


def test_data_that_come_later_are_added_to_what_was_saved() -> None:
    x, d = examples(40, "logistic")
    saved = io.BytesIO()
    torch.save(closed_form.ridge_parts(x[:11], d[:11], activation="logistic").state_dict(), saved)
    saved.seek(0)
    loaded = closed_form.RidgeParts.from_state(torch.load(saved, weights_only=True))
    later = closed_form.ridge_parts(x[11:], d[11:], activation="logistic")
    found = closed_form.solve_ridge(closed_form.merge_parts([loaded, later]), RIDGE)
    whole = closed_form.solve_ridge(closed_form.ridge_parts(x, d, activation="logistic"), RIDGE)
    torch.testing.assert_close(found, whole, atol=1e-9, rtol=0)
    with pytest.raises(UsageError, match=r"version 9, expected 'mycel.ridge_parts' version 1"):
        closed_form.RidgeParts.from_state({**loaded.state_dict(), "version": 9})


def test_the_sign_of_directions_is_the_same_in_any_order() -> None:
    """The trap: without a convention some order flips a vector, and a logistic layer on it is another layer."""
    x = examples(48, "linear", seed=3)[0]
    parts = [closed_form.ridge_parts(piece, None, bias=False, form="factors") for piece in x.split(12)]
    raw_signs, kept = set(), []
    for order in itertools.permutations(parts):
        merged = closed_form.merge_parts(order)
        raw = torch.linalg.svd(merged.second[0], full_matrices=False)[0]
        raw_signs.add(tuple(raw[0].sign().tolist()))
        kept.append(closed_form.principal_directions(merged, 4))
    assert len(raw_signs) > 1, "no order flips a sign here: the test needs other data"
    by_sums = closed_form.merge_parts([part.as_sums() for part in parts])
    for directions in [*kept, closed_form.principal_directions(by_sums, 4)]:
        torch.testing.assert_close(directions, kept[0], atol=1e-9, rtol=0)
    u = torch.linalg.svd(x.T)[0][:, :4]
    torch.testing.assert_close(kept[0].abs(), u.abs(), atol=1e-9, rtol=0)


def test_the_sign_does_not_hang_on_rounding() -> None:
    """Two entries of one size and opposite signs: the first decides, whichever is larger by a bit."""
    close = torch.tensor([[0.5], [-0.5]], dtype=torch.float64)
    for nudge in (1e-15, -1e-15):
        assert closed_form.oriented(close + nudge)[0, 0] > 0
        assert closed_form.oriented(-close + nudge)[0, 0] > 0


def test_the_linear_layer_is_the_solution() -> None:
    x, d = examples(30, "linear")
    parts = closed_form.ridge_parts(x, d)
    layer = closed_form.ridge_linear(parts, RIDGE, dtype=torch.float64)
    weights = closed_form.solve_ridge(parts, RIDGE)
    torch.testing.assert_close(layer(x), torch.cat([x, x.new_ones(30, 1)], 1) @ weights)


def test_fewer_numbers_decide_the_form() -> None:
    x, d = examples(40, "linear")
    assert closed_form.ridge_parts(x, d).form == "sums"
    assert closed_form.ridge_parts(x[:3], d[:3]).form == "factors"
    # Many ranks with few examples: gathering all factors is more than one sum.
    assert exchange_numbers(64, 1, 1, 8, 2)["factors"] < exchange_numbers(64, 1, 1, 8, 2)["sums"]
    assert exchange_numbers(64, 1, 1, 8, 16)["factors"] > exchange_numbers(64, 1, 1, 8, 16)["sums"]


X = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: closed_form.ridge_parts(torch.ones(3), None), r"shape \[examples, inputs\], got \[3\]"),
        (lambda: closed_form.ridge_parts(X, torch.ones(3, 1)), r"targets \[3, 1\] of inputs \[2, 2\]: expected \[2,"),
        (lambda: closed_form.ridge_parts(X * torch.inf, X), "example 0 has an input that is not finite"),
        (
            lambda: closed_form.ridge_parts(X, X, activation="logistic"),
            "target 1 of example 0: logistic stays strictly between 0 and 1; scale targets into, say, 0.05 to 0.95",
        ),
        (lambda: closed_form.ridge_parts(X, X, activation="relu"), "unknown activation that can be undone 'relu'"),
        (lambda: closed_form.ridge_parts(X, X, form="sum"), "unknown form of second moments 'sum' .did you mean"),
        (lambda: closed_form.merge_parts([]), "give at least one part"),
        (
            lambda: closed_form.merge_parts([closed_form.ridge_parts(X, X), closed_form.ridge_parts(X[:0], X[:0])]),
            "part 1 of 2 has no examples; leave it out",
        ),
        (
            lambda: closed_form.merge_parts([closed_form.ridge_parts(X, X), closed_form.ridge_parts(X, X[:, :1])]),
            "part 1 is of another layer: linear, 2 inputs and a constant, 1 outputs; part 0: linear, 2 inputs and",
        ),
        (lambda: closed_form.solve_ridge(closed_form.ridge_parts(X[:0], X[:0]), 1.0), "part 0 of 1 has no examples"),
        (lambda: closed_form.solve_ridge(closed_form.ridge_parts(X, X), 0.0), "ridge: 0.0 is not above 0"),
        (lambda: closed_form.solve_ridge(closed_form.ridge_parts(X, None), 1.0), "made without targets"),
        (lambda: closed_form.principal_directions(closed_form.ridge_parts(X, None), 1), "needs ridge_parts"),
        (
            lambda: closed_form.principal_directions(closed_form.ridge_parts(X, None, bias=False), 3),
            "principal directions: 3 is not in 1 to 2",
        ),
        (lambda: closed_form.RidgeParts.from_state(json.loads("{}")), "not parts of a ridge layer"),
    ],
)
def test_what_makes_no_sense_is_said(call: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        call()
    assert "\n" not in str(error.value)
