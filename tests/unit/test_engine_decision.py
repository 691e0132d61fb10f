"""The figures in the decision for the compiled engine are those of the recorded lines beside it."""

from __future__ import annotations

import json
from pathlib import Path

from mycel.units import format_seconds

DECISIONS = Path(__file__).resolve().parents[2] / "docs" / "decisions"


def test_figures_are_the_recorded_ones() -> None:
    lines = (DECISIONS / "0004-compiled-engine.jsonl").read_text(encoding="utf-8").splitlines()
    page = (DECISIONS / "0004-compiled-engine.md").read_text(encoding="utf-8")
    rows = [tuple(cell.strip() for cell in row.split("|")[2:5]) for row in page.splitlines() if " ms to " in row]
    rows += [tuple(cell.strip() for cell in row.split("|")[2:5]) for row in page.splitlines() if " s to " in row]
    recorded = []
    for line in map(json.loads, lines):
        median, low, high = (format_seconds(line[key]) for key in ("median_s", "p10_s", "p90_s"))
        recorded.append((line["main_thread"], median, f"{low} to {high}"))
    assert len(recorded) == 6
    assert sorted(rows) == sorted(recorded)
