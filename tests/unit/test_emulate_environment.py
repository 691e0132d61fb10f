"""What ranks find in their environment, and what is refused before anything is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from mycel.emulate import EmulatedCluster, launch, support
from mycel.emulate.environment import hosts_text, rank_environment
from mycel.errors import EmulationError, UsageError
from mycel.topology import Topology
from mycel.topology.builders import ring, star, two_boxes


def environment(topology: Topology, rank: int, extra: dict[str, str] | None = None) -> dict[str, str]:
    files = {"topology_file": Path("/t.json"), "wiring_file": Path("/w.json")}
    return rank_environment(topology, rank, extra=extra, **files)


def test_local_ranks_count_within_the_node() -> None:
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE")
    env = environment(two_boxes(num_ranks=6), 4)
    assert [env[name] for name in names] == ["4", "1", "3", "1", "2", "6"]


def test_a_rank_without_a_node_has_one_of_its_own() -> None:
    env = environment(ring(num_ranks=3, bandwidth="10 Mbit/s"), 2)
    assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"], env["GROUP_RANK"]) == ("0", "1", "2")


def test_the_launcher_wins_where_it_must_and_yields_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    env = environment(star(num_ranks=2), 1, {"RANK": "7", "COLOUR": "green"})
    assert (env["RANK"], env["OMP_NUM_THREADS"], env["COLOUR"]) == ("1", "3", "green")
    assert (env["MYCEL_TOPOLOGY"], env["MYCEL_WIRING"]) == ("/t.json", "/w.json")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert environment(star(num_ranks=2), 1)["OMP_NUM_THREADS"] == "1"


def test_every_rank_has_a_name() -> None:
    names = [line.split()[1] for line in hosts_text(3).splitlines()]
    assert {"rank0", "rank1", "rank2", "rank2.mgmt", "localhost"} <= set(names)


def test_relative_capacities_are_refused_with_the_way_out() -> None:
    with pytest.raises(UsageError, match="give the topology a unit"):
        EmulatedCluster(ring(num_ranks=3))


@pytest.mark.parametrize("command", [[], "true", ["no-such-program-here"]])
def test_a_command_that_cannot_run_is_refused_at_once(command: list[str]) -> None:
    with pytest.raises(UsageError):
        launch(star(num_ranks=2), command)


def test_missing_privileges_are_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_has_privileges", lambda: False)
    monkeypatch.setattr(support, "can_make_user_namespace", lambda: True)
    with pytest.raises(EmulationError, match=r"NET_ADMIN.*unshare -Ur.*loopback"):
        support.check_support()
    monkeypatch.setattr(support, "can_make_user_namespace", lambda: False)
    with pytest.raises(EmulationError, match=r"NET_ADMIN.*use sudo.*loopback"):
        support.check_support()


def test_other_systems_are_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.sys, "platform", "darwin")
    with pytest.raises(EmulationError, match="needs Linux network namespaces and this is darwin"):
        support.check_support()
