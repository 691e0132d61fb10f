"""Hugging Face models whose experts are divided over ranks do what they do whole, and come together again."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

for needed in ("transformers", "accelerate"):
    pytest.importorskip(needed, reason=f"{needed} is not installed")

RunRanks = Callable[..., list[Any]]
#: Of float32 results, relative to those of the library's eager experts in one process.
TOLERANCE = 1e-6
#: What ranks would each import for themselves otherwise.
MODELING = [
    f"transformers.models.{f}.modeling_{f}" for f in ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss")
]
TRAINING = ["transformers.trainer", "transformers.trainer_callback", "accelerate"]


@pytest.fixture
def run(run_ranks: RunRanks) -> RunRanks:
    return partial(run_ranks, preload=[*MODELING, *TRAINING])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_logits_and_gradients_of_five_families(run: RunRanks, world_size: int) -> None:
    for rank, worst in enumerate(run(world_size, "moe_hugging_face", "families")):
        assert len(worst) >= 9
        assert all(error <= TOLERANCE for error in worst.values()), f"rank {rank}: {worst}"


@pytest.mark.parametrize(
    ("family", "backend"), [("mixtral", "mycel"), ("mixtral", "gloo"), ("qwen3_moe", "mycel"), ("gpt_oss", "mycel")]
)
def test_slices_of_experts_and_chunks_of_tokens(run: RunRanks, family: str, backend: str) -> None:
    for found in run(4, "moe_hugging_face", "sliced", family, backend=backend):
        errors = found.pop("errors")
        assert len(errors) == 6 and max(errors.values()) <= 1.5 * TOLERANCE, errors
        before, after = found.pop("clipped")
        assert before > 2 and after == pytest.approx(1.0, rel=1e-5)  # of all slices together
        assert len(found) == 7 and all(found.values()), found


@pytest.mark.parametrize(("family", "backend"), [("mixtral", "mycel"), ("qwen3_moe", "gloo")])
def test_layers_choose_their_schedules(run: RunRanks, family: str, backend: str) -> None:
    for found in run(4, "moe_hugging_face", "tuned", family, backend=backend):
        assert found["apart"] <= 2 * TOLERANCE
        assert found["said"].count("<- fastest of") == 2 and min(found["tried"]) >= 2, found


@pytest.mark.parametrize(("world_size", "family"), [(2, "deepseek_v3"), (3, "gpt_oss")])
def test_restored_after_training(run: RunRanks, world_size: int, family: str) -> None:
    for found in run(world_size, "moe_hugging_face", "train_and_restore", family):
        for ours, theirs in found.pop("norms"):
            assert ours == pytest.approx(theirs, rel=1e-5)
        assert found.pop("errors") < 1e-5
        assert all(found.values()), found


def test_states_go_where_they_should(run: RunRanks, tmp_path: Path) -> None:
    for found in run(2, "moe_hugging_face", "checkpoints", str(tmp_path / "saved")):
        assert len(found) == 5 and all(found.values()), found


def test_generated_sentences_of_different_lengths(run: RunRanks) -> None:
    assert run(2, "moe_hugging_face", "generation") == [True, True]


def test_the_trainer_learns_the_same(run: RunRanks, tmp_path: Path) -> None:
    for found in run(2, "moe_hugging_face", "trainer", str(tmp_path)):
        assert found["got"] == pytest.approx(found["wanted"], rel=1e-4)
        assert found["error"] < 1e-3 and found["alike"] and found["sent"] > 0
        assert "writes the experts of one rank only" in found["said"]


@pytest.mark.skipif(
    importlib.util.find_spec("transformers.distributed.expert_parallel") is None,
    reason="this transformers has no expert parallelism of its own",
)
def test_models_that_the_library_divides(run: RunRanks, tmp_path: Path) -> None:
    for errors in run(2, "moe_hugging_face", "library_parallelism", str(tmp_path / "saved")):
        assert len(errors) > 10 and all(error <= TOLERANCE for error in errors.values()), errors


def test_experts_that_fsdp_shards_further(run: RunRanks) -> None:
    for found in run(4, "moe_hugging_face", "sharded_further"):
        errors = found["errors"]
        assert len(errors) > 40 and max(errors.values()) < 3e-6, errors
        assert found["norms"][0] == pytest.approx(found["norms"][1], rel=1e-5)
        assert found["state"] and "fully_shard has replaced its parameters" in found["said"]


def test_experts_in_slots_of_a_placement(run: RunRanks) -> None:
    for found in run(3, "moe_hugging_face", "placed"):
        assert len(found["errors"]) > 20 and max(found["errors"].values()) < 3e-6, found["errors"]
        assert found["restored"]


def test_codecs_on_the_wire(run: RunRanks) -> None:
    for found in run(2, "moe_hugging_face", "codecs"):
        assert found["identity error"] <= TOLERANCE < found["bf16 error"] < 3e-2
        assert 0 < found["bf16 bytes"] * 2 == found["identity bytes"]


def test_models_and_meshes_that_do_not_fit_are_named(run: RunRanks) -> None:
    for different, wrong, strange, uneven, shared in run(2, "moe_hugging_face", "refusals"):
        assert "has another router or first expert in model.layers.0.mlp than rank" in different
        assert wrong == "dispatcher 'hierarchical' wants a mesh of 2 dimensions, got 1"
        assert "has gates of which it is not known which up each belongs to: it cannot be cut into 2" in strange
        assert uneven == "3 shards of an expert do not divide 2 ranks"
        assert shared == "2 layers cannot share a dispatcher; give what makes one from num_experts"
