"""Lowering: programs of small fabrics and awkward sizes are right, in bounded pieces, the same every time."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mycel.collectives.lower import RankTemplate, chunk_bounds, lower
from mycel.collectives.program import Buffer, Op
from mycel.collectives.schedule import Chunk, Schedule, Transfer
from mycel.collectives.spec import COLLECTIVES, ROOTED, Collective
from mycel.collectives.synth import methods_for, synthesize
from mycel.collectives.verify import verify_programs, verify_schedule
from mycel.errors import ScheduleError
from mycel.topology.builders import full_mesh, loopback, ring, two_boxes
from mycel.topology.json_format import from_json
from mycel.topology.load import load_topology
from mycel.topology.model import Topology

DATA = Path(__file__).resolve().parents[1] / "data" / "topologies"
FABRICS = ("two_boxes", "ring", "loopback", "unbalanced")
METHODS = ("forest", "tree")


@cache
def fabric(name: str) -> Topology:
    if name == "unbalanced":
        return from_json(json.loads((DATA / "eth4_asym_unbal.json").read_text()))
    builders = {"two_boxes": two_boxes(num_ranks=4), "ring": ring(num_ranks=5), "loopback": loopback(num_ranks=3)}
    return builders[name]


@cache
def schedule(where: str, name: str, method: str) -> Schedule:
    topology = fabric(where)
    root = topology.num_ranks - 1 if name in ROOTED else None
    made = synthesize(topology, Collective(name=name, num_ranks=topology.num_ranks, root=root), method=method)
    verify_schedule(made)
    return made


every_schedule = pytest.mark.parametrize(
    ("where", "name", "method"), [(w, n, m) for w in FABRICS for n in COLLECTIVES for m in methods_for(n)]
)


@every_schedule
def test_programs_are_right_at_awkward_sizes(where: str, name: str, method: str) -> None:
    made = schedule(where, name, method)
    blocks = made.collective.num_blocks
    for elements, piece in ((0, 4), (1, 4), (2, 1), (3, 2), (7, 1), (13, 5), (61, 8), (61, 1000)):
        verify_programs(lower(made, elements * blocks, piece_elements=piece))


@every_schedule
def test_pieces_are_bounded_and_cover_what_a_transfer_carries(where: str, name: str, method: str) -> None:
    made = schedule(where, name, method)
    elements = 37 * made.collective.num_blocks
    bounds = chunk_bounds(made, elements)
    for program in lower(made, elements, piece_elements=5):
        wire = program.columns[program.columns["op"] != Op.COPY]
        assert wire["count"].max() <= 5
        for number, channel in enumerate(program.channels):
            on_channel = [
                t for t in made.transfers if (t.src, t.dst, t.path) == (channel.src, channel.dst, channel.path)
            ]
            carried = sum(int(bounds[t.chunk, 1] - bounds[t.chunk, 0]) for t in on_channel)
            assert wire["count"][wire["channel"] == number].sum() == carried


@every_schedule
def test_chunk_bounds_partition_every_block(where: str, name: str, method: str) -> None:
    made = schedule(where, name, method)
    blocks = made.collective.num_blocks
    for block in (0, 1, 2, 5, 97, 10**9 + 7):
        bounds = chunk_bounds(made, block * blocks)
        order = np.argsort([chunk.start for chunk in made.chunks])
        spans = [(int(a), int(b)) for a, b in bounds[order]]
        assert spans[0][0] == 0 and spans[-1][1] == block * blocks
        assert all(left[1] == right[0] for left, right in pairwise(spans))
        assert all(start <= stop for start, stop in spans)
        for chunk, (start, stop) in zip(range(len(bounds)), bounds, strict=True):
            owner = made.block_of(chunk)
            assert owner * block <= start and stop <= (owner + 1) * block


def test_chunks_are_cut_exactly_where_units_times_elements_exceed_64_bits() -> None:
    base = schedule("loopback", "broadcast", "tree")
    units = 3 * 10**9
    transfers = tuple(replace(t, chunk=c) for c in range(2) for t in base.transfers if not t.after)
    chunks = (Chunk(start=0, stop=10**9), Chunk(start=10**9, stop=units))
    made = replace(base, num_units=units, chunks=chunks, transfers=transfers)
    assert chunk_bounds(made, 9 * 10**12).tolist() == [[0, 3 * 10**12], [3 * 10**12, 9 * 10**12]]


def test_the_same_program_every_time() -> None:
    made = schedule("two_boxes", "all_reduce", "forest")
    for one, other in zip(lower(made, 100, piece_elements=7), lower(made, 100, piece_elements=7), strict=True):
        assert one.to_text() == other.to_text()


def test_every_element_is_averaged_once_on_the_way() -> None:
    """Of all ranks together, instructions marked final cover each element of a reduction exactly once."""
    for where in FABRICS:
        for method in METHODS:
            made = schedule(where, "reduce_scatter", method)
            block = 11
            for program in lower(made, block * made.collective.num_blocks, piece_elements=4):
                counted = np.zeros(block, dtype=int)
                for i in program.instructions:
                    if i.final:
                        assert i.buffer is Buffer.OUTPUT
                        counted[i.offset : i.offset + i.count] += 1
                assert (counted == 1).all()


def test_all_gather_copies_its_own_block_last_and_nothing_waits_for_it() -> None:
    made = schedule("ring", "all_gather", "tree")
    for program in lower(made, 40, piece_elements=3):
        copies = [i for i, row in enumerate(program.instructions) if row.op is Op.COPY]
        assert copies == [len(program.columns) - 1]
        assert copies[0] not in program.need_index
        row = program.instructions[copies[0]]
        assert (row.buffer, row.offset, row.count) == (Buffer.OUTPUT, 8 * program.rank, 8)


# -- what cannot be lowered ---------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [0, -1])
def test_pieces_hold_at_least_an_element(piece: int) -> None:
    with pytest.raises(ScheduleError, match="at least 1"):
        lower(schedule("ring", "all_reduce", "tree"), 10, piece_elements=piece)


def test_elements_divide_into_blocks() -> None:
    with pytest.raises(ScheduleError, match="7 elements do not divide into 5 blocks"):
        lower(schedule("ring", "all_gather", "tree"), 7, piece_elements=1)


def _on_a_line(name: str, *transfers: Transfer, num_chunks: int = 1) -> Schedule:
    """A schedule on three ranks in a ring, written by hand."""
    collective = Collective(name=name, num_ranks=3, root=0 if name == "broadcast" else None)
    chunks = tuple(Chunk(start=i, stop=i + 1) for i in range(num_chunks))
    return Schedule(
        collective=collective,
        topology=ring(num_ranks=3),
        method="by-hand",
        num_units=num_chunks,
        chunks=chunks,
        transfers=transfers,
    )


def test_a_rank_cannot_wait_for_what_it_does_not_see() -> None:
    foreign = _on_a_line(
        "broadcast",
        Transfer(chunk=0, src=0, dst=1, reduce=False, path=(0, 1)),
        Transfer(chunk=0, src=0, dst=2, reduce=False, path=(0, 2)),
        Transfer(chunk=0, src=2, dst=1, reduce=False, path=(2, 1), after=(0, 1)),
    )
    with pytest.raises(ScheduleError, match=r"transfer 2 waits for transfer 0 \(chunk 0, 0 -> 1\)"):
        RankTemplate(foreign, 2)


def test_a_rank_cannot_wait_for_another_chunk() -> None:
    crossed = _on_a_line(
        "broadcast",
        Transfer(chunk=0, src=0, dst=1, reduce=False, path=(0, 1)),
        Transfer(chunk=1, src=1, dst=2, reduce=False, path=(1, 2), after=(0,)),
        num_chunks=2,
    )
    with pytest.raises(ScheduleError, match="only wait for its own rank's transfers of the same chunk"):
        RankTemplate(crossed, 1)


def test_reduce_scatter_programs_do_not_overwrite_partial_sums() -> None:
    copying = _on_a_line(
        "reduce_scatter",
        Transfer(chunk=0, src=1, dst=0, reduce=False, path=(1, 0)),
        num_chunks=3,
    )
    with pytest.raises(ScheduleError, match="cannot copy into a partial sum"):
        RankTemplate(copying, 0)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), ranks=st.integers(3, 5))
def test_transfers_in_any_order_that_is_possible(seed: int, ranks: int) -> None:
    """Sums along random trees, the transfers in an order that has nothing to do with their depth."""
    choice = random.Random(seed)
    mesh = full_mesh(num_ranks=ranks)
    waiting: list[tuple[int, int, int]] = []  # chunk, child, parent
    for block in range(ranks):
        joined = [block]
        for child in choice.sample([r for r in range(ranks) if r != block], ranks - 1):
            waiting.append((block, child, choice.choice(joined)))
            joined.append(child)
    transfers: list[Transfer] = []
    into: dict[tuple[int, int], tuple[int, ...]] = {}
    while waiting:
        ready = [edge for edge in waiting if not any(c == edge[0] and dst == edge[1] for c, _, dst in waiting)]
        chunk, src, dst = choice.choice(ready)
        waiting.remove((chunk, src, dst))
        path = (mesh.ranks[src], mesh.ranks[dst])
        after = into.get((chunk, src), ())
        into[chunk, dst] = (*into.get((chunk, dst), ()), len(transfers))
        transfers.append(Transfer(chunk=chunk, src=src, dst=dst, reduce=True, path=path, after=after))
    made = Schedule(
        collective=Collective(name="reduce_scatter", num_ranks=ranks),
        topology=mesh,
        method="random",
        num_units=ranks,
        chunks=tuple(Chunk(start=i, stop=i + 1) for i in range(ranks)),
        transfers=tuple(transfers),
    )
    verify_schedule(made)
    for elements in (2, 5):
        verify_programs(lower(made, elements * ranks, piece_elements=2))


def test_slow_paths_come_last_but_first_where_one_rank_sends_everything() -> None:
    path = Path(__file__).resolve().parents[2] / "examples" / "clusters" / "slow_nic.yaml"
    topology = load_topology(path)
    slow = 3

    def order(name: str, method: str) -> list[int]:
        root = 0 if name == "broadcast" else None
        collective = Collective(name=name, num_ranks=4, root=root)  # type: ignore[arg-type]
        plan = RankTemplate(synthesize(topology, collective, method), 0)
        return [channel.dst for channel in plan.channels if channel.src == 0]

    assert order("all_gather", "tree") == [1, 2, slow]
    assert order("broadcast", "tree") == [slow, 1, 2]
