"""Schedules as JSON and as text: they come back equal, and what is malformed is refused with its place."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mycel.collectives.schedule import Chunk, Schedule, Transfer
from mycel.collectives.spec import COLLECTIVES, ROOTED, Collective
from mycel.errors import MycelError, ScheduleError
from mycel.topology.model import Link, Topology, Vertex

labels = st.text(st.characters(codec="utf-8"), max_size=8)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any well-formed schedule; hardly ever a right one."""
    n = draw(st.integers(2, 5))
    switch = draw(st.booleans())
    vertex_labels = draw(st.lists(labels, min_size=n + switch, max_size=n + switch, unique=True))
    nodes = st.none() | labels
    vertices = [
        Vertex(kind="switch" if switch and i == 0 else "rank", label=label, node=draw(nodes))
        for i, label in enumerate(vertex_labels)
    ]
    ranks = range(switch, n + switch)
    pairs = [(a, b) for a in ranks for b in ranks if a != b]
    pairs += [pair for r in ranks for pair in ((0, r), (r, 0))] if switch else []
    latency = st.floats(0, 1e3, allow_nan=False)
    links = tuple(
        Link(src=a, dst=b, capacity=draw(st.integers(1, 10**12)), latency_s=draw(latency)) for a, b in pairs
    )
    topology = Topology(
        name=draw(names),
        unit=draw(st.sampled_from(["link", "GB/s", "Mbit/s"])),
        vertices=tuple(vertices),
        links=links,
    )
    name = draw(st.sampled_from(COLLECTIVES))
    root = draw(st.integers(0, n - 1)) if name in ROOTED else None
    collective = Collective(name=name, num_ranks=n, root=root)
    per_block = draw(st.integers(1, 4))
    chunks = []
    for block in range(collective.num_blocks):
        cuts = sorted({0, per_block, *draw(st.lists(st.integers(0, per_block), max_size=3))})
        base = block * per_block
        chunks += [Chunk(start=base + a, stop=base + b) for a, b in pairwise(cuts)]
    transfers = []
    for position in range(draw(st.integers(0, 8))):
        src, dst = draw(st.sampled_from([(a, b) for a in range(n) for b in range(n) if a != b]))
        ends = (topology.ranks[src], topology.ranks[dst])
        path = (ends[0], 0, ends[1]) if switch and draw(st.booleans()) else ends
        after = draw(st.lists(st.integers(0, position - 1), max_size=3)) if position else []
        transfers.append(
            Transfer(
                chunk=draw(st.integers(0, len(chunks) - 1)),
                src=src,
                dst=dst,
                reduce=draw(st.booleans()),
                path=path,
                after=tuple(after),
            )
        )
    return Schedule(
        collective=collective,
        topology=topology,
        method=draw(st.from_regex(r"[a-z_0-9]{1,8}", fullmatch=True)),
        num_units=per_block * collective.num_blocks,
        chunks=tuple(draw(st.permutations(chunks))),
        transfers=tuple(transfers),
    )


def small() -> Schedule:
    """A broadcast of two chunks from rank 0 over a switch (vertex 0)."""
    ends = (
        Vertex(kind="switch", label="sw"),
        Vertex(kind="rank", label="a"),
        Vertex(kind="rank", label="b", node="x"),
    )
    return Schedule(
        collective=Collective(name="broadcast", num_ranks=2, root=0),
        topology=Topology(
            name="small star",
            unit="link",
            vertices=ends,
            links=tuple(Link(src=s, dst=d, capacity=3, latency_s=1e-6) for s, d in ((0, 1), (1, 0), (0, 2), (2, 0))),
        ),
        method="by_hand",
        num_units=3,
        chunks=(Chunk(start=0, stop=2), Chunk(start=2, stop=3)),
        transfers=(
            Transfer(chunk=0, src=0, dst=1, reduce=False, path=(1, 0, 2)),
            Transfer(chunk=1, src=0, dst=1, reduce=False, path=(1, 0, 2), after=(0,)),
        ),
    )


