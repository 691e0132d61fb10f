"""Torch sees the group as it sees its own: modes, traces, profiles, and tensors of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]
PRELOAD = (
    "torch.testing._internal.two_tensor",
    "torch.fx.experimental.proxy_tensor",
    "torch.distributed.tensor.debug",
)


@pytest.mark.parametrize("check", ["counted", "without_memory", "sharded"])
def test_what_others_see_is_what_they_see_of_gloo(run_ranks: RunRanks, check: str) -> None:
    ours = run_ranks(2, "door", check, preload=PRELOAD)
    assert ours == run_ranks(2, "door", check, backend="gloo", preload=PRELOAD)
    assert all(ours)


def test_wrappers_are_served_inside(run_ranks: RunRanks) -> None:
    """Over Gloo, a caller waits for the second tensor inside only."""
    for rank, found in enumerate(run_ranks(2, "door", "wrapped", preload=PRELOAD)):
        expected = {"all_reduce": 3.0, "broadcast": 1.0, "scatter": float(rank), "asynchronous": 3.0}
        assert found == {name: [[value] * 3, [10 * value] * 3] for name, value in expected.items()}


def test_traces_hold_collectives_and_can_be_run_again(run_ranks: RunRanks) -> None:
    """Over Gloo a graph that is run again does not wait for its collectives."""
    operators = ["c10d.allreduce_.default", "c10d._allgather_base_.default"]
    for found in run_ranks(2, "door", "traced", preload=PRELOAD):
        for mode in ("real", "fake"):
            assert found[mode] == {"names": operators, "again": [[5.0] * 6, [13.0] * 6]}


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_rank_may_look_while_others_do_not(run_ranks: RunRanks, world_size: int) -> None:
    looked, *others = run_ranks(world_size, "door", "one_looks", preload=PRELOAD)
    assert len(looked["seen"]) >= 14 and "c10d.allreduce_.default" in looked["seen"]
    assert not any(other["seen"] for other in others)


def test_profiles_name_operators_and_collectives(run_ranks: RunRanks) -> None:
    names = ["c10d::_allgather_base_", "c10d::allreduce_", "mycel:all_gather", "mycel:all_reduce"]
    assert run_ranks(2, "door", "profiled", preload=PRELOAD) == [names] * 2


def test_gloo_is_made_when_it_is_needed(run_ranks: RunRanks) -> None:
    assert run_ranks(3, "door", "unscheduled", preload=PRELOAD) == [[False, True]] * 3


def test_groups_over_one_fabric_share_schedules(run_ranks: RunRanks) -> None:
    assert run_ranks(2, "door", "new_groups", preload=PRELOAD) == [0, 0]


def test_under_torchs_checks(run_ranks: RunRanks) -> None:
    assert run_ranks(2, "door", "under_torchs_checks") == [[[3.0] * 2] * 2] * 2
