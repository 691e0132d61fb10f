"""The measured table of README.md: generated from recorded lines, and from right ones only."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction
from pathlib import Path

import pytest

import readme_table as script
from mycel.bench.measurement import Measurement, summarize
from mycel.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]


def measured(backend: str, seconds: float, *, num_bytes: int = 1 << 20, correct: bool = True) -> Measurement:
    return summarize(
        [seconds] * 3,
        collective="all_reduce",
        num_bytes=num_bytes,
        backend=backend,
        unit="Mbit/s",
        bound_algbw=Fraction(200),
        correct=correct,
        world_size=8,
        topology="two_boxes",
        fingerprint="0" * 12,
        emulated=True,
    )


def write_lines(file: Path, measurements: list[Measurement]) -> Path:
    lines = [json.dumps({**m.to_json(), "commit": "abc"}) for m in measurements]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def test_readme_shows_the_recorded_fabrics() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    text = script.fabric_tables(script.read_lines([script.FABRICS]))
    assert page == script.with_table(page, text, script.FABRICS_BEGIN, script.FABRICS_END), (
        "run: python benchmarks/readme_table.py"
    )


def test_fabrics_stand_beside_collectives_and_the_least_ratio_is_named() -> None:
    def pair(fabric: str, num_bytes: int, gloo: float, mycel: float) -> list[Measurement]:
        return [
            dataclasses.replace(measured(backend, seconds, num_bytes=num_bytes), topology=fabric)
            for backend, seconds in (("gloo", gloo), ("mycel", mycel))
        ]

    lines = [*pair("a", 16 << 20, 8.0, 1.0), *pair("b", 16 << 20, 3.0, 1.5), *pair("b", 1 << 20, 0.9, 1.0)]
    rows = script.fabric_tables([*lines, *pair("a", 1 << 20, 4.0, 1.0)[:1]]).splitlines()
    assert rows[:4] == [
        "| fabric, 16MB | all_reduce |",
        "|---|---|",
        "| a, 8 ranks | 0.67, 8.00x |",
        "| b, 8 ranks | 0.45, 2.00x |",
    ]
    assert "| 1MB | 0.90x (b) |" in rows and "| 16MB | 2.00x (b) |" in rows


def test_readme_shows_what_is_recorded() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    text = script.table(script.read_lines([script.BESIDE_GLOO]))
    assert page == script.with_table(page, text), "run: python benchmarks/readme_table.py"


def test_a_case_gets_a_row_with_the_ratio_of_medians(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [measured("gloo", 0.6), measured("mycel", 0.05)])
    rows = script.table(script.read_lines([file])).splitlines()
    assert rows[2] == "| two_boxes, 8 ranks | all_reduce | 1MB | 600 ms | 50 ms | 12.00x | 0.84 |"
    assert rows[4].count("python") == 1


def test_the_last_line_of_a_case_counts(tmp_path: Path) -> None:
    lines = [measured("gloo", 0.6), measured("mycel", 0.3), measured("gloo", 0.8), measured("mycel", 0.2)]
    text = script.table(script.read_lines([write_lines(tmp_path / "a.jsonl", lines)]))
    assert "4.00x" in text
    assert text.count("all_reduce") == 1


def test_a_case_without_its_baseline_has_no_row(tmp_path: Path) -> None:
    lines = [measured("gloo", 0.6), measured("mycel", 0.3, num_bytes=1024)]
    assert script.table(script.read_lines([write_lines(tmp_path / "a.jsonl", lines)])) == script.NOTHING


def test_wrong_results_are_refused_with_their_place(tmp_path: Path) -> None:
    lines = [measured("gloo", 0.6), measured("mycel", 0.05, correct=False)]
    file = write_lines(tmp_path / "a.jsonl", lines)
    with pytest.raises(UsageError, match=r"a\.jsonl:2: all_reduce over mycel gave wrong results"):
        script.read_lines([file])


@pytest.mark.parametrize("text", ["{", "[]", '{"collective": "all_reduce"}'])
def test_lines_that_are_no_measurements_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(text + "\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"a\.jsonl:1: "):
        script.read_lines([file])


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(UsageError, match="no place"):
        script.with_table("# nothing\n", "table")
