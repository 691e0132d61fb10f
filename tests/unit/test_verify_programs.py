"""What the program verifier says: which rank, instruction, channel and elements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mycel.collectives.program import Buffer, Channel, Instruction, Op, Program
from mycel.collectives.spec import ROOTED, Collective, CollectiveName
from mycel.collectives.verify import order, verify_programs
from mycel.errors import VerificationError

IN, OUT, SCRATCH = Buffer.INPUT, Buffer.OUTPUT, Buffer.SCRATCH
THERE, BACK = Channel(src=0, dst=1, path=(0, 1)), Channel(src=1, dst=0, path=(1, 0))

Code = list[Instruction]


def send(offset: int, count: int, *needs: int, buffer: Buffer = OUT) -> Instruction:
    return Instruction(op=Op.SEND, channel=0, buffer=buffer, offset=offset, count=count, needs=needs)


def recv(offset: int, count: int, *needs: int, buffer: Buffer = OUT) -> Instruction:
    return Instruction(op=Op.RECV, channel=1, buffer=buffer, offset=offset, count=count, needs=needs)


def add(offset: int, count: int, *needs: int, final: bool = True, into: int | None = None) -> Instruction:
    return Instruction(
        op=Op.RECV_REDUCE,
        channel=1,
        buffer=OUT,
        offset=offset if into is None else into,
        count=count,
        operand_buffer=OUT,
        operand_offset=offset,
        final=final,
        needs=needs,
    )


def copy(offset: int, count: int, *needs: int, source: Buffer = IN, from_: int = 0) -> Instruction:
    return Instruction(
        op=Op.COPY,
        channel=-1,
        buffer=OUT,
        offset=offset,
        count=count,
        operand_buffer=source,
        operand_offset=from_,
        needs=needs,
    )


def pair(name: CollectiveName, codes: tuple[Code, Code], *, elements: int = 4, scratch: int = 0) -> list[Program]:
    """Programs of ranks 0 and 1; channel 0 goes to the other, channel 1 comes from it."""
    collective = Collective(name=name, num_ranks=2, root=0 if name in ROOTED else None)
    return [
        Program.from_instructions(
            code,
            collective=collective,
            rank=rank,
            num_elements=elements,
            scratch_elements=scratch,
            channels=(THERE, BACK) if rank == 0 else (BACK, THERE),
        )
        for rank, code in enumerate(codes)
    ]


#: All_reduce of 4 elements: each rank sums one half and sends it back.
HALVES: tuple[Code, Code] = (
    [send(2, 2), add(0, 2), send(0, 2, 1), recv(2, 2, 0)],
    [send(0, 2), add(2, 2), send(2, 2, 1), recv(0, 2, 0)],
)
#: All_gather of two blocks of 2 elements.
GATHER: tuple[Code, Code] = (
    [copy(0, 2), send(0, 2, buffer=IN), recv(2, 2)],
    [copy(2, 2), send(0, 2, buffer=IN), recv(0, 2)],
)


def refusal(programs: list[Program]) -> str:
    with pytest.raises(VerificationError) as caught:
        verify_programs(programs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edited(codes: tuple[Code, Code], rank: int, index: int, **changes: object) -> tuple[Code, Code]:
    new = [list(code) for code in codes]
    new[rank][index] = replace(new[rank][index], **changes)  # type: ignore[arg-type]
    return new[0], new[1]


def test_right_programs_in_any_order_of_ranks():
    verify_programs(pair("all_reduce", HALVES))
    verify_programs(pair("all_reduce", HALVES)[::-1])
    verify_programs(pair("all_gather", GATHER))


# -- belonging together ---------------------------------------------------------------------------------------


def test_one_program_of_each_rank_of_the_same_collective_and_size():
    zero, one = pair("all_reduce", HALVES)
    assert "no programs" in refusal([])
    assert "expected one program of each of ranks 0..1, got ranks [0]" in refusal([zero])
    assert "got ranks [0, 0]" in refusal([zero, zero])
    assert "got ranks [0, 1, 1]" in refusal([zero, one, one])
    longer = pair("all_reduce", HALVES, elements=6)
    assert "rank 1 and rank 0 disagree about num_elements: 6 and 4" in refusal([zero, longer[1]])
    other = pair("reduce", HALVES)
    assert "disagree about collective" in refusal([zero, other[1]])


# -- meeting --------------------------------------------------------------------------------------------------


def test_counts_must_agree_where_messages_meet():
    message = refusal(pair("all_reduce", edited(HALVES, 1, 3, count=1)))
    assert "rank 0 instruction 2 (send output[0:2] to 1 on channel 0) sends 2 elements, but rank 1" in message
    assert message.endswith("which meets it, expects 1")


@pytest.mark.parametrize(("rank", "kept"), [(0, 3), (1, 3)])
def test_left_over_messages_are_named(rank, kept):
    codes = [list(code) for code in HALVES]
    del codes[rank][kept]
    message = refusal(pair("all_reduce", (codes[0], codes[1])))
    assert f"rank {1 - rank} instruction 2 (send" in message
    assert "is left over: channel" in message
    assert "has 2 sends and 1 receives" in message


def test_left_over_receives_are_named():
    codes = (HALVES[0], [*HALVES[1], recv(0, 2, 3)])
    message = refusal(pair("all_reduce", codes))
    assert "rank 1 instruction 4 (recv output[0:2] from 0 on channel 1) is left over" in message
    assert "2 sends and 3 receives" in message


def test_channels_must_be_known_at_both_ends_once():
    zero, one = pair("all_reduce", HALVES)
    elsewhere = replace(one, channels=(BACK, replace(THERE, path=(0, 2, 1))))
    assert "rank 1 lacks the channel 0 -> 1 via 0>1 that its peer has" in refusal([zero, elsewhere])
    twice = replace(one, channels=(BACK, THERE, THERE))
    assert "rank 1 has two channels 0 -> 1 via 0>1" in refusal([zero, twice])


# -- deadlock -------------------------------------------------------------------------------------------------


def test_a_deadlock_names_its_cycle():
    """Both ranks receive before they send."""
    codes = ([recv(2, 2), send(0, 2, 0)], [recv(0, 2), send(2, 2, 0)])
    message = refusal(pair("all_reduce", codes))
    assert "all_reduce over 2 ranks: deadlock, a cycle of 2 waits (a send and its receive are one): " in message
    assert "rank 0 instruction 1 (send output[0:2] to 1 on channel 0) needs instruction 0" in message
    assert "rank 1 instruction 1 (send output[2:4] to 0 on channel 0) needs instruction 0" in message


def test_a_deadlock_through_the_order_of_a_channel():
    """Rank 0 sends its second half first on the channel, but needs what comes after it."""
    codes = ([send(0, 2, 1), recv(2, 2), send(2, 2)], [add(0, 2), send(2, 2, 2), add(2, 2)])
    message = refusal(pair("all_reduce", codes))
    assert "a cycle of 3 waits" in message
    assert "rank 0 instruction 2 (send output[2:4] to 1 on channel 0) stands on its channel behind" in message


def test_an_instruction_that_needs_itself():
    message = refusal(pair("all_reduce", edited(HALVES, 0, 0, needs=(0,))))
    assert "a cycle of 1 waits" in message
    assert "rank 0 instruction 0 (send output[2:4] to 1 on channel 0) needs instruction 0" in message


# -- contents -------------------------------------------------------------------------------------------------


def test_missing_and_double_contributions():
    plain = [replace(HALVES[r][1], op=Op.RECV, final=False) for r in range(2)]
    wrong = (HALVES[0], [HALVES[1][0], plain[1], *HALVES[1][2:]])
    message = refusal(pair("all_reduce", wrong))
    assert (
        "wrong at rank 0, output[2:4]: contribution of rank 1 is missing; last write: rank 0 instruction 3" in message
    )
    late = ([send(0, 4), add(0, 4, 0)], [add(0, 4, final=False), send(0, 4, 0)])
    message = refusal(pair("all_reduce", late))
    assert "rank 0 instruction 1 (recv_reduce output[0:4] from 1 on channel 1) is marked final too early: " in message
    assert "contribution of rank 0 is counted twice" in message


def test_data_one_element_off():
    message = refusal(pair("all_gather", edited(GATHER, 1, 0, offset=1, count=2), elements=4))
    assert "wrong at rank 1, output[1:2]: element 2 of rank 1 stands where element 1 belongs" in message


def test_reading_what_is_empty():
    empty = "which nothing has been written to"
    codes = ([copy(0, 2), send(2, 2), recv(2, 2)], GATHER[1])
    message = refusal(pair("all_gather", codes))
    assert f"rank 0 instruction 1 (send output[2:4] to 1 on channel 0) reads output[2:4], {empty}" in message
    codes = ([copy(0, 2, source=SCRATCH), *GATHER[0][1:]], GATHER[1])
    message = refusal(pair("all_gather", codes, scratch=2))
    assert f"rank 0 instruction 0 (copy output[0:2] from scratch[0]) reads scratch[0:2], {empty}" in message


def test_an_output_never_written():
    message = refusal(pair("all_gather", ([*GATHER[0][1:]], GATHER[1])))
    assert "wrong at rank 0, output[0:2]: contribution of rank 0 is missing; it is never written" in message


def test_reducing_where_nothing_is_combined():
    codes = ([send(0, 4)], [add(0, 4, final=False)])
    assert "reduces, but broadcast combines nothing" in refusal(pair("broadcast", codes))


def test_final_exactly_once_and_last():
    assert "no reduction of it is marked final" in refusal(pair("all_reduce", edited(HALVES, 0, 1, final=False)))
    message = refusal(pair("all_reduce", edited(HALVES, 0, 2, final=True)))
    assert "rank 0 instruction 2 (send output[0:2] to 1 on channel 0) is marked final, which only a recv" in message
    twice = (
        [send(2, 2), add(0, 2), send(0, 2, 1), recv(2, 2, 0)],
        [send(0, 2), add(2, 2), send(2, 2, 1), add(0, 2, 0)],
    )
    assert "adds to what comes in after its final reduction" in refusal(pair("all_reduce", twice))
    own = ([*HALVES[0], send(0, 2, 1)], [*HALVES[1], add(2, 2, 1, final=False)])
    assert "adds to its operand after its final reduction" in refusal(pair("all_reduce", own))


def test_final_over_mixed_elements():
    codes = ([send(0, 1), recv(0, 2)], [add(1, 1), send(0, 2, 0)])
    message = refusal(pair("all_reduce", codes, elements=2))
    assert "is marked final too early: contributions of different elements are mixed" in message


def test_a_shifted_copy_within_itself():
    codes = ([copy(1, 2, source=OUT, from_=0), send(0, 4)], [recv(0, 4)])
    message = refusal(pair("broadcast", codes))
    assert "reads and writes overlapping elements that do not coincide" in message
    apart = ([copy(2, 2, source=OUT, from_=0), send(0, 4, 0)], [recv(0, 4)])
    assert "element 0 of rank 0 stands where element 2 belongs" in refusal(pair("broadcast", apart))


# -- order ----------------------------------------------------------------------------------------------------


def test_unordered_accesses_are_named_with_the_way_out():
    message = refusal(pair("all_reduce", edited(HALVES, 0, 2, needs=())))
    assert message == (
        "all_reduce over 2 ranks is wrong at rank 0, output[0:2]: rank 0 instruction 1 (recv_reduce output[0:2] from "
        "1 on channel 1) and rank 0 instruction 2 (send output[0:2] to 1 on channel 0) touch it in no fixed order; "
        "let instruction 2 need 1"
    )


def test_a_receive_is_ordered_behind_what_its_sender_waited_for():
    """Rank 0 need not wait with overwriting: what overwrites was made from what it sent.

    This is the one order that comes from elsewhere; rank 1's send still has to wait for what it sends.
    """
    verify_programs(pair("all_reduce", edited(HALVES, 0, 3, needs=())))
    swap = (
        [send(0, 4), recv(0, 4)],
        [recv(0, 4, buffer=SCRATCH), send(0, 4, 0, buffer=SCRATCH), copy(0, 4, 0, source=SCRATCH)],
    )
    verify_programs(pair("broadcast", swap, scratch=4))
    eager = (swap[0], [swap[1][0], replace(swap[1][1], needs=()), swap[1][2]])
    assert "touch it in no fixed order" in refusal(pair("broadcast", eager, scratch=4))


def test_a_reduction_may_prepare_its_destination_early_so_it_must_wait_itself():
    """Rank 1 answers what rank 0 sent with its own contribution; rank 0 adds it where it sent from."""
    answer = [recv(0, 4, buffer=SCRATCH), send(0, 4, 0)]
    verify_programs(pair("reduce", ([send(0, 4), add(0, 4, 0)], answer), scratch=4))
    message = refusal(pair("reduce", ([send(0, 4), add(0, 4)], answer), scratch=4))
    assert "in no fixed order; let instruction 1 need 0" in message


def test_all_who_read_must_be_waited_for():
    """Rank 0 stages two elements, one after the other, in one element of SCRATCH, for two receivers."""
    out = [Channel(src=0, dst=r, path=(0, r)) for r in (1, 2)]

    def stage(element: int, *needs: int) -> Instruction:
        return replace(copy(0, 1, *needs, source=OUT, from_=element), buffer=SCRATCH)

    def post(channel: int, *needs: int) -> Instruction:
        return replace(send(0, 1, *needs, buffer=SCRATCH), channel=channel)

    def broadcast(waits: tuple[int, ...]) -> list[Program]:
        root = [stage(0), post(0, 0), post(1, 0), stage(1, *waits), post(0, 3), post(1, 3)]
        leaf = [replace(recv(0, 1), channel=0), replace(recv(1, 1), channel=0)]
        return [
            Program.from_instructions(
                code,
                collective=Collective(name="broadcast", num_ranks=3, root=0),
                rank=rank,
                num_elements=2,
                scratch_elements=1,
                channels=tuple(c for c in out if rank in (c.src, c.dst)),
            )
            for rank, code in enumerate((root, leaf, leaf))
        ]

    verify_programs(broadcast((1, 2)))
    for waits, forgotten in (((1,), 2), ((2,), 1)):
        message = refusal(broadcast(waits))
        assert f"wrong at rank 0, scratch[0:1]: rank 0 instruction {forgotten} (send" in message
        assert f"let instruction 3 need {forgotten}" in message


def test_own_block_may_be_the_input():
    """A block that comes back to its owner is harmless apart from INPUT, and a hazard where INPUT is OUTPUT."""
    back = (
        [copy(0, 2), send(0, 2, buffer=IN), recv(2, 2), recv(0, 2, 0)],
        [copy(2, 2), send(0, 2, buffer=IN), recv(0, 2), send(0, 2, 2)],
    )
    verify_programs(pair("all_gather", back))
    racing = (
        [copy(0, 2), send(0, 2, buffer=IN), recv(2, 2), recv(0, 2, 0), send(0, 2, buffer=IN)],
        [copy(2, 2), send(0, 2, buffer=IN), recv(0, 2), send(0, 2, 2), recv(0, 2, 3)],
    )
    message = refusal(pair("all_gather", racing))
    assert message.startswith(
        "all_gather over 2 ranks, INPUT being the rank's own block of OUTPUT, is wrong at rank 0"
    )
    misplaced = (
        [copy(1, 2), copy(0, 1, 0), copy(1, 1, 0, from_=1), send(0, 2, buffer=IN), recv(2, 2, 0)],
        GATHER[1],
    )
    message = refusal(pair("all_gather", misplaced))
    assert "INPUT being the rank's own block" in message
    assert "reads and writes overlapping elements that do not coincide" in message


def test_many_instructions_are_traced_in_several_passes(monkeypatch):
    pieces = 40
    codes: tuple[Code, Code] = ([], [])
    for piece in range(pieces):
        for code in codes:
            first = len(code)
            mine, theirs = (2 * piece, 2 * piece + 1)[:: 1 if code is codes[0] else -1]
            code += [send(theirs, 1), add(mine, 1), send(mine, 1, first + 1), recv(theirs, 1, first)]
    right = pair("all_reduce", codes, elements=2 * pieces)
    wrong = pair("all_reduce", edited(codes, 0, 4 * 35 + 2, needs=()), elements=2 * pieces)
    whole = refusal(wrong)
    monkeypatch.setattr(order, "_MAX_BITS", 1)
    verify_programs(right)
    assert refusal(wrong) == whole
