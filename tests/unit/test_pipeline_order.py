"""Orders as CSV and JSON: they come back equal, torch reads what is torch's, and what is malformed is refused."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import long

from mycel.errors import MycelError, ScheduleError
from mycel.pipeline.check import check
from mycel.pipeline.known import KNOWN, known_order
from mycel.pipeline.lower import lower
from mycel.pipeline.order import NO_STAGE, Action, Kind, Order
from mycel.pipeline.replay import replay

TWO = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
SHARED = (
    "# mycel order 1\n# stages 2\n# micro-batches 1\n# feeds embed>0F 0F>1F 1B>0B\n"
    "SHARED0[embed],0F0,0B0\nSHARED0[embed],1F0,1B0\n"
)

computations = st.builds(
    Action,
    stage=st.integers(0, 5),
    kind=st.sampled_from([Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT]),
    micro_batch=st.integers(0, 5),
)
actions = st.one_of(
    computations,
    st.builds(
        Action,
        stage=st.integers(0, 5),
        kind=st.sampled_from([Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B]),
        micro_batch=st.integers(0, 5),
    ),
    st.builds(Action, stage=st.integers(0, 5), kind=st.sampled_from([Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD])),
    st.builds(
        lambda f, b, m, n: Action(
            stage=NO_STAGE,
            kind=Kind.OVERLAP,
            parts=(
                Action(stage=f, kind=Kind.FORWARD, micro_batch=m),
                Action(stage=b, kind=Kind.BACKWARD, micro_batch=n),
            ),
        ),
        *[st.integers(0, 5)] * 4,
    ),
    st.builds(
        Action,
        stage=st.just(NO_STAGE),
        kind=st.just(Kind.SHARED),
        micro_batch=st.integers(0, 5),
        block=st.sampled_from(["head", "e.1", "A-b_c"]),
    ),
)


@st.composite
def orders(draw: st.DrawFn) -> Order:
    """Any well-formed order; hardly ever a right one."""
    rows = draw(st.lists(st.lists(actions, min_size=1, max_size=8), min_size=1, max_size=4))
    leaves = [leaf for row in rows for action in row for leaf in action.leaves]
    num_stages = 1 + max(0, *(leaf.stage for leaf in leaves))
    micro_batches = 1 + max((leaf.micro_batch or 0 for leaf in leaves), default=0)
    held = {leaf.stage for leaf in leaves if leaf.kind.is_computation}
    seen = {leaf.micro_batch for leaf in leaves}
    for stage in range(num_stages):
        for m in range(micro_batches):
            if stage not in held or m not in seen:
                draw(st.sampled_from(rows)).append(Action(stage=stage, kind=Kind.FORWARD, micro_batch=m))
    how = draw(st.sampled_from(["plain", "routes", "feeds"]))
    routes = feeds = None
    if how == "routes":
        route = st.lists(st.integers(0, num_stages - 1), min_size=1, max_size=num_stages, unique=True).map(tuple)
        routes = tuple(draw(st.lists(route, min_size=micro_batches, max_size=micro_batches)))
    elif how == "feeds":
        blocks = sorted({leaf.block for leaf in leaves if leaf.block})
        ends = st.one_of(
            st.builds(lambda s, k: f"{s}{k}", st.integers(0, num_stages - 1), st.sampled_from("FBI")),
            *([st.sampled_from(blocks)] if blocks else []),
        )
        feeds = tuple(draw(st.lists(st.tuples(ends, ends), max_size=5)))
    return Order(
        rows=tuple(map(tuple, rows)),
        num_stages=num_stages,
        num_micro_batches=micro_batches,
        routes=routes,
        feeds=feeds,
        name=draw(st.text(max_size=6).filter(str.isprintable)),
    )


# -- forms --------------------------------------------------------------------------------------------------


@given(action=actions)
def test_actions_come_back_from_their_text(action: Action) -> None:
    assert Action.parse(str(action)) == action


@settings(deadline=None)
@given(order=orders())
def test_orders_come_back_from_csv_and_json(order: Order) -> None:
    for again in (
        Order.from_csv(order.to_csv()),
        Order.from_json(json.dumps(order.to_json())),
        Order.from_json(order.to_json()),
        Order.from_text(order.to_csv()),
        Order.from_text(json.dumps(order.to_json())),
    ):
        assert again == order and hash(again) == hash(order)
    assert Order.from_json(order.to_json()).name == order.name
    assert Order.from_csv(order.to_csv()).stage_ranks == order.stage_ranks


@given(order=orders())
def test_what_is_torchs_is_read_by_torchs_rules(order: Order) -> None:
    cells = [cell for line in order.torch_csv().splitlines() for cell in line.split(",") if cell]
    kept = [str(action) for row in order.rows for action in row if action.kind is not Kind.SHARED]
    assert cells == kept


def test_idle_cells_spaces_and_line_ends_change_nothing() -> None:
    text = "\ufeff0F0,,0F1,\t,0B0, 0B1,,\r\n ,1F0,1B0 ,1F1,1B1\r\n,,\r\n"
    assert Order.from_csv(text) == Order.from_csv(TWO)


def test_what_it_says_of_itself() -> None:
    order = Order.from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    assert [order.rank_of(stage) for stage in range(4)] == [0, 1, 1, 0]
    assert order.stages_of(1) == (1, 2) and order.ranks == 2 and not order.has_communication
    assert lower(order).has_communication
    assert Order.from_csv(SHARED).blocks == {"embed"}
    assert Order.from_csv(SHARED).torch_csv() == "0F0,0B0\n1F0,1B0\n"


# -- torch --------------------------------------------------------------------------------------------------


class Stage:
    """As much of a stage as torch's schedules ask for when they make their orders."""

    submod = None
    has_backward = True
    group_rank = 0

    def __init__(self, index: int, num_stages: int, group_size: int) -> None:
        self.stage_index, self.num_stages, self.group_size = index, num_stages, group_size
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.is_first, self.is_last = index == 0, index == num_stages - 1


