"""First calls of a group: channels are opened then, and nobody waits for a rank that is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]

TCP = {"MYCEL_LOCAL": "tcp"}


@pytest.mark.parametrize("world_size", [2, 3])
def test_nothing_is_opened_before(run_ranks: RunRanks, world_size: int) -> None:
    run_ranks(world_size, "first_calls", "nothing_is_opened_before")


@pytest.mark.parametrize("env", [{}, {"MYCEL_ON_LINK_FAILURE": "replan"}], ids=["raise", "replan"])
def test_who_starts_need_not_wait(run_ranks: RunRanks, env: dict[str, str]) -> None:
    run_ranks(3, "first_calls", "who_starts_need_not_wait", env=env, timeout_s=60.0)


@pytest.mark.parametrize("env", [{}, TCP], ids=["unix", "tcp"])
def test_groups_in_other_orders(run_ranks: RunRanks, env: dict[str, str]) -> None:
    run_ranks(3, "first_calls", "groups_in_other_orders", env=env, timeout_s=60.0)


@pytest.mark.parametrize("env", [{}, TCP], ids=["unix", "tcp"])
def test_many_first_calls_at_once(run_ranks: RunRanks, env: dict[str, str]) -> None:
    run_ranks(4, "first_calls", "many_first_calls_at_once", env=env, timeout_s=60.0)


def test_who_died_is_named(run_ranks: RunRanks) -> None:
    run_ranks(3, "first_calls", "who_died_is_named")


def test_who_plans_is_named(run_ranks: RunRanks) -> None:
    """Partners wait for a rank that plans until the group's time-out, and do not take it for one that is stuck."""
    found = run_ranks(3, "first_calls", "who_plans_is_named", 5.0, timeout_s=90.0)
    kinds, messages = zip(*found, strict=True)
    assert set(kinds) == {"CollectiveTimeoutError"}, found
    assert all("all_gather #1 reached its timeout of 5 s: rank 1 is planning all_gather over" in m for m in messages)


def test_who_left_is_named(run_ranks: RunRanks) -> None:
    run_ranks(3, "first_calls", "who_left_is_named")


@pytest.mark.parametrize("warm", [False, True])
def test_other_first_calls_are_told(run_ranks: RunRanks, *, warm: bool) -> None:
    run_ranks(4, "first_calls", "other_first_calls_are_told", warm)
