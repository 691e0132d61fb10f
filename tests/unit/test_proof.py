"""Programs that were broken after their schedule was verified are refused, by ``mycel verify --programs`` too."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from mycel.cli.verify import register
from mycel.collectives.export import export
from mycel.collectives.lower import RankTemplate, lower
from mycel.collectives.program import Buffer, Channel, Instruction, Op, Program
from mycel.collectives.proof import prove_lowering, prove_size
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import ROOTED, Collective, CollectiveName
from mycel.collectives.synth import methods_for, synthesize
from mycel.collectives.synth.classics import classics_for
from mycel.collectives.verify import verify_programs, verify_schedule
from mycel.errors import UsageError, VerificationError
from mycel.topology.builders import build, star

FABRICS = {
    "star": build("star:ranks=4"),
    "ring": build("ring:ranks=3"),
    "two_boxes": build("two_boxes:ranks=8"),
    "adding switch": star(num_ranks=3, computes=True),
}


@lru_cache(maxsize=64)
def schedule(fabric: str, name: CollectiveName, method: str) -> Schedule:
    topology = FABRICS[fabric]
    root = 1 if name in ROOTED else None
    made = synthesize(topology, Collective(name=name, num_ranks=topology.num_ranks, root=root), method)
    verify_schedule(made)
    return made


def rows(program: Program, *ops: Op) -> list[int]:
    return np.flatnonzero(np.isin(program.columns["op"], ops)).tolist()


def without(program: Program, row: int) -> Program:
    """Without an instruction; nobody needs it any more."""
    keep = np.arange(len(program.columns)) != row
    needs = [[n - (n > row) for n in program.instruction(i).needs if n != row] for i in np.flatnonzero(keep).tolist()]
    starts = np.cumsum([0, *map(len, needs)])
    index = np.array([n for those in needs for n in those], dtype=np.int64)
    return replace(program, columns=program.columns[keep], need_start=starts, need_index=index)


def drop(program: Program) -> Program:
    return without(program, rows(program, Op.SEND, Op.RECV, Op.RECV_REDUCE)[-1])


def redirect(program: Program) -> Program:
    """What goes to one rank goes to another, or, where there is one only, from elsewhere."""
    columns = program.columns.copy()
    sends = rows(program, Op.SEND)
    others = [r for r in sends if columns["channel"][r] != columns["channel"][sends[0]]]
    if others:
        columns["channel"][sends[0]] = columns["channel"][others[0]]
    else:
        columns["offset"][sends[0]] += 1 if columns["offset"][sends[0]] == 0 else -1
    return replace(program, columns=columns)


def reorder(program: Program) -> Program:
    """Two messages of a channel change places."""
    columns = program.columns.copy()
    for op in (Op.SEND, Op.RECV, Op.RECV_REDUCE):
        for channel in range(len(program.channels)):
            pair = [r for r in rows(program, op) if columns["channel"][r] == channel]
            pair = [r for r in pair if columns["offset"][r] != columns["offset"][pair[0]]][:1] + pair[:1]
            if len(pair) == 2:
                columns[pair] = columns[pair[::-1]]
                return replace(program, columns=columns)
    raise AssertionError("no channel with two messages")


def shift(program: Program) -> Program:
    """What comes in lands one element off."""
    columns = program.columns.copy()
    row = next(r for r in rows(program, Op.RECV, Op.RECV_REDUCE) if columns["offset"][r])
    columns["offset"][row] -= 1
    return replace(program, columns=columns)


def forget(program: Program) -> Program:
    return replace(program, need_start=program.need_start * 0, need_index=program.need_index[:0])


MUTANTS = (drop, redirect, reorder, shift, forget)


def breaking(how: Callable[[Program], Program]) -> Any:
    """``RankTemplate.expand``, with what it makes for rank 1 changed."""
    right = RankTemplate.expand

    def expand(self: RankTemplate, *args: Any, **kwargs: Any) -> Program:
        program = right(self, *args, **kwargs)
        return how(program) if self.rank == 1 else program

    return expand


def every_case() -> list[tuple[str, CollectiveName, str]]:
    names: tuple[CollectiveName, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", *sorted(ROOTED))
    usual = [(fabric, name, method) for fabric in FABRICS for name in names for method in methods_for(name)]
    # Most of them fit two nodes of four ranks.
    fitting = {name: [m for m in classics_for(name) if not m.startswith("trivance")] for name in names}
    classics = [("two_boxes", name, method) for name, methods in fitting.items() for method in methods]
    classics.append(("two_boxes", "all_reduce", "exchange"))
    return [*usual, *classics]


@pytest.mark.parametrize(("fabric", "name", "method"), every_case())
def test_what_is_proved_is_right_at_sizes_that_were_not_looked_at(fabric, name, method):
    made = schedule(fabric, name, method)
    assert prove_lowering(made) == prove_lowering(made) > 0
    random = np.random.default_rng(3)
    for most, piece in ((2, 1), (5, 2), (30, 7), (30, 1 << 20)):
        lengths = random.integers(0, most, made.collective.num_blocks).tolist()
        verify_programs(lower(made, sum(lengths), piece_elements=piece, block_elements=lengths))


@pytest.mark.parametrize("how", MUTANTS)
@pytest.mark.parametrize("name", ["all_reduce", "all_gather"])
def test_mutants_of_lowering(how, name, monkeypatch):
    made = schedule("two_boxes", name, "forest")
    monkeypatch.setattr(RankTemplate, "expand", breaking(how))
    verify_schedule(made)
    with pytest.raises(VerificationError, match=r"^all_(reduce|gather) over 8 ranks"):
        prove_lowering(made)
    with pytest.raises(VerificationError, match=r"^all_(reduce|gather) over 8 ranks"):
        prove_size(made, 1000, 64)


def run(*arguments: str) -> Any:
    app = typer.Typer()
    register(app)
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "all_reduce.json"
    path.write_text(json.dumps(schedule("star", "all_reduce", "forest").to_json()))
    return str(path)


def test_the_command_proves_programs(file):
    result = run(file, "--programs")
    assert result.exit_code == 0
    assert "programs at every size are right" in result.output
    answer = json.loads(run(file, "--programs", "--size", "1000", "--piece", "128", "--json").output)
    programs = lower(schedule("star", "all_reduce", "forest"), 250, piece_elements=32)
    seen = sum(len(program.columns) for program in programs)
    assert answer["programs"] == {"num_elements": 250, "piece_bytes": 128, "num_instructions": seen}
    assert "of 1000B in pieces of 128B" in run(file, "--programs", "--size", "1000", "--piece", "128").output


@pytest.mark.parametrize("how", MUTANTS)
@pytest.mark.parametrize("size", [(), ("--size", "64KB")])
def test_the_command_refuses_mutants_of_lowering(file, how, size, monkeypatch):
    monkeypatch.setattr(RankTemplate, "expand", breaking(how))
    assert run(file).exit_code == 0
    result = run(file, "--programs", *size)
    assert result.exit_code == 1
    assert result.output.startswith("wrong: all_reduce over 4 ranks")
    answer = json.loads(run(file, "--programs", *size, "--json").output)
    assert not answer["ok"]


def test_the_command_says_what_it_cannot_do(file, tmp_path):
    for arguments in (("--size", "1MB"), ("--programs", "--piece", "1KB")):
        assert isinstance(run(file, *arguments).exception, UsageError)
    for size in ("0", "1KB"):
        assert isinstance(run(file, "--programs", "--size", size, "--piece", "2").exception, UsageError)
    foreign = tmp_path / "ring.xml"
    made = schedule("ring", "all_gather", "forest")
    foreign.write_text(str(export(made, "msccl_xml")))
    caught = run(str(foreign), "--programs").exception
    assert isinstance(caught, UsageError)
    assert "a program already" in str(caught)


def test_an_order_of_messages_that_another_size_changes_is_no_order():
    """A place in SCRATCH is sent from, then written again by who has waited only for the message behind."""
    collective = Collective(name="broadcast", num_ranks=2, root=0)
    channel = Channel(src=0, dst=1, path=(0, 1))
    place = {"buffer": Buffer.SCRATCH, "offset": 0, "count": 1}
    root = (
        Instruction(op=Op.COPY, channel=-1, operand_buffer=Buffer.OUTPUT, operand_offset=0, **place),
        Instruction(op=Op.SEND, channel=0, needs=(0,), **place),
        Instruction(op=Op.SEND, channel=0, buffer=Buffer.OUTPUT, offset=1, count=1),
        Instruction(op=Op.COPY, channel=-1, operand_buffer=Buffer.OUTPUT, operand_offset=1, needs=(2,), **place),
    )
    other = tuple(Instruction(op=Op.RECV, channel=0, buffer=Buffer.OUTPUT, offset=k, count=1) for k in range(2))

    def both(*instructions: Instruction) -> list[Program]:
        return [
            Program.from_instructions(
                mine, collective=collective, rank=rank, num_elements=2, scratch_elements=1, channels=(channel,)
            )
            for rank, mine in enumerate((instructions, other))
        ]

    verify_programs(both(*root))
    with pytest.raises(VerificationError, match=r"scratch\[0:1\]: .* touch it in no fixed order"):
        verify_programs(both(*root), every_size=True)
    verify_programs(both(*root[:3], replace(root[3], needs=(1,))), every_size=True)


def test_a_need_that_points_forward_may_be_a_deadlock_at_another_size():
    made = schedule("star", "all_gather", "forest")
    programs = list(lower(made, 4 * made.num_units, piece_elements=1 << 20))
    program = programs[0]
    copies = rows(program, Op.COPY)
    assert program.instruction(copies[0]).buffer is Buffer.OUTPUT
    starts = program.need_start.copy()
    starts[1:] += 1
    index = np.insert(program.need_index, 0, copies[0])
    programs[0] = replace(program, need_start=starts, need_index=index)
    verify_programs(programs)
    with pytest.raises(VerificationError, match="stands behind it; at another size"):
        verify_programs(programs, every_size=True)
