"""DeMo and 1-bit Adam over ranks: equal to plain equations, the same bits everywhere, few bytes, no traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]
CHECKS = "momentum_optimizers"
KINDS = ("demo", "one bit")
#: Elements of the model.
COUNT = 40 * 70 + 9 * 7


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "backend"), [(2, "mycel"), (3, "gloo")])
def test_equals_the_papers_equations(run_ranks: RunRanks, size: int, backend: str, kind: str) -> None:
    for difference, alike in run_ranks(size, CHECKS, "equals_oracle", kind, backend=backend):
        assert difference < (1e-9 if kind == "demo" else 1e-5)  # signs' magnitudes are float32
        assert alike


@pytest.mark.parametrize("kind", KINDS)
def test_sends_few_bytes(run_ranks: RunRanks, kind: str) -> None:
    for first, later in run_ranks(2, CHECKS, "sends", kind, backend="gloo"):
        flag, agreed = 3 * 8, 24  # a number a bucket that says whether what stays is finite; ranks agree
        if kind == "demo":
            chunks = 3 * 5 + 1
            assert first == later == pytest.approx(chunks * 5 * (2 + 8) + agreed, abs=flag)
        else:
            assert first == pytest.approx(8 * COUNT + agreed, abs=flag)
            assert later == pytest.approx(COUNT / 8 + 4 * COUNT / 1024 + agreed, abs=flag + 8)


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_of_one_rank_is_everybodys(run_ranks: RunRanks, kind: str) -> None:
    for fine in run_ranks(2, CHECKS, "overflow_is_everybodys", kind, backend="gloo"):
        assert all(fine), fine


@pytest.mark.parametrize("kind", KINDS)
def test_resumes(run_ranks: RunRanks, kind: str) -> None:
    assert all(all(found) for found in run_ranks(2, CHECKS, "resumes", kind, backend="gloo"))
