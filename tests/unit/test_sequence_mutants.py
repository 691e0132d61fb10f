"""A few of the mistakes of ``benchmarks/sequence_mutants.py``: the checks see every one, and pass without it."""

from __future__ import annotations

import pytest
from tests.effort import long
from tests.oracles.sequence_mutants import KINDS, judged, mutant


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_mistake_of_every_kind_is_seen(kind: str) -> None:
    for seed in range(2):
        mistake = mutant(seed, kind)
        assert judged(mistake) in ("seen", "refused"), mistake


@long
@pytest.mark.parametrize("first", range(0, 2000, 250))
def test_mistakes_of_any_kind_are_seen(first: int) -> None:
    missed = [seed for seed in range(first, first + 250) if judged(mutant(seed)) in ("missed", "control")]
    assert not missed
