"""A job on a part of the cluster that its topology describes: by MYCEL_RANKS, by host names, in the file's order."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from mycel.errors import UsageError
from mycel.runtime.fabric import Fabric
from mycel.runtime.places import chosen_places, places_by_host
from mycel.runtime.transport.address import Address
from mycel.settings import read_settings
from mycel.topology.addresses import own_ip
from mycel.topology.load import load_topology
from mycel.topology.model import Topology
from mycel.topology.wiring import Wiring, write_wiring

BOXES = "two_boxes:ranks=8,inside=400 Mbit/s,between=50 Mbit/s"  # nodes left and right


@pytest.fixture
def boxes() -> Topology:
    return load_topology(BOXES)


def address(host: str, number: int = 0) -> Address:
    return Address(host=f"{host}/{number}", ip="127.0.0.1", port=1, pid=number, name=host)


@pytest.mark.parametrize(
    ("text", "ranks"), [("0-3", (0, 1, 2, 3)), ("5, 2-3", (5, 2, 3)), ("7", (7,)), ("", None), ("3-3", (3,))]
)
def test_ranks_are_read_as_numbers_and_ranges(text: str, ranks: tuple[int, ...] | None) -> None:
    assert read_settings({"MYCEL_RANKS": text}).ranks == ranks


@pytest.mark.parametrize("text", ["a", "3-1", "1,,2", "-2", "1-", "0-3,2", "0-99999999"])
def test_what_names_no_ranks_is_refused_where_it_is_read(text: str) -> None:
    with pytest.raises(UsageError, match="MYCEL_RANKS"):
        read_settings({"MYCEL_RANKS": text})


def test_chosen_ranks_are_as_many_as_the_job_has_and_are_there(boxes: Topology) -> None:
    assert chosen_places(boxes, (6, 4), 2) == (6, 4)
    with pytest.raises(UsageError, match="names 2 ranks of the topology, but the world size is 4"):
        chosen_places(boxes, (6, 4), 4)
    with pytest.raises(UsageError, match="no rank 8, two_boxes has ranks 0 to 7"):
        chosen_places(boxes, (6, 8), 2)


@pytest.mark.parametrize(
    ("hosts", "places"),
    [
        (["right", "right"], (4, 5)),
        (["right", "left", "right", "left"], (4, 0, 5, 1)),
        (["RIGHT.cluster.example", "left.cluster.example"], (4, 0)),
    ],
)
def test_hosts_that_are_nodes_of_the_file_say_where_ranks_are(
    boxes: Topology, hosts: list[str], places: tuple[int, ...]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert places_by_host(boxes, hosts) == places


@pytest.mark.parametrize(
    ("hosts", "why"),
    [
        (["left", "elsewhere"], "host elsewhere is no node of two_boxes, whose nodes are left, right"),
        (["left"] * 5, "5 ranks are on left, but node left of two_boxes has 4"),
        (["left", "left.2"], "left, left.2 would be one node"),
    ],
)
def test_hosts_that_do_not_fit_are_refused_with_the_way_out(boxes: Topology, hosts: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        places_by_host(boxes, hosts)
    assert "MYCEL_RANKS" in str(caught.value)


@pytest.mark.parametrize(
    ("hosts", "places"),
    [(["a", "b", "a"], (0, 4, 1)), (["a"] * 6, tuple(range(6))), (["a", "b", "c"], (0, 1, 2))],
)
def test_hosts_that_the_file_does_not_know_take_it_in_its_order_with_a_warning(
    boxes: Topology, hosts: list[str], places: tuple[int, ...]
) -> None:
    with pytest.warns(RuntimeWarning, match="no host of the job is a node of it.*MYCEL_RANKS"):
        assert places_by_host(boxes, hosts) == places


def fabric(group: list[int], world_size: int, **environment: str) -> Fabric:
    return Fabric(read_settings({"MYCEL_TOPOLOGY": BOXES, **environment}), group, world_size)


def labels(topology: Topology) -> list[str]:
    return [topology.label(vertex) for vertex in topology.ranks]


def test_a_group_has_the_part_of_the_fabric_that_its_ranks_are() -> None:
    whole = labels(load_topology(BOXES))
    chosen = fabric([2, 0], 3, MYCEL_RANKS="1,5-6").topology([address("a"), address("a")])
    assert labels(chosen) == [whole[6], whole[1]]


def test_other_groups_remember_where_the_group_of_all_ranks_found_them() -> None:
    whole = labels(load_topology(BOXES))
    everybody = fabric([0, 1, 2], 3).topology([address("right"), address("left"), address("right")])
    assert labels(everybody) == [whole[4], whole[0], whole[5]]
    assert labels(fabric([2, 1], 3).topology([address("right"), address("left")])) == [whole[5], whole[0]]


def test_a_group_of_some_ranks_alone_asks_for_the_ranks() -> None:
    with pytest.raises(UsageError, match=r"no group of all ranks has said.*MYCEL_RANKS"):
        fabric([0, 1], 5).topology([address("right"), address("left")])


def test_more_ranks_than_the_file_has_are_refused_before_anything_connects() -> None:
    with pytest.raises(UsageError, match="describes 8 ranks, but the world size is 9"):
        fabric(list(range(9)), 9)


def test_a_wiring_is_of_all_ranks_or_of_those_that_are_named(tmp_path: Path) -> None:
    wiring = tmp_path / "wiring.json"
    paths = {(4, 5): "10.1.0.5", (6, 7): "10.1.0.7"}
    write_wiring(Wiring(addresses=tuple(f"10.0.0.{rank}" for rank in range(8)), paths=paths), wiring)
    with pytest.raises(UsageError, match=r"wires all 8 ranks.*MYCEL_RANKS"):
        fabric([0, 1], 2, MYCEL_WIRING=str(wiring))
    part = fabric([0, 1], 2, MYCEL_WIRING=str(wiring), MYCEL_RANKS="6-7")
    assert (part.pinned(0), part.pinned(1)) == ((), ("10.1.0.7",))
    settings = read_settings({"MYCEL_WIRING": str(wiring), "MYCEL_RANKS": "6-7"})
    assert [own_ip(settings, rank) for rank in (0, 1)] == ["10.0.0.6", "10.0.0.7"]