def torchs(name: str, p: int, m: int, v: int, **options: Any) -> Any:
    """A schedule of torch's."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    stages = [Stage(chunk * p, p * v, p) for chunk in range(v)]
    return schedules.get_schedule_class(name)(stages, m, loss_fn=lambda y, t: 0, **options)


def order_of_torchs(rows: dict[int, list[Any]], num_stages: int, m: int) -> Order:
    return Order(
        rows=tuple(tuple(Action.parse(str(a)) for a in rows[rank] if a is not None) for rank in sorted(rows)),
        num_stages=num_stages,
        num_micro_batches=m,
    )


TORCHS = [
    ("Interleaved1F1B", "interleaved", (1, 2, 3)),
    ("LoopedBFS", "looped_bfs", (1, 2, 3)),
    ("InterleavedZeroBubble", "zb_h1", (1, 2)),
    ("ZBVZeroBubble", "zb_v", (2,)),
    ("DualPipeV", "dualpipe_v", (2,)),
]


@pytest.mark.parametrize(("torchs_name", "name", "chunks"), TORCHS)
def test_our_orders_are_torchs(torchs_name: str, name: str, chunks: tuple[int, ...]) -> None:
    num_equal = 0
    for p in (2, 3, 4):
        for m in (1, 2, 3, 4, 6, 8, 9, 12):
            for v in chunks:
                try:
                    theirs = torchs(torchs_name, p, m, v)
                except ValueError:
                    with pytest.raises(MycelError):
                        known_order(name, p, m, v)
                    continue
                assert known_order(name, p, m, v) == order_of_torchs(theirs.pipeline_order, p * v, m)
                num_equal += 1
    assert num_equal > 5


@pytest.mark.parametrize(("torchs_name", "name", "chunks"), TORCHS)
def test_torchs_lowered_orders_are_right(torchs_name: str, name: str, chunks: tuple[int, ...]) -> None:
    for p, m in ((2, 4), (4, 8)):
        theirs = torchs(torchs_name, p, m, chunks[-1])
        order = order_of_torchs(theirs.pipeline_order_with_comms, p * chunks[-1], m)
        assert check(order).has_communication
        ours = lower(known_order(name, p, m, chunks[-1]))
        # The same actions: only the receives, and gathers that are due at once, stand elsewhere.
        assert [sorted(map(str, row)) for row in ours.rows] == [sorted(map(str, row)) for row in order.rows]


#: Torch's orders with ``defer_pp_recv``, and whether it computes what it should with them.
DEFERRED = [
    ("ZBVZeroBubble", 2, 4, 2, False),
    ("ZBVZeroBubble", 4, 8, 2, False),
    ("DualPipeV", 4, 8, 2, False),
    ("InterleavedZeroBubble", 2, 4, 2, False),
    ("InterleavedZeroBubble", 4, 8, 2, True),
    ("Interleaved1F1B", 2, 4, 2, True),
    ("Interleaved1F1B", 4, 8, 2, True),
    ("LoopedBFS", 4, 8, 2, True),
]


@pytest.mark.parametrize(("name", "p", "m", "v", "is_right"), DEFERRED)
def test_deferred_receives_of_torch(name: str, p: int, m: int, v: int, is_right: bool) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = torchs(name, p, m, v)
    plain = schedule.pipeline_order_with_comms
    deferred = schedules._defer_recv_ops(plain, lambda stage: schedule.stage_index_to_group_rank[stage])
    check(order_of_torchs(plain, p * v, m))
    order = order_of_torchs(deferred, p * v, m)
    if is_right:
        check(order)
    else:
        with pytest.raises(ScheduleError, match=r"message \d+ from rank 0 to rank 1 is .*: it would silently get"):
            check(order)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v", "v_min"])
def test_torch_reads_our_files(name: str, tmp_path: Any) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    p, m = 2, 4
    order = known_order(name, p, m)
    path = tmp_path / "order.csv"
    for made, form in ((order, "compute_only"), (lower(order), "compute_comms")):
        path.write_text(made.to_csv())
        v = order.num_stages // p
        stages: Any = [Stage(chunk * p, p * v, p) for chunk in range(v)]
        runtime = schedules._PipelineScheduleRuntime(stages, m, loss_fn=lambda y, t: 0)
        runtime._load_csv(str(path), format=form)
        read = runtime.pipeline_order if form == "compute_only" else runtime.pipeline_order_with_comms
        assert order_of_torchs(read, p * v, m) == made
        runtime._dump_csv(str(path), format=form)
        assert Order.from_text(path.read_bytes().decode()) == made


# -- what is refused ----------------------------------------------------------------------------------------

BAD_CSV = {
    "": "the file has no rows",
    "\n\n": "the file has no rows",
    "0F0xyz,0B0\n": r"line 1 \(rank 0\), cell 1: '0F0xyz' is no action: after 0F0 stands 'xyz'",
    "0F0 0F1,0B0\n": "after 0F0 stands ' 0F1'",
    "0F,0B0\n": "its micro-batch is missing; write 0F0",
    "0F0,0B0\n\n1F0,1B0\n": r"line 2 \(rank 1\): the row is empty; every rank has work",
    "0F0,,0B0\n,,\n1F0,1B0\n": r"line 2 \(rank 1\): the row is empty",
    "0Q0,0B0\n": "'0Q0' is no action: expected stage, kind and micro-batch",
    "-1F0,0B0\n": "'-1F0' is no action",
    "0F-1,0B0\n": "'0F-1' is no action",
    "0F٣,0B0\n": "is no action",
    "(0F0;0B0)OVERLAP,0B0\n": r"two parts are written \(0F7;7B3\)OVERLAP_F_B",
    "(0B0;0F0)OVERLAP_F_B\n": "its parts are one F and one B, in this order",
    "(0F0)OVERLAP_F_B\n": "two parts are written",
    "0UNSHARD3,0F0\n": "'0UNSHARD3' is no action: after 0UNSHARD stands '3'",
    "SHARED0[],0F0\n": "is no action",
    '"0F0,0B0\n': "no row of cells between commas",
    "9999999999F0\n": "'9999999999F0' is no action",
    "999999999F0\n": "stage 0 of 1000000000 is on no rank: a row is missing",
    "0F999999999,0B0\n": "micro-batch 1 of 1000000000 occurs nowhere",
    "0F0,4F0,4B0,0B0\n1F0,5F0,5B0,1B0\n3F0,7F0,7B0,3B0\n": "stage 2 of 8 is on no rank: a row is missing",
    "# mycel order 2\n0F0,0B0\n": "order version 2 is newer than this mycel, which reads version 1: update mycel",
    "# mycel order 0\n0F0,0B0\n": "order version 0; this mycel reads version 1",
    "# mycel order x\n0F0,0B0\n": "line 1: mycel order 'x' is no whole number",
    "# hello\n0F0,0B0\n": "line 1: cannot read '# hello'",
    "0F0,0B0\n# stages 1\n": "stands among the rows",
    "# stages 1\n# stages 1\n0F0,0B0\n": "line 2: 'stages' stands there a second time",
    "# stages 0\n0F0,0B0\n": "an order over 0 stages",
    "# stages 3\n0F0,0B0\n": "stage 1 of 3 is on no rank",
    "# routes 0>1\n0F0,0B0\n": "no stage 1; stages are 0..0",
    "# routes 0>x\n0F0,0B0\n": "'0>x' is no route such as 0>1>3",
    "# routes 0 0\n0F0,0B0\n": "2 routes for 1 micro-batches",
    "# routes 0>0\n0F0,0B0\n": "each at most once",
    "# feeds 0F>head\n0F0,0B0\n": "'head' is no end such as 3F or 3B, nor a shared block of the order",
    "# feeds 0F>1F\n0F0,0B0\n": "stage 1 of 1",
    "# feeds 0F\n0F0,0B0\n": "'0F' is no pair such as embed>0F",
    "# name five\n0F0,0B0\n": "is no text in double quotes",
    "# routes 0\n# feeds\n0F0,0B0\n": "routes or feeds, not both",
    "[1]": "the JSON is no object but a list",
    "{": "not JSON",
    "{}": 'an order\'s JSON has "format": "mycel.order"; got None',
}


@pytest.mark.parametrize("text", BAD_CSV, ids=repr)
def test_malformed_files_are_refused_with_their_place(text: str) -> None:
    with pytest.raises(ScheduleError, match=BAD_CSV[text]) as caught:
        Order.from_text(text)
    assert "\n" not in str(caught.value)


BAD_JSON: list[tuple[dict[str, Any], str]] = [
    ({"version": 2}, "order version 2 is newer than this mycel"),
    ({"version": "1"}, "the order's version is '1'"),
    ({"version": True}, "the order's version is True"),
    ({"rows": "0F0"}, '"rows" is no list of lists of actions'),
    ({"rows": [[0]]}, '"rows" is no list of lists of actions'),
    ({"rows": []}, "one row of actions a rank"),
    ({"rows": [[], ["0F0"]]}, "rank 0 has no actions"),
    ({"rows": [["0F0", "zero"]]}, "rank 0, action 1: 'zero' is no action"),
    ({"num_stages": None}, "an order over None stages"),
    ({"num_stages": 1.5}, "an order over 1.5 stages"),
    ({"num_stages": True}, "an order over True stages"),
    ({"num_micro_batches": 10**30}, "occurs nowhere"),
    ({"num_stages": 1}, r"rank 1, action 0 \(1F0\): stage 1 of 1; the last is 0"),
    ({"num_micro_batches": 1}, r"rank 0, action 1 \(0F1\): micro-batch 1 of 1; the last is 0"),
    ({"name": 3}, "the order's name is 3, not text that can be shown"),
    ({"name": "a\nb"}, r"the order's name is 'a\\nb', not text"),
    ({"name": "\ud800"}, "not text that can be shown"),
    ({"feeds": [["0F", "x\ny"]]}, r"\('0F', 'x\\ny'\) among feeds: 'x\\ny' is no end such as 3F or 3B"),
    ({"routes": [0, 1]}, '"routes" is no list such as'),
    ({"routes": [[0, 1], [0, 1], [0, 1]]}, "3 routes for 2 micro-batches"),
    ({"feeds": [["0F"]]}, "is no pair"),
    ({"extra": 1}, "the order has a field 'extra', which version 1 does not have"),
]


@pytest.mark.parametrize(("change", "says"), BAD_JSON, ids=lambda value: str(value)[:40])
def test_malformed_objects_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        Order.from_json(Order.from_csv(TWO).to_json() | change)


@pytest.mark.parametrize(
    ("name", "ranks", "count", "chunks"),
    [("1f1b", 4, 9, 1), ("gpipe", 3, 5, 1), ("interleaved", 2, 8, 2), ("zb_h1", 4, 8, 1), ("zb_v", 2, 6, 2)],
)
def test_orders_of_the_first_micro_batches(name: str, ranks: int, count: int, chunks: int) -> None:
    whole = known_order(name, ranks, count, chunks)
    for first in range(1, count + 1):
        part = whole.of_first(first)
        check(part)
        assert part.num_micro_batches == first and part.stage_ranks == whole.stage_ranks
        if name in ("1f1b", "gpipe"):
            assert part == known_order(name, ranks, first, chunks)
    overlapped = Order.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    assert overlapped.of_first(1).to_csv() == "0F0,0B0\n"
    for wrong in (0, count + 1):
        with pytest.raises(ScheduleError, match="there must be one"):
            whole.of_first(wrong)


def test_fields_that_do_not_go_together() -> None:
    for fields in (
        {"stage": -1, "kind": Kind.FORWARD, "micro_batch": 0},
        {"stage": 0, "kind": Kind.FORWARD},
        {"stage": 0, "kind": Kind.UNSHARD, "micro_batch": 0},
        {"stage": 0, "kind": Kind.SHARED, "micro_batch": 0, "block": "head"},
        {"stage": NO_STAGE, "kind": Kind.SHARED, "micro_batch": 0, "block": "a,b"},
        {"stage": 0, "kind": Kind.FORWARD, "micro_batch": 0, "block": "head"},
        {"stage": 0, "kind": Kind.FORWARD, "micro_batch": 0, "parts": (Action.parse("0F0"),)},
        {"stage": NO_STAGE, "kind": Kind.OVERLAP},
        {"stage": 0, "kind": "F", "micro_batch": 0},
    ):
        with pytest.raises(ScheduleError):
            Action(**fields)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="order version 2; this mycel has version 1"):
        replace(Order.from_csv(TWO), version=2)
    with pytest.raises(ScheduleError, match="has communication already"):
        lower(lower(Order.from_csv(TWO)))


# -- fuzz ---------------------------------------------------------------------------------------------------

ODD = [
    "\x00",
    '"',
    ",",
    "\n",
    "\r",
    "\u2028",
    "#",
    ";",
    "(",
    ")",
    "F",
    "9" * 30,
    "\ud800",
    "é",
    "[",
    "]",
    "{",
    "-",
    ">",
    " ",
]


def fuzzed(rng: random.Random, texts: list[str]) -> str:
    """A file of an order with characters dropped, doubled, put in, exchanged, or lines moved."""
    text = rng.choice(texts)
    for _ in range(rng.choice([1, 1, 1, 1, 2, 5, 30])):
        at = rng.randrange(len(text) + 1)
        how = rng.randrange(6)
        if how == 0:
            text = text[:at] + text[at + rng.choice([1, 1, 4, 50]) :]
        elif how == 1:
            text = text[:at] + rng.choice(ODD) + text[at:]
        elif how == 2:
            end = min(len(text), at + rng.randrange(1, 60))
            text = text[:end] + text[at:end] * rng.choice([1, 2, 9]) + text[end:]
        elif how == 3:
            text = text[:at] + chr(rng.randrange(32, 127)) + text[at + 1 :]
        elif how == 4:
            lines = text.split("\n")
            rng.shuffle(lines)
            text = "\n".join(lines)
        else:
            text = text[:at] + str(rng.choice([0, 1, 7, 10**6, 10**18])) + text[at:]
    return text


def files() -> Iterator[str]:
    for name in KNOWN:
        order = known_order(name, 2, 4)
        for made in (order, lower(order)):
            yield made.to_csv()
            yield json.dumps(made.to_json(), indent=rng_indent(made))
    yield SHARED
    yield known_order("zb_v", 8, 16).to_csv()


def rng_indent(order: Order) -> int | None:
    return 1 if order.has_communication else None


def examined(count: int, seed: int) -> int:
    rng, texts, num_read = random.Random(seed), list(files()), 0
    for number in range(count):
        text = fuzzed(rng, texts)
        started = time.process_time()
        try:
            order = Order.from_text(text)
            num_read += 1
            check(order, executor="mycel" if number % 2 else "torch")
            replay(order)
        except MycelError as error:
            assert "\n" not in str(error) and len(str(error)) < 2500, text
        assert time.process_time() - started < 1, text
    return num_read


def test_fuzzed_files_give_an_order_or_one_line() -> None:
    assert 40 < examined(800, seed=3) < 760


@long
def test_many_fuzzed_files_give_an_order_or_one_line() -> None:
    assert 250 < examined(5000, seed=4) < 4750
