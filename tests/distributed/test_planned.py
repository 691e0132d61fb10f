"""Plans put to work: losses and parameters are those of one process, whatever the mesh."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.effort import long

from mycel.report.pipeline import read_pipelines

PRELOAD = ["mycel.parallel", "mycel.parallel.planned", "torch.distributed.checkpoint"]
HUGGING_FACE = [
    *PRELOAD,
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
]


def test_a_chain_of_modules(run_ranks: Callable[..., list[Any]]) -> None:
    kinds = [
        {"pp": 2, "counts": [3, 1], "ranks": [1, 0], "recompute": "full"},
        {"pp": 2, "chunks": 2, "counts": [1, 1, 1, 1], "recompute": "alternate"},
        {"dp": 2, "zero": 1, "max_norm": 0.05},
        {"tp": 2, "is_sequence_parallel": True, "recompute": "attention"},
    ]
    run_ranks(2, "planned", "trains", "tiny", kinds, preload=PRELOAD, timeout_s=120)


def test_several_directions_at_once(run_ranks: Callable[..., list[Any]]) -> None:
    kinds = [
        {"pp": 2, "dp": 2, "ranks": [2, 3, 0, 1], "zero": 1, "counts": [1, 3]},
        {"pp": 2, "tp": 2, "is_sequence_parallel": True, "is_scattered": True, "max_norm": 0.05},
    ]
    run_ranks(4, "planned", "trains", "tiny", kinds, backend="gloo", preload=PRELOAD, timeout_s=120)


def test_unequal_shares_of_the_batch(run_ranks: Callable[..., list[Any]]) -> None:
    """Each micro-batch counts alike, whoever has it."""
    kinds = [
        {"dp": 2, "shares": [5, 3], "max_norm": 0.05},
        {"dp": 2, "shares": [1, 7], "ranks": [1, 0], "zero": 2, "recompute": "full"},
    ]
    run_ranks(2, "planned", "trains", "tiny", kinds, preload=PRELOAD, timeout_s=120)


def test_unequal_shares_with_other_directions(run_ranks: Callable[..., list[Any]]) -> None:
    kinds = [
        {"pp": 2, "dp": 2, "shares": [6, 2], "zero": 1, "counts": [3, 1], "ranks": [2, 3, 0, 1]},
        {"pp": 2, "dp": 2, "shares": [2, 6], "chunks": 2, "max_norm": 0.05},
        {"pp": 2, "dp": 2, "shares": [6, 2], "order": "zb_h1"},
        {"dp": 2, "cp": 2, "shares": [5, 3], "zero": 1},
        {"dp": 2, "tp": 2, "shares": [3, 5], "is_sequence_parallel": True, "max_norm": 0.05},
    ]
    run_ranks(4, "planned", "trains", "tiny", kinds, backend="gloo", preload=PRELOAD, timeout_s=150)


def test_layers_in_pieces(run_ranks: Callable[..., list[Any]]) -> None:
    """Heads and inner columns one piece after the other: with all else that may stand beside it."""
    kinds = [
        {"pp": 2, "coshard": 2, "counts": [3, 1]},
        {"pp": 2, "chunks": 2, "coshard": 2, "recompute": "full"},
        {"pp": 2, "coshard": 2, "order": "zb_h1"},
        {"dp": 2, "zero": 3, "coshard": 2, "recompute": "full", "max_norm": 0.05},
        {"dp": 2, "zero": 2, "coshard": 2, "shares": [5, 3]},
    ]
    run_ranks(2, "planned", "trains", "llama", kinds, preload=HUGGING_FACE, timeout_s=150)
    given = {"preload": HUGGING_FACE, "timeout_s": 150}
    job = run_ranks(2, "planned", "searched", "llama", ["coshard=2", "recompute=full", "pp=2"], **given)[0]
    assert job["coshard"] == job["mesh"]["pp"] == 2


def test_shared_sequences(run_ranks: Callable[..., list[Any]]) -> None:
    kinds = [
        {"cp": 2, "max_norm": 0.05},
        {"cp": 2, "zero": 1, "recompute": "full"},
        {"cp": 2, "zero": 3, "recompute": "attention", "ranks": [1, 0]},
    ]
    run_ranks(2, "planned", "trains", "tiny", kinds, preload=PRELOAD, timeout_s=120)


def test_shared_sequences_with_other_directions(run_ranks: Callable[..., list[Any]]) -> None:
    kinds = [
        {"cp": 4},
        {"cp": 2, "dp": 2, "zero": 2, "max_norm": 0.05},
        {"pp": 2, "cp": 2, "ranks": [0, 1, 3, 2], "chunks": 2, "recompute": "full"},
        {"cp": 2, "tp": 2, "is_sequence_parallel": True, "max_norm": 0.05},
    ]
    run_ranks(4, "planned", "trains", "tiny", kinds, backend="gloo", preload=PRELOAD, timeout_s=120)


def test_shared_experts(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    kinds = [
        {"dp": 2, "ep": 2, "max_norm": 0.05},
        {"dp": 2, "ep": 2, "zero": 3, "recompute": "full"},
        {"cp": 2, "ep": 2, "zero": 1, "max_norm": 0.05, "recompute": "attention"},
    ]
    run_ranks(2, "planned", "trains", "qwen3_moe", kinds, preload=HUGGING_FACE, timeout_s=120)
    before, after = {"dp": 2, "ep": 2}, {"pp": 2}
    run_ranks(
        2, "planned", "resumes", "qwen3_moe", str(tmp_path / "1"), before, after, preload=HUGGING_FACE, timeout_s=120
    )
    run_ranks(
        2, "planned", "resumes", "qwen3_moe", str(tmp_path / "2"), after, before, preload=HUGGING_FACE, timeout_s=120
    )


def test_shared_experts_with_other_directions(run_ranks: Callable[..., list[Any]]) -> None:
    kinds = [
        {"dp": 2, "cp": 2, "ep": 2, "max_norm": 0.05},
        {"pp": 2, "dp": 2, "ep": 2, "ranks": [2, 3, 0, 1], "counts": [3, 1]},
        {"dp": 2, "tp": 2, "ep": 2, "is_sequence_parallel": True, "max_norm": 0.05},
    ]
    run_ranks(4, "planned", "trains", "qwen3_moe", kinds, backend="gloo", preload=HUGGING_FACE, timeout_s=150)


def test_a_hugging_face_model_without_edits(run_ranks: Callable[..., list[Any]]) -> None:
    kinds = [{"pp": 2, "counts": [3, 1]}, {"tp": 2, "is_sequence_parallel": True}, {"cp": 2, "recompute": "full"}]
    run_ranks(2, "planned", "trains", "qwen3_moe", kinds, preload=HUGGING_FACE, timeout_s=120)


@long
@pytest.mark.parametrize("backend", ["mycel", "gloo"])
def test_all_directions(run_ranks: Callable[..., list[Any]], backend: str) -> None:
    kinds = [
        {"dp": 4},
        {"dp": 4, "zero": 2},
        {"dp": 2, "tp": 2, "zero": 2, "max_norm": 0.05},
        {"dp": 2, "tp": 2, "zero": 3, "is_sequence_parallel": True, "recompute": "full"},
        {"pp": 2, "dp": 2, "ranks": [0, 2, 1, 3], "chunks": 2, "zero": 1},
        {"pp": 2, "tp": 2, "recompute": "alternate"},
        {"dp": 2, "tp": 2, "recompute": "attention"},
        {"pp": 4, "ranks": [3, 1, 0, 2], "order": "gpipe"},
        {"pp": 4, "order": "zb_h1"},
    ]
    run_ranks(4, "planned", "trains", "tiny", kinds, backend=backend, preload=PRELOAD, timeout_s=300)


@long
@pytest.mark.parametrize("backend", ["mycel", "gloo"])
def test_shared_sequences_in_all_directions(run_ranks: Callable[..., list[Any]], backend: str) -> None:
    kinds = [
        {"pp": 2, "cp": 2, "order": "zb_h1", "zero": 2},
        {"pp": 2, "cp": 2, "zero": 3},
        {"cp": 2, "dp": 2, "recompute": "alternate"},
        {"cp": 2, "tp": 2, "zero": 1},
        {"pp": 2, "cp": 2, "zero": 1},
    ]
    run_ranks(4, "planned", "trains", "tiny", kinds, backend=backend, preload=PRELOAD, timeout_s=300)


def test_a_checkpoint_loads_under_another_plan(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    before, after = {"pp": 2, "counts": [1, 3]}, {"dp": 2, "zero": 3}
    run_ranks(2, "planned", "resumes", "tiny", str(tmp_path), before, after, preload=PRELOAD, timeout_s=120)


def test_a_rank_that_the_plan_leaves_out(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    said = run_ranks(3, "planned", "idle_and_reported", str(tmp_path), preload=PRELOAD, timeout_s=120)
    assert said[0]["losses"] == said[1]["losses"] == said[2]["losses"]
    assert [each["written"] for each in said] == [True, False, True]
    assert said[1]["report"]["parameter_bytes"] == 0 < said[0]["report"]["parameter_bytes"]
    flights = read_pipelines([tmp_path])
    assert len(flights) == 2
    planned = [row for flight in flights for row in flight.rows if row.planned is not None]
    assert len(planned) == 2 * 2 * 8  # forwards and backwards of eight micro-batches on two stages


def test_boundaries_in_shares(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(4, "planned", "shares", backend="gloo", preload=PRELOAD, timeout_s=120) == [20] * 4


def test_what_cannot_be_is_refused(run_ranks: Callable[..., list[Any]]) -> None:
    said = run_ranks(2, "planned", "refused", preload=HUGGING_FACE, timeout_s=120)[0]
    assert "search for a plan of this model" in said["another model"]
    assert "hidden 32" in said["larger"] and "has 48" in said["larger"]
    assert "4 ranks" in said["more ranks"] and "this job has 2" in said["more ranks"]
    assert "embedding.of_byte.weight" in said["tied"] and "one parameter" in said["tied"]
    assert "would make two of it" in said["tied and shared"]
    assert "8 bits" in said["float8"]
    assert "LayerNorm" in said["odd"]
    assert "blocks.0 holds 4 matrices that are cut by columns and 2 by rows" in said["no pieces"]
    assert "no experts of" in said["no experts"]
    assert "no mixture of experts" in said["apart"] and "--limit ep=1" in said["apart"]
    assert "two halves" in said["halves"] and "--limit zero<=2" in said["halves"]
    assert "no numbers yet" in said["no numbers"]
    assert "ep=2 of 4 replicas with zero=1" in said["copies"] and "--limit ep=4" in said["copies"]
    assert "no position_ids" in said["no positions"] and "--limit cp=1" in said["no positions"]
    assert "no attention" in said["nothing mixes"] and "--limit cp=1" in said["nothing mixes"]
    assert "sequences of 16 tokens over cp=2" in said["length"] and "(8, 14)" in said["length"]
    assert "global batch of 8" in said["batch"] and "has 3" in said["batch"]


@long
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_hugging_face_models_in_all_directions(
    run_ranks: Callable[..., list[Any]], name: str, tmp_path: Path
) -> None:
    kinds = [
        {"dp": 2, "tp": 2, "is_sequence_parallel": name == "llama"},
        {"pp": 2, "tp": 2, "counts": [3, 1]},
        {"pp": 2, "dp": 2, "zero": 1, "counts": [1, 3]},
        {"dp": 2, "tp": 2, "zero": 3, "recompute": "full"},
        {"pp": 4, "ranks": [3, 1, 0, 2]},
    ]
    run_ranks(4, "planned", "trains", name, kinds, preload=HUGGING_FACE, timeout_s=200)
    before, after = {"pp": 2, "tp": 2}, {"pp": 4}
    run_ranks(4, "planned", "resumes", name, str(tmp_path), before, after, preload=HUGGING_FACE, timeout_s=200)


@long
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_hugging_face_models_with_shared_sequences(run_ranks: Callable[..., list[Any]], name: str) -> None:
    kinds = [{"pp": 2, "cp": 2, "recompute": "attention"}, {"cp": 2, "tp": 2, "zero": 1}]
    if name == "qwen3_moe":
        kinds += [{"pp": 2, "cp": 2, "ep": 2, "recompute": "alternate"}, {"dp": 2, "cp": 2, "ep": 4, "zero": 2}]
    run_ranks(4, "planned", "trains", name, kinds, preload=HUGGING_FACE, timeout_s=200)
