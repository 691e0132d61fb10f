"""Local updates equal a simulation of all workers, meet when they should, and go on where they were saved."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from mycel.data_parallel.local import CO2, QSR, Delayed, Periodic, PostLocal, SlowMo
from mycel.errors import UsageError

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize(("world_size", "backend"), [(1, "gloo"), (2, "mycel"), (3, "gloo")])
def test_formulas(run_ranks: RunRanks, world_size: int, backend: str) -> None:
    for found in run_ranks(world_size, "local", "formulas", backend=backend):
        wrong = {case: error for case, error in found.items() if not error < 1e-12}
        assert len(found) >= 16 and not wrong


def test_shards_meet_between_nodes(run_ranks: RunRanks) -> None:
    for found in run_ranks(4, "local", "sharded"):
        assert len(found) == 3 and all(error < 1e-12 for error in found.values()), found


def test_qsr_meets_when_the_rule_says(run_ranks: RunRanks) -> None:
    for found, expected in run_ranks(2, "local", "meetings"):
        assert found == expected
        lengths = {b - a for a, b in pairwise(expected)}
        assert len(lengths) >= 4 and expected[-1] == 60


def test_gradients_first_then_alone(run_ranks: RunRanks) -> None:
    for found in run_ranks(2, "local", "post_local"):
        assert found["parameters"] == [True, True, True, False, True, False, True, True]
        assert found["moments"] == found["parameters"]
        assert found["statistics"][4] and found["statistics"][6] and not found["statistics"][3]


@pytest.mark.parametrize(("kind", "save_at"), [("diloco", 6), ("co2 penalty", 6), ("co2 penalty", 5), ("slowmo", 4)])
def test_a_restart_ends_with_the_same_bits(run_ranks: RunRanks, kind: str, save_at: int) -> None:
    for same, agree in run_ranks(2, "local", "resumed", kind, save_at):
        assert same and agree


@pytest.mark.parametrize("kind", ["diloco", "late"])
def test_a_restart_with_fewer_and_more_ranks(run_ranks: RunRanks, kind: str, tmp_path: Path) -> None:
    file = str(tmp_path / "saved.pt")
    losses = run_ranks(3, "local", "part_of_a_run", kind, file, 0, 12)[0]
    losses += run_ranks(2, "local", "part_of_a_run", kind, file, 12, 24)[0]
    losses += run_ranks(4, "local", "part_of_a_run", kind, file, 24, 36)[0]
    assert len(losses) == 36
    first, second, third = (sum(losses[i : i + 6]) for i in (6, 18, 30))
    # It goes on where it was; noise of single batches is larger than what a few late steps gain.
    assert first > max(second, third)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_in_the_trainer(run_ranks: RunRanks, tmp_path: Path) -> None:
    for meetings, parameters_sent, agree in run_ranks(2, "local", "trainer", str(tmp_path)):
        assert meetings == [3, 6, 7]
        assert parameters_sent == 3
        assert agree


def test_rules_that_make_no_sense_are_refused() -> None:
    parameters = [torch.zeros(1, requires_grad=True)]
    for make in (
        lambda: Periodic(0),
        lambda: PostLocal(begin=3, steps=0),
        lambda: QSR(alpha=0.0),
        lambda: QSR(alpha=1.0).period(0, float("nan")),
        lambda: SlowMo(parameters, momentum=1.0),
        lambda: CO2(parameters, clip=0.0),
    ):
        with pytest.raises(UsageError):
            make()


def test_rates_at_the_end_of_a_schedule() -> None:
    assert QSR(alpha=0.1).period(7, 0.0) == 2**31
    assert Delayed(QSR(alpha=0.1, base=4)).period(7, 0.1) == 4


def test_clipping_clips() -> None:
    parameter = torch.zeros(3, requires_grad=True)
    outer = CO2([parameter], momentum=0.0, penalty=False, clip=0.5)
    parameter.grad = torch.tensor([2.0, -2.0, 0.1])
    outer.step()
    assert parameter.tolist() == pytest.approx([-0.5, 0.5, -0.1])
