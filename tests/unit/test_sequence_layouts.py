"""Layouts of documents over ranks: each token once, what follows from them, evenness, and what is refused."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mycel.errors import MismatchError, UsageError
from mycel.planning.grouping import PlannedGroup, SequencePlan
from mycel.planning.sequence import (
    CAUSAL,
    FULL,
    Layout,
    Mask,
    Segment,
    agree,
    balanced,
    bytes_by_rank,
    contiguous,
    grouped,
    imbalance,
    meetings,
    per_document_zigzag,
    predecessors,
    work_by_rank,
    zigzag,
)

LENGTHS: list[int] = json.loads(
    (Path(__file__).parents[1] / "data" / "planning" / "stdlib_lengths.json").read_text(encoding="utf-8")
)["lengths"]
MASKS = [CAUSAL, FULL, Mask(kind="window", width=3), Mask(kind="chunked", width=4)]


def drawn(seed: int) -> tuple[list[int], int]:
    chance = random.Random(seed)
    return [chance.choice([0, 1, 1, 2, 5, 9, 17]) for _ in range(chance.randint(1, 6))], chance.choice(
        [1, 2, 3, 4, 7]
    )


def layouts(documents: list[int], ranks: int) -> dict[str, Layout]:
    return {
        "contiguous": contiguous(documents, ranks),
        "zigzag": zigzag(documents, ranks),
        "per document": per_document_zigzag(documents, ranks),
        "window": balanced(documents, ranks, mask=MASKS[2], token_pairs=2.0),
        "speeds": balanced(documents, ranks, speeds=[1 + r % 3 for r in range(ranks)]),
    }


def sees(mask: Mask, query: int, key: int) -> bool:
    """The masks once more, a pair at a time."""
    if mask.kind == "full":
        return True
    if key > query:
        return False
    if mask.kind == "window":
        assert mask.width is not None
        return query - key < mask.width
    return mask.kind == "causal" or (mask.width is not None and query // mask.width == key // mask.width)


@pytest.mark.parametrize("seed", range(40))
def test_every_token_is_on_one_rank_and_knows_its_place(seed: int) -> None:
    documents, ranks = drawn(seed)
    whole = [(d, p) for d, length in enumerate(documents) for p in range(length)]
    for name, layout in layouts(documents, ranks).items():
        assert layout.num_ranks == ranks
        held = []
        for rank in range(ranks):
            positions, which = layout.positions(rank).tolist(), layout.documents_of(rank).tolist()
            mine = list(zip(which, positions, strict=True))
            held += mine
            assert [whole[index] for index in layout.indices(rank).tolist()] == mine
            for (document, position), label in zip(mine, layout.labels(rank).tolist(), strict=True):
                last = position + 1 == documents[document]
                assert label == -1 if last else whole[label] == (document, position + 1)
            assert layout.borders(rank)[-1] == len(mine)
        assert sorted(held) == whole, name
        batch = np.arange(len(whole)) * 10
        back = np.empty_like(batch)
        back[layout.order] = np.concatenate([batch[layout.indices(rank)] for rank in range(ranks)])
        assert (back == batch).all()


@pytest.mark.parametrize("mask", MASKS, ids=[mask.kind for mask in MASKS])
@pytest.mark.parametrize("seed", range(12))
def test_pairs_are_those_of_the_mask(seed: int, mask: Mask) -> None:
    documents, ranks = drawn(seed)
    for layout in layouts(documents, ranks).values():
        counted = np.zeros(ranks, dtype=int)
        for meeting in meetings(layout, mask):
            queries = layout.ranks[meeting.query_rank][meeting.query]
            keys = layout.ranks[meeting.key_rank][meeting.key]
            assert queries.document == keys.document
            seen = [
                sees(mask, q, k) for q in range(queries.start, queries.stop) for k in range(keys.start, keys.stop)
            ]
            assert meeting.pairs == sum(seen) > 0
            assert meeting.is_whole == all(seen)
            counted[meeting.query_rank] += meeting.pairs
        assert counted.tolist() == work_by_rank(layout, mask).tolist()
        assert counted.sum() == sum(
            sees(mask, q, k) for length in documents for q in range(length) for k in range(length)
        )


@pytest.mark.parametrize("seed", range(20))
def test_predecessors_are_the_tokens_before(seed: int) -> None:
    documents, ranks = drawn(seed)
    for layout in layouts(documents, ranks).values():
        for rank in range(ranks):
            for width in (0, 1, 3, 6):
                for segment, pieces in zip(layout.ranks[rank], predecessors(layout, rank, width), strict=True):
                    got = []
                    for piece in pieces:
                        mine = slice(piece.first, piece.first + piece.count)
                        assert set(layout.documents_of(piece.rank)[mine].tolist()) == {segment.document}
                        got += layout.positions(piece.rank)[mine].tolist()
                        assert layout.positions(piece.rank)[piece.first] == piece.position
                    wanted = list(range(max(0, segment.start - width), segment.start)) if len(segment) else []
                    assert got == wanted


def pack(chance: random.Random, most: int) -> list[int]:
    documents: list[int] = []
    while sum(documents) < most:
        documents.append(min(chance.choice(LENGTHS), most - sum(documents)))
    return documents


def packs_are_even(count: int) -> None:
    chance = random.Random(8)
    for _ in range(count):
        documents = pack(chance, chance.choice([16_384, 65_536, 131_072]))
        for ranks in (2, 4, 8):
            layout = per_document_zigzag(documents, ranks)
            assert imbalance(layout) < 1.02
            assert max(layout.tokens) < 1.02 * sum(documents) / ranks


def test_packed_files_are_even() -> None:
    packs_are_even(30)


@pytest.mark.long
def test_1000_packs_of_files_are_even() -> None:
    packs_are_even(1000)


def test_balanced_layouts_follow_masks_and_speeds() -> None:
    documents = pack(random.Random(1), 20_000)
    for mask in (CAUSAL, FULL, Mask(kind="window", width=512), Mask(kind="chunked", width=1000)):
        assert imbalance(balanced(documents, 5, mask=mask), mask) < 1.02
    work = work_by_rank(balanced(documents, 3, speeds=[1, 2, 5]))
    assert (abs(work / work.sum() * 8 - [1, 2, 5]) < 0.05).all()
    assert bytes_by_rank(balanced([10], 2, token_pairs=1e9), 4).tolist() == [20, 20]


def test_groups_of_a_plan_are_a_layout() -> None:
    groups = (
        PlannedGroup(micro_batch=0, ranks=(2, 3), sequences=(0, 4)),
        PlannedGroup(micro_batch=0, ranks=(0,), sequences=(1,)),
        PlannedGroup(micro_batch=1, ranks=(0, 1, 2, 3), sequences=(2, 3)),
    )
    plan = SequencePlan(groups=groups, total_us=1.0, lower_bound_us=1.0)
    lengths = [100, 20, 400, 7, 30]
    layout, sequences = grouped(lengths, 4, plan)
    assert sequences == (0, 1, 4)
    assert layout.tokens == (20, 0, 65, 65)
    assert set(layout.documents_of(2).tolist()) == {0, 2}
    assert grouped(lengths, 4, plan, 1)[0].documents == (400, 7)
    for wrong in (
        lambda: grouped(lengths, 4, plan, 2),
        lambda: grouped(lengths[:4], 4, plan),
        lambda: grouped(lengths, 3, plan),
    ):
        with pytest.raises(UsageError):
            wrong()


def segments(*parts: tuple[int, int, int]) -> tuple[Segment, ...]:
    return tuple(Segment(document=d, start=a, stop=b) for d, a, b in parts)


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ((segments((0, 0, 6)), segments((0, 5, 9))), "ranks 0 and 1 both have tokens 5 to 6 of document 0"),
        ((segments((0, 0, 4)), segments((0, 5, 9))), "tokens 4 to 5 of document 0 are on no rank"),
        ((segments((0, 0, 4)), segments((0, 4, 8))), "tokens 8 to 9 of document 0 are on no rank"),
        ((segments((0, 0, 10)),), "rank 0 has tokens 0 to 10 of document 0, which has 9"),
        ((segments((0, 0, 9), (1, 0, 1)),), "there are 1 documents"),
        ((), "at least one rank"),
    ],
)
def test_what_is_no_layout(ranks: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Layout(documents=(9,), ranks=ranks)


def test_what_else_is_refused() -> None:
    for wrong, says in (
        (lambda: contiguous([3], 0), "num_ranks: 0"),
        (lambda: zigzag([-3], 1), "document 0 has -3 tokens"),
        (lambda: balanced([3], 2, speeds=[1]), "1 speeds for 2 ranks"),
        (lambda: balanced([3], 2, speeds=[1, 0]), "speed"),
        (lambda: Mask(kind="window"), "a width is for window"),
        (lambda: Mask(kind="window", width=0), "a width of 0"),
        (lambda: Mask(kind="ring"), "one of full"),  # type: ignore[arg-type]
        (lambda: Segment(document=0, start=3, stop=2), "ends no earlier"),
    ):
        with pytest.raises(UsageError, match=says):
            wrong()


def test_ranks_with_other_layouts_are_named() -> None:
    one, other = contiguous([9], 2), zigzag([9], 2)
    assert one.digest == contiguous([9], 2).digest != other.digest
    assert agree([one.digest] * 3) == one.digest
    with pytest.raises(MismatchError, match=f"rank 1 has layout {other.digest}, and most have {one.digest}"):
        agree([one.digest, other.digest, one.digest])


def test_an_empty_batch_is_a_layout() -> None:
    layout = per_document_zigzag([0, 0], 3)
    assert layout.tokens == (0, 0, 0)
    assert imbalance(layout) == 1.0
    assert layout.order.tolist() == layout.labels(1).tolist() == []


def test_plans_need_no_torch() -> None:
    code = (
        "import sys, mycel.planning.sequence, mycel.planning.grouping, mycel.planning.residency; "
        "assert not {'torch', 'ortools'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
