"""Ranks that find each other: again on one port, over a store that stays, with a job's secret."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_destroy_and_init_again_on_one_port(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(3, "meeting", "again_on_one_port", _free_port(), 3, backend=None) == [3] * 3


def test_a_store_that_outlives_its_groups(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(2, "meeting", "over_one_store", 3, backend=None) == [3] * 2


def test_a_job_with_a_secret(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("twenty-four bytes of it.")
    file.chmod(0o600)
    assert run_ranks(3, "meeting", "with_a_secret", env={"MYCEL_SECRET_FILE": str(file)}) == [[3.0] * 3] * 3
