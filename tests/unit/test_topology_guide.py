"""The guide to topology files does what it says: its examples run, and its table has every format.

``python tests/unit/test_topology_guide.py`` writes the table anew.
"""

from __future__ import annotations

import doctest
from pathlib import Path

from mycel.topology.load import FORMATS

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "topology-files.md"
BEGIN, END = "<!-- formats:begin -->\n", "<!-- formats:end -->\n"


def table() -> str:
    """A row for every format of others."""
    rows = [f"| {known.written_by or known.name} | {known.becomes} |" for known in FORMATS if known.becomes]
    return "\n".join(["| written by | what becomes what |", "|---|---|", *rows]) + "\n"


def with_table(text: str) -> str:
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return before + BEGIN + table() + END + after


def test_examples_of_the_guide() -> None:
    outcome = doctest.testfile(str(GUIDE), module_relative=False, encoding="utf-8")
    assert outcome.attempted >= 10
    assert outcome.failed == 0


def test_the_table_has_every_format() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert text == with_table(text), "run: python tests/unit/test_topology_guide.py"


if __name__ == "__main__":
    GUIDE.write_text(with_table(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
