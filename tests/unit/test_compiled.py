"""Machine code on disk must go when anything that went into it changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.effort import long

from mycel import compile_lock
from mycel import compiled as module
from mycel.collectives import bound, maxflow
from mycel.collectives.spec import Collective, CollectiveName
from mycel.collectives.synth import methods_for, synthesize
from mycel.collectives.verify import verify_schedule
from mycel.compiled import compiled, interpreted_while_small
from mycel.topology.load import load_topology

INNER = "from mycel.compiled import compiled\n\n@compiled\ndef inner(x):\n    return x + {}\n"
OUTER = """
from mycel.compiled import {decorator}
from inner_module import inner

@{decorator}
def outer(x):
    return inner(x) * 10

if __name__ == "__main__":
    print(outer(1), sum(outer.stats.cache_hits.values()))
"""


def run(folder: Path) -> str:
    done = subprocess.run([sys.executable, str(folder / "outer.py")], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("decorator", [pytest.param("compiled_at_once", marks=long), "compiled_without_lock"])
def test_a_change_in_a_called_module_is_seen(tmp_path: Path, decorator: str) -> None:
    (tmp_path / "outer.py").write_text(OUTER.format(decorator=decorator), encoding="utf-8")
    (tmp_path / "inner_module.py").write_text(INNER.format(1), encoding="utf-8")
    assert run(tmp_path) == "20 0"
    assert run(tmp_path) == "20 1", "unchanged code comes from the disk"
    (tmp_path / "inner_module.py").write_text(INNER.format(2), encoding="utf-8")
    assert run(tmp_path) == "30 0"


@pytest.mark.parametrize("fabric", ["two_boxes:ranks=6", "ring:ranks=5", "dgx_a100:nodes=1"])
@pytest.mark.parametrize("scale", [1, 3, 50])
def test_interpreted_and_compiled_kernels_agree(fabric: str, scale: int) -> None:
    topology = load_topology(fabric)
    graph = maxflow.FlowGraph.of(topology)
    demand = np.full(topology.num_ranks, 40, dtype=np.int64)
    capacity = np.array([scale * link.capacity for link in topology.links], dtype=np.int64)
    kernel: Any = maxflow._shortfalls
    source = graph.num_vertices
    arguments = (source + 1, *graph.with_source(capacity, demand), source, graph.ranks, int(demand.sum()))
    for ours, theirs in zip(kernel.interpreted(*arguments), kernel.compiled(*arguments), strict=True):
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("fabric", ["two_boxes:ranks=6", "ring:ranks=5", "star:ranks=4"])
@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
def test_plans_are_the_same_interpreted_and_compiled(
    fabric: str, name: CollectiveName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that compile and ranks that do not must come to the same schedules."""
    topology = load_topology(fabric)
    collective = Collective(name=name, num_ranks=topology.num_ranks, root=0 if name == "broadcast" else None)
    made = []
    for way in ("interpreted", "compiled"):
        monkeypatch.setattr(module.Compiled, "__call__", lambda self, *given, way=way: getattr(self, way)(*given))
        bound._find_optimum.cache_clear()
        bound._find_division.cache_clear()
        schedules = [synthesize(topology, collective, method) for method in methods_for(name)]
        for schedule in schedules:
            verify_schedule(schedule)
        made.append([schedule.to_json() for schedule in schedules])
    assert made[0] == made[1]


def test_little_is_interpreted_and_much_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    function: Any = compiled(lambda x: x + 1)
    monkeypatch.setattr(module, "_interpreted", 0)
    assert interpreted_while_small(function, 30_000)(1) == 2
    assert interpreted_while_small(function, 10_000) is function.interpreted
    assert not function.is_loaded
    assert interpreted_while_small(function, 1) is not function.interpreted, "40,001 steps cost more than loading"
    monkeypatch.setattr(module, "_interpreted", 0)
    assert interpreted_while_small(function, 1) is not function.interpreted, "it is there already"


