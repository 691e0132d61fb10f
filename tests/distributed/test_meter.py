"""Metrics of real ranks: what is counted, what goes to Prometheus and TensorBoard, and what could not be counted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mycel.errors import UsageError
from mycel.runtime.flight import FlightRecorder
from mycel.runtime.meter import Meter, keep_writing, prometheus_text
from mycel.settings import Settings, read_settings

RunRanks = Callable[..., list[Any]]


def test_calls_and_bytes_are_counted_by_group_and_collective(run_ranks: RunRanks, tmp_path: Path) -> None:
    ranks = run_ranks(3, "meter", "counted", str(tmp_path))
    for rank, (found, of_pair, text, added) in enumerate(ranks):
        assert (found["rank"], found["world_size"], found["unread"], found["under_way"]) == (rank, 3, 0, 0)
        by_size = {group["ranks"]: group for group in found["groups"].values()}
        assert sorted(by_size) == ([2, 3] if rank < 2 else [3])
        summed = by_size[3]["collectives"]["all_reduce"]
        assert (summed["calls"], summed["bytes"]) == (4, 4 * 200_000)
        assert summed["seconds"] > 0 and summed["queued_seconds"] >= 0
        if rank < 2:
            assert by_size[2]["collectives"]["broadcast"]["bytes"] == 20
            assert [group["ranks"] for group in of_pair["groups"].values()] == [2]
        assert [file.name for file in tmp_path.iterdir() if not re.fullmatch(r"rank\d\.prom", file.name)] == []
        assert "default" in found["groups"]
        line = f'mycel_collective_bytes_total{{rank="{rank}",group="default",collective="all_reduce"}} 800000'
        assert line in text.splitlines()
        _check_format(text)
        calls = [(value, step) for tag, value, step in added if tag.endswith("/all_reduce/calls")]
        assert calls == [(3.0, 1), (1.0, 2)]
    # What ranks sent is what an all_reduce needs: all but one share of the array each way, counted once.
    sent = sum(
        sum(c["sent_bytes"] for g in r[0]["groups"].values() for c in g["collectives"].values()) for r in ranks
    )
    assert sent >= 4 * 2 * 2 * 200_000 + 20


def test_what_left_the_recorder_uncounted_is_said(run_ranks: RunRanks) -> None:
    for first, last in run_ranks(2, "meter", "overrun", backend=None, env={"MYCEL_FLIGHT_RECORDER": "16"}):
        kept = sum(counts["calls"] for group in first["groups"].values() for counts in group["collectives"].values())
        assert (kept, first["unread"]) == (16, 84)
        now = sum(counts["calls"] for group in last["groups"].values() for counts in group["collectives"].values())
        assert (now, last["unread"]) == (116, 84)


def test_a_file_is_written_without_being_asked_for(run_ranks: RunRanks, tmp_path: Path) -> None:
    where = str(tmp_path / "mycel{rank}.prom")
    env = {"MYCEL_METRICS": where, "MYCEL_METRICS_SECONDS": "0.05"}
    for rank, text in enumerate(run_ranks(2, "meter", "by_itself", where, backend=None, env=env)):
        _check_format(text)
        at_the_end = (tmp_path / f"mycel{rank}.prom").read_text()
        line = f'mycel_collectives_total{{rank="{rank}",group="default",collective="all_reduce"}} 1'
        assert line in at_the_end.splitlines()
    assert sorted(file.name for file in tmp_path.glob("*.prom")) == ["mycel0.prom", "mycel1.prom"]


def _check_format(text: str) -> None:
    """Prometheus reads every line; what belongs to a metric stands together; no series is there twice."""
    name, series = "", set()
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split()[2]
        elif line.startswith("# TYPE "):
            assert line.split()[2:] in ([name, "counter"], [name, "gauge"])
            assert name.endswith("_total") == line.endswith(" counter")
        else:
            found = re.fullmatch(r'(\w+)\{(\w+="(?:[^"\\\n]|\\.)*",?)+\} [0-9.e+-]+', line)
            assert found is not None and found[1] == name, line
            assert line.rpartition(" ")[0] not in series
            series.add(line.rpartition(" ")[0])
    assert text.endswith("\n")


def test_names_of_groups_are_escaped() -> None:
    counts = {"calls": 1, "bytes": 2, "sent_bytes": 3, "seconds": 0.5, "queued_seconds": 0.0}
    links = dict.fromkeys(("acknowledged_bytes", "busy_seconds", "receiver_full_seconds", "retransmitted_packets"), 0)
    group = {"collectives": {"all_reduce": counts}, "connections": links, "failures": 0, "links_lost": 0}
    found = {"rank": 0, "world_size": 1, "under_way": 0, "unread": 0, "groups": {'a "\\\n': group}}
    text = prometheus_text(found)
    assert 'group="a \\"\\\\\\n"' in text
    _check_format(text)


def test_where_files_cannot_go_is_refused_at_once(tmp_path: Path) -> None:
    recorder = FlightRecorder(4, rank=1, world_size=2)
    with pytest.raises(UsageError, match=r"put \{rank\} into the name"):
        keep_writing(recorder, Settings(metrics=str(tmp_path / "mycel.prom")))
    with pytest.raises(UsageError, match="there is no folder"):
        keep_writing(recorder, Settings(metrics=str(tmp_path / "missing" / "{rank}.prom")))
    assert Meter(recorder).as_dict()["groups"] == {}
    assert read_settings({"MYCEL_METRICS": "x", "MYCEL_METRICS_SECONDS": "3"}).metrics_every_s == 3.0
    with pytest.raises(UsageError, match="MYCEL_METRICS_SECONDS"):
        read_settings({"MYCEL_METRICS_SECONDS": "often"})
