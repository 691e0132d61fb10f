"""When a silent machine is lost: tried on made-up outages, second by second."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mycel.runtime.silence import ASK_S, DOUBT_S, LOST_S, Decision, Silences

TICK_S = 0.25
#: Kernels ask every second.
ROUND_S = 1.0


def run(
    seconds: float,
    ages_at: Callable[[float], dict[str, float]],
    *,
    tell: Callable[[Silences, float, Decision], None] = lambda silences, now, decision: None,
) -> tuple[float, Decision] | None:
    """The first loss, and when."""
    silences = Silences()
    now = 0.0
    while now < seconds:
        decision = silences.judge(1000 + now, ages_at(now))
        if decision.lost:
            return now, decision
        tell(silences, 1000 + now, decision)
        now += TICK_S
    return None


def outage(begin: float, end: float, now: float) -> float:
    """Age of a machine that says nothing in between, and else a word every second."""
    if now < begin:
        return now % ROUND_S
    return now % ROUND_S if now >= end + ROUND_S else now - (begin - begin % ROUND_S)


@given(st.floats(0, 20))
def test_a_machine_that_vanishes_is_lost_within_ten_seconds(begin: float) -> None:
    found = run(40, lambda now: {"a": 0.5, "b": outage(begin, 1e9, now)})
    assert found is not None
    when, decision = found
    assert decision.lost == ("b",) and not decision.is_cut_off
    assert LOST_S - ROUND_S - TICK_S <= when - begin <= 10.0


@given(st.floats(0, 20), st.floats(0, 6))
def test_short_outages_are_none(begin: float, length: float) -> None:
    assert run(40, lambda now: {"a": 0.5, "b": outage(begin, begin + length, now)}) is None


def test_a_machine_that_another_rank_hears_is_not_lost_until_nobody_does() -> None:
    def others_hear(silences: Silences, now: float, decision: Decision) -> None:
        if "b" in decision.ask and now < 1030:
            silences.heard_by_another("b", now + 0.1)

    found = run(60, lambda now: {"a": 0.5, "b": now}, tell=others_hear)
    assert found is not None and 32 <= found[0] <= 37


def test_a_new_connection_that_is_answered_ends_the_doubt() -> None:
    """The old one needs as long as the outage took before its kernel tries again."""

    def dial(silences: Silences, now: float, decision: Decision) -> None:
        if "b" in decision.dial and now >= 1007:
            silences.answered("b", now)

    assert run(13, lambda now: {"a": 0.5, "b": now}, tell=dial) is None


def test_who_hears_nobody_is_cut_off_where_there_are_several_others() -> None:
    found = run(20, lambda now: {"a": now, "b": max(0.0, now - 1.0)})
    assert found is not None and found[1].is_cut_off
    found = run(20, lambda now: {"b": now})
    assert found is not None and not found[1].is_cut_off


@pytest.mark.parametrize("away", [8.0, 60.0])
def test_a_process_that_could_not_look_decides_nothing_from_the_gap(away: float) -> None:
    """Its clock jumps and connections seem old for a moment: nobody is lost on the first looks."""
    silences = Silences()
    assert silences.judge(1000, {"b": 0.1}) == Decision()
    decision = silences.judge(1000 + away, {"b": away})
    assert decision.dial == ("b",) and not decision.lost
    silences.answered("b", 1000 + away + 0.1)
    assert silences.judge(1000 + away + TICK_S, {"b": away + TICK_S}) == Decision()
    assert silences.is_quiet


def test_one_question_serves_all_and_one_answer() -> None:
    silences = Silences()
    silences.judge(1000, {"b": DOUBT_S})
    silences.asked("b", 1002.9)
    assert not silences.judge(1003, {"b": ASK_S}).ask
    assert silences.judge(1005, {"b": ASK_S + 2}).ask == ("b",)
    assert silences.must_answer("b", 1005)
    silences.heard_by_another("b", 1005)
    assert not silences.must_answer("b", 1005.1)
