"""A search for counterexamples to a conjecture of docs/concepts/forest.md, as long as one likes.

Every sequence of transfers after which all ranks know what all knew contains, for some rank, an in-tree to it and an
out-tree from it without a common transfer. Were it false somewhere, a schedule that is not of trees might beat the
bound of all_reduce there. `MYCEL_TESTS=long` tries a hundred times as many; edit the numbers below for more.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.effort import examples

Transfers = list[tuple[int, int]]


def completes(num_ranks: int, transfers: Sequence[tuple[int, int]]) -> bool:
    """Whether all ranks know of all in the end."""
    knows = [1 << rank for rank in range(num_ranks)]
    for src, dst in transfers:
        knows[dst] |= knows[src]
    return all(known == (1 << num_ranks) - 1 for known in knows)


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[int, Transfers]:
    """Sequences that complete and of which none can be left out."""
    num_ranks = draw(st.integers(3, 7))
    rng = random.Random(draw(st.integers(0, 2**32)))
    knows = [1 << rank for rank in range(num_ranks)]
    transfers: Transfers = []
    while any(known != (1 << num_ranks) - 1 for known in knows):
        src, dst = rng.sample(range(num_ranks), 2)
        if knows[src] & ~knows[dst]:
            knows[dst] |= knows[src]
            transfers.append((src, dst))
    for transfer in rng.sample(transfers, len(transfers)):
        place = transfers.index(transfer)
        without = transfers[:place] + transfers[place + 1 :]
        transfers = without if completes(num_ranks, without) else transfers
    return num_ranks, transfers


def has_disjoint_trees(num_ranks: int, transfers: Transfers) -> bool:
    """By trying every in-tree of every root."""
    leaving = [[place for place, (src, _) in enumerate(transfers) if src == rank] for rank in range(num_ranks)]
    for root in range(num_ranks):
        others = [rank for rank in range(num_ranks) if rank != root]
        for chosen in product(*(leaving[rank] for rank in others)):
            up = {transfers[place][0]: transfers[place][1] for place in chosen}
            if all(ends_at(root, rank, up) for rank in others):
                rest = [t for place, t in enumerate(transfers) if place not in chosen]
                if len(reached(root, rest)) == num_ranks:
                    return True
    return False


def ends_at(root: int, rank: int, up: dict[int, int]) -> bool:
    for _ in range(len(up)):
        rank = up.get(rank, root)
    return rank == root


def reached(root: int, transfers: Transfers) -> set[int]:
    found, grows = {root}, True
    while grows:
        new = {dst for src, dst in transfers if src in found} - found
        found, grows = found | new, bool(new)
    return found


@examples(100, 10_000, derandomize=True)
@given(exchange=exchanges())
def test_no_exchange_is_without_disjoint_trees_of_one_root(exchange):
    assert has_disjoint_trees(*exchange)


@pytest.mark.parametrize(
    ("transfers", "has"),
    [
        ([(1, 0), (2, 0), (0, 1), (0, 2)], True),
        ([(0, 1), (1, 2), (2, 0), (0, 1)], True),
        ([(0, 1), (1, 2), (2, 0)], False),  # a round of the ring alone
        ([(0, 1), (1, 0), (2, 3), (3, 2), (0, 2), (2, 0), (1, 3), (3, 1)], True),  # recursive doubling
    ],
)
def test_the_search_knows_trees_when_it_sees_them(transfers, has):
    num_ranks = 1 + max(map(max, transfers))
    assert has_disjoint_trees(num_ranks, transfers) == completes(num_ranks, transfers) == has
