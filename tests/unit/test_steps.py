"""Steps: what is found is right and keeps its numbers, what is ruled out does not exist, what is published is met."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import combinations, pairwise, product

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from mycel.cli import steps as steps_command
from mycel.collectives.bound import bound
from mycel.collectives.lower import lower
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import COLLECTIVES, ROOTED, Collective
from mycel.collectives.synth import NAMED_ONLY, methods_for, synthesize
from mycel.collectives.synth.steps import Front, front
from mycel.collectives.synth.steps_instance import find_sends, least_ratio, problem_of
from mycel.collectives.verify import verify_programs, verify_schedule
from mycel.errors import SynthesisError, UsageError
from mycel.topology.builders import dgx1_v100, full_mesh, mi250, ring, star, torus, two_boxes
from mycel.topology.model import Link, Topology, Vertex

NEVER = float("inf")


#: These searches end by themselves, in seconds where it is quiet: what they prove does not depend on the load.
PATIENCE_S = 900.0


def on(topology: Topology, name: str, root: int = 1) -> Collective:
    return Collective(name=name, num_ranks=topology.num_ranks, root=root if name in ROOTED else None)


def check(schedule: Schedule, *, steps: int, rounds: int, chunks: int) -> None:
    """Right, and within its steps and rounds; its programs are right too."""
    verify_schedule(schedule)
    assert schedule.depth <= steps
    capacity = schedule.topology.capacity
    unit = min(capacity.values())
    assert all(value % unit == 0 for value in capacity.values())
    assert all(load * unit <= rounds * capacity[hop] for hop, load in schedule.link_load.items())
    parts = (
        schedule.collective.num_ranks if schedule.collective.name == "all_reduce" else schedule.collective.num_blocks
    )
    assert schedule.num_units == chunks * parts
    verify_programs(lower(schedule, schedule.collective.num_blocks * 7, piece_elements=3))


# -- what is published ----------------------------------------------------------------------------------------


def numbers(found: Front) -> list[tuple[int, int, int]]:
    return [(point.steps, point.rounds, point.chunks) for point in found.points]


@pytest.mark.parametrize(("name", "times"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)])
def test_the_published_front_of_dgx1(name: str, times: int) -> None:
    """microsoft/msccl-tools, SYNTHESIS.md: 2 steps, 3 rounds, 2 chunks; 3 steps, 7 rounds, 6 chunks; none at 4/3."""
    topology = dgx1_v100()
    found = front(topology, on(topology, name), time_limit_s=PATIENCE_S)
    assert numbers(found) == [(2 * times, 3 * times, 2), (3 * times, 7 * times, 6)]
    assert [point.proof for point in found.points] == ["any chunks", "any chunks"]
    assert found.optimum == Fraction(7 * times, 6)
    for point in found.points:
        check(point.schedule, steps=point.steps, rounds=point.rounds, chunks=point.chunks)
    with pytest.raises(SynthesisError, match=f"{2 * times} steps, at most {4 * times} rounds, 3 chunks; at least"):
        synthesize(
            topology,
            on(topology, name),
            "steps",
            steps=2 * times,
            rounds=4 * times,
            chunks=3,
            time_limit_s=PATIENCE_S,
        )


# -- against searching everything -------------------------------------------------------------------------------


def reaches(topology: Topology, rounds_of_steps: tuple[int, ...], chunks: int) -> bool:
    """Whether all_gather can end after these rounds, by going through all possessions; everybody sends all it can."""
    n = topology.num_ranks
    everything = frozenset(product(range(n), range(chunks)))
    states = {tuple(frozenset((rank, i) for i in range(chunks)) for rank in range(n))}
    for rounds in rounds_of_steps:
        following = set()
        for state in states:
            choices = []
            for link in topology.links:
                useful = sorted(state[link.src] - state[link.dst])
                count = min(link.capacity * rounds, len(useful))
                choices.append([(link.dst, sent) for sent in combinations(useful, count)])
            for chosen in product(*choices):
                held = [set(mine) for mine in state]
                for dst, sent in chosen:
                    held[dst] |= set(sent)
                following.add(tuple(map(frozenset, held)))
        states = following
    return any(all(held == everything for held in state) for state in states)


@st.composite
def tiny_fabrics(draw: st.DrawFn) -> Topology:
    """Three ranks on a cycle and further links, one of capacity 1."""
    pairs = [(0, 1), (1, 2), (2, 0), *draw(st.sets(st.sampled_from([(1, 0), (2, 1), (0, 2)])))]
    capacities = [1, *(draw(st.integers(1, 3)) for _ in pairs[1:])]
    return Topology(
        name="tiny",
        unit="link",
        vertices=tuple(Vertex(kind="rank", label=str(i)) for i in range(3)),
        links=tuple(Link(src=a, dst=b, capacity=c) for (a, b), c in zip(pairs, capacities, strict=True)),
    )


@settings(max_examples=40, deadline=None)
@given(topology=tiny_fabrics(), steps=st.integers(1, 3), chunks=st.integers(1, 2))
def test_what_exists_is_found_and_what_is_ruled_out_does_not_exist(
    topology: Topology, steps: int, chunks: int
) -> None:
    problem = problem_of(topology, on(topology, "all_gather"))
    floor = least_ratio(problem, steps, time_limit_s=60)
    for rounds in range(steps, steps + 4):
        divisions = [
            tuple(b - a for a, b in pairwise((0, *cuts, rounds)))
            for cuts in combinations(range(1, rounds), steps - 1)
        ]
        exists = any(reaches(topology, division, chunks) for division in divisions)
        assert (find_sends(problem, steps, rounds, chunks, deadline=NEVER) != "none") == exists
        if exists:
            assert Fraction(rounds, chunks) >= floor


# -- every collective -------------------------------------------------------------------------------------------

FABRICS = (star(num_ranks=3), ring(num_ranks=4), torus(dims=(2, 3)), full_mesh(num_ranks=4), two_boxes(num_ranks=4))


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("topology", FABRICS, ids=lambda t: t.name)
def test_every_collective_is_right_and_keeps_its_numbers(topology: Topology, name: str) -> None:
    found = front(topology, on(topology, name), chunks=3, time_limit_s=PATIENCE_S)
    limit = bound(topology, on(topology, name)).algbw
    for point in found.points:
        check(point.schedule, steps=point.steps, rounds=point.rounds, chunks=point.chunks)
        assert point.ratio >= point.floor >= found.optimum
        if name != "all_reduce":  # which is two halves here
            assert point.schedule.algbw <= limit
    for before, after in pairwise(found.points):
        assert before.steps < after.steps and before.ratio > after.ratio
    if found.ended == "the last one meets the bandwidth bound" and name != "all_reduce":
        assert found.points[-1].schedule.algbw == limit


def test_links_that_differ_by_direction() -> None:
    links = [(0, 1, 2), (1, 2, 2), (2, 0, 2), (0, 2, 1)]
    topology = Topology(
        name="lopsided",
        unit="link",
        vertices=tuple(Vertex(kind="rank", label=str(i)) for i in range(3)),
        links=tuple(Link(src=a, dst=b, capacity=c) for a, b, c in links),
    )
    for name in ("all_gather", "reduce_scatter", "all_reduce", "reduce", "all_to_all"):
        for point in front(topology, on(topology, name), chunks=4, time_limit_s=PATIENCE_S).points:
            check(point.schedule, steps=point.steps, rounds=point.rounds, chunks=point.chunks)


def test_options_ask_for_one_point() -> None:
    topology = ring(num_ranks=5)
    gather = on(topology, "all_gather")
    check(synthesize(topology, gather, "steps"), steps=2, rounds=2, chunks=1)
    check(synthesize(topology, gather, "steps", steps=4, chunks=3), steps=4, rounds=6, chunks=3)
    check(synthesize(topology, gather, "steps", rounds=4, chunks=2), steps=2, rounds=4, chunks=2)


def test_the_same_question_has_the_same_answer() -> None:
    topology = torus(dims=(2, 3))
    for name in ("all_gather", "all_to_all"):
        assert synthesize(topology, on(topology, name), "steps") == synthesize(topology, on(topology, name), "steps")


# -- refusals ---------------------------------------------------------------------------------------------------


def test_refusals_say_why() -> None:
    topology = ring(num_ranks=6)
    gather, everywhere = on(topology, "all_gather"), on(topology, "all_reduce")
    with pytest.raises(SynthesisError, match="no all_gather exists with 2 steps, 1 chunk; at least 3 steps and 5/2"):
        synthesize(topology, gather, "steps", steps=2, chunks=1)
    with pytest.raises(SynthesisError, match=r"no all_gather exists with at most 4 rounds, 2 chunks"):
        synthesize(topology, gather, "steps", rounds=4, chunks=2)
    with pytest.raises(UsageError, match="two halves with equally many steps, and 5 is odd"):
        synthesize(topology, everywhere, "steps", steps=5)
    with pytest.raises(UsageError, match="option 'chunks' is 0; expected at least 1"):
        synthesize(topology, gather, "steps", chunks=0)
    with pytest.raises(UsageError, match="a time limit of 0 s"):
        synthesize(topology, gather, "steps", time_limit_s=0)
    with pytest.raises(UsageError, match="over 4 ranks, but"):
        synthesize(topology, Collective(name="all_gather", num_ranks=4), "steps")
    large = mi250(num_nodes=4)
    with pytest.raises(
        SynthesisError, match=r"choices, and the limit is 250000; forest, tree and flow take any size"
    ):
        synthesize(large, on(large, "all_to_all"), "steps")
    with pytest.raises(SynthesisError, match=r"neither found nor ruled out in 1e-06 s; set time_limit_s"):
        synthesize(topology, gather, "steps", time_limit_s=1e-6)
    with pytest.raises(SynthesisError, match="time ran out before 3 steps; allow more time"):
        front(topology, gather, time_limit_s=1e-6)


def test_nobody_tries_it_unasked() -> None:
    assert "steps" in NAMED_ONLY
    assert all("steps" not in methods_for(name) for name in COLLECTIVES)


def test_the_command_prints_the_front() -> None:
    app = typer.Typer()
    app.callback()(lambda: None)
    steps_command.register(app)
    arguments = ["steps", "ring:ranks=4", "-c", "broadcast", "--chunks", "2"]
    record = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert [(p["steps"], p["rounds_per_chunk"], p["proof"], p["verified"]) for p in record["points"]] == [
        (2, "1", "any chunks", True)
    ]
    shown = CliRunner().invoke(app, arguments).stdout
    assert "No schedule has fewer than 1/2 rounds a chunk." in shown
