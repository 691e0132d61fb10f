"""What the examination of orders refuses and how it says so; what it finds out; ``mycel plan check``."""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from mycel import cli
from mycel.errors import UsageError, VerificationError
from mycel.pipeline.check import Memory, check, check_collectives, check_mesh
from mycel.pipeline.check.places import Place, drawn
from mycel.pipeline.known import KNOWN, known_order
from mycel.pipeline.lower import lower
from mycel.pipeline.order import Action, Order
from mycel.pipeline.replay import peaks

TWO = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
LOWERED = lower(Order.from_csv(TWO)).to_csv()


def refused(text: str, **options: Any) -> VerificationError:
    with pytest.raises(VerificationError) as caught:
        check(Order.from_text(text), **options)
    assert "\n" not in str(caught.value)
    return caught.value


# -- what torch's loader takes, and runs into wrong gradients or a stop ----------------------------------------

#: What is wrong, and what the message must say: the action, and the way out.
TABLE = {
    "a stage on two ranks": (
        "0F0,0F1,0B0\n1F0,0B1,1B0,1F1,1B1\n",
        "stage 0 is on rank 0 and on rank 1 (rank 1, step 1: 0B1); a stage is on one rank: move it to rank 0",
    ),
    "a stage that lacks a micro-batch": (
        "0F0,0F1,0B0,0B1\n1F0,1B0\n",
        "stage 1 (rank 1) lacks 1F1: every stage on a micro-batch's route has one forward and one backward; its "
        "neighbour is at rank 1, step 0: 1F0; add it there, or let routes say that micro-batch 1 skips the stage",
    ),
    "a backward that is missing": (
        "0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n",
        "stage 1 (rank 1) lacks 1B1 (or I and W)",
    ),
    "a circle": (
        "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
        "the order stops in a circle: rank 1, step 2: 1B0 stands after 1F1 (step 1), which waits for rank 0, "
        "step 2: 0F1 stands after 0B0 (step 1), which waits for 1B0; move 1B0 of rank 1 from step 2 before 1F1 "
        "(step 1), and the order is right",
    ),
    "a forward twice": (
        "0F0,0F1,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
        "rank 0, step 2: 0F1: 0F1 stands there a second time, after rank 0, step 1; leave one out",
    ),
    "a forward twice and one missing": (
        "0F0,0F0,0B0,0B1\n1F0,1B0,1F1,1B1\n",
        "rank 0, step 1: 0F0: 0F0 stands there a second time, after rank 0, step 0; 0F1 is missing, which one "
        "of them may be",
    ),
    "a backward twice": (
        "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1,1B1\n",
        "rank 1, step 4: 1B1: 1B1 stands there a second time",
    ),
    "both kinds of backward": (
        "0F0,0F1,0B0,0B1\n1F0,1B0,1I0,1W0,1F1\n",
        "stage 1, micro-batch 0 has a whole backward (rank 1, step 1) and half of one, 1I0 (rank 1, step 2); "
        "it is B, or I and W",
    ),
    "half a backward": (
        "0F0,0F1,0B0,0B1\n1F0,1I0,1F1,1B1\n",
        "rank 1, step 1: 1I0 is one half of a backward, and 1W0, the other, is missing; add it to rank 1, or "
        "write 1B0",
    ),
    "a backward before its forward": (
        "0F0,0F1,0B0,0B1\n1B0,1F0,1F1,1B1\n",
        "rank 1, step 0: 1B0 stands before 1F0 (step 1), which it needs; move it behind that",
    ),
    "the halves of a backward the wrong way round": (
        "0F0,0W0,0I0\n1F0,1B0\n",
        "rank 0, step 1: 0W0 stands before 0I0 (step 2), which it needs",
    ),
    "the last stage out of index order": (
        "0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1\n",
        "rank 1, step 1: 1F0 stands after 1F1 on the last stage, and torch's runtime reads losses by position: "
        "micro-batches would silently exchange their losses and gradients",
    ),
    "two receives exchanged": (
        LOWERED.replace("1RECV_F0", "x").replace("1RECV_F1", "1RECV_F0").replace("x", "1RECV_F1"),
        "rank 1, step 5: 1RECV_F0 stands after 1F0 (step 2), which needs it",
    ),
    "a send doubled": (
        LOWERED.replace("0SEND_F0", "0SEND_F0,0SEND_F0"),
        "rank 0, step 3: 0SEND_F0: 0SEND_F0 stands there a second time, after rank 0, step 2; every later message of "
        "these two ranks would meet a wrong receive: leave one out",
    ),
    "a send missing": (
        LOWERED.replace("0SEND_F1,", ""),
        "0SEND_F1 is missing on rank 0: 1RECV_F1 would wait for ever; add it after 0F1 (step 3)",
    ),
    "a receive missing": (
        LOWERED.replace("1RECV_F1,", ""),
        "1RECV_F1 is missing on rank 1: what 0SEND_F1 sends would meet another receive; add it before 1F1 (step 5)",
    ),
    "a reduction missing": (
        LOWERED.replace("1REDUCE_GRAD,", ""),
        "1REDUCE_GRAD is missing on rank 1: gradients of stage 1 would silently stay 2 times too large, and "
        "unreduced; add it after 1B1 (step 7)",
    ),
    "a reduction too early": (
        LOWERED.replace("1REDUCE_GRAD,", "").replace("1B1,", "1REDUCE_GRAD,1B1,"),
        "rank 1, step 7: 1REDUCE_GRAD stands before 1B1 (step 8), which still adds to the gradients of stage 1",
    ),
    "parameters that are not whole": (
        LOWERED.replace("1UNSHARD,", ""),
        "rank 1, step 1: 1F0: the parameters of stage 1 are not whole there; add 1UNSHARD before it",
    ),
    "parameters that stay whole": (
        LOWERED.replace(",1RESHARD", ""),
        "stage 1 stays whole at the end of the step (since rank 1, step 0), and the next step stops",
    ),
    "a message to nobody": (
        LOWERED.replace("1B0,", "1B0,1SEND_F0,"),
        "rank 1, step 4: 1SEND_F0: nobody on another rank needs what it says",
    ),
    "a send before its result": (
        LOWERED.replace("0F0,0SEND_F0", "0SEND_F0,0F0"),
        "rank 0, step 1: 0SEND_F0 stands before 0F0 (step 2), whose result it sends; move it behind that",
    ),
    "a receive on another rank": (
        LOWERED.replace("1RECV_F0,", "").replace("0F0,", "0F0,1RECV_F0,"),
        "rank 0, step 2: 1RECV_F0: stage 1 is on rank 1; move it there, beside 1F0 (step 1)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_what_is_wrong_is_named_with_the_way_out(case: str) -> None:
    text, says = TABLE[case]
    error = refused(text)
    assert says in str(error)
    assert ">" in error.grid, "the bad cell is marked"


def test_exchanged_receives_that_both_come_in_time() -> None:
    order = lower(known_order("gpipe", 2, 2))
    text = order.to_csv().replace("1RECV_F0,1F0,1RECV_F1,", "1RECV_F1,1RECV_F0,1F0,")
    assert (
        "message 0 from rank 0 to rank 1 is 0SEND_F0 (step 2), but receive 0 is 1RECV_F1 (rank 1, step 1): it would "
        "silently get what belongs to 1RECV_F0 (step 2); put the receives into the sequence of the sends, 1RECV_F0 "
        "before 1RECV_F1"
    ) in str(refused(text))
    both = text.replace("0F0,0SEND_F0,0F1,0SEND_F1", "0F0,0F1,0SEND_F1,0SEND_F0")
    check(Order.from_csv(both))


def test_the_grid_marks_the_cells_of_a_circle() -> None:
    assert refused(TABLE["a circle"][0]).grid == (
        "        rank 0  rank 1\n"
        "step 0  0F0     1F0\n"
        "step 1  >0B0<   >1F1<\n"
        "step 2  >0F1<   >1B0<\n"
        "step 3  0B1     1B1"
    )


def test_large_grids_show_what_is_around_the_cell() -> None:
    order = known_order("1f1b", 32, 64)
    lines = drawn(order, [Place(20, 50)]).splitlines()
    assert len(lines) < 40 and max(map(len, lines)) < 140
    assert any(f">{order.rows[20][50]}<" in line and line.startswith("step 50") for line in lines)


def test_a_circle_over_many_ranks_is_the_shortest() -> None:
    order = known_order("1f1b", 6, 12)
    rows = [list(row) for row in order.rows]
    rows[2].insert(0, rows[2].pop(9))
    error = refused(Order(rows=tuple(map(tuple, rows)), num_stages=6, num_micro_batches=12).to_csv())
    assert str(order.rows[2][9]) in str(error)


def test_no_move_is_proposed_that_does_not_mend_it() -> None:
    # Two circles: whichever is opened, the other stays.
    error = refused("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n2F0,2B0,2F1,2B1\n3F0,3F1,3B0,3B1\n")
    assert "and the order is right" not in str(error)
    assert "one of them has to come earlier in its row" in str(error)


# -- who runs it ------------------------------------------------------------------------------------------------


def test_the_last_stage_in_any_order_is_for_our_executor() -> None:
    report = check(Order.from_csv("0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1\n"), executor="mycel")
    assert report.notes == (
        "the last stage does its forwards out of index order: only mycel's executor keeps losses apart",
    )
    with pytest.raises(UsageError, match="no executor is called 'deepspeed'"):
        check(Order.from_csv(TWO), executor="deepspeed")  # type: ignore[arg-type]


def test_stages_built_elsewhere_are_refused() -> None:
    check(Order.from_csv(TWO), stage_ranks=(0, 1))
    with pytest.raises(
        UsageError, match="stage 0 has been built on rank 1, and the order has it on rank 0; build it"
    ):
        check(Order.from_csv(TWO), stage_ranks=(1, 0))
    with pytest.raises(UsageError, match="3 stages have been built and the order has 2"):
        check(Order.from_csv(TWO), stage_ranks=(0, 1, 1))


# -- buffering --------------------------------------------------------------------------------------------------


def test_what_needs_buffering_is_said_plain_and_with_communication() -> None:
    for order in (known_order("1f1b", 3, 4), lower(known_order("1f1b", 3, 4))):
        assert check(order).buffering.startswith("the order stops in a circle: ")
    for order in (known_order("gpipe", 4, 3), lower(known_order("gpipe", 4, 3))):
        assert check(order).buffering == ""
    for name in KNOWN:
        order = known_order(name, 2, 4)
        assert (check(order).buffering == "") == (check(lower(order)).buffering == "")


def test_receives_posted_early_make_buffering_needless() -> None:
    # As torch lowers it: every receive stands where its send has just been placed.
    order = Order.from_csv(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\n"
        "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD\n"
    )
    report = check(order)
    assert report.buffering == "" and report.has_communication
    assert report.notes == ("stage 0 is never gathered: for stages under FSDP it has to be (UNSHARD, RESHARD)",)


# -- shared blocks, routes, branches -----------------------------------------------------------------------------

M_SHAPE = (
    "# mycel order 1\n# stages 2\n# micro-batches 2\n# feeds e>0F 0F>1F 1F>h h>1B 1B>0B 0B>t\n"
    "SHARED0[e],SHARED1[e],0F0,0F1,SHARED0[h],0B0,SHARED1[h],SHARED0[t],0B1,SHARED1[t]\n"
    "SHARED0[e],SHARED1[e],1F0,SHARED0[h],1B0,1F1,SHARED1[h],1B1,SHARED0[t],SHARED1[t]\n"
)


def test_blocks_on_several_ranks() -> None:
    report = check(Order.from_csv(M_SHAPE))
    assert report.notes == ("blocks on several ranks (e, h, t): only mycel's executor runs them",)
    lowered = lower(Order.from_csv(M_SHAPE))
    assert check(lowered).has_communication and "SEND_F0" in lowered.to_csv()


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("SHARED0[h],0B0", "0B0", "SHARED0[h] is missing on rank 0; block h is on ranks 0, 1"),
        ("SHARED0[e],SHARED1[e],0F0", "SHARED0[e],SHARED1[e],SHARED1[e],0F0", "stands there a second time"),
        ("SHARED0[e],SHARED1[e],0F0", "SHARED1[e],SHARED0[e],0F0", "the order stops in a circle"),
        ("0F0,0F1,SHARED0[h]", "SHARED0[h],0F0,0F1", "rank 0, step 3: 0F0 stands after SHARED0[h]"),
        ("1F0,SHARED0[h],1B0", "1F0,1B0,SHARED0[h]", "the order stops in a circle"),
        ("SHARED1[h],1B1", "1B1,SHARED1[h]", "the order stops in a circle"),
    ],
)
def test_wrong_blocks_on_several_ranks(before: str, after: str, says: str) -> None:
    assert before in M_SHAPE
    assert says in str(refused(M_SHAPE.replace(before, after, 1)))


