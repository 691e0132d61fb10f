"""What ``mycel advise`` refuses, and how advice is chosen from predictions."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mycel.cli import build_app
from mycel.cli.advise import _report
from mycel.data_parallel import PowerSGD
from mycel.data_parallel.advise import Advice, Prediction
from mycel.errors import UsageError


@pytest.mark.parametrize(
    ("model", "part"),
    [
        ("train", "a module and a function"),
        ("no_such_module:make", "no_such_module"),
        ("json:no_such_function", "has no function"),
        ("json:__doc__", "has no function"),
    ],
)
def test_models_that_are_not_there(model: str, part: str) -> None:
    result = CliRunner().invoke(build_app(), ["advise", model])
    assert isinstance(result.exception, UsageError)
    assert part in str(result.exception)


def made(**milliseconds: float) -> Advice:
    return Advice(
        compute_s=0.01,
        overlap=0.5,
        predictions=tuple(
            Prediction(
                method=m, step_s=ms / 1e3, compress_s=0.0, communicate_s=0.0, sent_bytes=1e6 / (i + 1), error=0.1 * i
            )
            for i, (m, ms) in enumerate(milliseconds.items())
        ),
    )


def test_the_most_faithful_of_the_fast_is_advised() -> None:
    assert made(uncompressed=100, bf16=60, int8=40, int4=38, powersgd=37).best.method == "int8"
    assert made(uncompressed=100, bf16=60, powersgd=20).best.method == "powersgd"
    assert made(uncompressed=100, bf16=95, powersgd=120).best.method == "uncompressed"


def test_advice_in_words() -> None:
    assert "does not pay" in made(uncompressed=100, bf16=99).explain()
    assert "2.5 times faster" in made(uncompressed=100, bf16=40).explain()
    assert "2.0 times fewer bytes" in made(uncompressed=100, bf16=40).explain()


def test_local_updates_are_named_where_they_are_faster_still(capsys: pytest.CaptureFixture[str]) -> None:
    plain, *_ = made(uncompressed=100).predictions
    rounds = tuple(replace(plain, method=f"local {n}", step_s=s) for n, s in ((10, 0.095), (100, 0.05)))
    advice = Advice(compute_s=None, overlap=None, predictions=(replace(plain, is_measured=True),), local=rounds)
    assert "local 100 (local updates): 50 ms" in advice.explain()
    assert replace(advice, local=rounds[:1]).explain().endswith("takes 100 ms")
    _report(advice, {}, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["methods"][0]["measured_s"] == 0.1
    assert [r["predicted_s"] for r in document["local"]] == [0.095, 0.05]
    _report(advice, {}, as_json=False)
    assert "local 100" in capsys.readouterr().out


def test_a_method_that_learns_is_judged_as_far_as_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """PowerSGD begins each step with the directions of the last one: of one matrix it loses less each time."""
    advice = import_module("mycel.data_parallel.advise")
    monkeypatch.setattr(advice, "_settle", lambda device, group: None)
    left, right = torch.randn(2, 48, 4, generator=torch.Generator().manual_seed(3)).unbind()
    noise = torch.randn(48, 48, generator=torch.Generator().manual_seed(4))
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    compressor = PowerSGD(rank=4)
    errors = [advice._rehearse(compressor, {"w": left @ right.T + noise}, group)[2] for _ in range(4)]
    assert errors[-1] < 0.98 * errors[0]
