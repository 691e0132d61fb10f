"""A representative part of ``python -m tests.faults``: every fault, in a few collectives."""

from __future__ import annotations

import pytest
from tests.faults.__main__ import Cell, cells, matrix

from mycel.emulate.support import check_support
from mycel.errors import EmulationError


def _emulation_missing() -> str | None:
    try:
        check_support()
    except EmulationError as error:
        return str(error)
    return None


needs_emulation = pytest.mark.skipif(_emulation_missing() is not None, reason=_emulation_missing() or "")


def test_the_matrix_is_whole() -> None:
    every = cells()
    assert len(every) == len(set(every)) == 6 * 10 + 2 * 10 + 2 * 9 + 3 + 4 + (10 + 2) + 3 * 10 + 2


@pytest.mark.namespaces
@needs_emulation
def test_one_switch() -> None:
    chosen = [
        Cell(fault="kill", collective="all_to_all"),
        Cell(fault="down", collective="all_gather"),
        Cell(fault="slow", collective="reduce"),
        Cell(fault="store", collective="all_reduce"),
        Cell(fault="mismatch", variant="collective", collective="all_reduce"),
        Cell(fault="mismatch", variant="root", collective="broadcast"),
        Cell(fault="mismatch", variant="order", collective="barrier"),
    ]
    with matrix("star4") as ranks:
        outcomes = [ranks.outcome(cell) for cell in chosen]
    assert not [outcome for outcome in outcomes if outcome.complaints]


@pytest.mark.namespaces
@needs_emulation
def test_a_ring() -> None:
    """No switch: ranks relay data, and what they tell each other."""
    with matrix("ring4") as ranks:
        outcomes = [
            ranks.outcome(Cell(fault=fault, collective=collective))
            for fault, collective in (("half", "all_reduce"), ("kill", "reduce_scatter"))
        ]
    assert not [outcome for outcome in outcomes if outcome.complaints]
