"""Experts in slots: results and gradients are those of the layer without a placement, also while experts move."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_placement_and_dispatcher_equals_the_reference(run_ranks: RunRanks, world_size: int) -> None:
    for rank, result in enumerate(run_ranks(world_size, "moe_placement", "every_placement")):
        worst = {(case, name): e for case, errors in result.items() for name, e in errors.items() if e > 1e-6}
        assert result and not worst, f"rank {rank}: {worst}"


def test_losses_are_unchanged_while_experts_and_adams_moments_move(run_ranks: RunRanks) -> None:
    for result in run_ranks(4, "moe_placement", "losses_with_and_without_moves"):
        for kind in ("moved", "eplb", "flex"):
            assert result[kind] == pytest.approx(result["plain"], rel=1e-10, abs=0), kind
        sent, counted = result["bytes"]
        assert sent == counted == result["metered"] > 0
        for policy in ("eplb", "flex"):
            assert any(len(set(held)) == len(held) and -1 not in held for held in result[f"{policy} placement"])
            counted, unchanged = result[f"{policy} closed"]
            assert counted > 0 and unchanged  # what is closed sees no more


def test_states_with_a_row_for_each_slot_move_whatever_their_rows_are(run_ranks: RunRanks) -> None:
    for found in run_ranks(2, "moe_placement", "factored_states"):
        assert found["moved"] == pytest.approx(found["still"], rel=1e-10, abs=0)
        assert found["said"] == (
            "PerExpert keeps 'shared' of down_proj in shape [3], with no row for each of the 4 slots: experts cannot "
            "move with what several of them share"
        )
        assert found["unmoved"]


def test_moves_without_replicas_change_no_bit(run_ranks: RunRanks) -> None:
    for still, moved in run_ranks(4, "moe_placement", "moves_alone_change_no_bit"):
        assert still == moved


def test_replicas_send_what_is_counted(run_ranks: RunRanks) -> None:
    for sent, counted in run_ranks(3, "moe_placement", "bytes_of_replicas"):
        assert sent == counted > 0


def test_a_trace_of_all_ranks_adds_their_tokens_up(run_ranks: RunRanks) -> None:
    for counts, wanted in run_ranks(3, "moe_placement", "recorded_over_ranks"):
        assert counts == [[wanted]] and sum(wanted) > 0


def test_checkpoints_load_at_every_placement(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert all(run_ranks(4, "moe_placement", "reload", str(tmp_path / "saved")))


def test_what_cannot_move_is_named(run_ranks: RunRanks) -> None:
    for said in run_ranks(2, "moe_placement", "wrong_moves"):
        assert said == [
            "MoE was made without a PlacedDispatcher; its experts cannot move",
            "a placement of 4 experts on 2 ranks with 2 slots cannot follow one of 4 on 2 with 3",
            "the placement is for 1 ranks, the mesh has 2",
            "no layer of MoE was made with a PlacedDispatcher",
            "experts in slots of a placement cannot be taken in parts; partition by tokens",
        ]
