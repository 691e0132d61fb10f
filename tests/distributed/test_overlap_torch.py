"""Styles of tensor parallelism, and compiled programs: what torch's users meet of overlapped operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.effort import long

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize(("shape", "dim"), [((12, 12), 0), ((2, 6, 12), 1)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_parallel_mlp_is_the_whole_one(
    run_ranks: RunRanks, world_size: int, shape: tuple[int, ...], dim: int
) -> None:
    for errors in run_ranks(world_size, "overlap_torch", "styles", shape, dim):
        assert len(errors) == 6 and max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("backend", ["mycel", pytest.param("gloo", marks=long)])
def test_pairs_of_compiled_programs_are_replaced_with_the_same_bits(run_ranks: RunRanks, backend: str) -> None:
    shape = (4, 4, 12) if backend == "mycel" else (16, 12)
    for found in run_ranks(2, "overlap_torch", "compiled", backend == "mycel", 2, shape, backend=backend):
        assert found["replaced"] == ["all_gather", "reduce_scatter", "all_gather", "reduce_scatter"], found
        assert not found["left"]
        assert all(found["same"]) and len(found["same"]) >= 4, found


def test_a_rank_whose_tiles_have_other_bits_multiplies_at_once(run_ranks: RunRanks) -> None:
    found = run_ranks(2, "overlap_torch", "compiled", True, 2, (16, 12), True)
    assert [set(each["at_once"]) for each in found] == [{True}, {False}]
    for each in found:
        assert len(each["replaced"]) == 4 and all(each["same"]), each
    assert found[0]["explained"].count("multiplied at once") == 4


@long
def test_pairs_that_do_not_pay_are_left_alone_and_listed(run_ranks: RunRanks) -> None:
    for found in run_ranks(2, "overlap_torch", "compiled", True, None):
        assert not found["replaced"]
        assert len(found["left"]) == 4 and all("left alone" in line for line in found["left"]), found
        assert found["explained"].count("\n") == 3
