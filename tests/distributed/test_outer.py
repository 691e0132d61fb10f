"""Local updates whose changes are compressed, that meet in fragments, and whose ranks come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize(("world_size", "backend"), [(2, "mycel"), (3, "gloo")])
def test_fragments_meet_as_published(run_ranks: RunRanks, world_size: int, backend: str) -> None:
    for found in run_ranks(world_size, "outer", "streaming", backend=backend):
        wrong = {case: error for case, error in found.items() if not error < 1e-12}
        assert len(found) == 6 and not wrong


@pytest.mark.parametrize(("world_size", "backend"), [(2, "mycel"), (3, "gloo")])
def test_all_that_changed_arrives(run_ranks: RunRanks, world_size: int, backend: str) -> None:
    for found in run_ranks(world_size, "outer", "compressed", backend=backend):
        # Half types are added up by the network, whose rounding nobody is owed.
        wrong = {case: error for case, error in found.items() if not error < (5e-3 if "16" in case else 1e-5)}
        assert len(found) >= 17 and not wrong


@pytest.mark.parametrize(
    ("way", "save_at"), [("blocking", 7), ("delayed", 7), ("streamed", 5), ("since", 5), ("powersgd", 7)]
)
def test_a_restart_ends_with_the_same_bits(run_ranks: RunRanks, way: str, save_at: int) -> None:
    for same, agree in run_ranks(2, "outer", "resumed", way, save_at):
        assert same and agree


def test_int4_in_fragments_is_an_eighth_of_the_bytes(run_ranks: RunRanks) -> None:
    for whole, part in run_ranks(4, "outer", "fewer_bytes"):
        assert part <= whole / 8


@pytest.mark.parametrize("method", [None, "dense_int4", "top_k", "powersgd"])
@pytest.mark.parametrize("way", ["blocking", "delayed", "streamed"])
def test_a_round_that_is_not_finite_changes_nothing(run_ranks: RunRanks, way: str, method: str | None) -> None:
    for finite, agree, skipped in run_ranks(2, "outer", "overflown", way, method):
        assert finite and agree and skipped == (1 if way == "blocking" else 2)  # late results are known late


def test_steps_that_a_scaler_leaves_out_count(run_ranks: RunRanks) -> None:
    for (steps, rounds), agree in run_ranks(2, "outer", "scaled"):
        assert steps == 12 and rounds == 6 and agree


def test_shards_leave_a_round_out_together(run_ranks: RunRanks) -> None:
    for agree, moved, skipped in run_ranks(4, "outer", "sharded"):
        assert agree and moved and skipped == 1


@pytest.mark.parametrize(("way", "compress"), [("blocking", False), ("blocking", True), ("delayed", False)])
def test_uneven_numbers_of_batches(run_ranks: RunRanks, way: str, compress: bool) -> None:
    for agree, error, _ in run_ranks(3, "outer", "uneven", way, compress, backend="gloo"):
        assert agree and error < (1e-6 if compress else 1e-12)


@pytest.mark.parametrize("way", ["streamed", "by rate"])
def test_uneven_numbers_of_batches_in_other_rounds(run_ranks: RunRanks, way: str) -> None:
    for agree, error, _ in run_ranks(4, "outer", "uneven", way, False):
        assert agree and (way == "streamed" or error < 1e-12)


@pytest.mark.parametrize(("way", "lost"), [("blocking", 2), ("streamed", 0)])
def test_a_rank_is_lost_in_a_round_and_comes_back(run_ranks: RunRanks, way: str, lost: int) -> None:
    found = run_ranks(3, "outer", "lives", way, lost, 5, 14, backend=None)
    assert [len(lives) for lives in found] == [1 + (rank == lost) for rank in range(3)]
    ends = [lives[-1][-1] for lives in found]
    assert all(end["agree"] for end in ends) and len({(end["end"], end["sum"]) for end in ends}) == 1
    first, again = found[lost]
    assert first == [{"from": 0, "size": 3}]
    assert again[0]["from"] >= 5 and again[0]["size"] == 3 and again[-1]["end"] >= again[0]["from"] + 14
