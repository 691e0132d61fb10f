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

from mycel import compiled as module
from mycel.collectives import maxflow
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


@pytest.mark.parametrize("decorator", [pytest.param("compiled", marks=long), "compiled_without_lock"])
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
    for ours, theirs in zip(kernel.interpreted(*arguments), kernel(*arguments), strict=True):
        assert np.array_equal(ours, theirs)


def test_little_is_interpreted_and_much_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    function: Any = compiled(lambda x: x + 1)
    monkeypatch.setattr("mycel.compiled._interpreted", 0)
    monkeypatch.setitem(sys.modules, "numba", sys)  # whichever module: only its name counts
    assert interpreted_while_small(function, 10) is function, "numba is there already"
    monkeypatch.delitem(sys.modules, "numba")
    assert interpreted_while_small(function, 30_000)(1) == 2
    assert interpreted_while_small(function, 30_000) is function, "60,000 steps are more than importing numba costs"


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
