"""Tables of the claims about local updates and combiners are those of the recorded lines."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("sklearn", reason="scikit-learn is not installed")


@pytest.fixture
def script() -> Any:
    """Imports a script of benchmarks/claims by name, as it is when it runs."""
    return importlib.import_module


def make_tables(script: Callable[[str], Any]) -> dict[str, tuple[Path, str]]:
    """Section, page and table of every claim."""
    record = script("record")
    qsr, adasum, co2, word2vec = (script(name) for name in ("qsr", "adasum", "co2", "graphword2vec"))
    outer = script("outer")
    of_qsr, of_co2 = record.read(qsr.OUTPUT), record.read(co2.OUTPUT)
    return {
        "qsr": (qsr.PAGE, qsr.table(of_qsr, of_qsr[0]["steps"])),
        "adasum": (adasum.PAGE, adasum.table(record.read(adasum.OUTPUT))),
        "graphword2vec": (word2vec.PAGE, word2vec.table(record.read(word2vec.OUTPUT))),
        "outer": (outer.PAGE, outer.table(record.read(outer.OUTPUT))),
        "co2-rate": (co2.PAGE, co2.rate_table([line for line in of_co2 if line["part"] == "rate"])),
        "co2-quality": (co2.PAGE, co2.quality_table([line for line in of_co2 if line["part"] == "quality"])),
    }


def test_tables_in_pages_are_those_of_the_recorded_lines(script: Callable[[str], Any]) -> None:
    record = script("record")
    for section, (page, table) in make_tables(script).items():
        text = page.read_text(encoding="utf-8")
        assert record.with_section(text, section, table) == text, section


def test_meetings_that_a_rule_asks_for_are_counted_by_hand(script: Callable[[str], Any]) -> None:
    qsr = script("qsr")
    found = qsr.expected(0.3, 2, 100)
    assert found[-1] == 100 and found[0] == 2
    for before, after in zip([0, *found], found[:-1], strict=False):
        assert after - before == max(2, int((0.3 / qsr.rate(before, 100)) ** 2))


def test_steps_that_were_never_enough_are_said(script: Callable[[str], Any]) -> None:
    cell = script("adasum").cell
    assert cell([]) == "-"
    assert cell([3, 9, 6]) == "6"
    assert cell([3, None, 6]) == "6 (1 of 3 never)"
    assert cell([None, None, 6]) == cell([None, None, None]) == "never"
