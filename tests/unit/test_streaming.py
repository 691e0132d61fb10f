"""Copies past the caches: the same bytes as any other copy, at every alignment, and nothing beside them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mycel.runtime import streaming
from mycel.runtime.streaming import cache_bytes, copy_past_caches
from mycel.standalone import standalone


@standalone
def copied(dst: int, src: int, num_bytes: int) -> int:
    copy_past_caches(dst, src, num_bytes)
    return num_bytes


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 64, 65, 127, 1000, 4096, 70_001])
def test_bytes_arrive_at_every_alignment(num_bytes: int) -> None:
    source = np.random.default_rng(num_bytes).integers(1, 256, num_bytes + 256, dtype=np.uint8)
    for to, by in ((0, 0), (1, 0), (0, 1), (8, 24), (63, 64), (100, 3)):
        target = np.zeros(num_bytes + 256, dtype=np.uint8)
        assert copied(target.ctypes.data + to, source.ctypes.data + by, num_bytes) == num_bytes
        assert (target[to : to + num_bytes] == source[by : by + num_bytes]).all()
        assert not target[:to].any()
        assert not target[to + num_bytes :].any()


def test_the_largest_cache_is_what_the_machine_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, size in enumerate(("32K", "512K", "24576K", "nonsense")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(size + "\n")
    monkeypatch.setattr(streaming, "_CACHES", tmp_path)
    assert cache_bytes.__wrapped__() == 24576 << 10
    monkeypatch.setattr(streaming, "_CACHES", tmp_path / "none")
    assert cache_bytes.__wrapped__() == 32 << 20
