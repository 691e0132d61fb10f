"""Examples of the annex give on several ranks what one process gives."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

RunRanks = Callable[..., list[Any]]
ENCRYPTED = find_spec("tenseal") is not None


def assert_alike(run_ranks: RunRanks, world_size: int) -> None:
    alone = run_ranks(1, "annex_examples", "results", ENCRYPTED, backend=None)[0]
    ranks = run_ranks(world_size, "annex_examples", "results", ENCRYPTED)
    for rank, mine in enumerate(ranks):
        for name in ("total", "products", "normalised", "count"):
            assert np.allclose(mine["pose"][name], alone["pose"][name], rtol=1e-12, atol=1e-15)
        ours, theirs = mine["reinforcement"], alone["reinforcement"]
        assert ours["steps"] == theirs["steps"] and np.allclose(ours["scores"], theirs["scores"], equal_nan=True)
        assert np.abs(ours["parameters"] - theirs["parameters"]).max() < 1e-9
        assert (ours["parameters"] == ranks[0]["reinforcement"]["parameters"]).all()
        early = mine["stopped_early"]
        assert early["steps"] == (32 if rank == 0 else 8) and early["samples"] == 2 * (32 + 8 * (world_size - 1))
        assert early["off"] < 1e-12
        assert mine["point_clouds"]["trained"] == alone["point_clouds"]["trained"]
        assert np.allclose(mine["point_clouds"]["losses"], alone["point_clouds"]["losses"], rtol=1e-4)
        assert mine["diffusion_schedule"] == alone["diffusion_schedule"]
        for method, (errors, against) in mine["tasks"].items():
            assert np.allclose(errors, alone["tasks"][method][0], rtol=1e-9), method
            assert against == alone["tasks"][method][1]
        assert mine["ensemble"] == alone["ensemble"]
        assert len(mine["refusals"]) == (4 if world_size > 2 else 3)
        assert f"{world_size + 1} environments on {world_size} ranks" in mine["refusals"][0]
        assert f"a batch of {2 * world_size + 1} clouds on {world_size} ranks" in mine["refusals"][1]
        assert f"{world_size + 1} members on {world_size} ranks" in mine["refusals"][2]
        if world_size > 2:
            assert f"{world_size} ranks for 2 tasks with batches of {world_size + 1}" in mine["refusals"][3]
    if ENCRYPTED:
        assert ranks[0]["encrypted_inference"]["off"] < 1e-2
        assert all(mine["encrypted_inference"] == {} for mine in ranks[1:])


def test_two_ranks_give_what_one_process_gives(run_ranks: RunRanks) -> None:
    assert_alike(run_ranks, 2)


@pytest.mark.long
def test_four_ranks_give_what_one_process_gives(run_ranks: RunRanks) -> None:
    assert_alike(run_ranks, 4)
