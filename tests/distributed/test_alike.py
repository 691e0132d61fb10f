"""What groups of more than 32 ranks run, between few: one part and moves, trees by construction, own proofs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mycel.topology.builders import hosts
from mycel.topology.json_format import to_json

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize("methods", ["forest,flow", "tree,direct"])
def test_collectives_of_large_groups(run_ranks: RunRanks, tmp_path: Path, methods: str) -> None:
    file = tmp_path / "nodes.json"
    file.write_text(json.dumps(to_json(hosts(["a", "b", "c", "b", "c", "a"], between="4 GB/s"))))
    env = {"MYCEL_TOPOLOGY": str(file), "MYCEL_METHODS": methods, "MYCEL_PIECE_BYTES": "4096"}
    stated = ["all_gather", "all_to_all"] if "tree" in methods else ["all_reduce", "all_gather", "all_to_all"]
    assert run_ranks(6, "alike", "collectives", backend=None, env=env) == [stated] * 6


def test_one_machine(run_ranks: RunRanks) -> None:
    assert run_ranks(3, "alike", "collectives", backend=None) == [["all_reduce", "all_gather", "all_to_all"]] * 3
