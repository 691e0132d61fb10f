"""The ring of the flight recorder: what it keeps, what it lets go, and what it refuses to write to."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mycel.collectives.program import Channel
from mycel.errors import PeerLostError
from mycel.runtime import flight
from mycel.runtime import job_fields as j
from mycel.runtime.flight import FlightLog, FlightRecorder
from mycel.runtime.headers import pack_kind
from mycel.runtime.prepared import Origin, Traffic
from mycel.settings import read_settings
from mycel.topology.builders import star

ORIGIN = Origin(collective="all_reduce", root=None, method="forest", piece_bytes=1024, even=True)


def log_of(recorder: FlightRecorder, folder: Path | None = None) -> FlightLog:
    return FlightLog(
        recorder,
        identity="f00",
        name="0",
        ranks=(0, 1),
        topology=star(num_ranks=2),
        described=True,
        dtype_name=lambda code: f"type {code}",
        folder=folder,
    )


def job_of(sequence: int, rows: Any = None) -> Any:
    fields = np.zeros(j.JOB_FIELDS, dtype=np.int64)
    fields[j.J_REMAINING] = -1
    fields[[j.J_HEADER + 1, j.J_HEADER + 2]] = sequence, pack_kind("all_reduce", 0, None, None, 0)
    channels = (Channel(src=0, dst=1, path=(0, 2, 1)),)
    state = weakref.ref(rows) if rows is not None else lambda: None
    prepared: Any = lambda: None if state() is None else SimpleNamespace(channel_rows=state())  # noqa: E731
    traffic = Traffic(origin=ORIGIN, channels=channels, moved=(64, 4), prepared=prepared)
    return SimpleNamespace(fields=fields, prepared=SimpleNamespace(traffic=traffic))


def note(log: FlightLog, job: Any) -> None:
    log.note(job.prepared.traffic, 1, job.fields)


def lines_of(recorder: FlightRecorder) -> list[dict[str, Any]]:
    lines = recorder.lines("test")
    assert json.loads(json.dumps(lines)) == lines
    return [line for line in lines if "sequence" in line]


def test_the_ring_keeps_the_last_ones_in_order() -> None:
    recorder = FlightRecorder(5, rank=0, world_size=2)
    log = log_of(recorder)
    for sequence in range(1, 13):
        note(log, job_of(sequence))
    assert [line["sequence"] for line in lines_of(recorder)] == [8, 9, 10, 11, 12]
    head = recorder.lines("test")[0]
    assert (head["recorded"], head["kept"]) == (12, 5)


def test_states_come_from_what_the_engine_writes() -> None:
    recorder = FlightRecorder(5, rank=0, world_size=2)
    log = log_of(recorder)
    rows = np.zeros((1, j.CHANNEL_FIELDS), dtype=np.int64)
    queued, running, done = job_of(1), job_of(2, rows), job_of(3)
    for job in (queued, running, done):
        note(log, job)
    running.fields[j.J_REMAINING], rows[0, j.C_HEAD] = 7, 3
    done.fields[[j.J_STATUS, j.J_STARTED_NS, j.J_ENDED_NS]] = j.DONE, 10, 30
    first, second, third = lines_of(recorder)
    assert (first["what"], first["op"], first["method"], first["dtype"]) == ("all_reduce", "AVG", "forest", "type 0")
    assert (first["state"], first["started_ns"], first["ended_ns"]) == ("queued", None, None)
    assert (second["state"], second["messages_done"], second["ended_ns"]) == ("running", [3], None)
    assert (third["state"], third["started_ns"], third["ended_ns"]) == ("done", 10, 30)


def test_the_ring_keeps_no_program_alive() -> None:
    recorder = FlightRecorder(5, rank=0, world_size=2)
    log = log_of(recorder)
    rows = np.zeros((1, j.CHANNEL_FIELDS), dtype=np.int64)
    watched, job = weakref.ref(rows), job_of(1, rows)
    job.fields[j.J_REMAINING] = 2
    note(log, job)
    del rows, job
    gc.collect()
    assert watched() is None
    assert "messages_done" not in lines_of(recorder)[0]


def test_a_failure_is_written_down_once(tmp_path: Path) -> None:
    recorder = FlightRecorder(5, rank=0, world_size=2)
    log = log_of(recorder, tmp_path)
    note(log, job_of(1))
    first, second = PeerLostError("rank 1 was lost"), PeerLostError("again")
    log.failed(first)
    log.failed(second)
    file = tmp_path / "failed-f00" / "rank0.jsonl"
    assert json.loads(file.read_text().splitlines()[0])["why"] == "PeerLostError: rank 1 was lost"
    assert str(file) in first.__notes__[0]
    assert not hasattr(second, "__notes__")


def test_a_folder_that_cannot_be_written_hides_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    error = PeerLostError("rank 1 was lost")
    log_of(FlightRecorder(5, rank=0, world_size=2), tmp_path / "file").failed(error)
    assert not hasattr(error, "__notes__")


def test_a_link_in_the_place_of_the_temporary_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    flight._own_temporary_folder().symlink_to(tmp_path / "elsewhere")
    error = PeerLostError("rank 1 was lost")
    log_of(FlightRecorder(5, rank=0, world_size=2)).failed(error)
    assert not list((tmp_path / "elsewhere").iterdir())
    assert not hasattr(error, "__notes__")


def test_settings_name_ring_and_folder() -> None:
    assert read_settings({}).flight_records == 2000
    assert read_settings({"MYCEL_FLIGHT_RECORDER": "0"}).flight_records == 0
    asked = read_settings({"MYCEL_FLIGHT_RECORDER": "50", "MYCEL_FLIGHT_DIR": "flight"})
    assert (asked.flight_records, asked.flight_folder) == (50, Path("flight"))