def test_routes_that_skip_and_exchange_stages() -> None:
    rows = "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F2,1B2\n2F0,2B0,2F1,2B1,2F2,2B2\n"
    text = "# routes 0>1>2 0>2 0>2>1\n" + rows
    report = check(Order.from_csv(text))
    assert report.notes == (
        "not all micro-batches visit all stages in order: torch's loader refuses it, mycel's executor runs it",
    )
    assert check(lower(Order.from_csv(text))).has_communication
    assert "micro-batch 1 does not visit stage 1; its route is 0>2" in str(refused(text.replace("1F0,", "1F1,1F0,")))
    assert "stage 2 (rank 2) lacks 2F1" in str(refused(text.replace("2F1,", "")))


def test_branches_have_no_words_of_torchs() -> None:
    text = "# feeds 0F>2F 1F>2F 2B>0B 2B>1B\n0F0,0B0\n1F0,1B0\n2F0,2B0\n"
    check(Order.from_csv(text))
    with pytest.raises(ValueError, match="can be one message only; join branches in a block"):
        lower(Order.from_csv(text))
    by_hand = (
        "# feeds 0F>2F 1F>2F 2B>0B 2B>1B\n0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n"
        "1F0,1SEND_F0,1RECV_B0,1B0,1REDUCE_GRAD\n2RECV_F0,2F0,2B0,2SEND_B0,2REDUCE_GRAD\n"
    )
    assert "torch's actions have no words for branches" in str(refused(by_hand))


