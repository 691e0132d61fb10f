"""The guide to topology files does what it says: its examples run."""

from __future__ import annotations

import doctest
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "topology-files.md"


def test_examples_of_the_guide() -> None:
    outcome = doctest.testfile(str(GUIDE), module_relative=False, encoding="utf-8")
    assert outcome.attempted >= 10
    assert outcome.failed == 0
