"""Collectives over the backend: every form, type, operation and size, also at odd world sizes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.effort import long

from mycel.emulate import launch
from mycel.runtime import warm
from mycel.topology.builders import two_boxes

RunRanks = Callable[..., list[Any]]
CHECKS = Path(__file__).resolve().parent / "checks"


def assert_same_bits(results: list[dict[str, Any]]) -> None:
    for check, value in results[0].items():
        assert all(result[check] == value for result in results), f"{check}: ranks got different bits"


@pytest.mark.parametrize("world_size", [2, 3, 5, *(pytest.param(size, marks=long) for size in (4, 7, 8))])
def test_everything(run_ranks: RunRanks, world_size: int) -> None:
    results = run_ranks(world_size, "collectives", "everything")
    assert set(results[0]) >= {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "not_scheduled"}
    assert len(results[0]["all_reduce"]) == (127 if world_size < 5 else 124)
    assert_same_bits(results)


def test_a_full_ring_waits_and_goes_on(run_ranks: RunRanks) -> None:
    run_ranks(2, "collectives", "more_than_the_ring_holds")


@pytest.mark.parametrize("cluster", ["ring4", "two_slow_nics"])
def test_uneven_where_ranks_relay(run_ranks: RunRanks, cluster: str) -> None:
    """On a ring what two ranks exchange goes by way of a third, which has to know its length."""
    file = Path(__file__).resolve().parents[2] / "examples" / "clusters" / f"{cluster}.yaml"
    run_ranks(4, "collectives", "uneven", env={"MYCEL_TOPOLOGY": str(file)})


def test_monitored_barrier(run_ranks: RunRanks) -> None:
    run_ranks(3, "collectives", "monitored")


def test_what_no_schedule_carries_does_not_hang(run_ranks: RunRanks) -> None:
    run_ranks(4, "collectives", "many_not_scheduled")


@pytest.mark.namespaces
@pytest.mark.usefixtures("warm_ranks")
def test_on_an_emulated_cluster(tmp_path: Path) -> None:
    """Two nodes with a slow way between, real packets on shaped links: the same results as on loopback."""
    heard: list[str] = []
    checks = [
        "reduce_scatter",
        "broadcast",
        "all_to_all",
        "uneven",
        "several_at_once",
        "not_scheduled",
    ]
    code = launch(
        two_boxes(num_ranks=4, inside="400 Mbit/s", between="100 Mbit/s"),
        [sys.executable, str(CHECKS / "launched.py"), str(tmp_path), *checks],
        env={"OMP_NUM_THREADS": "1"},
        output=lambda rank, line: heard.append(f"{rank}: {line}"),
        timeout_s=120.0,
        warm=warm,
    )
    assert code == 0, "\n".join(heard)
    answers = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)]
    assert answers[0]["fabric"] == "two_boxes"
    assert all(answer == answers[0] for answer in answers)
