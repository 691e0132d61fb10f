"""Sends and receives between ranks: what torch promises, who is named when it fails; parts of any length."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.effort import long

from mycel.emulate import launch
from mycel.runtime import warm
from mycel.topology.builders import ring, two_boxes

RunRanks = Callable[..., list[Any]]
CHECKS = Path(__file__).resolve().parent / "checks"
CLUSTERS = Path(__file__).resolve().parents[2] / "examples" / "clusters"


LOCAL = pytest.mark.parametrize("local", ["memory", "unix"])


@pytest.mark.parametrize(
    ("world_size", "local"), [(2, "memory"), (2, "unix"), (2, "tcp"), (3, "unix"), (4, "memory"), (4, "tcp")]
)
def test_everything(run_ranks: RunRanks, world_size: int, local: str) -> None:
    run_ranks(world_size, "messages", "everything", env={"MYCEL_LOCAL": local})


def test_on_a_ring_where_some_ranks_have_no_cable(run_ranks: RunRanks) -> None:
    run_ranks(4, "messages", "any_source", env={"MYCEL_TOPOLOGY": str(CLUSTERS / "ring4.yaml")})


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=long) for seed in range(1, 20))])
@pytest.mark.parametrize("local", ["memory", "unix", "tcp"])
def test_any_messages_in_any_order(run_ranks: RunRanks, seed: int, local: str) -> None:
    run_ranks(4, "messages", "random_exchanges", seed, env={"MYCEL_LOCAL": local})


@pytest.mark.parametrize("local", ["memory", "unix"])
def test_who_leaves_with_a_message_has_taken_it(run_ranks: RunRanks, local: str) -> None:
    run_ranks(2, "messages", "gone_with_what_it_wanted", env={"MYCEL_LOCAL": local})


def test_bytes_go_the_way_that_was_asked_for(run_ranks: RunRanks) -> None:
    ways = {"memory": "MemoryWire", "unix": "SocketWire", "tcp": "SocketWire", None: "MemoryWire"}
    for local, wire in ways.items():
        env = {"MYCEL_LOCAL": local} if local else {}
        assert run_ranks(2, "messages", "kinds_of_wires", env=env) == [[wire], [wire]]


def test_ranks_that_were_told_different_ways_understand_each_other(run_ranks: RunRanks) -> None:
    """Who sends decides."""
    run_ranks(3, "messages", "mixed_ways", backend=None)


def test_nothing_goes_over_gloo(run_ranks: RunRanks) -> None:
    run_ranks(3, "messages", "nothing_over_gloo")


@pytest.mark.parametrize("late", [False, True])
def test_sizes_or_types_that_differ(run_ranks: RunRanks, late: bool) -> None:
    run_ranks(2, "messages", "disagreeing", late)


def test_a_time_out_names_the_rank(run_ranks: RunRanks) -> None:
    run_ranks(2, "messages", "late")


@LOCAL
def test_a_rank_that_is_killed_is_named(run_ranks: RunRanks, local: str) -> None:
    run_ranks(3, "messages", "killed", backend=None, env={"MYCEL_LOCAL": local})


@LOCAL
def test_a_rank_leaves_with_messages_under_way(run_ranks: RunRanks, local: str) -> None:
    run_ranks(2, "messages", "left_behind", env={"MYCEL_LOCAL": local})


@LOCAL
def test_a_forked_child_disturbs_nobody(run_ranks: RunRanks, local: str) -> None:
    run_ranks(2, "messages", "forked", env={"MYCEL_LOCAL": local})


def test_monitored_barriers(run_ranks: RunRanks) -> None:
    run_ranks(3, "messages", "barriers")


@pytest.mark.parametrize("cluster", [None, "ring4"])
def test_parts_of_any_length(run_ranks: RunRanks, cluster: str | None) -> None:
    """On a ring, ranks pass on the parts of others and have to know how long they are."""
    env = {"MYCEL_TOPOLOGY": str(CLUSTERS / f"{cluster}.yaml")} if cluster else {}
    run_ranks(4, "messages", "parts", env=env)
    run_ranks(4, "messages", "parts_that_differ", env=env)


def test_pipelines_of_torch(run_ranks: RunRanks) -> None:
    losses = run_ranks(3, "messages", "pipeline", preload=["torch.distributed.pipelining"])
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.namespaces
def test_long_messages_take_both_paths_of_a_fabric(tmp_path: Path) -> None:
    """Two ranks of a box have their own switch and the way around by the core: both carry their part."""
    heard: list[str] = []
    code = launch(
        two_boxes(num_ranks=4, inside="400 Mbit/s", between="100 Mbit/s"),
        [sys.executable, str(CHECKS / "launched_messages.py"), str(tmp_path)],
        env={"OMP_NUM_THREADS": "1"},
        output=lambda rank, line: heard.append(f"{rank}: {line}"),
        timeout_s=120.0,
        warm=warm,
    )
    assert code == 0, "\n".join(heard)
    carried = json.loads((tmp_path / "rank0.json").read_text())
    assert carried["routes"] == 2
    assert carried["parts"] == [round(share * (4 << 20)) for share in (0.8, 0.2)]
    for num_bytes, part in zip(carried["carried"], carried["parts"], strict=True):
        assert part <= num_bytes <= 1.01 * part


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.namespaces
@pytest.mark.parametrize("what", ["pass", pytest.param("stop", marks=long), pytest.param("secret", marks=long)])
def test_other_ranks_pass_on_long_messages(tmp_path: Path, what: str) -> None:
    """Between neighbours on a ring the way around is idle; a rank there that stops delays a message, and no more."""
    heard: list[str] = []
    code = launch(
        ring(num_ranks=4, bandwidth="200 Mbit/s"),
        [sys.executable, str(CHECKS / "launched_relays.py"), str(tmp_path), what],
        env={"OMP_NUM_THREADS": "1", **({"MYCEL_SECRET": "a secret of enough letters"} if what == "secret" else {})},
        output=lambda rank, line: heard.append(f"{rank}: {line}"),
        timeout_s=120.0,
        warm=warm,
    )
    assert code == 0, "\n".join(heard)
    answer = json.loads((tmp_path / "rank0.json").read_text())
    assert answer["passed"][0] == 0 and answer["passed"][2] > 0, "used from when they are there"
    assert answer["relays"] == (0 if what == "stop" else 1)