def test_stages_without_backward_are_right_where_feeds_say_so() -> None:
    text = "# feeds 0F>1F\n0F0,0F1\n1F0,1B0,1F1,1B1\n"
    assert check(Order.from_csv(text)).peaks == (0, 1)
    assert check(lower(Order.from_csv(text))).has_communication
    assert "lacks 0B0" in str(refused(text.replace("# feeds 0F>1F\n", "")))
    assert "lacks 0B1" in str(refused("# feeds 0F>1F\n0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n"))


# -- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v", "v_min", "chimera"])
def test_peaks_are_those_of_the_replay(name: str) -> None:
    order = known_order(name, 4, 8)
    for share in (Fraction(0), Fraction(1, 2), Fraction(1, 3)):
        expected = peaks(order, input_frees=share)
        assert check(order, memory=Memory(input_frees=share)).peaks == expected
        assert check(lower(order), memory=Memory(input_frees=share)).peaks == expected


def test_limits_name_the_action_that_is_too_much() -> None:
    order = known_order("1f1b", 3, 5)
    check(order, memory=Memory(limit=(Fraction(3), Fraction(2), Fraction(1))))
    with pytest.raises(
        VerificationError, match=r"rank 0, step 2: 0F2: rank 0 holds 3 there, and its limit is 2; put"
    ):
        check(order, memory=Memory(limit=(Fraction(2),)))
    with pytest.raises(UsageError, match="2 limits for 3 ranks: expected one for all, or one each"):
        check(order, memory=Memory(limit=(Fraction(2), Fraction(2))))
    with pytest.raises(UsageError, match="negative amounts"):
        Memory(limit=(Fraction(-1),))