def test_uncounted_calls_are_interpreted_for_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_interpreted_s", 0.0)
    function: Any = compiled(lambda x, scale: (x * scale).sum())
    little, much = np.arange(10), np.arange(5000)
    result = function(little, 3)
    assert result == 135 and type(result) is int, "as compiled code gives it"
    assert not function.is_loaded
    monkeypatch.setattr(module, "_interpreted_s", 0.3)
    assert function(little, 3) == 135
    assert function.is_loaded
    other: Any = compiled(lambda x, scale: (x * scale).sum())
    monkeypatch.setattr(module, "_interpreted_s", 0.0)
    assert other(much, 2) == 5000 * 4999
    assert other.is_loaded


WAITING = """
import sys
from mycel.compiled import compiled_at_once

@compiled_at_once
def function(x):
    return x + 1

sys.stdin.readline()
print(function(1), sum(function.stats.cache_misses.values()))
"""


def test_one_of_many_processes_compiles(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(WAITING, encoding="utf-8")
    command = [sys.executable, str(tmp_path / "waiting.py")]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [process.communicate("\n") for process in processes]
    assert [out.split()[0] for out, _ in said] == ["2"] * 3
    assert sorted(int(out.split()[1]) for out, _ in said) == [0, 0, 1], said
    assert not any("compiling" in err for _, err in said), "what is not mycel's is not announced"


HOLDER = """
import sys
from pathlib import Path
from mycel.compile_lock import Turn

Turn(Path(sys.argv[1])).take("")
print("held", flush=True)
sys.stdin.readline()
"""


def test_whoever_dies_lets_go_and_whoever_stops_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compile_lock, "PATIENCE_S", 0.0)
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    turn = compile_lock.Turn(tmp_path)
    turn.take("one")
    turn.take("another inside of it")
    assert caplog.text.count("compiling one here") == 1
    turn.give()
    turn.give()
    holder.kill()
    holder.communicate()
    caplog.clear()
    turn.take("one")
    assert not caplog.text, "nobody has it any more"
    turn.give()


def test_a_folder_without_locks_delays_nobody(tmp_path: Path) -> None:
    turn = compile_lock.Turn(tmp_path / "missing")
    turn.take("one")
    turn.give()


class ReadOnly:
    """Stands for numba on a machine where code can be kept in the folder that its settings name, or nowhere."""

    def __init__(self) -> None:
        self.config = self
        self.CACHE_DIR = ""
        self.asked: list[tuple[bool, str]] = []

    def njit(self, *, cache: bool = False) -> Any:
        self.asked.append((cache, self.CACHE_DIR))
        if cache and not self.CACHE_DIR:
            raise RuntimeError("cannot cache function 'f': no locator available for file 'f.py'")
        return lambda function: function


def test_an_image_that_nobody_may_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code is kept among the temporary files, in a folder of the user's own; numba's settings stay as they were."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    module._private_folder.cache_clear()
    numba = ReadOnly()
    module._cached_on_disk(numba, len, {})
    (folder,) = tmp_path.iterdir()
    assert numba.asked == [(True, ""), (True, str(folder))]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert numba.CACHE_DIR == ""


def test_a_folder_that_others_may_write_to_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    module._private_folder.cache_clear()
    (tmp_path / f"mycel-compiled-{os.geteuid()}").mkdir(mode=0o755)
    numba = ReadOnly()
    for _ in range(2):
        module._cached_on_disk(numba, len, {})
    assert numba.asked == [(True, ""), (False, "")] * 2
    assert caplog.text.count("compiled code cannot be kept") == 1
    module._private_folder.cache_clear()


def test_what_else_numba_refuses_is_raised() -> None:
    class Broken(ReadOnly):
        def njit(self, *, cache: bool = False) -> Any:
            raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        module._cached_on_disk(Broken(), len, {})
