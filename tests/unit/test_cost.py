"""The cost model: monotone where it must be, and sensible where it chooses."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from mycel.collectives.cost import (
    LOCAL_PIECE_BYTES,
    PIECE_BYTES,
    WHOLE_BYTES,
    choose,
    estimate_seconds,
    longest_piece,
)
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import Collective
from mycel.collectives.synth import methods_for, synthesize
from mycel.topology.builders import loopback, ring, two_boxes
from mycel.topology.model import Topology

SIZES = [1, 100, 1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26, 1 << 30]


@cache
def candidates(name: str, slow: str = "50 Mbit/s") -> dict[str, Schedule]:
    topology = two_boxes(num_ranks=8, between=slow)
    root = 0 if name == "broadcast" else None
    collective = Collective(name=name, num_ranks=8, root=root)
    return {method: synthesize(topology, collective, method=method) for method in methods_for(collective.name)}


def with_links(schedule: Schedule, *, faster: int = 1, latency_s: float = 0.0) -> Schedule:
    t = schedule.topology
    links = tuple(replace(k, capacity=k.capacity * faster, latency_s=latency_s) for k in t.links)
    return replace(schedule, topology=Topology(name=t.name, unit=t.unit, vertices=t.vertices, links=links))


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
@pytest.mark.parametrize("method", methods_for("all_reduce"))
def test_more_bytes_take_no_less_time(name: str, method: str) -> None:
    schedule = candidates(name)[method]
    for piece in (PIECE_BYTES[0], PIECE_BYTES[-1]):
        times = [estimate_seconds(schedule, size, piece) for size in SIZES]
        assert all(b >= a > 0 for a, b in pairwise(times))


@pytest.mark.parametrize("method", methods_for("all_reduce"))
def test_faster_links_take_less_time_and_latency_takes_more(method: str) -> None:
    schedule = candidates("all_reduce")[method]
    normal = estimate_seconds(schedule, 1 << 24, 1 << 16)
    assert estimate_seconds(with_links(schedule, faster=10), 1 << 24, 1 << 16) < normal
    assert estimate_seconds(with_links(schedule, latency_s=1e-3), 1 << 24, 1 << 16) > normal


@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_no_estimate_beats_the_links(name: str) -> None:
    for schedule in candidates(name).values():
        rate = schedule.topology.bytes_per_second_per_unit
        assert rate is not None
        for size in SIZES:
            least = size / float(schedule.algbw * rate)
            assert all(estimate_seconds(schedule, size, piece) >= least for piece in PIECE_BYTES)


def test_small_arrays_take_the_tree_and_large_ones_the_forest() -> None:
    for name in ("all_reduce", "broadcast"):
        methods = [choose(candidates(name), size).method for size in SIZES]
        assert methods[0] == "tree"
        assert methods[-1] == "forest"
        assert methods == sorted(methods, reverse=True), "one change-over, not a patchwork"


def test_the_choice_is_the_best_of_all_it_considers() -> None:
    for size in SIZES:
        choice = choose(candidates("all_reduce"), size)
        for schedule in candidates("all_reduce").values():
            assert all(choice.seconds <= estimate_seconds(schedule, size, piece) for piece in PIECE_BYTES)


def test_equal_candidates_give_the_earlier_name_and_the_larger_piece() -> None:
    one = candidates("all_reduce")["tree"]
    choice = choose({"first": one, "second": one}, 8)
    assert (choice.method, choice.piece_bytes) == ("first", max(PIECE_BYTES))
    assert choose({"second": one, "first": one}, 8).method == "second"
    assert choose({"first": one, "second": one}, 8) == choice


@pytest.mark.parametrize(("name", "longest"), [("all_reduce", max(LOCAL_PIECE_BYTES)), ("all_gather", WHOLE_BYTES)])
def test_long_pieces_are_for_ranks_that_share_memory(name: str, longest: int) -> None:
    topology = loopback(num_ranks=3)
    collective = Collective(name=name, num_ranks=3)
    made = {method: synthesize(topology, collective, method=method) for method in methods_for(name)}
    assert choose(made, 1 << 30).piece_bytes == longest_piece(is_local=False) == max(PIECE_BYTES)
    assert choose(made, 1 << 30, is_local=True).piece_bytes == longest
    assert longest_piece(is_local=True) == WHOLE_BYTES


def test_a_given_piece_size_is_kept() -> None:
    assert choose(candidates("all_reduce"), 1 << 24, piece_bytes=12345).piece_bytes == 12345


def test_relative_capacities_can_be_chosen_from() -> None:
    topology = ring(num_ranks=4)
    collective = Collective(name="all_reduce", num_ranks=4)
    made = {method: synthesize(topology, collective, method=method) for method in methods_for(collective.name)}
    assert choose(made, 64).seconds < choose(made, 1 << 30).seconds


def test_nothing_to_choose_from() -> None:
    with pytest.raises(ValueError, match="no candidate"):
        choose({}, 1)