def test_bytes_of_activations_parameters_and_buffers() -> None:
    order = lower(known_order("gpipe", 2, 3))
    memory = Memory(activation=(Fraction(100), Fraction(40)), fixed=(Fraction(7), Fraction(9)), message=Fraction(5))
    # Rank 0: three activations, and the buffer of a gradient; rank 1: two, the third, and the buffer it came in.
    assert check(order, memory=memory).peaks == (7 + 300 + 5, 9 + 120 + 5)


# -- collectives --------------------------------------------------------------------------------------------------


def test_collectives_in_opposite_order_are_refused() -> None:
    pair, other = frozenset({0, 1}), frozenset({0, 1, 2})
    with pytest.raises(VerificationError, match=r"collectives wait for each other: .* let all"):
        check_collectives({0: [(pair, "a"), (other, "b")], 1: [(other, "b"), (pair, "a")], 2: [(other, "b")]})


def test_a_circle_over_three_groups_is_refused() -> None:
    ab, bc, ca = frozenset({0, 1}), frozenset({1, 2}), frozenset({2, 0})
    calls = {0: [(ca, "z"), (ab, "x")], 1: [(ab, "x"), (bc, "y")], 2: [(bc, "y"), (ca, "z")]}
    with pytest.raises(VerificationError, match="collectives wait for each other"):
        check_collectives(calls)
    assert check_collectives(calls | {0: [(ab, "x"), (ca, "z")]}) == 3