@settings(max_examples=80, deadline=None)
@given(schedule=schedules())
def test_json_and_text_come_back_equal(schedule):
    again = Schedule.from_json(json.loads(json.dumps(schedule.to_json())))
    assert again == schedule
    assert hash(again) == hash(schedule)
    assert Schedule.from_text(schedule.to_text()) == schedule


def test_text_is_for_people():
    text = small().to_text()
    assert "1: copy chunk 1 0 -> 1 via 1>0>2 after 0" in text.splitlines()
    commented = "# a note\n\n" + text.replace("units 3", "  units 3  \n# another")
    assert Schedule.from_text(commented) == small()


# -- malformed text -------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(schedule=schedules(), data=st.data())
def test_damaged_text_is_refused_or_still_a_schedule(schedule, data):
    """Whatever a line is turned into, the complaint is one of ours."""
    lines = schedule.to_text().splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    change = data.draw(st.sampled_from(["drop", "repeat", "swap", "cut", "replace"]))
    if change == "drop":
        del lines[at]
    elif change == "repeat":
        lines.insert(at, lines[at])
    elif change == "swap":
        other = data.draw(st.integers(0, len(lines) - 1))
        lines[at], lines[other] = lines[other], lines[at]
    elif change == "cut":
        lines[at] = lines[at][: data.draw(st.integers(0, len(lines[at])))]
    else:
        place = data.draw(st.integers(0, max(len(lines[at]) - 1, 0)))
        lines[at] = lines[at][:place] + data.draw(st.sampled_from(list('09-x>\\" .e'))) + lines[at][place + 1 :]
    _read_or_refuse(lambda: Schedule.from_text("\n".join(lines)))


def _read_or_refuse(read):
    try:
        result = read()
    except MycelError as error:
        assert str(error)
    else:
        assert Schedule.from_json(json.loads(json.dumps(result.to_json()))) == result


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("units 3", "unit 3", "line 12: cannot read 'unit 3'"),
        ("chunk 1 2..3", "chunk 2 2..3", "line 14: chunk 2 where chunk 1 was expected"),
        ("1: copy", "2: copy", "line 16: transfer 2 where transfer 1 was expected"),
        ("1: copy", "1: move", "line 16: cannot read '1: move chunk 1"),
        ("rank 1 ", "rank 2 ", "line 6: vertex 2 where vertex 1 was expected"),
        ("link 0 -> 1 3 1e-06", "link 0 -> 1 3 soon", r"line 8: .*soon"),
        ('rank 1 "a"', r'rank 1 "\q"', r"line 6: .*\\q"),
        ('rank 1 "a"', 'rank 1 "a', "line 6: cannot read"),
        ("via 1>0>2 after 0", "via 1>0>2 after 1", "transfer 1 .*'after' names transfer 1, which does not stand"),
        ("chunk 1 0 -> 1", "chunk 5 0 -> 1", r"transfer 1 \(chunk 5, 0 -> 1\): no such chunk; chunks are 0..1"),
        ("mycel.schedule 1", "mycel.schedule 9", "schedule version 9; this mycel reads version 1"),
        ("method by_hand\n", "", "lacks the key 'method'"),
        ("units 3\n", "", "lacks the key 'num_units'"),
        ('topology "small star" link\n', "", "lacks the key 'name'"),
        ("collective broadcast 2 root 0", "collective broadcast 2 root 5", "root 5 is not among ranks 0..1"),
        ("collective broadcast 2 root 0", "collective shuffle 2", "unknown collective 'shuffle'"),
    ],
)
def test_malformed_text_names_the_line_or_transfer(old, new, complaint):
    text = small().to_text()
    assert old in text
    with pytest.raises(MycelError, match=complaint):
        Schedule.from_text(text.replace(old, new, 1))


# -- malformed JSON -------------------------------------------------------------------------------------------

