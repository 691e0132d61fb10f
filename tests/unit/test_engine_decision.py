"""The figures in the decision for the compiled engine are those of its recorded lines."""

from __future__ import annotations

import json
from pathlib import Path

from mycel.units import format_seconds

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "benchmarks" / "recorded" / "decisions"


def test_figures_are_the_recorded_ones() -> None:
    lines = (RECORDED / "0004-compiled-engine.jsonl").read_text(encoding="utf-8").splitlines()
    page = (ROOT / "docs" / "decisions" / "0004-compiled-engine.md").read_text(encoding="utf-8")
    rows = [tuple(cell.strip() for cell in row.split("|")[2:5]) for row in page.splitlines() if " ms to " in row]
    rows += [tuple(cell.strip() for cell in row.split("|")[2:5]) for row in page.splitlines() if " s to " in row]
    recorded = []
    for line in map(json.loads, lines):
        median, low, high = (format_seconds(line[key]) for key in ("median_s", "p10_s", "p90_s"))
        recorded.append((line["main_thread"], median, f"{low} to {high}"))
    assert len(recorded) == 6
    assert sorted(rows) == sorted(recorded)
