"""A rank is killed or stopped in the middle of an all_reduce: every survivor names it, in time, and nothing hangs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.effort import long

from mycel.emulate.launch import start
from mycel.topology.load import load_topology
from mycel.topology.model import Topology

PROGRAM = Path(__file__).parent / "programs" / "fault.py"
CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
TIMEOUT_S = 6.0
#: For a busy machine's wake-up.
LATE_S = 2.0
#: The harness's own limit for a whole run; imports of torch on a busy machine take most of it.
LIMIT_S = 120.0


def _reports(where: Topology | int, arguments: Sequence[str]) -> list[dict[str, object]]:
    """Run the program on the ranks of an emulated cluster, or of this machine's loopback; what survivors report."""
    lines: list[str] = []
    victim = int(arguments[1])
    command = [sys.executable, str(PROGRAM), *arguments]
    with start(where, command, output=lambda rank, line: lines.append(line)) as run:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            codes = run.exit_codes
            if all(code is not None for rank, code in enumerate(codes) if rank != victim):
                break
            run.wait(0.2)
        pids = run.pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "a rank outlived its cluster"
    return [json.loads(line) for line in lines if line.startswith("{")]


def _check(reports: list[dict[str, object]], survivors: set[int], victim: int, error: str) -> None:
    assert {report["rank"] for report in reports} == survivors
    causes = set()
    for report in reports:
        kind, message, seconds = report["first"]  # type: ignore[misc]
        assert kind == error, message
        assert f"rank {victim} " in message
        assert seconds <= TIMEOUT_S + LATE_S
        causes.add(message)
        kind, message, seconds = report["second"]  # type: ignore[misc]
        assert kind == error
        assert "failed earlier" in message
        assert f"rank {victim} " in message
        assert seconds < LATE_S  # at once: no second deadline is waited for
    assert len(causes) == 1, causes


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("how", "world_size", "victim", "mode"),
    [("kill", 3, 0, "sync"), ("stop", 3, 1, "async")],
)
def test_survivors_name_the_rank_on_loopback(how: str, world_size: int, victim: int, mode: str) -> None:
    reports = _reports(world_size, [how, str(victim), str(TIMEOUT_S), mode])
    error = "PeerLostError" if how == "kill" else "CollectiveTimeoutError"
    _check(reports, set(range(world_size)) - {victim}, victim, error)


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.namespaces
@pytest.mark.parametrize(
    ("how", "cluster", "victim", "mode"),
    [
        ("kill", "two_boxes.yaml", 5, "async"),
        pytest.param("stop", "two_boxes.yaml", 5, "sync", marks=long),
        ("stop", "ring4.yaml", 0, "async"),
    ],
)
def test_survivors_name_the_rank_in_an_emulated_cluster(how: str, cluster: str, victim: int, mode: str) -> None:
    topology = load_topology(CLUSTERS / cluster)
    reports = _reports(topology, [how, str(victim), str(TIMEOUT_S), mode])
    error = "PeerLostError" if how == "kill" else "CollectiveTimeoutError"
    _check(reports, set(range(topology.num_ranks)) - {victim}, victim, error)
