"""A representative part of ``python -m tests.faults``: every fault, in a few collectives."""

from __future__ import annotations

import pytest
from tests.effort import long
from tests.faults.__main__ import PROCESSES, Cell, cells, matrix


def test_the_matrix_is_whole() -> None:
    every = cells()
    assert len(every) == len(set(every)) == 6 * 10 + 2 * 10 + 2 * 9 + 3 + 4 + (10 + 2) + 3 * 10 + 2 + 7 + 3 + 1


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.namespaces
def test_one_switch() -> None:
    chosen = [
        Cell(fault="kill", collective="all_to_all"),
        Cell(fault="down", collective="all_gather"),
        Cell(fault="slow", collective="reduce"),
        Cell(fault="store", collective="all_reduce"),
        Cell(fault="mismatch", variant="collective", collective="all_reduce"),
        Cell(fault="new_group", collective="all_reduce"),
        Cell(fault="handler", collective="reduce_scatter"),
        Cell(fault="swap", collective="all_reduce"),
    ]
    with matrix("star4") as ranks:
        outcomes = [ranks.outcome(cell) for cell in chosen]
    assert not [outcome for outcome in outcomes if outcome.complaints]


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("elements", [256, pytest.param(1 << 18, marks=long)])
def test_processes_that_share_memory(elements: int) -> None:
    chosen = [
        Cell(fault="kill", collective="all_reduce"),
        Cell(fault="handler", collective="all_reduce"),
        Cell(fault="mismatch", variant="type", collective="all_reduce"),
        Cell(fault="mismatch", variant="root", collective="broadcast"),
        Cell(fault="mismatch", variant="late root", collective="broadcast"),
        Cell(fault="mismatch", variant="order", collective="barrier"),
        Cell(fault="children", collective="broadcast"),
        Cell(fault="orphan", collective="all_reduce"),
        Cell(fault="kill", collective="send_recv"),
        Cell(fault="orphan", collective="send_recv"),
        Cell(fault="mismatch", variant="order", collective="send_recv"),
    ]
    with matrix(PROCESSES, elements) as ranks:
        outcomes = [ranks.outcome(cell) for cell in chosen]
    assert not [outcome for outcome in outcomes if outcome.complaints]


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.namespaces
def test_a_ring() -> None:
    """No switch: ranks relay data, and what they tell each other; some calls take two collectives then."""
    with matrix("ring4") as ranks:
        outcomes = [
            ranks.outcome(Cell(fault=fault, collective=collective))
            for fault, collective in (
                ("half", "all_reduce"),
                ("kill", "reduce_scatter"),
                ("handler", "gather"),
                ("handler", "all_to_all_split"),
            )
        ]
    assert not [outcome for outcome in outcomes if outcome.complaints]


@pytest.mark.usefixtures("warm_ranks")
@long
@pytest.mark.namespaces
@pytest.mark.parametrize("cluster", ["star4", "ring4"])
def test_a_machine_goes_dark(cluster: str) -> None:
    """Named within ten seconds at a time-out of half an hour; on the ring, the way to others is gone with it."""
    chosen = [
        Cell(fault="power", collective="all_gather"),
        Cell(fault="power", variant="new_group", collective="all_reduce"),
        Cell(fault="power", variant="between", collective="all_reduce"),
    ]
    with matrix(cluster) as ranks:
        outcomes = [ranks.outcome(cell) for cell in chosen]
    assert not [outcome for outcome in outcomes if outcome.complaints]


@pytest.mark.usefixtures("warm_ranks")
@long
@pytest.mark.namespaces
@pytest.mark.parametrize("cluster", ["star8", "ring4"])
def test_words_that_are_relayed(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control connections to some ranks only, as in groups of many: the same errors in the same time."""
    monkeypatch.setenv("MYCEL_MESH_RANKS", "0")
    chosen = [
        Cell(fault="kill", collective="all_reduce"),
        Cell(fault="stop", collective="all_gather"),
        Cell(fault="half", collective="all_reduce"),
        Cell(fault="down", collective="reduce_scatter"),
        Cell(fault="mismatch", variant="order", collective="broadcast"),
        Cell(fault="new_group", collective="all_reduce"),
        Cell(fault="power", collective="all_reduce"),
        Cell(fault="power", variant="new_group", collective="all_reduce"),
        Cell(fault="power", variant="between", collective="all_reduce"),
    ]
    with matrix(cluster) as ranks:
        outcomes = [ranks.outcome(cell) for cell in chosen]
    assert not [outcome for outcome in outcomes if outcome.complaints]
