"""The page on search: its tables are those of the recorded lines."""

from __future__ import annotations

import re
from pathlib import Path

import frontier
import pytest
import superscaler

import plan_search
from record import read

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "plan_search.md"


def section(name: str) -> str:
    """What stands between a table's marks."""
    match = re.search(
        rf"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    assert match is not None
    return match[1]


def test_tables_are_those_of_the_lines() -> None:
    """Of times, equality, published clusters and trials."""
    made = plan_search.tables(read(plan_search.OUTPUT))
    assert set(made) == set(plan_search.SECTIONS)
    for name, table in made.items():
        assert section(f"search-{name}") == table, "run: python benchmarks/plan_search.py --write"


@pytest.mark.parametrize("claim", [superscaler, frontier])
def test_tables_of_claims(claim) -> None:  # type: ignore[no-untyped-def]
    """Of both claims that stand on the page."""
    name = claim.__name__.rpartition(".")[2]
    assert section(name) == claim.table(read(claim.OUTPUT)), f"run: python benchmarks/claims/{name}.py"


def test_limits_never_moved_the_optimum() -> None:
    """Recorded: the same step with and without limits, and fewer jobs looked at."""
    rows = [row for row in read(superscaler.OUTPUT) if row["part"] == "limits"]
    assert rows
    for row in rows:
        assert row["limited_step_s"] == pytest.approx(row["free_step_s"])
        assert row["limited_space"] < row["free_space"] and row["limited_visited"] <= row["free_visited"]


def test_all_small_searches_were_the_best() -> None:
    """Recorded: every one of 200 found what trying everything finds."""
    (row,) = [row for row in read(plan_search.OUTPUT) if row["what"] == "equal"]
    assert row["same"] == row["proved"] == row["cases"] == 200
