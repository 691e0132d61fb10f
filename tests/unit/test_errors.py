"""What users wrote is quoted, but never at any length."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from mycel.collectives.schedule import Schedule
from mycel.collectives.synth import synthesize
from mycel.errors import MycelError, ScheduleError, TopologyError, UsageError
from mycel.topology.load import load_topology, parse_topology

HUGE = "x" * 100_000
FORMS: list[Any] = [HUGE, [HUGE] * 20, {HUGE: HUGE}, " ".join(["word"] * 50_000)]


@pytest.mark.parametrize("value", FORMS, ids=["word", "list", "object", "words"])
def test_schedules_with_huge_values_are_refused_in_few_words(value: Any) -> None:
    good = synthesize(load_topology("ring:ranks=3"), "all_gather").to_json()
    for key in good:
        broken = good | {key: value}
        try:
            Schedule.from_json(broken)
        except MycelError as error:
            assert len(str(error)) < 2100
    for text in (HUGE, json.dumps(value), f"mycel.schedule 1\n{value}\n"):
        with pytest.raises(ScheduleError) as caught:
            Schedule.from_text(text)
        assert len(str(caught.value)) < 2100


def test_a_topology_of_one_huge_line_is_refused_in_few_words() -> None:
    with pytest.raises(TopologyError) as caught:
        parse_topology(f"name: a\nranks: [{HUGE}]\n", source="huge.yaml")
    assert len(str(caught.value)) < 2100


def test_what_is_short_stays_as_it_is_and_errors_travel() -> None:
    message = "line 3: cannot read 'a b c'; expected " + ", ".join(f"'name_{i}'" for i in range(50))
    for kind in (ScheduleError, TopologyError, UsageError):
        assert str(kind(message)) == message
        again = pickle.loads(pickle.dumps(kind(f"{HUGE} is no name")))
        assert str(again) == f"{'x' * 120}...{'x' * 60} is no name"
