"""Tables of the claims about MASHA and HD-PiSSA are those of the recorded lines."""

from __future__ import annotations

import importlib

import pytest

import record


@pytest.mark.parametrize("name", ["masha", "hd_pissa"])
def test_tables_in_pages_are_those_of_the_recorded_lines(name: str) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    claim = importlib.import_module(name)
    lines = record.read(claim.OUTPUT)
    page = claim.PAGE.read_text(encoding="utf-8")
    assert lines and record.with_section(page, name, claim.table(lines)) == page
