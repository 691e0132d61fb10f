"""Tables of claims that may be unmeasured are those of the recorded lines or say so, and count what they say."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import record

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

CLAIMS = (
    "carl", "cmcl", "daef", "dapt", "dfa", "encrypted", "flexiffusion", "flextron", "karma", "lasp", "msgemm",
    "multitask", "patrickstar", "tls_pose", "yuan_lfa",
)  # fmt: skip


@pytest.mark.parametrize("name", CLAIMS)
def test_tables_in_the_page_are_those_of_the_recorded_lines(name: str) -> None:
    """Of every section of a claim; where nothing is recorded the page says so."""
    claim = importlib.import_module(name)
    lines = record.read(claim.OUTPUT)
    page = claim.PAGE.read_text(encoding="utf-8")
    sections = getattr(claim, "SECTIONS", None) or {name: claim.table}
    for section, make in sections.items():
        assert record.with_section(page, section, make(lines) if lines else "") == page, section


def test_every_claim_of_the_annex_is_looked_at() -> None:
    page = (record.ROOT / "docs" / "concepts" / "annex.md").read_text(encoding="utf-8")
    named = set(re.findall(r"benchmarks/claims/(\w+)\.py", page))
    assert len(named) > 10 and named <= set(CLAIMS)


def test_parts_that_were_not_run_keep_their_lines(tmp_path: Path) -> None:
    page, output = tmp_path / "page.md", tmp_path / "lines.jsonl"
    page.write_text("<!-- a:begin -->\n<!-- a:end -->\n<!-- b:begin -->\n<!-- b:end -->\n")

    def shown(part: str) -> Callable[[list[dict[str, Any]]], str]:
        return lambda lines: "".join(f"{line['value']}\n" for line in lines if line["part"] == part)

    sections = {name: shown(name) for name in "ab"}
    record.conclude_parts(output, page, sections, [{"part": "a", "value": 1}, {"part": "b", "value": 2}])
    record.conclude_parts(output, page, sections, [{"part": "b", "value": 3}])
    assert [(line["part"], line["value"]) for line in record.read(output)] == [("a", 1), ("b", 3)]
    assert "begin -->\n1\n<!-- a" in page.read_text() and "begin -->\n3\n<!-- b" in page.read_text()
    output.unlink()
    record.conclude_parts(output, page, sections, [{"part": "a", "value": 4}])
    assert f"<!-- b:begin -->\n{record.NOT_MEASURED}<!-- b:end -->" in page.read_text()


def test_a_deviation_too_far_from_the_bound_is_said() -> None:
    table = importlib.import_module("tls_pose").table
    line = {"seed": 0, "runs": 10, "unweighted": [2.0] * 6, "normalised": 6.0, "band": [5.0, 7.0]}
    assert "| yes |" in table([{**line, "weighted": [1.0, 1.02, 0.98, 1.0, 1.0, 1.0]}])
    assert "| no |" in table([{**line, "weighted": [1.0, 1.04, 0.98, 1.0, 1.0, 1.0]}])
    assert "outside 6.500 to 7.000" in table([{**line, "weighted": [1.0] * 6, "band": [6.5, 7.0]}])


def test_wins_are_counted_seed_by_seed() -> None:
    table = importlib.import_module("flexiffusion").table
    shared: dict[str, Any] = {"seed": 0, "judged": 1, "schedule": ""}
    base = {**shared, "way": "10 uniform full steps", "cost": 10.0, "distances": [3.0, 3.0, 3.0]}
    made = table([base, {**shared, "way": "searched", "cost": 7.5, "distances": [2.0, 3.0, 4.0]}])
    assert "| 0.75 | 3.00 ± 1.00 | 2 of 3 |" in made


def test_rates_and_scores_have_rows_of_their_own() -> None:
    table = importlib.import_module("carl").table
    shared = {"task": "simple", "minibatch": 2048, "ranks": 4, "steps": 8, "steps_per_s": 5.0}
    lines = [{**shared, "kind": "simple", "seed": seed, "score": 60.0 + seed} for seed in range(3)]
    made = table([*lines, {**shared, "kind": "rate", "seed": 0, "score": 1.0}])
    assert "| 60.0, 61.0, 62.0 | 61.0 |" in made
    assert "by ranks on this one machine: 5 on 4." in made


def test_what_was_not_measured_is_a_dash() -> None:
    dapt = importlib.import_module("dapt")
    accuracy = [{"kind": "accuracy", "way": way, "seed": 0, "accuracy": 0.5, "trained": 250} for way in dapt.WAYS]
    assert dapt.table(accuracy).count("| 0.500 | 1.0 | - | - |") == 4
    sent = [
        {"kind": "bytes", "way": way, "interface_bytes": 100.0 * (i + 1), "gradient_bytes": 2000}
        for i, way in enumerate(dapt.WAYS)
    ]
    assert "| adapters | 0.500 | 2.0 | 0.3 | 1.3 |" in dapt.table(accuracy + sent)
    assert "| adapters | - | 2.0 | 0.3 | 1.3 |" in dapt.table(sent)
