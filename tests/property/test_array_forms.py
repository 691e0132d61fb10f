"""What goes through arrays against the same through objects: forests, schedules made of them, the verifier, JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from math import gcd

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.oracles import object_forest
from tests.oracles.replay import refusal

from mycel.collectives.bound import find_optimum
from mycel.collectives.columns import Columns
from mycel.collectives.schedule import Schedule, Transfer
from mycel.collectives.spec import Collective
from mycel.collectives.synth import synthesize
from mycel.collectives.synth.array_forest import grow_forest
from mycel.collectives.synth.careful import grow_carefully
from mycel.collectives.synth.emission import emit
from mycel.collectives.synth.scales import scale
from mycel.collectives.verify import schedule as checker
from mycel.collectives.verify import verify_schedule
from mycel.errors import ScheduleError, VerificationError
from mycel.topology.load import load_topology
from mycel.topology.model import Link, Topology, Vertex

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@st.composite
def fabrics(draw):
    """Rings through all ranks and some switches, laid over each other: every vertex is balanced."""
    ranks, switches = draw(st.integers(2, 6)), draw(st.integers(0, 3))
    capacity = {}
    for _ in range(draw(st.integers(1, 4))):
        ring = draw(st.permutations(range(ranks + switches)))
        amount = draw(st.integers(1, 5))
        for a, b in zip(ring, ring[1:] + ring[:1], strict=True):
            capacity[a, b] = capacity.get((a, b), 0) + amount
    vertices = tuple(Vertex(kind="rank" if v < ranks else "switch", label=f"v{v}") for v in range(ranks + switches))
    links = tuple(Link(src=a, dst=b, capacity=c) for (a, b), c in capacity.items())
    return Topology(name="rings", unit="link", vertices=vertices, links=links)


@st.composite
def weights_of(draw, topology):
    weights = draw(st.lists(st.integers(0, 3), min_size=topology.num_ranks, max_size=topology.num_ranks))
    return tuple(w // gcd(*weights) for w in weights) if any(weights) else (1,) * topology.num_ranks


@QUICK
@given(data=st.data(), fabric=fabrics(), is_reversed=st.booleans())
def test_forests_of_arrays_are_optimal_trees_as_objects(data, fabric, is_reversed):
    best = find_optimum(fabric, data.draw(weights_of(fabric)), is_reversed=is_reversed)
    forests = [grow_carefully(fabric, best, *scale(best), None), grow_forest(fabric, best, *scale(best))]
    for forest in forests:
        if forest is not None:
            time = object_forest.time_of(object_forest.trees_of(forest), forest)
            assert time == forest.check()[0] == best.inverse_x


@QUICK
@given(fabric=fabrics())
def test_schedules_of_arrays_are_those_of_objects(fabric):
    weights = (1,) * fabric.num_ranks
    optima = [find_optimum(fabric, weights, is_reversed=turned) for turned in (True, False)]
    up, down = (grow_carefully(fabric, best, *scale(best), None) for best in optima)
    adding = [tree.reversed() for tree in object_forest.trees_of(up)]
    copying = object_forest.trees_of(down)
    for name, pair, trees in (
        ("all_gather", [(down, 1)], (None, copying)),
        ("reduce_scatter", [(up, 1)], (adding, None)),
        ("all_reduce", [(up, 1), (down, 1)], (adding, copying)),
    ):
        collective = Collective(name=name, num_ranks=fabric.num_ranks)
        schedule = emit(fabric, collective, weights, pair)
        verify_schedule(schedule)
        assert schedule == object_forest.emit(fabric, collective, weights, *trees)


# -- the verifier ---------------------------------------------------------------------------------------------

FABRICS = ("ring:ranks=4", "star:ranks=5", "torus:dims=2x3")
METHODS = {"all_gather": "forest", "reduce_scatter": "ring", "all_reduce": "forest"}
CASES = [(fabric, name) for fabric in FABRICS for name in METHODS]


@cache
def right_one(spec: str, name: str) -> Schedule:
    fabric = load_topology(spec)
    return synthesize(fabric, Collective(name=name, num_ranks=fabric.num_ranks), method=METHODS[name])


def changed(draw, schedule: Schedule) -> Schedule:
    """One to three transfers made others: another kind, chunk, wait, or place in the order."""
    transfers = list(schedule.transfers)
    for _ in range(draw(st.integers(1, 3))):
        i = draw(st.integers(0, len(transfers) - 1))
        t = transfers[i]
        what = draw(st.sampled_from(("kind", "chunk", "forget", "wait", "twice", "drop")))
        if what == "kind":
            transfers[i] = replace(t, reduce=not t.reduce)
        elif what == "chunk":
            transfers[i] = replace(t, chunk=draw(st.integers(0, len(schedule.chunks) - 1)))
        elif what == "forget":
            transfers[i] = replace(t, after=t.after[1:])
        elif what == "wait" and i:
            transfers[i] = replace(t, after=(*t.after, draw(st.integers(0, i - 1))))
        elif what == "twice":
            transfers.append(replace(t, after=(i,)))
        elif what == "drop" and len(transfers) > 1:
            del transfers[i]
            gone = [
                replace(x, after=tuple(j - (j > i) for j in x.after if j != i) + (t.after if i in x.after else ()))
                for x in transfers[i:]
            ]
            transfers[i:] = gone
    return replace(schedule, transfers=tuple(transfers))


@settings(QUICK, max_examples=400)
@given(data=st.data(), case=st.sampled_from(CASES), max_bits=st.sampled_from((1, 1 << 28)))
def test_the_compiled_verifier_says_what_the_slow_one_says(data, case, max_bits):
    schedule = changed(data.draw, right_one(*case))
    expected = refusal(schedule)
    said = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checker, "_MAX_BITS", max_bits)
        try:
            verify_schedule(schedule)
        except VerificationError as error:
            said = str(error)
    assert said == expected


@pytest.mark.parametrize("case", CASES)
def test_both_verifiers_accept_what_is_right(case):
    right = right_one(*case)
    verify_schedule(right)
    assert refusal(right) is None


# -- forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_columns_and_objects_are_one_schedule(case):
    right = right_one(*case)
    again = Schedule.of_columns(
        collective=right.collective,
        topology=right.topology,
        method=right.method,
        num_units=right.num_units,
        chunks=right.chunks,
        columns=Columns.of(right.transfers),
    )
    assert again == right and hash(again) == hash(right)
    assert again.to_json_text() == json.dumps(right.to_json())
    assert Schedule.from_json(json.loads(again.to_json_text())) == right


def test_numbers_of_every_length_are_written():
    right = right_one(*CASES[0])
    first = right.transfers[0]
    many = tuple(replace(first, after=tuple(range(max(0, i - 3), i))) for i in range(1100))
    long = replace(right, transfers=many)
    assert long.to_json_text() == json.dumps(long.to_json())
    none = replace(right, transfers=())
    assert none.to_json_text() == json.dumps(none.to_json())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"chunk": 99}, "no such chunk"),
        ({"chunk": 1 << 70}, "no such chunk"),
        ({"src": -1}, "ranks are 0"),
        ({"dst": 1 << 40}, "ranks are 0"),
        ({"path": (0, 2)}, "no link 0 -> 2|does not lead"),
        ({"path": ()}, "does not lead"),
        ({"after": (7,)}, "does not stand before it"),
    ],
)
def test_columns_are_refused_for_what_objects_are(change, says):
    right = right_one(*CASES[0])
    transfers: list[Transfer] = list(right.transfers)
    transfers[5] = replace(transfers[5], **change)
    with pytest.raises(ScheduleError, match=rf"transfer 5 \(.*({says})"):
        replace(right, transfers=tuple(transfers))


def test_a_sum_beyond_64_bits_is_exact():
    right = right_one(*CASES[0])
    factor = 1 << 80
    chunks = tuple(replace(c, start=c.start * factor, stop=c.stop * factor) for c in right.chunks)
    large = replace(right, num_units=right.num_units * factor, chunks=chunks)
    assert large.link_load == {hop: load * factor for hop, load in right.link_load.items()}
    assert large.algbw == right.algbw
    assert np.array_equal(large.levels, right.levels)
