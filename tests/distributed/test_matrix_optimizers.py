"""Dion and Muon over ranks: equal to one process with all data, the same bits everywhere, few bytes, no traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RunRanks = Callable[..., list[Any]]
CHECKS = "matrix_optimizers"


@pytest.mark.parametrize("kind", ["dion", "muon", "mixed"])
@pytest.mark.parametrize(("how", "size", "backend"), [("ddp", 2, "mycel"), ("ddp", 3, "gloo"), ("fsdp", 3, "gloo")])
def test_equals_one_process(run_ranks: RunRanks, how: str, size: int, backend: str, kind: str) -> None:
    for difference, same_bits in run_ranks(size, CHECKS, "equals_one_process", how, kind, backend=backend):
        assert difference < 1e-9
        assert same_bits


def test_sharded_over_mycel(run_ranks: RunRanks) -> None:
    assert all(d < 1e-9 and same for d, same in run_ranks(2, CHECKS, "equals_one_process", "fsdp", "mixed"))


def test_factors_are_fewer_bytes(run_ranks: RunRanks) -> None:
    for found in run_ranks(2, CHECKS, "sends", backend="gloo"):
        sent = {way: bytes_ for way, (bytes_, _) in found.items()}
        exact = found["muon torch.float32"][1]
        assert sent["dion torch.bfloat16"] < sent["dion torch.float32"] < exact
        assert exact < sent["muon torch.bfloat16"] < sent["muon torch.float32"] < 1.6 * exact


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_an_overflow_of_one_rank_is_everybodys(run_ranks: RunRanks, how: str) -> None:
    for fine in run_ranks(2, CHECKS, "overflow_is_everybodys", how, backend="gloo", timeout_s=100):
        assert all(fine.values()), fine


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_resumes(run_ranks: RunRanks, how: str) -> None:
    for own, mean in run_ranks(2, CHECKS, "resumes", how, backend="gloo"):
        assert own == 0
        assert mean < 1e-9


def test_after_close_momenta_are_alike(run_ranks: RunRanks) -> None:
    assert max(run_ranks(2, CHECKS, "closing_averages", backend="gloo")) < 1e-9


def test_refuses(run_ranks: RunRanks) -> None:
    for said in run_ranks(2, CHECKS, "refuses", backend="gloo"):
        assert len(said) == 3
        for words, text in zip(("clipping", "already", "bias"), said, strict=True):
            assert words in text


def test_what_a_rank_has_alone_does_not_pile_up(run_ranks: RunRanks) -> None:
    for deviation in run_ranks(2, CHECKS, "deviations_fade", backend="gloo"):
        assert abs(deviation - 1) < 1e-4  # 1/2 + 1/4 + ...; 20 where ranks take off the mean's part
