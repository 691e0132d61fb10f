"""The planner of both engines: what it keeps is bounded, whatever lengths calls have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from mycel.collectives.cost import Choice, choose
from mycel.collectives.lower import RankTemplate
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import CollectiveName
from mycel.errors import SynthesisError
from mycel.runtime.calls import Call
from mycel.runtime.device import steps
from mycel.runtime.device.choice import choose_for_steps
from mycel.runtime.forms import Form
from mycel.runtime.planner import Planner, sends_directly, verified_schedules
from mycel.runtime.prepared import PREPARED
from mycel.topology.builders import ring, star

FABRIC = ring(num_ranks=4)
CHOOSERS: dict[str, Callable[..., Choice]] = {"sockets": choose, "devices": choose_for_steps}


@cache
def made(name: CollectiveName, root: int | None) -> dict[str, Schedule]:
    return verified_schedules(FABRIC, name, root)


def unproved(schedule: Schedule, call: Call, pieces: int, *, comes_back: bool) -> bool:
    """What is chosen and kept does not depend on proofs, which have tests of their own."""
    return True


def laid_out(engine: str, num_elements: int) -> Callable[[RankTemplate, int], Any]:
    """What each engine makes of a plan, on no sockets and no device."""

    def for_devices(plan: RankTemplate, elements: int) -> steps.Prepared:
        return steps.prepare(plan.expand(num_elements, elements), plan.steps(num_elements, elements), 4)

    def for_sockets(plan: RankTemplate, elements: int) -> Any:
        form = Form(plan, [-1] * len(plan.channels), np.full(1, -1, dtype=np.int64))
        return form.prepare(num_elements, elements, 4)

    return for_devices if engine == "devices" else for_sockets


@pytest.mark.parametrize("engine", CHOOSERS)
def test_ten_thousand_lengths_share_a_bounded_number_of_choices(engine: str) -> None:
    asked: list[int] = []

    def counting(candidates: Mapping[str, Schedule], num_bytes: int) -> Choice:
        asked.append(num_bytes)
        return CHOOSERS[engine](candidates, num_bytes)

    planner: Planner[Any] = Planner(0, made, counting, unproved)
    sizes = np.random.default_rng(3).integers(1, 1 << 26, 10_000).tolist()
    choices = {size: planner.choice("all_gather", None, size) for size in sizes}
    assert len(asked) == len(set(asked)) <= 8 * 26
    for size in sizes[:200]:
        rounded = min(n for n in asked if n >= size)
        assert rounded <= size * 9 / 8 + 1
        assert choices[size] == CHOOSERS[engine](made("all_gather", None), rounded)


@pytest.mark.parametrize("engine", CHOOSERS)
def test_what_is_prepared_is_bounded_made_once_and_forgotten(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = PREPARED.num_bytes
    monkeypatch.setattr(PREPARED, "limit_bytes", before + 100_000)
    planner: Planner[Any] = Planner(0, made, partial(CHOOSERS[engine], piece_bytes=1 << 20), unproved)
    for per_rank in range(1, 300):
        call = Call(name="all_gather", num_elements=4 * per_rank, item_bytes=4, output_address=0)
        choice, lay_out = planner.choice("all_gather", None, 16 * per_rank), laid_out(engine, 4 * per_rank)
        first = planner.prepared(call, choice, lay_out)
        assert planner.prepared(call, choice, lay_out) is first
        assert PREPARED.num_bytes <= PREPARED.limit_bytes
    assert PREPARED.num_bytes > before + 50_000
    planner.forget()
    assert PREPARED.num_bytes <= before


def test_what_comes_back_is_proved_once_and_what_does_not_is_forgotten() -> None:
    asked: list[tuple[int, bool]] = []

    def later(schedule: Schedule, call: Call, pieces: int, *, comes_back: bool) -> bool:
        asked.append((call.num_elements, comes_back))
        return comes_back

    planner: Planner[Any] = Planner(0, made, choose, later)

    def run(num_elements: int) -> None:
        call = Call(name="all_gather", num_elements=num_elements, item_bytes=4, output_address=0)
        planner.prepared(call, planner.choice("all_gather", None, 4096), laid_out("sockets", num_elements))

    for num_elements in (4, 8, 4, 4, 8, 12):
        run(num_elements)
    assert asked == [(4, False), (8, False), (4, True), (8, True), (12, False)]
    asked.clear()
    for num_elements in range(16, 16 + 4 * 300, 4):
        run(num_elements)
    run(12)
    run(16 + 4 * 299)
    assert asked[300:] == [(16 + 4 * 299, True)]  # of 12, nothing is known any more
    planner.forget()


def test_schedules_are_made_once_until_they_are_forgotten() -> None:
    asked: list[tuple[str, int | None]] = []

    def making(name: CollectiveName, root: int | None) -> Mapping[str, Schedule]:
        asked.append((name, root))
        return made(name, root)

    planner: Planner[Any] = Planner(1, making, choose, unproved)
    assert planner.schedules("broadcast", 2) is planner.schedules("broadcast", 2)
    assert planner.plan("broadcast", 2, "forest") is planner.plan("broadcast", 2, "forest")
    assert planner.plan("broadcast", 2, "forest").rank == 1
    planner.choice("broadcast", 2, 100)
    assert asked == [("broadcast", 2)]
    planner.forget()
    planner.choice("broadcast", 2, 100)
    assert len(asked) == 2


def test_groups_over_equal_fabrics_share_schedules_and_parts() -> None:
    first, second = (verified_schedules(ring(num_ranks=4), "all_gather", None) for _ in range(2))
    assert first is not second  # either may be changed
    assert first.keys() == second.keys() and all(first[method] is second[method] for method in first)
    assert verified_schedules(star(num_ranks=4), "all_gather", None)["forest"] is not first["forest"]
    planners: list[Planner[Any]] = [Planner(rank, made, choose, unproved) for rank in (1, 1, 2)]
    one, same, other = (planner.plan("all_gather", None, "forest") for planner in planners)
    assert one is same and other.rank == 2


def test_methods_asked_for_serve_where_they_can() -> None:
    assert set(verified_schedules(FABRIC, "all_reduce", None, ["ring"])) == {"ring"}
    assert set(verified_schedules(FABRIC, "broadcast", 0, ["bruck"])) == set(made("broadcast", 0))
    with pytest.raises(SynthesisError):
        verified_schedules(ring(num_ranks=3), "all_reduce", None, ["hierarchical"])


def test_parts_are_sent_directly_where_nobody_has_to_relay() -> None:
    assert sends_directly(verified_schedules(star(num_ranks=4), "all_to_all", None))
    assert not sends_directly({})
    assert not sends_directly({"flow": made("all_to_all", None)["flow"]})
