"""Tables of the claims about MASHA and HD-PiSSA are those of the recorded lines."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["masha", "hd_pissa"])
def test_tables_in_pages_are_those_of_the_recorded_lines(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    for folder in ("benchmarks", "benchmarks/claims"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    known = set(sys.modules)
    claim = runpy.run_path(str(ROOT / "benchmarks" / "claims" / f"{name}.py"))
    record = sys.modules["record"]
    lines = record.read(claim["OUTPUT"])
    page = claim["PAGE"].read_text(encoding="utf-8")
    assert lines and record.with_section(page, name, claim["table"](lines)) == page
    for module in set(sys.modules) - known:  # others have modules of these names, too
        if str(getattr(sys.modules[module], "__file__", "")).startswith(str(ROOT / "benchmarks")):
            del sys.modules[module]
