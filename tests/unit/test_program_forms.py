"""Programs: what is malformed is refused with its place, and the text shows every instruction."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mycel.collectives.lower import lower
from mycel.collectives.program import Buffer, Channel, Instruction, Op, Program
from mycel.collectives.spec import COLLECTIVES, ROOTED, Collective
from mycel.collectives.synth import synthesize
from mycel.errors import ScheduleError
from mycel.topology.builders import ring

OUT = Channel(src=0, dst=1, path=(0, 2, 1))
BACK = Channel(src=1, dst=0, path=(1, 2, 0))
SEND = Instruction(op=Op.SEND, channel=0, buffer=Buffer.OUTPUT, offset=0, count=3)
ADD = Instruction(
    op=Op.RECV_REDUCE,
    channel=1,
    buffer=Buffer.OUTPUT,
    offset=3,
    count=3,
    operand_buffer=Buffer.OUTPUT,
    operand_offset=3,
    final=True,
    needs=(0,),
)
COPY = Instruction(
    op=Op.COPY, channel=-1, buffer=Buffer.OUTPUT, offset=0, count=2, operand_buffer=Buffer.SCRATCH, operand_offset=2
)


def program(*code: Instruction, name: str = "all_reduce", elements: int = 6, channels=(OUT, BACK)) -> Program:
    root = 0 if name in ROOTED else None
    return Program.from_instructions(
        code,
        collective=Collective(name=name, num_ranks=2, root=root),
        rank=0,
        num_elements=elements,
        scratch_elements=4,
        channels=channels,
    )


@st.composite
def instructions(draw: st.DrawFn) -> list[Instruction]:
    """Any well-formed ones for six elements of OUTPUT and four of SCRATCH."""
    total = draw(st.integers(0, 8))
    out = []
    for _ in range(total):
        op = draw(st.sampled_from(Op))
        count = draw(st.integers(1, 4))
        out.append(
            Instruction(
                op=op,
                channel={Op.SEND: 0, Op.COPY: -1, Op.REDUCE: -1}.get(op, 1),
                buffer=draw(st.sampled_from((Buffer.OUTPUT, Buffer.SCRATCH))),
                offset=draw(st.integers(0, 4 - count)),
                count=count,
                operand_buffer=draw(st.sampled_from((Buffer.OUTPUT, Buffer.SCRATCH))),
                operand_offset=draw(st.integers(0, 4 - count)),
                final=draw(st.booleans()),
                needs=tuple(draw(st.lists(st.integers(0, total - 1), max_size=3))),
            )
        )
    return out


@settings(deadline=None)
@given(code=instructions())
def test_columns_give_back_the_instructions(code):
    made = program(*code)
    assert made.instructions == tuple(code)
    assert not made.columns.flags.writeable
    assert len(made.to_text().splitlines()) == 3 + 2 + len(code)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(SEND, offset=4),
        replace(SEND, offset=-1),
        replace(SEND, count=0),
        replace(SEND, channel=1),  # an incoming one
        replace(SEND, channel=2),
        replace(SEND, channel=-1),
        replace(SEND, buffer=Buffer.SCRATCH, offset=2),
        replace(SEND, buffer=Buffer.INPUT),  # all_reduce works in place
        replace(ADD, channel=0),
        replace(ADD, operand_offset=4),
        replace(ADD, operand_offset=-1),
        replace(ADD, buffer=Buffer.INPUT, offset=0),
        replace(COPY, channel=0),
        replace(COPY, operand_offset=3),
    ],
)
def test_an_instruction_out_of_range_is_named(wrong):
    with pytest.raises(ScheduleError, match=r"rank 0, instruction 1: .* is out of range \(buffers hold \[0, 6, 4\]"):
        program(SEND, wrong)


def test_input_is_never_written():
    taken = replace(ADD, op=Op.RECV, final=False, buffer=Buffer.INPUT, offset=0, needs=())
    with pytest.raises(ScheduleError, match="instruction 0"):
        program(taken, name="all_gather")
    program(replace(taken, buffer=Buffer.OUTPUT), name="all_gather")


@pytest.mark.parametrize("need", [-1, 2])
def test_needs_name_existing_instructions(need):
    with pytest.raises(ScheduleError, match="'needs' name instructions that do not exist"):
        program(SEND, replace(ADD, needs=(need,)))


@pytest.mark.parametrize("starts", [[0, 0], [0, 0, 0], [0, 2, 1], [1, 1, 1], [0, 0, 1, 1], []])
def test_needs_match_the_instructions(starts):
    right = program(SEND, ADD)
    with pytest.raises(ScheduleError, match="'needs' do not match 2 instructions"):
        replace(right, need_start=np.array(starts, dtype=np.int64))


def test_channels_are_ones_own():
    for stranger in (replace(OUT, src=1), Channel(src=2, dst=1, path=(3, 1))):
        with pytest.raises(ScheduleError, match="is not one of its own"):
            program(channels=(stranger,))


def test_weights_are_one_a_channel():
    program = lower(synthesize(ring(num_ranks=3), "all_gather"), 12, piece_elements=4)[0]
    assert len(program.weights) == len(program.channels) == 4
    assert "channel 0 0 -> 1 via 0>1 weight 1" in program.to_text()
    for wrong in (program.weights[1:], (0, *program.weights[1:])):
        with pytest.raises(ScheduleError, match=r"rank 0: \d weights from \d for 4 channels"):
            replace(program, weights=wrong)


def test_elements_divide_into_blocks():
    with pytest.raises(ScheduleError, match="7 elements do not divide into 2 blocks"):
        program(name="reduce_scatter", elements=7)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_lengths_of_buffers(name):
    made = program(name=name, elements=12)
    expected = {
        "all_gather": [6, 12, 4],
        "reduce_scatter": [12, 6, 4],
        "all_to_all": [6, 6, 4],
        "gather": [6, 12, 4],
        "scatter": [12, 6, 4],
    }
    assert [made.length(buffer) for buffer in Buffer] == expected.get(name, [0, 12, 4])
    assert replace(made, rank=1, channels=()).length(Buffer.OUTPUT) == {"gather": 0}.get(
        name, made.length(Buffer.OUTPUT)
    )
    assert replace(made, rank=1, channels=()).length(Buffer.INPUT) == {"scatter": 0}.get(
        name, made.length(Buffer.INPUT)
    )


def test_text():
    assert program(SEND, ADD, COPY).to_text() == (
        "mycel.program 1\n"
        "collective all_reduce 2\n"
        "rank 0 elements 6 scratch 4\n"
        "channel 0 0 -> 1 via 0>2>1\n"
        "channel 1 1 -> 0 via 1>2>0\n"
        "0: send output[0:+3] on 0\n"
        "1: recv_reduce output[3:+3] with output[3] on 1 final needs 0\n"
        "2: copy output[0:+2] with scratch[2]\n"
    )
    assert "collective reduce 2 root 0\n" in program(name="reduce").to_text()
