"""Orders of pipelines run through torch: losses and gradients are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.effort import long

PRELOAD = ["mycel.parallel"]
#: Of a wait for a message, and for a busy machine's wake-up.
TIMEOUT_S, LATE_S = 4.0, 10.0


@pytest.mark.parametrize("backend", ["mycel", "gloo"])
@pytest.mark.parametrize("size", [2, 3])
def test_torchs_own_orders(run_ranks: Callable[..., list[Any]], size: int, backend: str) -> None:
    run_ranks(size, "pipelines", "torchs", backend=backend, preload=PRELOAD, timeout_s=60)


@pytest.mark.parametrize("backend", ["mycel", "gloo"])
@pytest.mark.parametrize("size", [2, 4])
def test_orders_that_torch_has_no_class_for(run_ranks: Callable[..., list[Any]], size: int, backend: str) -> None:
    run_ranks(size, "pipelines", "unlike", backend=backend, preload=PRELOAD, timeout_s=60)


@pytest.mark.parametrize("backend", ["mycel", "gloo"])
@pytest.mark.parametrize("what", ["m_shape", "k_shape", "sharded", "recomputed", "evaluated"])
def test_shapes_and_what_is_inside(run_ranks: Callable[..., list[Any]], what: str, backend: str) -> None:
    run_ranks(4, "pipelines", what, backend=backend, preload=PRELOAD, timeout_s=60)


def test_what_does_not_fit_is_refused(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(2, "pipelines", "refused", preload=PRELOAD, timeout_s=60)


@pytest.mark.parametrize("backend", ["mycel", "gloo"])
def test_torchs_classes_in_our_place(run_ranks: Callable[..., list[Any]], backend: str) -> None:
    run_ranks(2, "pipelines", "by_torch", backend=backend, preload=PRELOAD, timeout_s=60)


def test_one_process_holds_the_orders(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    happened = run_ranks(3, "pipelines", "controlled", str(tmp_path / "store"), preload=PRELOAD, timeout_s=60)
    assert happened == [["one0", "other0", "other1", "one1"]] * 2 + [[]]


@long
@pytest.mark.parametrize("backend", ["mycel", "gloo"])
@pytest.mark.parametrize("size", [3, 4, 5])
def test_both_at_more_ranks(run_ranks: Callable[..., list[Any]], size: int, backend: str) -> None:
    for function in ("torchs", "unlike"):
        run_ranks(size, "pipelines", function, backend=backend, preload=PRELOAD, timeout_s=200)


@pytest.mark.parametrize("backend", ["mycel", pytest.param("gloo", marks=long)])
def test_tensor_pipeline_and_data(run_ranks: Callable[..., list[Any]], backend: str) -> None:
    run_ranks(8, "pipelines", "threefold", backend=backend, preload=PRELOAD, timeout_s=200)


@pytest.mark.parametrize(("backend", "how"), [("mycel", "kill"), ("gloo", "kill"), ("mycel", "stop")])
def test_of_a_lost_rank_survivors_say_what_they_wait_for(
    run_ranks: Callable[..., list[Any]], backend: str, how: str
) -> None:
    reports = run_ranks(4, "pipelines", "lost", backend, how, 2, TIMEOUT_S, backend=None, preload=PRELOAD)
    assert reports[2] is None
    for rank in (0, 1, 3):
        (first, _, _), (kind, words, seconds) = reports[rank]
        assert first == "none" and kind in ("PeerLostError", "CollectiveTimeoutError"), reports
        assert words.startswith(f"rank {rank} was at ") and seconds < 2 * TIMEOUT_S + LATE_S, reports
    # Its neighbours wait for what it was about to do: the forward in which it went, and the backward after that.
    assert "waits for 2F3 of rank 2" in reports[3][1][1]
    assert "waits for 2B2 of rank 2" in reports[1][1][1]
    if backend == "mycel":  # over Gloo, who is no neighbour learns only of the neighbour who gave up
        assert "behind that for 2B2 of rank 2" in reports[0][1][1]
