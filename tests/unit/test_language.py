"""The language for schedules: what it makes, on every fabric, and what it refuses, by the author's line."""

from __future__ import annotations

import ast
import importlib
import json
import os
import random
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import judge
from mycel.cli import build, draw, select
from mycel.collectives.bound import bound
from mycel.collectives.channels import ChannelPlan
from mycel.collectives.language import Array, Written, collective, load_written
from mycel.collectives.lower import lower
from mycel.collectives.plan_programs import load_plan
from mycel.collectives.proof import prove_lowering
from mycel.collectives.schedule import Schedule
from mycel.collectives.simulate import simulate
from mycel.collectives.synth import synthesize
from mycel.collectives.verify import program_sums_agree, sums_agree, verify_programs
from mycel.errors import ScheduleError, SynthesisError, UsageError, VerificationError
from mycel.settings import as_another_rank
from mycel.topology import load_topology

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "collectives.py"
NAMES = (
    "ring",
    "both_ways",
    "halving_doubling",
    "double_tree",
    "hierarchical",
    "all_pairs",
    "doubling",
    "two_step",
    "one_shot",
)
FABRICS = (
    *(f"star:ranks={n}" for n in (2, 3, 4, 5, 7, 8)),
    *(f"ring:ranks={n}" for n in (2, 3, 4, 8)),
    "full_mesh:ranks=6",
    "two_boxes:ranks=4",
    "two_boxes:ranks=8",
    "dgx_a100:nodes=1",
    "hypercube:dim=3",
)
HERE = re.escape(Path(__file__).name)
FABRIC = load_topology("star:ranks=4")


def example(name: str) -> Written:
    return load_written(f"{EXAMPLES}:{name}")


# -- well-known collectives --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_well_known_collectives_on_every_fabric_that_has_them(name: str) -> None:
    written, served = example(name), 0
    for spec in FABRICS:
        fabric = load_topology(spec)
        try:
            schedule = written.on(fabric)
        except SynthesisError:  # partners without a direct way, or a fabric without equal nodes
            continue
        served += 1
        assert judge.judge_schedule(schedule) is None
        prove_lowering(schedule)
        assert Schedule.from_json(schedule.to_json()) == Schedule.from_text(schedule.to_text()) == schedule
        assert schedule.algbw <= bound(fabric, schedule.collective).algbw
        if name != "one_shot":
            assert sums_agree(schedule)
    assert served >= (2 if name in ("hierarchical", "two_step") else 8)


