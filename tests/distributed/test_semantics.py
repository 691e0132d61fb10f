"""What a call promises: when its results are there, and what may happen meanwhile without harm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize("env", [{}, {"MYCEL_ON_LINK_FAILURE": "replan"}], ids=["raise", "replan"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_results_are_there_when_a_work_says_so(run_ranks: RunRanks, world_size: int, env: dict[str, str]) -> None:
    run_ranks(world_size, "semantics", "results_are_there", env=env)


@pytest.mark.parametrize("env", [{}, {"MYCEL_ON_LINK_FAILURE": "replan"}], ids=["raise", "replan"])
def test_futures_of_works_that_are_over_are_done(run_ranks: RunRanks, env: dict[str, str]) -> None:
    run_ranks(2, "semantics", "futures_are_done", env=env)


@pytest.mark.parametrize("world_size", [2, 3])
def test_callbacks_keep_their_order(run_ranks: RunRanks, world_size: int) -> None:
    run_ranks(world_size, "semantics", "callbacks_keep_their_order")


@pytest.mark.parametrize("env", [{}, {"MYCEL_ON_LINK_FAILURE": "replan"}], ids=["raise", "replan"])
def test_what_a_signal_handler_calls_comes_after(run_ranks: RunRanks, env: dict[str, str]) -> None:
    run_ranks(2, "semantics", "handlers_come_after", env=env, timeout_s=60.0)


def test_what_a_signal_handler_raises_comes_after(run_ranks: RunRanks) -> None:
    run_ranks(2, "semantics", "handlers_may_raise", timeout_s=60.0)


def test_an_interrupt_fails_the_group_and_says_so(run_ranks: RunRanks) -> None:
    run_ranks(2, "semantics", "an_interrupt_ends_it", timeout_s=60.0)


def test_signals_at_any_time_change_nothing(run_ranks: RunRanks) -> None:
    run_ranks(2, "semantics", "signals_at_any_time", timeout_s=60.0)


def test_time_counts_from_when_a_call_begins(run_ranks: RunRanks) -> None:
    run_ranks(2, "semantics", "a_queue_takes_its_time", timeout_s=60.0)


@pytest.mark.parametrize("timeout", ["inf", "1e12"])
def test_any_timeout_goes(run_ranks: RunRanks, timeout: str) -> None:
    run_ranks(2, "semantics", "any_timeout_goes", env={"MYCEL_TIMEOUT": timeout, "MYCEL_LOCAL": "tcp"})


@pytest.mark.parametrize("env", [{}, {"MYCEL_ON_LINK_FAILURE": "replan"}], ids=["raise", "replan"])
def test_forked_children_leave_their_parents_group_alone(run_ranks: RunRanks, env: dict[str, str]) -> None:
    run_ranks(2, "semantics", "children_leave_it_alone", env=env, timeout_s=60.0)


def test_memory_is_held_while_a_call_is_under_way(run_ranks: RunRanks) -> None:
    run_ranks(2, "semantics", "memory_is_held")


def test_expanded_tensors(run_ranks: RunRanks) -> None:
    run_ranks(2, "semantics", "expanded")


def test_sequence_numbers(run_ranks: RunRanks) -> None:
    assert run_ranks(3, "semantics", "sequence_numbers") == [[0, 2]] * 3


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("broadcast", "uint16", "float16"),
        ("all_gather", "uint32", "int32"),
        ("all_gather_into_tensor", "float64", "int64"),
        ("all_to_all_single", "float8_e4m3fn", "float8_e5m2"),
        ("gather", "uint64", "float64"),
        ("scatter", "uint16", "bfloat16"),
    ],
)
def test_element_types_are_compared(run_ranks: RunRanks, name: str, first: str, second: str) -> None:
    errors = run_ranks(2, "semantics", "types_are_compared", name, first, second, timeout_s=60.0)
    assert len(set(errors)) == 1
    assert f"of {first}" in errors[0]
    assert f"of {second}" in errors[0]


def test_whatever_fails_in_the_engines_thread_is_the_error_of_who_waits(run_ranks: RunRanks) -> None:
    errors = run_ranks(2, "semantics", "an_engine_thread_that_fails", timeout_s=60.0)
    assert all("the engine's thread failed: KeyError: 'what no release knows'" in error for error in errors)
