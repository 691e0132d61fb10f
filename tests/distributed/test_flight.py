"""The flight recorder on real ranks: what it writes down on request and after a failure, and that ranks agree."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mycel.emulate.launch import launch
from mycel.report.flight.findings import examine
from mycel.report.flight.links import carried, suspect
from mycel.report.flight.records import read_dumps
from mycel.topology import load_topology, to_json

PROMISED = Path(__file__).parent / "programs" / "promised.py"
CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
RunRanks = Callable[..., list[Any]]
Lines = list[dict[str, Any]]


def calls(lines: Lines) -> Lines:
    return [line for line in lines if "sequence" in line]


def test_ranks_write_down_the_same_collectives(run_ranks: RunRanks, tmp_path: Path) -> None:
    dumps = run_ranks(3, "flight", "recorded", str(tmp_path))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank0.jsonl", "rank1.jsonl", "rank2.jsonl"]
    world = [
        ("all_reduce", "all_reduce", 200_000, "float32", "SUM", None),
        ("all_reduce", "all_reduce", 64, "float64", "MAX", None),
        ("broadcast", "broadcast", 6, "int16", None, 1),
        ("barrier", "all_reduce", 4, "int32", "MAX", None),
    ]
    pair = ("all_gather", "all_gather", 80, "float32", None, None)
    groups = set()
    for rank, lines in enumerate(dumps):
        head, *rest = lines
        assert (head["mycel_flight"], head["rank"], head["world_size"]) == (1, rank, 3)
        keys = ("what", "collective", "bytes", "dtype", "op", "root")
        made = [tuple(line[key] for key in keys) for line in calls(lines)]
        assert made == [*world[:3], *([pair] if rank < 2 else []), world[3]]
        assert [line["number"] for line in calls(lines)] == list(range(head["recorded"]))
        for line in calls(lines):
            assert line["state"] == "done"
            assert line["called_ns"] <= line["started_ns"] <= line["ended_ns"] <= head["monotonic_ns"]
        members = {line["group"]: line["ranks"] for line in rest if "topology" in line}
        assert sorted(members.values()) == ([[0, 1], [0, 1, 2]] if rank < 2 else [[0, 1, 2]])
        groups |= {(identity, tuple(ranks)) for identity, ranks in members.items()}
    assert len(groups) == 2
    assert moved(dumps, 0, sent=True) == moved(dumps, 0, sent=False)


def moved(dumps: list[Lines], number: int, *, sent: bool) -> dict[tuple[int, int], int]:
    """Bytes of a collective by channel, as its senders, or its receivers, have written them down."""
    found: dict[tuple[int, int], int] = {}
    for rank, lines in enumerate(dumps):
        program = calls(lines)[number]["program"]
        line = next(line for line in lines if line.get("channels") is not None and line["program"] == program)
        for channel, num_bytes in zip(line["channels"], line["bytes"], strict=True):
            if channel["src" if sent else "dst"] == rank:
                found[channel["src"], channel["dst"]] = num_bytes
    return found


def test_signal_and_end_write_records_where_a_folder_is_set(run_ranks: RunRanks, tmp_path: Path) -> None:
    env = {"MYCEL_FLIGHT_DIR": str(tmp_path)}
    results = run_ranks(2, "flight", "on_request", str(tmp_path), backend=None, env=env)
    for by_signal, at_the_end in results:
        assert (by_signal[0]["why"], len(calls(by_signal))) == ("SIGUSR2", 1)
        assert len(calls(at_the_end)) == 2
        group = next(line for line in at_the_end if "topology" in line)
        assert all(link["src"] != link["dst"] for link in group["connections"])


def test_a_ring_of_none_keeps_none(run_ranks: RunRanks) -> None:
    assert run_ranks(2, "flight", "off", env={"MYCEL_FLIGHT_RECORDER": "0"}) == [True, True]


def test_a_failure_writes_records_and_says_where(run_ranks: RunRanks, tmp_path: Path) -> None:
    results = run_ranks(2, "flight", "failed", env={"MYCEL_FLIGHT_DIR": str(tmp_path), "MYCEL_TIMEOUT": "20"})
    messages = {message for message, _ in results}
    assert len(messages) == 1 and "do not agree" in messages.pop()
    (folder,) = (place for place in tmp_path.iterdir() if place.name.startswith("failed-"))
    for rank, (message, notes) in enumerate(results):
        file = folder / f"rank{rank}.jsonl"
        assert str(file) in notes[0] and f"mycel report {folder}" in notes[0]
        head, *rest = (json.loads(line) for line in file.read_text().splitlines())
        assert head["why"] == f"MismatchError: {message}"
        first, second = (line for line in rest if "sequence" in line)
        assert (first["state"], second["state"]) == ("done", "running")
        program = next(line for line in rest if line.get("program") == second["program"] and "messages" in line)
        assert len(second["messages_done"]) == len(program["messages"])
        assert sum(second["messages_done"]) < sum(program["messages"])


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.namespaces
def test_the_report_names_the_slow_cable_and_the_late_rank(tmp_path: Path) -> None:
    """Rank 3's cable carries 100 of the 400 Mbit/s that the topology file promises; rank 1 is late each time."""
    real = load_topology(CLUSTERS / "slow_nic.yaml")
    promised = to_json(real)
    for link in promised["links"]:
        link["capacity"] = max(link["capacity"] for link in promised["links"])
    file = tmp_path / "promised.json"
    file.write_text(json.dumps(promised), encoding="utf-8")
    said: list[str] = []
    status = launch(
        real,
        [sys.executable, str(PROMISED), str(file), "1"],
        env={"MYCEL_FLIGHT_DIR": str(tmp_path / "flight"), "OMP_NUM_THREADS": "1"},
        output=lambda rank, line: said.append(line),
        timeout_s=100.0,
        prefix=False,
    )
    assert status == 0, "".join(said)
    found = examine(read_dumps([tmp_path / "flight"]))
    assert len(found.whole) == 6 and not found.unfinished and not found.silent
    assert found.latest is not None and found.latest.rank == 1
    slow = suspect(carried(found.dumps))
    assert slow is not None
    assert set(slow.ends) == {real.label(real.ranks[3]), "switch"}
    assert found.kinds[0].of_bound is not None and found.kinds[0].of_bound < 0.5