leaves = st.none() | st.booleans() | st.integers(-3, 10) | st.floats(allow_nan=True) | st.text(max_size=3)
anything = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damaged_json_is_refused_or_still_a_schedule(data):
    """One value, anywhere, becomes something else."""
    whole = small().to_json()
    at = whole
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(at[key], dict | list) and at[key] and data.draw(st.booleans()):
            at = at[key]
            continue
        if data.draw(st.booleans()):
            at[key] = data.draw(anything)
        else:
            del at[key]
        break
    _read_or_refuse(lambda: Schedule.from_json(whole))


@pytest.mark.parametrize("data", [None, [], 3, "text", {}, {"format": "other"}])
def test_what_is_no_schedule_at_all(data):
    with pytest.raises(ScheduleError, match="not a mycel schedule"):
        Schedule.from_json(data)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"transfers": [[0, 0, 1, "melt", [1, 0, 2], []]]}, "transfer kind 'melt'"),
        ({"transfers": [[0, 0, 7, "copy", [1, 0, 2], []]]}, r"transfer 0 \(chunk 0, 0 -> 7\): ranks are 0..1"),
        ({"transfers": [[0, 0, 0, "copy", [1, 0, 2], []]]}, "a rank does not send to itself"),
        ({"transfers": [[0, 0, 1, "copy", [1, 2], []]]}, "no link 1 -> 2 in small star"),
        ({"transfers": [[0, 0, 1, "copy", [2, 0, 1], []]]}, "does not lead from 0 to 1"),
        ({"transfers": [[0, 0, 1, "copy", [1, 0, 2]]]}, "wrong shape"),
        ({"transfers": [[0, 0, 1, "copy", [1, 0, 2], [-1]]]}, "'after' names transfer -1"),
        ({"chunks": [[0, 3], [2, 3]]}, "chunk 1 covers units 2..3; expected one starting at 3"),
        ({"chunks": [[0, 2]]}, "chunks cover 2 of 3 units"),
        ({"num_units": 0}, "0 units do not divide"),
        ({"num_units": "3"}, "wrong shape|units"),
    ],
)
def test_malformed_json_names_the_chunk_or_transfer(change, complaint):
    with pytest.raises(ScheduleError, match=complaint):
        Schedule.from_json({**small().to_json(), **change})


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({700: (700, 702)}, r"chunk 701 covers units 701..702; expected one starting at 702"),
        ({1999: (1999, 1999)}, "chunk 1999 covers units 1999..1999; expected one starting at 1999"),
        ({0: (1, 1)}, "chunk 0 covers units 1..1; expected one starting at 0"),
        ({5: (5, 1 << 70)}, "chunk 5 .* crosses a block boundary"),
    ],
)
def test_many_chunks_are_tested_as_few_are(changed, complaint):
    chunks = {number: (number, number + 1) for number in range(2000)}
    rows = [list(bounds) for _, bounds in sorted((chunks | changed).items())]
    form = {**small().to_json(), "num_units": 2000, "transfers": []}
    assert Schedule.from_json({**form, "chunks": list(map(list, chunks.values()))}).num_units == 2000
    with pytest.raises(ScheduleError, match=complaint):
        Schedule.from_json({**form, "chunks": rows})


def test_chunks_may_not_cross_blocks_and_ranks_must_agree():
    gather = Collective(name="all_gather", num_ranks=2)
    with pytest.raises(ScheduleError, match=r"chunk 0 \(0..3\) crosses a block boundary"):
        replace(
            small(),
            collective=gather,
            num_units=4,
            chunks=(Chunk(start=0, stop=3), Chunk(start=3, stop=4)),
            transfers=(),
        )
    with pytest.raises(ScheduleError, match="over 3 ranks on a topology of 2"):
        replace(small(), collective=Collective(name="all_reduce", num_ranks=3))


def test_cost_figures():
    schedule = small()
    assert schedule.link_load == {(1, 0): 3, (0, 2): 3}
    assert schedule.algbw == 3
    assert (schedule.depth, schedule.levels) == (2, (0, 1))
