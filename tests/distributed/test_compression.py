"""Compressed gradients under DDP: what is equal, what telescopes, what is awkward, over mycel and over Gloo."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.effort import long

from mycel.bench.ranks import run_ranks as launch_ranks
from mycel.data_parallel.compress import COMPRESSORS, make_compressor
from mycel.topology.builders import star

RunRanks = Callable[..., list[Any]]
EVERY = sorted(COMPRESSORS)
WITH_FEEDBACK = [name for name in EVERY if make_compressor(name).is_contractive]


def test_awkward_models_train(run_ranks: RunRanks) -> None:
    for results in run_ranks(3, "compression", "each", "trains", EVERY):
        for name, result in results.items():
            assert result["identical"], name
            assert result["finite"], name
            assert result["steps"] == 6, name
            assert 0 < result["sent"] < result["exact"], name


def test_over_gloo_with_many_buckets(run_ranks: RunRanks) -> None:
    for results in run_ranks(4, "compression", "each", "trains", ["powersgd", "int4", "top_k"], backend="gloo"):
        assert all(result["identical"] and result["finite"] for result in results.values())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_losing_nothing_equals_plain_ddp(run_ranks: RunRanks, size: int) -> None:
    assert max(run_ranks(size, "compression", "equals_uncompressed")) < 1e-6


def test_feedback_telescopes(run_ranks: RunRanks) -> None:
    for results in run_ranks(3, "compression", "each", "telescopes", WITH_FEEDBACK):
        for name, (with_residuals, without) in results.items():
            half = name in ("bf16", "fp16")  # sums of halves are rounded by the network, which nobody sees
            assert with_residuals < (4e-3 if half else 1e-5), name
            assert half or without > 1e-4, name


NAMES_ANYHOW = ["powersgd", "top_k", "sign", "fp8", "tagc", "random_k"]


def test_nothing_that_is_owed_is_lost(run_ranks: RunRanks) -> None:
    for results in run_ranks(2, "compression", "each", "telescopes_anyhow", NAMES_ANYHOW, backend="gloo"):
        for name, lost in results.items():
            assert lost < 1e-5, name


def test_a_step_that_overflowed_changes_nothing(run_ranks: RunRanks) -> None:
    for fine in run_ranks(2, "compression", "each", "overflow_changes_nothing", NAMES_ANYHOW, backend="gloo"):
        assert all(fine.values()), fine


def test_complex_sparse_and_double_gradients_are_exact(run_ranks: RunRanks) -> None:
    for found in run_ranks(2, "compression", "complex_sparse_and_double", backend="gloo"):
        assert set(found) == {"embedding.weight", "turn", "last"}
        assert found.pop("last") < 1e-12
        assert max(found.values()) < 1e-6, found


def test_zeros_give_zeros(run_ranks: RunRanks) -> None:
    for fine in run_ranks(2, "compression", "each", "zeros", EVERY):
        assert all(fine.values()), fine


@pytest.mark.parametrize("function", ["half_types", "overflow_is_forgotten"])
def test_number_types(run_ranks: RunRanks, function: str) -> None:
    for fine in run_ranks(2, "compression", "each", function, ["powersgd", "int8", "bf16"]):
        assert all(fine.values()), fine


def test_a_run_goes_on_bit_for_bit(run_ranks: RunRanks) -> None:
    assert all(all(fine.values()) for fine in run_ranks(2, "compression", "each", "resumes", ["powersgd", "int8"]))


def test_a_run_goes_on_with_other_ranks(run_ranks: RunRanks, tmp_path: Path) -> None:
    file = str(tmp_path / "state.pt")
    two = run_ranks(2, "compression", "first_half", file)
    assert two[0] == two[1]
    for size in (1, 4):
        for numbers in run_ranks(size, "compression", "second_half", file):
            assert numbers == pytest.approx(two[0], rel=1e-3, abs=1e-3)


def test_what_makes_no_sense_is_refused(run_ranks: RunRanks) -> None:
    said = run_ranks(1, "compression", "complaints")[0]
    assert len(said) == 8
    wanted = (
        "wrap it first",
        "is not at least 0",
        "belongs to the policy",
        "compressed or combined already",
        "compressed or combined already",
        "another version",
        "own state",
        "shape",
    )
    for message, part in zip(said, wanted, strict=True):
        assert part in message


def test_a_closed_handle_leaves_plain_ddp(run_ranks: RunRanks) -> None:
    for results in run_ranks(2, "compression", "closes"):
        assert [name for name, _, _ in results] == ["compressed", "combined", "again"]
        for name, attached, closed in results:
            assert attached > 1e-2, name
            assert closed < 1e-6, name


def test_failures_are_raised_by_backward(run_ranks: RunRanks) -> None:
    assert all("this policy cannot look" in text for text in run_ranks(2, "compression", "failure_is_raised"))


def test_bytes_metered_equal_the_formula(run_ranks: RunRanks) -> None:
    for results in run_ranks(3, "compression", "each", "formula", EVERY):
        for name, (sent, formula) in results.items():
            assert sent == pytest.approx(formula), name


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.namespaces
@pytest.mark.parametrize("backend", ["mycel", pytest.param("gloo", marks=long)])
def test_bytes_metered_equal_the_interfaces(backend: str) -> None:
    names = ["bf16", "int4", "sign", "top_k", "powersgd"]
    records: list[dict[str, Any]] = []
    launch_ranks(
        star(num_ranks=3),
        [sys.executable, str(Path(__file__).parent / "programs" / "compression_bytes.py"), backend, *names],
        sink=lambda rank, record: records.append(record),
        timeout_s=200,
    )
    assert [r["name"] for r in records] == names
    for record in records:
        wire, metered, formula = record["counts"]
        assert metered == pytest.approx(formula, rel=0.01)
        # Headers, acknowledgements and a barrier come on top: a few per cent, and some KB for each of the four steps.
        assert metered < wire < 1.08 * metered + 4 * 3 * 6000, record


def test_hugging_face_trainer(run_ranks: RunRanks) -> None:
    pytest.importorskip("transformers")
    for losses, steps, ratio in run_ranks(2, "compression", "trainer"):
        assert steps == 12
        assert ratio > 2
        assert not losses or losses[-1] < losses[0]


def test_advice(run_ranks: RunRanks) -> None:
    for found in run_ranks(2, "compression", "advice"):
        rounds = found["local"]
        assert list(rounds) == ["local 10", "local 10 int4", "local 100", "local 100 int4"]
        assert rounds["local 10"][0] == pytest.approx(found["sent"]["uncompressed"] / 10)
        assert rounds["local 100 int4"][0] < found["sent"]["uncompressed"] / 700
        assert all(takes_longer for _, takes_longer in rounds.values())
        assert found["untouched"]
        assert found["best"] in found["text"] or found["best"] == "uncompressed"
        sent, error = found["sent"], found["error"]
        assert sent["uncompressed"] > 1.9 * sent["bf16"] > 3.6 * sent["int8"] > 3.6 * 1.8 * sent["int4"]
        assert error["uncompressed"] == 0 < error["bf16"] < error["int8"] < error["int4"] < 1
        assert all(seconds > 0 for seconds in found["step"].values())


@pytest.mark.parametrize("name", ["int8", "dense_int4", "terngrad", "tagc"])
def test_nothing_is_compiled_in_a_step(run_ranks: RunRanks, name: str) -> None:
    for found in run_ranks(2, "compression", "compiles_in_a_step", "replicated", name, backend="gloo"):
        assert found == {"new": [], "any": True}


@pytest.mark.parametrize(("kind", "name"), [("local", "dense_int4"), ("sharded", "qsdp"), ("eight bits", "powersgd")])
def test_nothing_is_compiled_in_other_steps(run_ranks: RunRanks, kind: str, name: str) -> None:
    for found in run_ranks(2, "compression", "compiles_in_a_step", kind, name, backend="gloo"):
        assert found == {"new": [], "any": True}
