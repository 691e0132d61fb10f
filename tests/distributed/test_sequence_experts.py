"""Sequences and experts divided over the same ranks: losses and gradients of one process, balance of all tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tests.effort import long

RunRanks = Callable[..., list[Any]]


@pytest.fixture
def run(run_ranks: RunRanks) -> RunRanks:
    return partial(run_ranks, preload=["mycel.sequence", "mycel.moe"], timeout_s=240)


@pytest.mark.parametrize(
    ("world_size", "backend"), [(3, "gloo"), *(pytest.param(n, "mycel", marks=long) for n in (2, 3))]
)
def test_gradients_are_those_of_one_process(run: RunRanks, world_size: int, backend: str) -> None:
    for found in run(world_size, "sequence_experts", "divided", backend=backend):
        assert len(found) == 30
        assert not {case: error for case, error in found.items() if not error < 1e-12}


def test_relu_routing(run: RunRanks) -> None:
    assert max(run(2, "sequence_experts", "relu", backend="gloo")) < 1e-12


def test_groups_side_by_side(run: RunRanks) -> None:
    for found in run(3, "sequence_experts", "grouped", backend="gloo"):
        assert not {case: error for case, error in found.items() if not error < 1e-12}


def test_models_of_transformers(run: RunRanks) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    for found in run(2, "sequence_experts", "hugging_face", ["qwen3_moe"], backend="gloo"):
        assert max(found.values()) < 1e-6
    assert max(run(2, "sequence_experts", "balanced", "qwen3_moe", backend="gloo")) < 1e-6


@long
def test_more_models_of_transformers(run: RunRanks) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    for found in run(3, "sequence_experts", "hugging_face", ["gpt_oss", "minimax", "qwen3_next"], backend="mycel"):
        assert max(found.values()) < 1e-6
    assert max(run(3, "sequence_experts", "balanced", "minimax", backend="mycel")) < 1e-6


def test_what_would_mix_tokens_or_experts_is_refused(run: RunRanks) -> None:
    for said in run(2, "sequence_experts", "refused", backend="gloo"):
        reduced, replicas, sharded = said
        assert "dispatcher='all_reduce' is for ranks with the same tokens" in reduced
        assert "replicas= is for ranks with the same tokens" in replicas
        assert "fully_shard is over ranks 0, 1, which hold other experts each" in sharded
        assert all("\n" not in line for line in said)
