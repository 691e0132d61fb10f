"""What a machine was measured to need: kept, read back, and weighed in choices."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mycel.collectives.cost import choose, estimate_seconds
from mycel.collectives.spec import Collective
from mycel.collectives.synth import synthesize
from mycel.cost import Costs
from mycel.cost.processors import ADD_S_PER_GB, COPY_S_PER_GB, MESSAGE_S, WAKE_S
from mycel.errors import UsageError
from mycel.runtime import calibration
from mycel.runtime.calibration import calibration_file, costs_from_text, costs_to_text, known_costs, measure_costs
from mycel.settings import read_settings
from mycel.topology.builders import loopback

METHODS = ("forest", "tree")
SLOW = Costs(message_s=1.0, wake_s=2.0, copy_s_per_gb=3.0, add_s_per_gb=4.0, cores=5)


class Clock:
    """Stands for ``time``: the four loops take what is said in one run of seven, and more in the others."""

    def __init__(self, seconds: list[float]) -> None:
        runs = [each * factor for each in seconds for factor in (3.0, 2.0, 1.5, 1.0, 1.0, 4.0, 1.2)]
        self.readings = iter([reading for each in runs for reading in (0.0, each)])

    def perf_counter(self) -> float:
        return next(self.readings)


@pytest.mark.parametrize(("slower", "costs_more"), [(0.5, 0.5), (1.0, 1.0), (2.1, 2.0), (0.01, 0.25), (100.0, 4.0)])
def test_a_machine_that_is_slower_costs_more(
    slower: float, costs_more: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loops run as they are; how long each took is told, and the least of its runs counts."""
    message, wake, copy, add = (slower * there for there in calibration._THERE)
    count, longer = calibration._MESSAGES, calibration._LONG - calibration._SHORT
    short = 2 * count * message
    long = short + 2 * count * longer * copy / 1e9
    added = count * calibration._LONG * add / 1e9
    trip = 2 * count * (2 * message + wake)
    monkeypatch.setattr(calibration, "time", Clock([short, long, added, trip]))
    costs = measure_costs()
    assert costs.message_s == pytest.approx(costs_more * MESSAGE_S)
    assert costs.wake_s == pytest.approx(costs_more * WAKE_S)
    assert costs.copy_s_per_gb == pytest.approx(costs_more * COPY_S_PER_GB)
    assert costs.add_s_per_gb == pytest.approx(costs_more * ADD_S_PER_GB)
    assert costs.cores == len(os.sched_getaffinity(0))
    assert costs_from_text(costs_to_text(costs)) == costs


def test_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter([SLOW])
    monkeypatch.setattr(calibration, "measure_costs", lambda: next(measured))
    folder = tmp_path / "new" / "folder"
    assert [known_costs(folder) for _ in range(3)] == [SLOW] * 3
    assert [file.name for file in folder.iterdir()] == [calibration_file(folder).name]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "{}",
        "[" * 200_000,
        *(
            json.dumps({**asdict(SLOW), **wrong})
            for wrong in (
                {"cores": "5"},
                {"cores": 0},
                {"cores": -1},
                {"cores": True},
                {"cores": 2.5},
                {"cores": 10**400},
                {"message_s": -1.0},
                {"wake_s": float("nan")},
                {"copy_s_per_gb": float("inf")},
                {"add_s_per_gb": 10**400},
                {"add_s_per_gb": 1e300},
                {"message_s": None},
            )
        ),
    ],
    ids=lambda content: content[:40],
)
def test_a_broken_file_is_measured_over(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "measure_costs", lambda: SLOW)
    calibration_file(tmp_path).write_text(content)
    assert known_costs(tmp_path) == SLOW
    assert costs_from_text(calibration_file(tmp_path).read_text()) == SLOW


def test_a_number_too_long_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "measure_costs", lambda: SLOW)
    calibration_file(tmp_path).write_text(costs_to_text(SLOW).replace("5", "5" * 5000))
    assert known_costs(tmp_path) == SLOW


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_something_else_than_a_file(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a pipe would wait for somebody who writes."""
    monkeypatch.setattr(calibration, "measure_costs", lambda: SLOW)
    if kind == "pipe":
        os.mkfifo(calibration_file(tmp_path))
    else:
        calibration_file(tmp_path).mkdir()
    assert known_costs(tmp_path) == SLOW


def test_a_folder_that_refuses_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "measure_costs", lambda: SLOW)
    (tmp_path / "file").write_text("no folder")
    assert known_costs(tmp_path / "file") == SLOW


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(calibration, "measure_costs", lambda: SLOW)
    monkeypatch.setattr(calibration.Path, "home", nowhere)
    assert known_costs() == SLOW


def test_the_file_belongs_to_a_machine_and_its_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = calibration_file(tmp_path)
    assert here == calibration_file(tmp_path)
    monkeypatch.setattr(calibration.socket, "gethostname", lambda: "elsewhere")
    assert calibration_file(tmp_path) != here
    monkeypatch.undo()
    monkeypatch.setattr(calibration, "_version", lambda package: "0")
    assert calibration_file(tmp_path) != here


def test_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = read_settings({"XDG_CACHE_HOME": str(tmp_path)})
    assert calibration_file(asked.cache).parent == tmp_path / "mycel"
    assert read_settings({"XDG_CACHE_HOME": str(tmp_path), "MYCEL_CACHE": "here"}).cache == Path("here")
    monkeypatch.setattr(calibration.Path, "home", lambda: tmp_path)
    assert calibration_file(read_settings({}).cache).parent == tmp_path / ".cache" / "mycel"


@pytest.mark.parametrize("wrong", [{"cores": 0}, {"message_s": -1.0}, {"wake_s": float("inf")}])
def test_impossible_costs(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="needs a core, and times from 0"):
        replace(SLOW, **wrong)  # type: ignore[arg-type]


def test_every_cost_counts() -> None:
    schedule = synthesize(loopback(num_ranks=4), Collective(name="all_reduce", num_ranks=4))
    free = Costs(message_s=0, wake_s=0, copy_s_per_gb=0, add_s_per_gb=0)
    least = estimate_seconds(schedule, 1 << 20, 1 << 15, free)
    for name in ("message_s", "wake_s", "copy_s_per_gb", "add_s_per_gb"):
        assert estimate_seconds(schedule, 1 << 20, 1 << 15, replace(free, **{name: 1.0})) > least


def test_ranks_of_a_machine_share_its_cores() -> None:
    schedule = synthesize(loopback(num_ranks=4), Collective(name="all_reduce", num_ranks=4))
    alone = estimate_seconds(schedule, 1 << 20, 1 << 15, SLOW)
    together = {
        cores: estimate_seconds(schedule, 1 << 20, 1 << 15, replace(SLOW, cores=cores), (0,) * 4)
        for cores in (1, 2, 4)
    }
    assert together[1] > together[2] > together[4] >= alone
    assert estimate_seconds(schedule, 1 << 20, 1 << 15, SLOW, (0, 1, 2, 3)) == alone


def test_dear_messages_make_for_few_of_them() -> None:
    made = {m: synthesize(loopback(num_ranks=4), Collective(name="all_reduce", num_ranks=4), m) for m in METHODS}
    free = Costs(message_s=0.0, wake_s=0.0, copy_s_per_gb=0.0, add_s_per_gb=0.0)
    assert choose(made, 1 << 20, costs=free, piece_bytes=1 << 20).method == "forest"
    assert choose(made, 1 << 20, costs=replace(free, message_s=1.0), piece_bytes=1 << 20).method == "tree"
