"""Compression for FSDP2: it trains, says what it sends, and goes on after a restart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

RunRanks = Callable[..., list[Any]]
MODULE = "fsdp_compression"
backends = pytest.mark.parametrize("backend", ["gloo", "mycel"])


@backends
@pytest.mark.parametrize("world_size", [2, 3])
def test_it_trains_as_without(run_ranks: RunRanks, world_size: int, backend: str) -> None:
    for found in run_ranks(world_size, MODULE, "trains", backend=backend):
        for name in ("plain", "half", "kept"):
            assert found[f"{name}, compressed"] == pytest.approx(found[name], rel=0.02), name
            assert found[f"{name}, compressed"] != found[name]


def test_every_compressor_of_one_round_works_and_others_are_refused(run_ranks: RunRanks) -> None:
    for found in run_ranks(3, MODULE, "takes_any", backend="gloo"):
        exact = found.pop("exact")
        refused = {name for name, losses in found.items() if isinstance(losses, str)}
        assert refused == {"powersgd", "random_k"}
        assert "in several rounds" in found["powersgd"]
        for name, losses in found.items():
            if name not in refused:
                assert losses[0] == pytest.approx(exact[0], rel=1e-6), name  # nothing was reduced yet
                assert losses[-1] < 0.9 * losses[0], name
        for name in ("bf16", "fp16", "fp8", "int8", "lattice"):
            assert found[name] == pytest.approx(exact, rel=0.05), name


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_are_those_of_the_formula(run_ranks: RunRanks, world_size: int) -> None:
    for counted, formula, exact in run_ranks(world_size, MODULE, "sends", backend="gloo"):
        assert counted == formula
        assert 3 < exact / counted < 5.4  # 8 bits out, 4 bits back, four bytes for every 64 values, vectors whole


def test_vectors_are_exact_and_matrices_near(run_ranks: RunRanks) -> None:
    for errors in run_ranks(3, MODULE, "vectors_are_exact", backend="gloo"):
        small = [error for count, error in errors.values() if count < 256]  # all vectors, and one tiny matrix
        matrices = [error for count, error in errors.values() if count >= 256]
        assert max(small) < 1e-6 < 1e-5 < min(matrices)
        assert max(matrices) < 0.3


def test_weights_are_the_same_forward_and_backward_and_everywhere(run_ranks: RunRanks) -> None:
    assert run_ranks(3, MODULE, "same_weights_twice", backend="gloo") == [True] * 3


def test_gradients_accumulate_and_may_be_missing(run_ranks: RunRanks) -> None:
    for used, unused in run_ranks(2, MODULE, "accumulates", backend="gloo"):
        assert 0 < used < 0.02
        assert 0 < unused < 0.02


@backends
def test_full_precision_inside_nodes_and_compressed_between(run_ranks: RunRanks, backend: str) -> None:
    all_found = run_ranks(4, MODULE, "between_nodes", backend=backend)
    for found in all_found:
        assert found["flat"] == pytest.approx(found["none"], rel=0.02)
        assert found["nodes"] == pytest.approx(found["none"], rel=0.02)
        flat, nodes = found["flat bytes"], found["nodes bytes"]
        assert flat["inside"] == 0 < nodes["inside"]
        assert nodes["compressed"] * 3 == flat["compressed"]  # one row goes to the other node instead of three
        assert nodes["compressed"] == found["nodes formula"] * 4
        for name, weights in found["nodes weights"].items():
            assert np.array_equal(weights, all_found[0]["nodes weights"][name])


@backends
def test_only_the_mean_over_replicas_is_compressed(run_ranks: RunRanks, backend: str) -> None:
    all_found = run_ranks(4, MODULE, "between_replicas", backend=backend)
    for found in all_found:
        assert found["exact"] == pytest.approx(found["native"], rel=1e-5)
        assert found["int8"] == pytest.approx(found["native"], rel=0.02)
        assert found["powersgd"] == pytest.approx(found["native"], rel=1e-3)  # of full rank
        assert found["exact ratio"] == pytest.approx(1.0)
        assert found["int8 ratio"] > 2.5
        for method in ("int8", "powersgd"):
            assert found[f"{method} state"]
            for name, weights in found[f"{method} weights"].items():
                assert np.array_equal(weights, all_found[0][f"{method} weights"][name])


def test_levels_are_chosen_from_shards_and_the_same_everywhere(run_ranks: RunRanks) -> None:
    all_found = run_ranks(2, MODULE, "adapts", backend="gloo")
    losses, levels, table = all_found[0]
    assert [found[1] for found in all_found] == [levels, levels]
    assert len(set(levels.values())) > 1
    assert "embedding.weight" in levels
    assert "bytes instead of" in table
    assert all(np.isfinite(losses))


def test_memory_pays_back_what_rounding_lost(run_ranks: RunRanks) -> None:
    for with_memory, in_eight_bits, without, smaller in run_ranks(2, MODULE, "feedback_pays_back", backend="gloo"):
        assert with_memory < 0.1
        assert in_eight_bits < 0.11
        assert without > 3 * in_eight_bits
        assert 3.9 < smaller < 4


def test_a_step_that_overflowed_leaves_no_trace(run_ranks: RunRanks) -> None:
    for found in run_ranks(2, MODULE, "overflows", backend="gloo"):
        for name, (is_finite, is_same) in found.items():
            assert is_finite == [True, False, True, True], name
            assert is_same, name


def test_steps_are_counted(run_ranks: RunRanks) -> None:
    assert run_ranks(2, MODULE, "counts", backend="gloo") == [{"both": 3, "weights": 3, "sign": 3}] * 2


def test_weights_may_be_kept_by_a_few_ranks(run_ranks: RunRanks) -> None:
    for found in run_ranks(4, MODULE, "keeps_near", backend="gloo"):
        assert found["two"] == pytest.approx(found["all"], rel=1e-6)
        assert found["all inside"] == 0 < found["two inside"]
        for name in ("all", "two", "nodes"):
            assert found[f"{name} sent"][0] == found[f"{name} sent"][1]
        assert found["two sent"][0] < found["all sent"][0]
        assert found["nodes"] == pytest.approx(found["exact"], rel=0.02)
        assert found["nodes sent"][0] < found["two sent"][0] / 3  # one row instead of three, gradients of 4 bits
        assert found["said"][0] == "" and "reshard_after_forward=2" in found["said"][1]


def test_a_state_is_for_any_number_of_ranks(run_ranks: RunRanks) -> None:
    three = run_ranks(3, MODULE, "goes_on", None, backend="gloo")
    state, residuals, losses = three[0]
    assert any(abs(value) > 0 for value in residuals.values())
    for _, found, _ in run_ranks(2, MODULE, "goes_on", state, backend="gloo"):
        assert found == pytest.approx(residuals, rel=1e-4, abs=1e-6)
    assert all(np.isfinite(losses))


def test_a_resumed_run_is_the_uninterrupted_one(run_ranks: RunRanks) -> None:
    assert run_ranks(2, MODULE, "resumes_exactly", backend="gloo") == [True, True]


def test_it_can_be_taken_away(run_ranks: RunRanks) -> None:
    for without, after in run_ranks(2, MODULE, "detaches", backend="gloo"):
        assert after == without


def test_what_cannot_be_done_is_refused(run_ranks: RunRanks) -> None:
    for messages in run_ranks(2, MODULE, "refuses", backend="gloo"):
        assert len(messages) == 4
        assert "call torch.distributed.fsdp.fully_shard first" in messages[0]
        assert "mesh of 2 dimensions" in messages[1]
        assert "of other parameters or another method" in messages[2]
        assert "sharded over the whole world" in messages[3]


def test_advice_for_sharded_models_is_measured(run_ranks: RunRanks) -> None:
    for found in run_ranks(2, MODULE, "advises", backend="gloo"):
        sent, error = found["sent"], found["error"]
        assert list(sent) == ["uncompressed", "int8", "w8g8", "w4g4"]
        assert sent["uncompressed"] == found["formula"]
        assert sent["w4g4"] < sent["w8g8"] < sent["int8"] < sent["uncompressed"]
        assert error["uncompressed"] == 0 < error["w8g8"] < error["w4g4"]
        assert found["measured"] and found["untouched"]
