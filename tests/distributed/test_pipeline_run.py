"""Orders of pipelines run through torch: losses and gradients are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

PRELOAD = ["mycel.parallel"]


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
