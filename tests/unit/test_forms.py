"""Programs filled in by arithmetic are those that columns give, for any schedule and size, in bounded memory."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.effort import examples
from tests.oracles.lowering import expand_by_columns, steps_by_columns
from tests.oracles.preparing import arrays_of

from mycel.collectives import rows
from mycel.collectives.lower import RankTemplate
from mycel.collectives.program import Channel, Program
from mycel.collectives.schedule import Schedule
from mycel.collectives.spec import COLLECTIVES, ROOTED, Collective, CollectiveName
from mycel.collectives.synth import methods_for, synthesize
from mycel.collectives.synth.classics import classics_for
from mycel.errors import ScheduleError, SynthesisError
from mycel.runtime import job_fields as j
from mycel.runtime.forms import Form, Workspace
from mycel.runtime.prepared import Line, Prepared, asking
from mycel.topology.builders import build, star

FABRICS = {
    "star": build("star:ranks=2"),
    "ring": build("ring:ranks=3"),
    "two_boxes": build("two_boxes:ranks=8"),
    "adding switch": star(num_ranks=3, computes=True),
}
EXTRAS = np.full(3, -1, dtype=np.int64)
#: Nothing, an element, primes, and lengths around those of the pieces that are drawn.
LENGTHS = st.one_of(st.sampled_from([0, 1, 2, 3, 5, 7, 13, 63, 64, 65, 127]), st.integers(0, 3000))
PIECES = st.sampled_from([1, 2, 3, 7, 64, 1000, 1 << 20])


@cache
def schedule(fabric: str, name: CollectiveName, method: str, root: int, weighed: bool) -> Schedule | None:
    topology = FABRICS[fabric]
    collective = Collective(name=name, num_ranks=topology.num_ranks, root=root if name in ROOTED else None)
    if weighed:
        weights = [3 * block % 5 for block in range(collective.num_blocks)]
        collective = Collective(name, topology.num_ranks, root=collective.root, weights=tuple(weights))
    try:
        return synthesize(topology, collective, method)
    except SynthesisError:
        return None


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Schedule, int, int, tuple[int, ...] | None]:
    """A schedule, elements of the array and of a piece, and of each block where they differ."""
    fabric, name = draw(st.sampled_from(sorted(FABRICS))), draw(st.sampled_from(COLLECTIVES))
    method = draw(st.sampled_from([*methods_for(name), *classics_for(name)]))
    can_weigh = name in ("all_gather", "reduce_scatter", "all_to_all") and method in methods_for(name)
    root = draw(st.integers(0, FABRICS[fabric].num_ranks - 1))
    made = schedule(fabric, name, method, root, can_weigh and draw(st.booleans()))
    if made is None:  # a classic that does not fit the fabric
        made = schedule(fabric, name, methods_for(name)[0], root, False)
        assert made is not None
    c, piece = made.collective, draw(PIECES)
    if draw(st.booleans()):
        lengths = [draw(LENGTHS) if weight else 0 for weight in c.block_weights]
        return made, sum(lengths), piece, tuple(lengths)
    return made, draw(LENGTHS) * c.total_weight, piece, None


def same(one: Program, other: Program) -> bool:
    arrays = ((p.columns, p.need_start, p.need_index) for p in (one, other))
    return one.scratch_elements == other.scratch_elements and all(
        map(np.array_equal, *arrays)  # numpy compares shapes too
    )


@examples(80, 3000)
@given(case=drawn())
def test_expanding_is_what_columns_give(case: Any) -> None:
    made, num_elements, piece, blocks = case
    for vertex in range(made.num_compute_vertices):
        plan = RankTemplate(made, vertex)
        assert same(
            plan.expand(num_elements, piece, block_elements=blocks),
            expand_by_columns(plan, num_elements, piece, blocks),
        )
        steps = plan.steps(num_elements, piece, block_elements=blocks)
        assert np.array_equal(steps, steps_by_columns(plan, num_elements, piece, blocks))


def formed(plan: RankTemplate, workspace: Workspace | None = None) -> Form:
    return Form(plan, [Line(100 + number) for number in range(len(plan.channels))], EXTRAS, asking(1, -1), workspace)


def check_prepared(prepared: Prepared, program: Program, item_bytes: int, stated: int | None) -> None:
    """A preparation is that of a program whose headers state so many bytes; ``None``: those of the channel."""
    wanted, (num_rows, num_channels) = arrays_of(program, item_bytes), prepared.addresses[:2]
    assert (num_rows, num_channels) == (len(program.columns), len(program.channels))
    parts = {
        j.J_ROWS: wanted.rows.ravel(),
        j.J_PENDING0: wanted.pending0,
        j.J_DEPENDENT_START: wanted.dependent_start,
        j.J_DEPENDENTS: wanted.dependents,
        j.J_QUEUE_START: wanted.queue_start,
        j.J_QUEUE: wanted.queue,
    }
    for field, array in parts.items():
        assert np.array_equal(prepared.part(field, len(array)), array), field
    table = prepared.channel_rows
    assert np.array_equal(prepared.part(j.J_CHANNELS, table.size), table.ravel())
    assert table[:, j.C_FD].tolist() == [100 + number for number in range(num_channels)]
    assert table[:, j.C_OUTGOING].tolist() == [channel.src == program.rank for channel in program.channels]
    assert table[:, j.C_STATED].tolist() == (wanted.moved.tolist() if stated is None else [stated] * num_channels)
    at, end = prepared.staging.ctypes.data, prepared.staging.ctypes.data + len(prepared.staging)
    for area, length in zip(table[:, j.C_STAGING].tolist(), wanted.longest.tolist(), strict=True):
        assert area % 64 == 0 and at <= area and area + length <= end
        at = area + length
    assert len(prepared.scratch) >= program.scratch_elements * item_bytes
    assert prepared.scratch_address + program.scratch_elements * item_bytes <= (
        prepared.scratch.ctypes.data + len(prepared.scratch)
    )
    traffic = prepared.traffic
    assert (traffic.num_bytes, sum(traffic.num_messages)) == (tuple(wanted.moved.tolist()), len(wanted.queue))
    state = traffic.state()
    assert state is not None and np.shares_memory(state, table)
    assert prepared.total_bytes == program.num_elements * item_bytes


@examples(80, 3000)
@given(case=drawn(), item_bytes=st.sampled_from([1, 2, 4, 8]), states=st.booleans())
def test_a_form_fills_in_what_columns_give(case: Any, item_bytes: int, states: bool) -> None:
    made, num_elements, piece, blocks = case
    workspace = Workspace()
    for rank in range(made.collective.num_ranks):
        plan = RankTemplate(made, rank)
        form = formed(plan, workspace)
        for elements, lengths in ((num_elements, blocks), (made.collective.total_weight, None)):
            prepared = form.prepare(elements, piece, item_bytes, lengths, states_channel_bytes=states)
            program = expand_by_columns(plan, elements, piece, lengths)
            check_prepared(prepared, program, item_bytes, None if states else elements * item_bytes)
            assert same(prepared.program, program)


@pytest.mark.parametrize("blocks", [None, (40, 0, 7, 0, 0, 1, 64, 3)])
def test_what_is_interpreted_is_what_is_compiled(blocks: tuple[int, ...] | None) -> None:
    made = schedule("two_boxes", "reduce_scatter", "forest", 0, False)
    assert made is not None
    plan = RankTemplate(made, 3)
    lengths = np.array(blocks or (), dtype=np.int64)
    spans, unit = plan.spans if blocks else plan.even_spans, plan.unit(115 if blocks else 80, blocks)
    results = []
    for measure, fill in ((rows.measure, rows.fill), (rows.measure.interpreted, rows.fill.interpreted)):  # type: ignore[attr-defined]
        told, work = np.zeros(rows.TOLD, dtype=np.int64), np.zeros(rows.work_to_measure(plan.table), dtype=np.int64)
        measure(plan.table, lengths, spans, unit, 3, 4, work, told)
        num_rows, num_needs, _, _, most, num_work = told.tolist()
        made_of = [np.zeros(n, dtype=np.int64) for n in (8 * num_rows, num_rows + 1, num_needs, num_rows)]
        fill(plan.table, lengths, unit, 3, 4, most, np.zeros(num_work, dtype=np.int64), *made_of)
        results.append([told.tolist(), *(array.tolist() for array in made_of)])
    assert results[0] == results[1]
    assert len(results[0][1]) > 8 * 20


@given(size=st.integers(0, 1 << 60), units=st.integers(1, 1 << 60), data=st.data())
def test_parts_of_blocks_are_exact(size: int, units: int, data: Any) -> None:
    start = data.draw(st.integers(0, units))
    assert rows._part(size, start, units) == size * start // units


# -- what is refused ------------------------------------------------------------------------------------------------


def test_rows_outside_of_their_buffers_are_refused() -> None:
    made = schedule("ring", "all_gather", "forest", 0, False)
    assert made is not None
    plan = RankTemplate(made, 0)
    fields = plan.table[10:17]  # of the first chunk: block, weight, first unit, end, units of the block, ...
    assert fields[3] == fields[4]
    plan.table[13] = 40 * fields[4]
    with pytest.raises(ScheduleError, match=r"rank 0, instruction \d+: .* is out of range"):
        formed(plan).prepare(300, 1000, 4)


def test_rows_that_need_what_stands_behind_them_are_refused() -> None:
    made = schedule("two_boxes", "all_gather", "forest", 0, False)
    assert made is not None
    plan = next(p for p in (RankTemplate(made, rank) for rank in range(8)) if any(r.needs for r in p._roles))
    waiting = next(number for number, role in enumerate(plan._roles) if role.needs)
    first_role = 10 + 7 * int(plan.table[0])
    plan.table[first_role + 8 * plan._roles[waiting].needs[0] + 4] = 50  # later than the one that waits
    plan.table[7] = 51
    with pytest.raises(ScheduleError, match=r"instruction \d+ of all_gather of 800 .*: it needs one that stands"):
        formed(plan).prepare(800, 1000, 4)


@pytest.mark.parametrize(
    ("num_elements", "blocks", "message"),
    [
        (7, None, "7 elements do not divide into 3 blocks"),
        (7, (1, 2), "2 block lengths given for 3 blocks"),
        (7, (1, 2, 3), "blocks of 6 elements in all, for an array of 7"),
        (3, (5, -2, 0), "block 1 has -2 elements"),
    ],
)
def test_lengths_that_do_not_fit(num_elements: int, blocks: tuple[int, ...] | None, message: str) -> None:
    made = schedule("ring", "all_gather", "forest", 0, False)
    assert made is not None
    with pytest.raises(ScheduleError, match=message):
        formed(RankTemplate(made, 0)).prepare(num_elements, 4, 4, blocks)


def test_blocks_that_a_schedule_does_not_move() -> None:
    collective = Collective("all_gather", 3, weights=(1, 0, 2))
    plan = RankTemplate(synthesize(FABRICS["ring"], collective), 0)
    assert formed(plan).prepare(9, 4, 4, (4, 0, 5)).addresses[0] > 0
    with pytest.raises(ScheduleError, match="block 1 has 3 elements, but weight 0"):
        formed(plan).prepare(9, 4, 4, (4, 3, 2))


# -- memory ---------------------------------------------------------------------------------------------------------


def summing() -> RankTemplate:
    """A rank's part of a reduce_scatter that passes on sums for others."""
    made = schedule("two_boxes", "reduce_scatter", "forest", 0, False)
    assert made is not None
    return next(plan for plan in (RankTemplate(made, rank) for rank in range(8)) if plan._scratch_chunks)


