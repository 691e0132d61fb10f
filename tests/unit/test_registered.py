"""Registered schedules: which serve a call, under which name and number, and what a folder of them says."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from mycel.collectives.schedule import Schedule
from mycel.collectives.synth import synthesize
from mycel.errors import ScheduleError, UsageError
from mycel.runtime.registered import Registered, Registry
from mycel.runtime.registering import read_folder
from mycel.topology import load_topology

RING = synthesize(load_topology("ring:ranks=3"), "all_reduce", "ring")


def registered(method: str, **named: object) -> Registered:
    return Registered(method=method, name="all_reduce", digest="0f" * 32, **named)  # type: ignore[arg-type]


def test_sizes_are_from_and_to() -> None:
    one = registered("ring@0f0f0f0f", least_bytes=1 << 10, most_bytes=1 << 20)
    assert [one.covers(size) for size in (1023, 1024, 1 << 20, (1 << 20) + 1)] == [False, True, True, False]
    assert str(one) == "ring@0f0f0f0f for all_reduce from 1KB up to 1MB"
    assert str(registered("a", most_bytes=1024, always=False)) == (
        "a for all_reduce up to 1KB, where the cost model prefers it"
    )


def test_what_serves_a_call(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    assert len(registry) == 0 and registry.serving("all_reduce", None, 8) == {}
    registry.add(registered("small", most_bytes=100), RING)
    registry.add(registered("offered", always=False), RING)
    assert registry.serving("all_reduce", None, 8) == {"small": (RING, True), "offered": (RING, False)}
    assert list(registry.serving("all_reduce", None, 101)) == ["offered"]
    assert registry.serving("all_gather", None, 8) == registry.serving("all_reduce", 0, 8) == {}
    assert registry.schedule("small") is RING and registry.schedule("ring") is None
    usual = ("forest", "ring")
    assert registry.number("ring", usual) == 1
    assert 2 <= registry.number("small", usual) < 1 << 10
    assert registry.remove("small") is not None and registry.remove("small") is None
    with caplog.at_level(logging.WARNING):
        registry.drop(is_said=True)
        registry.drop(is_said=True)
    (said,) = caplog.messages
    assert said.endswith("serve no more: offered for all_reduce of any size, where the cost model prefers it")
    assert len(registry) == 0


def test_a_folder(tmp_path: Path) -> None:
    for name in ("b@64KB-16MB.json", "a.txt", "c@-1KB.json", "d@1MB-.json", "e@x.json"):
        text = RING.to_text() if name.endswith(".txt") else RING.to_json_text()
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "README.md").write_text("ours", encoding="utf-8")
    (tmp_path / ".hidden.json").write_text("{", encoding="utf-8")
    found = read_folder(tmp_path)
    assert [(file.name, sizes) for file, _, sizes in found] == [
        ("a.txt", (0, None)),
        ("b@64KB-16MB.json", ("64KB", "16MB")),
        ("c@-1KB.json", (0, "1KB")),
        ("d@1MB-.json", ("1MB", None)),
        ("e@x.json", (0, None)),
    ]
    assert all(isinstance(schedule, Schedule) and schedule == RING for _, schedule, _ in found)
    (tmp_path / "z.json").write_text('{"nothing": 1}', encoding="utf-8")
    with pytest.raises(ScheduleError):
        read_folder(tmp_path)
    with pytest.raises(UsageError, match=r"MYCEL_SCHEDULES=.*: no such folder"):
        read_folder(tmp_path / "nowhere")
