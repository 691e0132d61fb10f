"""Divided experts in training loops: DDP around wrappers, adapters, one norm, recomputation of several passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ddp_leaves_experts_alone_within_any_wrapper(run_ranks: RunRanks, world_size: int) -> None:
    for found in run_ranks(world_size, "moe_training", "experts_stay"):
        assert found["stayed"]
        assert found["names"] == ["module.inner.1.experts.gate_up_proj", "module.inner.1.experts.down_proj"]
        assert len(found["errors"]) == 7 and max(found["errors"].values()) < 1e-6, found["errors"]


def test_ddp_that_cannot_be_right_is_refused(run_ranks: RunRanks) -> None:
    for rank, (copies, nothing, alike) in enumerate(run_ranks(4, "moe_training", "refused")):
        mine = "0, 1" if rank < 2 else "2, 3"
        assert copies.startswith(
            f"inner.1.experts: DDP is over ranks 0, 1, 2, 3, of which {mine} divide these experts"
        )
        assert "there is nothing to average; train the model without DDP" in nothing
        assert alike == "copies alike: True"


def test_adapters_of_a_divided_model_are_those_of_one_process(run_ranks: RunRanks) -> None:
    pytest.importorskip("transformers")
    preload = ["transformers.models.mixtral.modeling_mixtral"]
    for found in run_ranks(4, "moe_training", "lora", preload=preload):
        assert found["stayed"] and found["apart"] == 2 * 6  # two stacks and four parts of deltas a layer
        assert max(found["losses"]) < 1e-6, found["losses"]
        assert len(found["far"]) == 2 * 8 and max(found["far"].values()) < 1e-6, found["far"]
        assert "adapts the experts of this rank alone" in found["said"]


def test_one_norm_for_any_division(run_ranks: RunRanks) -> None:
    for found in run_ranks(4, "moe_training", "one_norm"):
        assert found.keys() == {"whole", "slices", "replicas", "sharded", "nowhere"}
        for kind, (norm, clipped, put_together) in found.items():
            assert norm < 1e-5 and clipped < 1e-5 and put_together, (kind, norm, clipped)


def test_every_pass_is_computed_again_by_its_own_plan(run_ranks: RunRanks) -> None:
    for found in run_ranks(2, "moe_training", "plans_of_passes"):
        assert found["tried"] >= 2 and found["frozen"] < 1e-5 and found["wanted"] < 1e-5, found


def test_divided_experts_may_be_far(run_ranks: RunRanks) -> None:
    pytest.importorskip("transformers")
    preload = ["transformers.models.mixtral.modeling_mixtral"]
    for found in run_ranks(2, "moe_training", "far", preload=preload):
        assert max(found["inference"]) < 1e-6, found
        assert found["of"] == 3 * 4 and 0 < found["near"] <= 2 * 4 and found["fetched"] > 0
        assert found["same"]


def test_tiles_of_shards_give_the_bits_of_one_step(run_ranks: RunRanks) -> None:
    assert run_ranks(3, "moe_training", "tiled") == [True] * 3