def test_forms_of_a_group_share_the_memory_that_they_work_in() -> None:
    workspace = Workspace()
    forms = [formed(plan, workspace) for plan in (summing(), summing())]
    large = forms[0].prepare(8 * 100_000, 1 << 14, 4)
    small = [form.prepare(8 * (100 + size), 1 << 14, 4) for form in forms for size in range(50)]
    for prepared in small:
        assert prepared.scratch is large.scratch and prepared.staging is large.staging
        assert prepared.num_bytes < 8192
    assert len({prepared.addresses[2] for prepared in small}) == 100  # what a job in the queue reads is its own
    huge = [forms[0].prepare(8 * 3_000_000, 1 << 22, 4) for _ in range(2)]
    assert huge[0].scratch is not huge[1].scratch and huge[0].num_bytes > 8_000_000
    assert forms[0].prepare(800, 1 << 14, 4).scratch is large.scratch


def test_what_shared_memory_was_before_it_grew_stays_with_those_who_have_it() -> None:
    form = formed(summing())
    one = form.prepare(8 * 100, 1 << 14, 4)
    two = form.prepare(8 * 100_000, 1 << 14, 4)
    assert one.scratch is not two.scratch
    assert one.scratch.ctypes.data <= one.scratch_address < one.scratch.ctypes.data + 64


def test_only_what_is_used_is_in_a_table() -> None:
    """Of an all_to_all over 8 ranks a rank has 15 of 64 blocks."""
    made = schedule("two_boxes", "all_to_all", "direct", 0, False)
    assert made is not None
    plan = RankTemplate(made, 5)
    assert plan.table[0] == 14 and len(plan.even_spans) == 4
    assert isinstance(plan.channels[0], Channel)
