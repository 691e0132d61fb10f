"""Machine code on disk must go when anything that went into it changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.effort import long

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
