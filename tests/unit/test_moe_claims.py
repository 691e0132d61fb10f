"""The tables of claims about experts, and those of adaptive parallelism, are made from the recorded lines."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(monkeypatch: pytest.MonkeyPatch, file: str) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location(Path(file).stem, ROOT / "benchmarks" / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["tutel", "smile", "ppmoe", "ted", "eps_moe"])
def test_claims_are_those_recorded(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    claim = load(monkeypatch, f"claims/{name}.py")
    record = importlib.import_module("record")
    lines = record.read(claim.OUTPUT)
    page = claim.PAGE.read_text(encoding="utf-8")
    assert lines and record.with_section(page, name, claim.table(lines)) == page


def test_plans_are_those_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    flex = load(monkeypatch, "moe_flex.py")
    record = importlib.import_module("record")
    rows = flex.latest(record.read(flex.RECORDED / "moe_flex.jsonl"))
    page = flex.PAGE.read_text(encoding="utf-8")
    assert record.with_section(page, "moe_flex", flex.tables(rows)) == page
    counted = [row for row in rows if row["question"] == "bytes"]
    sent = {(row["tokens"], row["top_k"], row["algorithm"]): row["metered"] for row in counted}
    assert all(sent[*load, "hierarchical"] < sent[*load, "all_to_all"] for load in flex.LOADS)