def test_collectives_that_not_all_of_a_group_call() -> None:
    pair = frozenset({0, 1})
    with pytest.raises(VerificationError, match="rank 1 never calls b of ranks 0, 1, call 1 of that group"):
        check_collectives({0: [(pair, "a"), (pair, "b")], 1: [(pair, "a")]})
    with pytest.raises(VerificationError, match="call 0 of ranks 0, 1 is a on rank 0 and b on rank 1"):
        check_collectives({0: [(pair, "a")], 1: [(pair, "b")]})
    with pytest.raises(VerificationError, match="rank 2 calls a of ranks 0, 1, to which it does not belong"):
        check_collectives({2: [(pair, "a")]})


# -- mesh ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ranks": 3}, "the order has 4 ranks and the group 3: start 4 ranks, or make the order for 3"),
        ({"ranks": 5}, "the order has 4 ranks and the group 5: it lacks rows"),
        ({"micro_batches": 6}, "the order treats 8 micro-batches and the job cuts 6"),
        ({"mesh": {"pp": 2}}, "axis pp of the mesh is 2 and the order has 4 ranks"),
        ({"mesh": {"dp": 2, "tp": 2}, "world_size": 8}, "the mesh pp 4 x dp 2 x tp 2 has 16 ranks and the job 8"),
        ({"batch": 20}, "batch of 20 does not divide into 8 micro-batches; 16 or 24 would"),
        ({"batch": 24, "mesh": {"dp": 2}}, "8 micro-batches on each of 2 replicas; 16 or 32 would"),
        ({"layers": 6}, "layers of 6 does not divide into 4 stages; 4 or 8 would"),
        ({"heads": 9, "mesh": {"tp": 2}}, "heads of 9 does not divide into axis tp of 2; 8 or 10 would"),
        ({"batch": 0}, "batch of 0: expected at least 1"),
        ({"mesh": {"dp": 0}}, "axis dp of 0: expected at least 1"),
    ],
)
def test_meshes_and_batches_that_do_not_divide(given: dict[str, Any], says: str) -> None:
    order = known_order("1f1b", 4, 8)
    with pytest.raises(UsageError, match=says):
        check_mesh(order, **given)
    check_mesh(order, ranks=4, micro_batches=8, mesh={"pp": 4, "dp": 2}, world_size=8, batch=32, layers=8, heads=7)


