"""The engine for devices over Gloo's point-to-point operations: on the CPU, but in steps as on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.effort import long

from mycel.runtime.backend import is_called_by_torch

RunRanks = Callable[..., list[Any]]

FABRICS = {
    2: "star:ranks=2,bandwidth=10 Gbit/s",
    3: "ring:ranks=3,bandwidth=10 Gbit/s",
    4: "two_boxes:ranks=4,inside=100 Gbit/s,between=10 Gbit/s",
    5: "ring:ranks=5,bandwidth=10 Gbit/s",
}
NAMES = {
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
}


@pytest.mark.parametrize("world_size", [3, pytest.param(5, marks=long)])  # the unit tests have the others
def test_everything(run_ranks: RunRanks, world_size: int) -> None:
    results = run_ranks(world_size, "devices", "everything", env={"MYCEL_TOPOLOGY": FABRICS[world_size]})
    assert {name.removesuffix(" of parts") for name in results[0]["ran"]} >= NAMES
    for check, value in results[0].items():
        assert all(result[check] == value for result in results), f"{check}: ranks differ"


@pytest.mark.parametrize("world_size", FABRICS)
def test_the_bits_of_the_engine_for_sockets(run_ranks: RunRanks, world_size: int) -> None:
    results = run_ranks(world_size, "devices", "same_bits", env={"MYCEL_TOPOLOGY": FABRICS[world_size]})
    assert {"forest", "tree"} <= set(results[0])


#: From torch 2.14 on, a group has a backend for each device that it names, and NCCL's cannot be made without a GPU.
without_gpu = pytest.mark.skipif(
    is_called_by_torch() and not torch.cuda.is_available(), reason="torch makes NCCL's group, which needs a GPU"
)


@pytest.mark.parametrize(
    "backend",
    ["cpu:mycel,cuda:mycel", pytest.param("cpu:mycel,cuda:nccl", marks=without_gpu), "cpu:gloo,cuda:mycel"],
)
def test_a_backend_for_each_device(run_ranks: RunRanks, backend: str) -> None:
    """Before torch 2.14 they all give the one group that serves every device; then, each device has its own."""
    of_cpus = "gloo" if is_called_by_torch() and "cpu:gloo" in backend else "mycel"
    assert run_ranks(2, "devices", "of_which_group", backend=backend) == [of_cpus] * 2


def test_training(run_ranks: RunRanks) -> None:
    ours = run_ranks(3, "devices", "training", env={"MYCEL_TOPOLOGY": FABRICS[3]})
    theirs = run_ranks(3, "devices", "training_over_gloo", backend="gloo")
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        for form, losses in mine.items():
            assert losses == pytest.approx(other[form], rel=1e-5), form


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and a torch made for it")
def test_one_rank_on_a_gpu(run_ranks: RunRanks) -> None:
    run_ranks(1, "devices", "one_on_a_gpu")
