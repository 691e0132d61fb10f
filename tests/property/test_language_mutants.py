"""A share of ``benchmarks/language_mutants.py``: mistakes in written collectives are refused by line, or are none."""

from __future__ import annotations

import pytest

import language_mutants


@pytest.mark.parametrize("seed", [5, pytest.param(6, marks=pytest.mark.long)])
def test_what_is_accepted_is_right_and_what_is_refused_names_its_line(seed: int) -> None:
    found = list(language_mutants.mutants(300 if seed == 5 else 3000, seed))
    assert not [(one.program, one.kind, one.refusal, one.defect) for one in found if not one.is_good]
    for kind in language_mutants.KINDS:
        assert any(one.refusal is not None for one in found if one.kind == kind), kind
    assert any(one.refusal is None for one in found)