def test_they_are_short() -> None:
    tree = ast.parse(EXAMPLES.read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert {node.name for node in functions} == set(NAMES)
    for node in functions:
        body = node.body[1:]  # behind the docstring
        assert (body[-1].end_lineno or 0) - body[0].lineno + 1 <= 12, node.name


def test_hierarchical_meets_the_bound_of_two_boxes() -> None:
    fabric = load_topology("two_boxes:ranks=8")
    schedules = {name: example(name).on(fabric) for name in ("hierarchical", "all_pairs", "ring")}
    assert {name: schedule.algbw for name, schedule in schedules.items()} == {
        "hierarchical": bound(fabric, "all_reduce").algbw,
        "all_pairs": 50,
        "ring": Fraction(200, 7),
    }
    assert schedules["hierarchical"].algbw == 200
    seconds = [simulate(schedule, 1 << 22).seconds for schedule in schedules.values()]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize(
    ("name", "method", "served"),
    [
        ("ring", "ring", "all_reduce"),
        ("ring", "ring", "all_gather"),
        ("ring", "ring", "reduce_scatter"),
        ("both_ways", "bidirectional_ring", "all_reduce"),
        ("all_pairs", "two_shot", "all_reduce"),
        ("two_step", "two_step", "all_to_all"),
        ("doubling", "recursive_doubling", "all_reduce"),
    ],
)
def test_they_are_as_good_as_the_classics(name: str, method: str, served: str) -> None:
    """The same algorithm from another hand sends as much over each link in as many steps."""
    for spec in ("two_boxes:ranks=8", "two_boxes:ranks=4"):
        fabric = load_topology(spec)
        ours, theirs = example(name).on(fabric, served), synthesize(fabric, served, method)
        assert (ours.algbw, ours.depth, len(ours.transfers)) == (theirs.algbw, theirs.depth, len(theirs.transfers))


def test_sums_have_the_same_bits_as_the_classics_ring() -> None:
    fabric = load_topology("star:ranks=5")
    ours, theirs = example("ring").on(fabric), synthesize(fabric, "all_reduce", "ring")
    assert [(t.chunk, t.src, t.dst, t.reduce) for t in ours.transfers] == [
        (t.chunk, t.src, t.dst, t.reduce) for t in theirs.transfers
    ]


# -- what can be said --------------------------------------------------------------------------------------------


def test_spans_overlap_as_they_like() -> None:
    """Chunks are what no statement divides: thirds of one half, and the whole."""

    @collective("broadcast", ranks=4)
    def parts(array: Array) -> None:
        left, right = array.cut(2)
        for third in left.split(3):
            third.copy(0, 1)
        right.copy(0, 2, 1)
        left.copy(1, 2)
        array.block().copy(1, 3)

    schedule = parts.on(FABRIC)
    assert [chunk.num_units for chunk in schedule.chunks] == [1, 1, 1, 3]
    assert len(schedule.transfers) == 3 + 2 + 3 + 4


def test_root_and_weights() -> None:
    @collective("broadcast", "scatter")
    def star(array: Array) -> None:
        for rank in array.ranks:
            if rank != array.root:
                if array.collective.name == "scatter":
                    array.block(rank).copy(array.root, rank)
                else:
                    array.block().copy(array.root, rank)

    assert star.on(FABRIC).collective.root == 0
    assert star.on(FABRIC, root=2).collective.root == 2
    uneven = star.on(FABRIC, "scatter", weights=(1, 2, 0, 3))
    assert uneven.collective.weights == (1, 2, 0, 3)
    assert [chunk.num_units for chunk in uneven.chunks] == [1, 2, 3]


def test_switches_that_copy_and_add() -> None:
    @collective("all_reduce")
    def in_switch(array: Array) -> None:
        (switch,) = array.switches
        for rank in array.ranks:
            array.block().add(rank, switch)
        for rank in array.ranks:
            array.block().copy(switch, rank)

    fabric = load_topology("star:ranks=4,computes=true")
    schedule = in_switch.on(fabric)
    assert schedule.algbw == bound(fabric, "all_reduce").algbw
    assert judge.judge_schedule(schedule) is None
    verify_programs(lower(schedule, 8, piece_elements=4))
    with pytest.raises(UsageError, match=rf"{HERE}:\d+: .*ValueError"):
        in_switch.on(FABRIC)


def test_ways_through_named_switches() -> None:
    fabric = load_topology(str(ROOT / "examples" / "clusters" / "two_boxes.yaml"))
    switches = [fabric.label(vertex) for vertex in fabric.switches]

    def along(via: object) -> Schedule:
        @collective("broadcast")
        def chain(array: Array) -> None:
            array.block().copy(0, 1, via=via)  # type: ignore[arg-type]
            array.block().copy(1, *range(2, array.num_ranks))

        return chain.on(fabric)

    usual = along(None)
    through = list(usual.transfers[0].path[1:-1])
    assert along([fabric.label(vertex) for vertex in through]) == along(tuple(through)) == usual
    with pytest.raises(SynthesisError, match=rf"{HERE}:\d+: .*no switch 'nowhere' in .*its switches: {switches[0]}"):
        along("nowhere")


def test_instances_repeat_a_program_on_parts_of_every_block() -> None:
    @collective("all_gather", instances=3)
    def direct(array: Array) -> None:
        for owner in array.ranks:
            for step in range(1, array.num_ranks):
                array.block(owner).copy(owner, (owner + step + array.instance) % array.num_ranks) if (
                    step + array.instance
                ) % array.num_ranks else array.block(owner).copy(owner, (owner + array.instance) % array.num_ranks)

    schedule = direct.on(FABRIC)
    assert len(schedule.chunks) == 12 and len(schedule.transfers) == 36
    assert schedule.algbw == bound(FABRIC, "all_gather").algbw


def test_written_collectives_are_parts_of_others() -> None:
    ring = example("ring")

    @collective("all_reduce")
    def twice(array: Array) -> None:
        ring(array)

    assert twice.on(FABRIC).transfers == ring.on(FABRIC).transfers


def test_partners_form_sums_apart() -> None:
    schedule = example("doubling").on(load_topology("star:ranks=8"))
    assert schedule.depth == 3 and {t.places for t in schedule.transfers} == {(0, 1), (1, 2), (2, 3)}
    one = example("one_shot").on(FABRIC)
    assert one.depth == 1 and not sums_agree(one)


# -- what is refused ---------------------------------------------------------------------------------------------


def refusal(
    function: Callable[[Array], None], error: type[Exception], *names: str, fabric: str = "star:ranks=4"
) -> str:
    with pytest.raises(error) as caught:
        collective(*(names or ("all_reduce",)))(function).on(load_topology(fabric))  # type: ignore[arg-type]
    text = str(caught.value)
    assert re.search(rf"{HERE}:\d+", text) and "\n" not in text, text
    return text


def test_a_way_that_does_not_exist() -> None:
    text = refusal(lambda array: array.block().add(0, 2), SynthesisError, fabric="ring:ranks=4")
    assert "no way leads from 0 to 2 that passes no other rank; from 0 it is one step to 1, 3" in text


@pytest.mark.parametrize(
    ("say", "expected"),
    [
        (lambda array: array.cut(4)[4].add(0, 1), "no chunk 4; chunks are 0..3"),
        (lambda array: array.block().add(0, 9), "no 9 here; ranks are 0..3"),
        (lambda array: array.block().add(0, -1), "no -1 here"),
        (lambda array: array.block().add(2, 2), "rank 2 does not send to itself"),
        (lambda array: array.block().add(2), "add needs two ranks at least"),
        (lambda array: array.block().add(0, 1, 2, via="switch"), "via= is the way between two ranks"),
        (lambda array: array.cut(0), "cut into 0 parts"),
        (lambda array: array.block().split(1.5), "split into 1.5 parts"),
        (lambda array: array.block(1), "blocks of all_reduce are block()"),
    ],
)
def test_malformed_statements(say: Callable[[Array], None], expected: str) -> None:
    assert expected in refusal(say, ScheduleError)


def test_a_sum_where_nothing_is_combined() -> None:
    text = refusal(lambda array: array.block(0).add(0, 1), ScheduleError, "all_gather")
    assert "all_gather combines nothing, so nothing is added; copy instead" in text
    text = refusal(lambda array: array.cut(6)[0].copy(0, 1), ScheduleError, "all_gather")
    assert "6 parts would cross them; cut it into a multiple of 4" in text


def test_steps_do_not_nest() -> None:
    def nested(array: Array) -> None:
        with array.step(), array.step():
            array.block().add(0, 1)

    assert "a step within a step" in refusal(nested, ScheduleError)


def test_other_numbers_of_ranks() -> None:
    @collective("all_reduce", ranks=8)
    def for_eight(array: Array) -> None:
        array.block().add(*array.ranks)

    with pytest.raises(UsageError, match=rf"{HERE}:\d+: for_eight is written for 8 ranks, and star_4 has 4"):
        for_eight.on(FABRIC)

    def for_three(array: Array) -> None:
        array.block().add(0, 1, 2)
        array.block().copy(2, 1, 0)

    assert "contribution of rank 3 is missing" in refusal(for_three, VerificationError)
    with pytest.raises(UsageError, match="ring is written for all_reduce, all_gather, reduce_scatter, not"):
        example("ring").on(FABRIC, "reduce")


def test_programs_without_end() -> None:
    def calls_itself(array: Array) -> None:
        array.block().add(0, 1)
        calls_itself(array)

    text = refusal(calls_itself, UsageError)
    assert "calls itself without end" in text

    def goes_on(array: Array) -> None:
        while True:
            array.block().add(0, 1)

    module: Any = importlib.import_module("mycel.collectives.language.array")
    kept = module.MOST_STATEMENTS, module.MOST_SECONDS
    module.MOST_STATEMENTS = 1000
    try:
        assert "more than 1,000 transfers; does this never end?" in refusal(goes_on, ScheduleError)
        module.MOST_STATEMENTS, module.MOST_SECONDS = 1 << 30, 0.0
        assert "there is no end yet" in refusal(goes_on, ScheduleError)
    finally:
        module.MOST_STATEMENTS, module.MOST_SECONDS = kept


def test_programs_that_differ_from_run_to_run() -> None:
    def by_chance(array: Array) -> None:
        array.block().add(0, random.randrange(1 << 30) % 3 + 1)
        array.block().copy(1, random.randrange(2, 4))

    with pytest.raises(UsageError, match=rf"{HERE}:\d+: by_chance does not say the same in every run"):
        for _ in range(50):
            try:
                collective("all_reduce")(by_chance).on(FABRIC)
            except VerificationError:
                continue

    def by_rank(array: Array) -> None:
        me = int(os.environ.get("RANK", "0"))
        for rank in array.ranks:
            if rank != me:
                array.block().add(rank, me)

    assert "as another rank" in refusal(by_rank, UsageError)
    before = dict(os.environ)
    with as_another_rank():
        assert os.environ["RANK"] == "1"
    assert dict(os.environ) == before


def test_a_race_names_both_statements() -> None:
    def race(array: Array) -> None:
        chunk = array.block(0)
        chunk.copy(0, 1)
        chunk.copy(0, 2)
        chunk.copy(1, 3)
        chunk.copy(2, 3)

    text = refusal(race, VerificationError, "all_gather")
    assert len(set(re.findall(rf"{HERE}:\d+: chunk\.copy\(\d, 3\)", text))) == 2
    assert "nothing makes it wait for" in text

    def swapped(array: Array) -> None:
        with array.step():
            array.block().copy(0, 1)
            array.block().copy(1, 0)

    assert "at the same time as" in refusal(swapped, VerificationError)


def test_errors_of_the_functions_own() -> None:
    text = refusal(lambda array: [][array.num_ranks], UsageError)  # type: ignore[func-returns-value]
    assert "IndexError: list index out of range" in text


@pytest.mark.parametrize(
    ("arguments", "named", "expected"),
    [
        ((), {}, "say what it carries out"),
        (("all_reduces",), {}, "did you mean 'all_reduce'"),
        (("all_reduce",), {"instances": 0}, "instances=0"),
        (("all_reduce",), {"ranks": 1}, "ranks=1"),
    ],
)
def test_the_decorator(arguments: tuple[str, ...], named: dict[str, int], expected: str) -> None:
    with pytest.raises(UsageError, match=re.escape(expected)):
        collective(*arguments, **named)  # type: ignore[arg-type]


# -- files and commands ------------------------------------------------------------------------------------------

HEADER = "from mycel.collectives.language import collective\n\n"
ONE = '@collective("all_reduce")\ndef mine(array):\n    array.block().add(0, 1)\n    array.block().copy(1, 0)\n'


@pytest.mark.parametrize(
    ("content", "name", "expected"),
    [
        ("x = 1\n", "", "no collective in it"),
        (HEADER + ONE + ONE.replace("mine", "other"), "", "has several collectives; say which"),
        (HEADER + ONE, ":min", "no collective 'min' (did you mean 'mine'?)"),
        ("def (\n", "", "mine.py:1: invalid syntax"),
        ("x = 1\nraise RuntimeError('no')\n", "", "mine.py:2: RuntimeError: no"),
        ("x = 1\nraise SystemExit(3)\n", "", "mine.py:2: SystemExit: 3"),
    ],
)
def test_files_that_hold_none(content: str, name: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=re.escape(expected)):
        load_written(str(tmp_path / "mine.py") + name)


def test_files_that_are_not_there() -> None:
    for text in ("nowhere.py", "nowhere.py:ring", "ring", str(ROOT)):
        with pytest.raises(UsageError, match="no such file"):
            load_written(text)


def run(module: object, *arguments: str) -> str:
    app = typer.Typer()
    module.register(app)  # type: ignore[attr-defined]
    done = CliRunner().invoke(app, list(arguments))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0
    return done.stdout


def test_build_writes_every_form(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.json", "a.txt", "a.xml", "a.plan.json", "a.dot")]
    outputs = [word for file in files for word in ("-o", str(file))]
    text = run(build, f"{EXAMPLES}:hierarchical", "--topology", "two_boxes:ranks=8", "--sizes", "1MB", *outputs)
    assert text.startswith("200 of 200 Mbit/s, optimal: all_reduce over 8 ranks of two_boxes by hierarchical, ver")
    assert "1MB: " in text and "nothing takes less than" in text and all(file.stat().st_size for file in files)
    schedule = Schedule.from_json(json.loads(files[0].read_text(encoding="utf-8")))
    assert schedule == example("hierarchical").on(load_topology("two_boxes:ranks=8"))
    said = json.loads(run(build, f"{EXAMPLES}:one_shot", "-t", "star:ranks=3", "--sizes", "1KB", "--json"))
    assert (said["depth"], said["same_bits"], said["share_of_bound"]) == (1, False, pytest.approx(2 / 3))
    assert said["sizes"][0]["simulated_s"] >= said["sizes"][0]["bound_s"]


def test_build_leaves_nothing_behind_where_it_fails(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    with pytest.raises(SynthesisError, match=r"collectives\.py:\d+"):
        run(build, f"{EXAMPLES}:two_step", "-t", "ring:ranks=4", "-o", str(file))
    with pytest.raises(UsageError, match="its name says no form"):
        run(build, f"{EXAMPLES}:ring", "-t", "ring:ranks=4", "-o", str(file), "-o", "a.nothing")
    assert not list(tmp_path.iterdir())


def test_draw_and_select_take_ones_own(tmp_path: Path) -> None:
    picture, file = tmp_path / "a.dot", tmp_path / "ring.json"
    run(draw, "two_boxes:ranks=4", "--schedule", f"{EXAMPLES}:hierarchical", "-o", str(picture))
    assert "digraph" in picture.read_text(encoding="utf-8")
    run(build, f"{EXAMPLES}:ring", "-t", "star:ranks=4", "-o", str(file))
    own = ["--schedule", str(file), "--schedule", f"{EXAMPLES}:all_pairs"]
    said = json.loads(run(select, "star:ranks=4", "-c", "all_reduce", "--sizes", "1MB", *own, "--json"))
    assert {"own ring", "all_pairs", "ring"} <= said["rows"][0]["simulated_s"].keys()
    assert said["rows"][0]["simulated_s"]["own ring"] == pytest.approx(said["rows"][0]["simulated_s"]["ring"])
    with pytest.raises(UsageError, match="is for star_4"):
        run(draw, "star:ranks=5", "--schedule", str(file), "-o", str(picture))
    with pytest.raises(UsageError, match="carries out all_reduce 4"):
        run(select, "star:ranks=4", "-c", "all_gather", "--schedule", str(file))
    with pytest.raises(UsageError, match="give one of them"):
        run(draw, "star:ranks=4", "-c", "all_reduce", "--method", "tree", "--schedule", str(file), "-o", str(picture))


def test_one_shot_has_the_same_bits_as_a_plan_with_scratch() -> None:
    """What chunks cannot say, since a rank has one place for each: everybody adds in the order of ranks."""
    plan = ChannelPlan("all_reduce", 3, name="one_shot", chunks=1)
    blocks = [rank.block() for rank in plan.ranks]
    pairs = [plan.memory(blocks[a], blocks[b]) for a in range(3) for b in range(a + 1, 3)]
    ends = [end for pair in pairs for end in pair]
    for end in ends:
        end.signal(is_relaxed=True)
    for end in ends:
        end.wait(is_relaxed=True)
        end.put(plan.ranks[end.block.rank].input[0], plan.ranks[end.peer].scratch[end.block.rank])
        end.signal()
    for end in ends:
        end.wait()
    for rank, block in zip(plan.ranks, blocks, strict=True):
        block.copy(rank.input[0], rank.scratch[rank.number])
        block.copy(rank.scratch[0], rank.output[0])
        for other in (1, 2):
            block.reduce(rank.output[0], rank.output[0], rank.scratch[other])
    template = load_plan(plan.build())
    assert program_sums_agree(template.verified(template.least_elements))
    assert not sums_agree(example("one_shot").on(load_topology("star:ranks=3")))