# -- the command --------------------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["mycel", *arguments])
    monkeypatch.setattr(cli, "_say_what_is_compiled", lambda: None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    code = ended.value.code
    return int(code or 0), *capsys.readouterr()


def test_the_command_says_what_is_right(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    file = tmp_path / "order.csv"
    assert run(monkeypatch, capsys, *f"plan known zb_v --ranks 4 --micro-batches 8 -o {file}".split()) == (0, "", "")
    assert file.read_text() == known_order("zb_v", 4, 8).to_csv()
    code, out, err = run(monkeypatch, capsys, "plan", "check", str(file), "--ranks", "4", "--limit", "4")
    assert (code, err) == (0, "")
    assert out.splitlines()[:2] == [
        "right: 4 ranks, 8 stages, 8 micro-batches, computations only",
        "makespan 25.5 at unit times, bubble 1.5 (5.9%); most held, by rank: 4, 4, 4, 4 micro-batches",
    ]
    code, out, err = run(monkeypatch, capsys, "plan", "check", str(file), "--json")
    record = json.loads(out)
    assert (code, err, record["ok"], record["makespan"]) == (0, "", True, 25.5) and record["peaks"] == [4.0] * 4


def test_known_orders_are_printed_in_both_forms(monkeypatch: Any, capsys: Any) -> None:
    asked = "plan known gpipe --ranks 2 --micro-batches 2"
    assert run(monkeypatch, capsys, *asked.split())[1] == known_order("gpipe", 2, 2).to_csv()
    out = run(monkeypatch, capsys, *f"{asked} --communication --json".split())[1]
    assert Order.from_json(out) == lower(known_order("gpipe", 2, 2))


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        (TABLE["a circle"][0], "", "the order stops in a circle: "),
        (TWO, "--ranks 3", "the order has 2 ranks and the group 3"),
        (TWO, "--micro-batches 3", "the order treats 2 micro-batches and the job cuts 3"),
        (TWO, "--batch 5", "batch of 5 does not divide into 2 micro-batches; 4 or 6 would"),
        (TWO, "--limit 1.5", "rank 0, step 1: 0F1: rank 0 holds 2 there, and its limit is 1.5"),
        (TWO, "--limit 1GB", "'1GB' is no number of micro-batches; bytes need --activation beside them"),
        (TWO, "--limit 1GB --activation 1GB", "rank 0 holds 2147483648 there, and its limit is 1073741824"),
        (TWO, "--limit 1,1,1", "3 limits for 2 ranks"),
        (TWO, "--mesh pp=2,dp", "'dp' is no axis such as pp=4"),
        (TWO, "--mesh pp=2,dp=4 --world-size 6", "the mesh pp 2 x dp 4 has 8 ranks and the job 6"),
        (TWO, "--stage-ranks 1,0", "stage 0 has been built on rank 1"),
        (TWO, "--stage-ranks x", "--stage-ranks 'x': expected the rank of each stage"),
        (TWO, "--executor best", "--executor best: torch and mycel are known"),
        (TWO, "--message 1MB", "--message and --fixed are in bytes, and need --activation beside them"),
        ("0F0xyz,0B0\n", "", "line 1 (rank 0), cell 1: '0F0xyz' is no action: after 0F0 stands 'xyz'"),
        ("0F0,2F0,2B0,0B0\n", "", "stage 1 of 3 is on no rank: a row is missing"),
        ("# mycel order 7\n" + TWO, "", "order version 7 is newer than this mycel"),
        (b"\xff\xfe\x00", "", "no order: neither CSV nor JSON in UTF-8"),
    ],
)
def test_the_command_refuses_in_one_line(
    content: str | bytes, options: str, says: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    file = tmp_path / "order.csv"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, out, err = run(monkeypatch, capsys, "plan", "check", str(file), *options.split())
    line, *grid = err.splitlines()
    assert (code, out) == (2, "") and line.startswith("mycel: ") and says in line
    assert not grid or (grid[0] == "" and grid[1].lstrip().startswith("rank 0") and ">" in err)
    code, out, err = run(monkeypatch, capsys, "plan", "check", str(file), *options.split(), "--json")
    record = json.loads(out)
    assert (code, err, record["ok"]) == (2, "", False) and says in record["error"]


def test_a_file_that_is_not_there(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    code, _, err = run(monkeypatch, capsys, "plan", "check", str(tmp_path / "none.csv"))
    assert code == 2 and err.endswith("none.csv: cannot be read: No such file or directory\n")
    code, _, err = run(monkeypatch, capsys, *f"plan known 1f1b --ranks 2 --micro-batches 0 -o {tmp_path}/x".split())
    assert (code, err) == (2, "mycel: 1F1B with 0 micro-batches: expected at least 1\n")
    assert not (tmp_path / "x").exists()


def test_actions_are_what_the_message_says() -> None:
    order = Order.from_csv(TWO)
    assert order.rows[1][1] == Action.parse("1B0")
