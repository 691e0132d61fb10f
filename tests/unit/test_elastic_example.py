"""The verdict of the example in which ranks are killed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

TRUTH = (5.0, 4.0, 3.0)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's program, gone again afterwards: its files have names that others have too."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples" / "elastic")
    for name in ("run", "train", "state"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("run")


@pytest.mark.parametrize(
    ("losses", "right", "said"),
    [
        ([(1, 5.0), (2, 4.0), (3, 3.0 + 1e-6)], True, "at most 1.0e-06 from"),
        ([(1, 5.0), (2, 4.1), (2, 4.0), (3, 3.0)], False, "WRONG in 1 steps, the first is 2: 4.1, not 4"),
        ([(1, 5.0), (2, float("nan")), (3, float("nan"))], False, "WRONG in 2 steps, the first is 2: nan, not 4"),
        ([(2, float("nan")), (1, 5.0)], False, "WRONG in 1 steps"),
        ([(1, float("inf"))], False, "inf"),
    ],
)
def test_losses_of_all_ranks_are_compared(run: Any, losses: list[tuple[int, float]], right: bool, said: str) -> None:
    verdict, words = run.compare([{"step": step, "loss": loss} for step, loss in losses], TRUTH)
    assert verdict is right
    assert said in words


def test_a_state_survives_a_group_that_fails_while_it_is_joined(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state = importlib.import_module("state")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        training = state.Training(length=4, width=2, shards=1, seed=1, learning_rate=0.1)
        for _ in range(2):
            training.gradients(torch.ones(3, 4, dtype=torch.long), torch.ones(3, dtype=torch.long))
            training.take_step()
        before = training._pack()
        with monkeypatch.context() as lost:
            lost.setattr(training, "_unpack", lambda *_: fail())
            with pytest.raises(RuntimeError, match="a rank is lost"):
                training.join()
        training.join()
        assert training.step == 2
        torch.testing.assert_close(training._pack(), before, rtol=0, atol=0)
    finally:
        dist.destroy_process_group()


def fail() -> None:
    """What a collective does when a rank is lost."""
    raise RuntimeError("a rank is lost")
