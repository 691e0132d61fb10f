"""Permutations: one block from each rank to one other, at the bound, and near it in simulated time."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mycel.collectives.bound import bound
from mycel.collectives.simulate import simulate
from mycel.collectives.spec import Collective, permutation
from mycel.collectives.synth import synthesize
from mycel.collectives.verify import verify_schedule
from mycel.errors import SynthesisError, UsageError
from mycel.topology.load import load_topology

FABRICS = ["two_boxes:ranks=8", "torus:dims=2x4,bandwidth=200 Mbit/s", "torus:dims=4x4,bandwidth=200 Mbit/s"]
FILES = ["ring_8", "hypercube_16", "torus_4x4_failed", "eth4_mixed", "random12", "dragonfly_g3a2p2"]


def rotation(size: int, by: int = 1) -> Collective:
    return permutation([(rank + by) % size for rank in range(size)])


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("by", [1, -1, 3])
def test_a_rotation_takes_little_more_than_its_bound(fabric: str, by: int) -> None:
    topology = load_topology(fabric)
    wanted = rotation(topology.num_ranks, by)
    schedule = synthesize(topology, wanted, "permute")
    verify_schedule(schedule)
    most = bound(topology, wanted).algbw
    assert schedule.algbw == most
    reached = max(simulate(schedule, 1 << 20, piece_bytes=1 << bits).algbw for bits in (14, 15, 16))
    assert reached >= 0.85 * float(most)


def test_straight_ways_are_a_quarter_of_the_bound_between_two_boxes() -> None:
    topology, wanted = load_topology(FABRICS[0]), rotation(8)
    fast, straight = (synthesize(topology, wanted, method).algbw for method in ("permute", "direct"))
    assert fast == 4 * straight


@pytest.mark.parametrize("name", FILES)
def test_any_permutation_on_any_fabric(name: str) -> None:
    topology = load_topology(str(Path(__file__).parents[1] / "data" / "topologies" / f"{name}.json"))
    draw = random.Random(name)
    for _ in range(3):
        targets: list[int | None] = [*range(topology.num_ranks)]
        draw.shuffle(targets)
        targets[draw.randrange(len(targets))] = None
        wanted = permutation(targets)
        schedule = synthesize(topology, wanted, "permute")
        verify_schedule(schedule)
        assert schedule.algbw <= bound(topology, wanted).algbw
        assert schedule.algbw >= synthesize(topology, wanted, "flow").algbw


def test_what_is_no_permutation_is_refused() -> None:
    for targets, said in (
        ([1, None, 1], "ranks 0 and 2 both send to rank 1"),
        ([3, 0, 1], "rank 0 sends to 3; ranks are 0 to 2"),
        ([0, 1, None], "no block that has to move"),
    ):
        with pytest.raises(UsageError, match=said):
            permutation(targets)
    topology = load_topology("ring:ranks=4")
    assert rotation(4).is_permutation and not Collective("all_to_all", 4).is_permutation
    two = Collective("all_to_all", 4, weights=(0, 1, 1, 0, *[0] * 12))
    for other in (two, Collective("all_to_all", 4)):
        assert not other.is_permutation
        with pytest.raises(SynthesisError, match="each rank sends to one other at most"):
            synthesize(topology, other, "permute")
