"""Blocks of different sizes, and groups of ranks: what is refused and why, all forms, and the commands."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mycel.cli import build_app
from mycel.cli.request import parse_ranks, read_weights
from mycel.collectives.bound import bound
from mycel.collectives.export import export
from mycel.collectives.lower import RankTemplate, chunk_bounds, lower
from mycel.collectives.schedule import Schedule
from mycel.collectives.simulate import simulate
from mycel.collectives.spec import COLLECTIVES, ROOTED, UNEVEN, Collective
from mycel.collectives.synth import NAMED_ONLY, SYNTHESIZERS, methods_for, synthesize
from mycel.collectives.synth.classics import classics_for
from mycel.collectives.verify import verify_programs, verify_schedule
from mycel.errors import MycelError, ScheduleError, SynthesisError, UsageError, VerificationError
from mycel.topology.builders import ring, star, two_boxes

WEIGHTS = (2, 1, 0, 3)


def collective(name: str = "all_gather", weights: tuple[int, ...] | None = WEIGHTS) -> Collective:
    if name == "all_to_all" and weights is not None:
        weights = tuple(a * b for a in weights for b in weights[::-1])
    return Collective(name=name, num_ranks=4, root=1 if name in ROOTED else None, weights=weights)


# -- the collective -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "weights", "message"),
    [
        ("all_gather", (1, 2, 3), "needs 4 weights, one a rank; got 3"),
        ("all_to_all", (1, 2, 3, 4), "needs 16 weights, one a pair of ranks, row by row; got 4"),
        ("scatter", (1, 2, -3, 4), "weight -3 of block 2"),
        ("reduce_scatter", (1, 2, 0.5, 4), "weight 0.5 of block 2"),
        ("all_gather", (True, 1, 1, 1), "weight True of block 0"),
        ("all_gather", (0, 0, 0, 0), "no block that has to move"),
        ("gather", (0, 5, 0, 0), "no block that has to move"),
        ("all_gather", (1, 0, 0, 1 << 40), "weights add up to more than 1099511627776"),
        ("all_reduce", (1, 1, 1, 1), "all_reduce has one array and no blocks to weigh; weights are for all_gather"),
        ("broadcast", (1,), "broadcast has one array"),
    ],
)
def test_weights_that_make_no_sense_are_refused(name: str, weights: tuple[int, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Collective(name=name, num_ranks=4, root=1 if name in ROOTED else None, weights=weights)


def test_a_rank_that_keeps_everything_is_refused_only_where_nothing_moves() -> None:
    own = tuple(int(i % 5 == 0) for i in range(16))
    with pytest.raises(UsageError, match="no block that has to move"):
        Collective(name="all_to_all", num_ranks=4, weights=own)
    assert Collective(name="all_gather", num_ranks=4, weights=(0, 0, 7, 0)).weights == (0, 0, 1, 0)


def test_weights_are_in_lowest_terms_and_equal_ones_are_none() -> None:
    assert collective(weights=(6, 3, 0, 9)) == collective(weights=WEIGHTS)
    assert hash(collective(weights=(4, 4, 4, 4))) == hash(collective(weights=None))
    assert collective(weights=None).block_weights == (1, 1, 1, 1)
    assert collective().total_weight == 6


# -- schedules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UNEVEN)
def test_every_method_that_serves_plans_uneven_blocks_or_refuses(name: str) -> None:
    fabric, wanted = two_boxes(num_ranks=4), collective(name)
    limit = bound(fabric, wanted).algbw
    for method in (*methods_for(wanted.name), *classics_for(name)):
        try:
            schedule = synthesize(fabric, wanted, method)
        except SynthesisError:
            continue
        verify_schedule(schedule)
        assert schedule.algbw <= limit
        verify_programs(lower(schedule, 3 * schedule.num_units, piece_elements=4))
    assert synthesize(fabric, wanted).algbw == limit


@pytest.mark.parametrize("name", UNEVEN)
def test_the_largest_weights_are_planned_exactly_or_refused(name: str) -> None:
    largest = (1 << 36) - 5
    blocks = [(7 * i + 3) % 11 * largest // 16 for i in range(16 if name == "all_to_all" else 4)]
    wanted = Collective(name=name, num_ranks=4, root=0 if name in ROOTED else None, weights=tuple(blocks))
    for fabric in (two_boxes(num_ranks=4), ring(num_ranks=4)):
        schedule = synthesize(fabric, wanted)
        verify_schedule(schedule)
        assert schedule.algbw == bound(fabric, wanted).algbw


def test_methods_that_search_for_equal_blocks_refuse_others() -> None:
    assert set(NAMED_ONLY) <= set(SYNTHESIZERS)
    for method, served in NAMED_ONLY.items():
        if "all_gather" in served:
            with pytest.raises(UsageError, match="plans equal blocks only; methods for uneven ones: forest, tree"):
                synthesize(star(num_ranks=4), collective(), method)


@pytest.mark.parametrize("name", UNEVEN)
def test_both_forms_come_back_equal(name: str) -> None:
    schedule = synthesize(ring(num_ranks=4), collective(name))
    assert Schedule.from_text(schedule.to_text()) == schedule
    assert Schedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule


@pytest.mark.parametrize("name", COLLECTIVES)
def test_equal_blocks_leave_no_trace_in_the_forms(name: str) -> None:
    schedule = synthesize(ring(num_ranks=4), collective(name, None))
    assert "weights" not in schedule.to_text()
    assert set(schedule.to_json()["collective"]) == {"name", "num_ranks", "root"}


@pytest.mark.parametrize(
    "weights",
    [
        5,
        "ab",
        {},
        [1],
        [1, 2, 3, None],
        [1, -1, 2, 3],
        [0, 0, 0, 0],
        [10**4000, 1, 1, 1],
        [1.0, 1, 1, 1],
        [7, 1, 1, 1],
    ],
)
def test_malformed_weights_in_json_are_refused(weights: object) -> None:
    right = synthesize(star(num_ranks=4), collective()).to_json()
    with pytest.raises((ScheduleError, UsageError)):
        Schedule.from_json(right | {"collective": right["collective"] | {"weights": weights}})


@pytest.mark.parametrize(
    "weights", ["", "1,2", "2,1,0,3,", "2,1,-0,3", "a", "0,0,0,0", "9,1,1,1", "1" + "0" * 5000 + ",1,1,1"]
)
def test_malformed_weights_in_text_are_refused(weights: str) -> None:
    text = synthesize(star(num_ranks=4), collective()).to_text()
    with pytest.raises((ScheduleError, UsageError)):
        Schedule.from_text(text.replace("weights 2,1,0,3", f"weights {weights}"))


def test_blocks_and_chunks_follow_the_weights() -> None:
    schedule = synthesize(star(num_ranks=4), collective())
    unit = schedule.num_units // 6
    assert schedule.block_starts == (0, 2 * unit, 3 * unit, 3 * unit, 6 * unit)
    assert sorted({schedule.block_of(chunk) for chunk in range(len(schedule.chunks))}) == [0, 1, 3]
    crossing = schedule.to_json() | {"chunks": [[0, schedule.num_units]], "transfers": []}
    with pytest.raises(ScheduleError, match="crosses a block boundary"):
        Schedule.from_json(crossing)
    with pytest.raises(ScheduleError, match="7 units do not divide into 6 parts"):
        Schedule.from_json(crossing | {"num_units": 7})


def test_the_bound_and_the_rate_count_the_whole_array() -> None:
    fabric = star(num_ranks=4)
    best = bound(fabric, collective())
    assert best.algbw == 400  # rank 2 has nothing, so the whole array enters over its link
    assert "(blocks 2 : 1 : 0 : 3)" in best.explain()
    # The most that one rank gives or gets decides.
    wanted = collective("all_to_all")
    rows = [wanted.block_weights[4 * s : 4 * s + 4] for s in range(4)]
    gives = [sum(row) - row[s] for s, row in enumerate(rows)]
    gets = [sum(row[d] for row in rows) - rows[d][d] for d in range(4)]
    assert bound(fabric, wanted).algbw == Fraction(400 * wanted.total_weight, 4 * max(*gives, *gets))


def test_the_verifier_sees_a_block_cut_at_the_wrong_place() -> None:
    right = synthesize(star(num_ranks=4), collective(), "tree").to_json()
    wrong = dict(right, collective=right["collective"] | {"weights": [1, 2, 0, 3]}, chunks=[[0, 1], [1, 3], [3, 6]])
    verify_schedule(Schedule.from_json(wrong))  # the same transfers serve other sizes of the same blocks ...
    swapped = dict(wrong, collective=right["collective"] | {"weights": [1, 0, 2, 3]})
    with pytest.raises(VerificationError):  # ... but not blocks of other ranks
        verify_schedule(Schedule.from_json(swapped))


# -- programs -------------------------------------------------------------------------------------------------


def test_chunks_are_parts_of_their_own_blocks() -> None:
    schedule = synthesize(star(num_ranks=4), collective(weights=None), "tree")
    assert chunk_bounds(schedule, 9, [4, 0, 5, 0]).tolist() == [[0, 4], [4, 4], [4, 9], [9, 9]]
    assert chunk_bounds(schedule, 8).tolist() == [[0, 2], [2, 4], [4, 6], [6, 8]]
    halves = synthesize(ring(num_ranks=4), collective(weights=None), "bidirectional_ring")
    assert chunk_bounds(halves, 10, [1, 3, 0, 6]).tolist() == [
        [0, 0], [0, 1], [1, 2], [2, 4], [4, 4], [4, 4], [4, 7], [7, 10]
    ]  # fmt: skip
    most = (1 << 60) + 7  # units times elements do not fit into 64 bits
    assert chunk_bounds(halves, 4 * most, [most] * 4)[0].tolist() == [0, most // 2]


@pytest.mark.parametrize(
    ("lengths", "total", "message"),
    [
        ([1, 2, 3], 6, "3 block lengths given for 4 blocks"),
        ([1, 2, -3, 6], 6, "block 2 has -3 elements"),
        ([1, 2, 3, 4], 11, "blocks of 10 elements in all, for an array of 11"),
        ([1, 1, 1, 1], 4, "block 2 has 1 elements, but weight 0 in the schedule"),
        (None, 10, "10 elements do not divide into 6 parts"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(lengths: list[int] | None, total: int, message: str) -> None:
    schedule = synthesize(star(num_ranks=4), collective())
    with pytest.raises(ScheduleError, match=message):
        RankTemplate(schedule, 0).expand(total, 4, block_elements=lengths)


def test_programs_of_different_lengths_do_not_belong_together() -> None:
    schedule = synthesize(star(num_ranks=4), collective(weights=None))
    programs = list(lower(schedule, 8, piece_elements=4, block_elements=[1, 2, 2, 3]))
    verify_programs(programs)
    programs[2] = lower(schedule, 8, piece_elements=4, block_elements=[2, 1, 2, 3])[2]
    with pytest.raises(VerificationError, match="disagree about block_elements"):
        verify_programs(programs)


def test_the_text_of_a_program_names_weights_and_lengths() -> None:
    schedule = synthesize(star(num_ranks=4), collective())
    lines = lower(schedule, 11, piece_elements=4, block_elements=[5, 0, 0, 6])[3].to_text().splitlines()
    assert lines[1] == "collective all_gather 4 weights 2,1,0,3"
    assert lines[3] == "blocks 5,0,0,6"


def test_nothing_at_all_is_a_program_too() -> None:
    schedule = synthesize(ring(num_ranks=4), collective("all_to_all", None))
    programs = lower(schedule, 0, piece_elements=4, block_elements=[0] * 16)
    verify_programs(programs)
    assert all(len(program.columns) == 0 for program in programs)


# -- around ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UNEVEN)
def test_a_simulated_time_is_not_below_the_bound(name: str) -> None:
    fabric, wanted = two_boxes(num_ranks=4), collective(name)
    run = simulate(synthesize(fabric, wanted), 1 << 20)
    # Blocks are rounded up to whole elements, and chunks inside them down.
    assert run.algbw <= 1.0001 * float(bound(fabric, wanted).algbw)
    assert 0 <= run.num_bytes - (1 << 20) <= 4 * wanted.num_blocks


def test_formats_that_have_equal_blocks_only_say_so() -> None:
    schedule = synthesize(star(num_ranks=4), collective())
    with pytest.raises(ScheduleError, match="msccl_xml has equal blocks only"):
        export(schedule, "msccl_xml")
    assert "digraph" in export(schedule, "dot")
    assert "traceEvents" in export(schedule, "chrome_trace")


# -- the command line -----------------------------------------------------------------------------------------


def run(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(build_app(), [*arguments, "--json"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return json.loads(result.stdout)


def test_bound_and_synth_take_weights(tmp_path: Path) -> None:
    shown = run("bound", "star:ranks=4", "-c", "all_gather", "--weights", "2,1,0,3")
    assert (shown["bound_algbw"], shown["weights"]) == (400.0, [2, 1, 0, 3])
    output = tmp_path / "made.json"
    made = run("synth", "star:ranks=4", "-c", "reduce_scatter", "--weights", "4,2,0,6", "-o", str(output))
    assert made["optimal"] and made["weights"] == [2, 1, 0, 3]
    assert run("verify", str(output))["ok"]
    assert (
        "ranks on star_4 (blocks 2 : 1 : 0 : 3), " in CliRunner().invoke(build_app(), ["verify", str(output)]).stdout
    )


def test_many_weights_are_not_listed_in_messages() -> None:
    many = Collective(name="all_gather", num_ranks=40, weights=tuple(range(40)))
    assert many.blocks_in_words == " (40 blocks, weights from 0 to 39)"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("w.json", "[[0, 1, 2], [3, 0, 4], [5, 6, 0]]"),
        ("w.csv", "# rows are senders\n0,1,2\n3, 0, 4,\n\n5;6;0\n"),
        ("w.txt", "0 1 2\n3 0 4\n5 6 0\n"),
    ],
)
def test_weights_come_from_files(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert read_weights(str(tmp_path / name)) == (0, 1, 2, 3, 0, 4, 5, 6, 0)
    shown = run("bound", "star:ranks=3", "-c", "all_to_all", "--weights", str(tmp_path / name))
    assert shown["weights"] == [0, 1, 2, 3, 0, 4, 5, 6, 0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[0, 1], [2, 0.5]]", "'0.5' is not a whole number"),
        ('[[0, 1], {"a": 2}]', "is not a whole number"),
        ("[[0, 1], [2, 3]", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("0,1\n2,x\n", r"w:2: 'x' is not a whole number"),
        ("0,1\n2,99999999999999999999\n", "w:2"),
    ],
)
def test_files_that_hold_no_weights_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "w").write_text(content)
    with pytest.raises(UsageError, match=message):
        read_weights(str(tmp_path / "w"))


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"'none\.csv' is not a list of whole numbers, and not a file either: No such"
    ):
        read_weights("none.csv")


def test_bound_and_synth_plan_for_a_group() -> None:
    whole = run("bound", "two_boxes:ranks=8", "-c", "all_gather")
    inside = run("bound", "two_boxes:ranks=8", "-c", "all_gather", "--ranks", "0-3")
    assert inside["num_ranks"] == 4 and inside["bound_algbw"] > whole["bound_algbw"]
    rooted = run(
        "synth", "two_boxes:ranks=8", "-c", "gather", "--ranks", "1,4-5", "--root", "5", "--weights", "1,2,3"
    )
    assert (rooted["num_ranks"], rooted["root"], rooted["optimal"]) == (3, 2, True)
    assert rooted["ranks"] == [1, 4, 5]
    planned = run("synth", "two_boxes:ranks=8", "-c", "all_gather", "--ranks", "0-3", "--summary")
    assert (planned["num_ranks"], planned["ranks"]) == (4, [0, 1, 2, 3])


def test_whatif_and_select_take_both() -> None:
    asked = ("two_boxes:ranks=8", "-c", "all_gather", "--ranks", "0,1,4,5", "--weights", "0,0,1,1")
    changed = run("whatif", *asked, "--change", "core->left/0=10 Mbit/s")
    assert changed["ranks"] == [0, 1, 4, 5]
    assert changed["before"]["bound_algbw"] == run("bound", *asked)["bound_algbw"]
    assert changed["after"]["bound_algbw"] < changed["before"]["bound_algbw"]
    chosen = run("select", *asked, "--sizes", "1KB,16MB")
    rows = chosen["rows"]
    assert [row["bytes"] for row in rows] == [1 << 10, 1 << 24] and rows[1]["method"] == "forest"


@pytest.mark.parametrize(
    ("ranks", "root", "message"),
    [
        ("0,x", None, "'x' is neither a rank nor a range"),
        ("0,,1", None, "'' is neither a rank nor a range"),
        ("0-2,1", None, "rank 1 is named twice"),
        ("3-1", None, "'3-1' is empty or too long"),
        ("0-999999999", None, "is empty or too long"),
        ("0,1,8", None, "no rank 8 among 8"),
        ("5", None, "1 rank"),
        ("0,2", "1", "--root 1 is not among --ranks 0,2"),
    ],
)
def test_groups_that_make_no_sense_are_refused(ranks: str, root: str | None, message: str) -> None:
    more = [] if root is None else ["--root", root]
    with pytest.raises(MycelError, match=message):
        run("bound", "two_boxes:ranks=8", "-c", "broadcast", "--ranks", ranks, *more)


def test_ranks_come_in_order() -> None:
    assert parse_ranks("7,0, 2-3") == (0, 2, 3, 7)
