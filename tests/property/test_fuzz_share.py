"""A share of ``benchmarks/fuzz.py``: broken files end in an error of one line, and the harness sees what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fuzz
from mycel.errors import UsageError


def test_right_files_are_read(tmp_path: Path) -> None:
    seeds = fuzz.seeds()
    assert {seed.reader for seed in seeds} == set(fuzz.READERS)
    for seed in seeds:
        file = tmp_path / seed.name
        file.write_bytes(seed.data)
        fuzz.READERS[seed.reader](file)


def test_broken_files_end_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "SLOW_S", float("inf"))  # how fast is for the benchmark to say
    outcomes = fuzz.run(700, seed=11)
    assert len(outcomes) == len(fuzz.seeds())
    assert not any("failed" in counts for counts in outcomes.values())
    assert sum(counts.get("result", 0) for counts in outcomes.values()) > 70
    assert sum(counts.get("error", 0) for counts in outcomes.values()) > 300


def test_the_harness_sees_failures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def complain(text: str) -> object:
        raise UsageError(text)

    faults: dict[str, Any] = {
        "traceback": lambda file: dict[str, str]()["x"],
        "lines": lambda file: complain("one\ntwo"),
        "silence": lambda file: complain(""),
        "fine": lambda file: complain("x: what is wrong"),
    }
    monkeypatch.setattr(fuzz, "READERS", faults)
    found = {name: fuzz.try_file(name, tmp_path) for name in faults}
    assert found["traceback"].startswith("KeyError")
    assert found["lines"].startswith("not one line") and found["silence"].startswith("not one line")
    assert found["fine"] == "error"
    monkeypatch.setattr(fuzz, "SLOW_S", -1.0)
    assert fuzz.try_file("fine", tmp_path).startswith("slow")
