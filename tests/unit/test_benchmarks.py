"""The scripts in benchmarks/: what they leave out, and that the tables in pages are those of the recorded lines."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mycel.bench import Case

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script of the folder by name, as it is when it runs."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module
    for name in [
        n for n, m in sys.modules.items() if str(getattr(m, "__file__", "")).startswith(f"{ROOT}/benchmarks")
    ]:
        del sys.modules[name]


def test_a_sweep_goes_on_where_it_stopped(script: Any, tmp_path: Path) -> None:
    fabrics = script("fabrics")
    wanted = fabrics.cases(["all_reduce", "broadcast"], [1 << 20, 4 << 20], 5)
    assert [case.repeats for case in wanted] == [5, 3, 5, 3]
    file = tmp_path / "out" / "measured.jsonl"
    assert fabrics.missing(wanted, "f00", file) == wanted
    done = [
        {"collective": "all_reduce", "bytes": 1 << 20, "backend": backend, "fingerprint": "f00"}
        for backend in ("gloo", "mycel")
    ]
    half = {"collective": "broadcast", "bytes": 1 << 20, "backend": "gloo", "fingerprint": "f00"}
    elsewhere = [{**row, "collective": "broadcast", "fingerprint": "f11"} for row in done]
    script("record").append(file, [*done, half, *elsewhere])
    assert fabrics.missing(wanted, "f00", file) == wanted[1:]
    assert Case(collective="broadcast", num_bytes=1 << 20) not in fabrics.missing(wanted, "f11", file)


def test_a_table_goes_between_its_marks_only(script: Any) -> None:
    record = script("record")
    table = record.markdown(["a", "b"], [(1, "x"), (2, "y")])
    page = "before <!-- t:begin -->\nold\n<!-- t:end --> after <!-- u:begin -->\nkept\n<!-- u:end -->"
    new = record.with_section(page, "t", table)
    assert new.startswith("before <!-- t:begin -->\n| a | b |\n|---|---|\n| 1 | x |\n| 2 | y |\n<!-- t:end --> after")
    assert "kept" in new and "old" not in new
    with pytest.raises(SystemExit, match="no place for a table: <!-- v:begin"):
        record.with_section(page, "v", table)


def test_lines_read_back(script: Any, tmp_path: Path) -> None:
    record = script("record")
    record.append(tmp_path / "a.jsonl", [{"a": 1}])
    record.append(tmp_path / "a.jsonl", [{"b": [2]}])
    assert record.read(tmp_path / "a.jsonl") == [{"a": 1}, {"b": [2]}]
    assert record.read(tmp_path / "b.jsonl") == []
    assert set(record.stamp()) == {"commit", "time"} and json.dumps(record.stamp())
