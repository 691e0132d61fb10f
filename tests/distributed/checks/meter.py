"""What every rank runs for ``test_meter.py``: collectives, and what was counted of them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mycel.runtime


class Writer:
    """As TensorBoard's, as far as it is used."""

    def __init__(self) -> None:
        self.added: list[tuple[str, float, int | None]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        self.added.append((tag, scalar_value, global_step))


def counted(rank: int, world_size: int, folder: str) -> tuple[dict[str, Any], dict[str, Any], str, list[Any]]:
    """Collectives of two groups: the counts of all groups and of one, the file, and what a writer was given."""
    pair = dist.new_group([0, 1])
    writer = Writer()
    for _ in range(3):
        dist.all_reduce(torch.ones(50_000))
    mycel.runtime.log_metrics(writer, 1)
    dist.all_reduce(torch.ones(50_000))
    if rank < 2:
        dist.broadcast(torch.ones(10, dtype=torch.int16), src=1, group=pair)
    mycel.runtime.log_metrics(writer, 2)
    file = mycel.runtime.write_metrics(f"{folder}/rank{{rank}}.prom")
    found = mycel.runtime.metrics()
    of_pair = mycel.runtime.metrics(pair) if rank < 2 else found
    dist.barrier()
    assert file is not None
    return found, of_pair, file.read_text(), writer.added


def overrun(rank: int, world_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """More calls than the recorder keeps: without a reading in between, and then with."""
    store = dist.FileStore(os.environ["STORE_FILE"], world_size)
    dist.init_process_group("mycel", store=store, rank=rank, world_size=world_size)
    for _ in range(100):
        dist.all_reduce(torch.ones(4))
    first = mycel.runtime.metrics()
    for _ in range(10):
        for _ in range(10):
            dist.all_reduce(torch.ones(4))
        last = mycel.runtime.metrics()
    dist.destroy_process_group()
    return first, last


def by_itself(rank: int, world_size: int, file: str) -> str:
    """With ``MYCEL_METRICS``: the first file that has calls in it, which nobody asked for."""
    store = dist.FileStore(os.environ["STORE_FILE"], world_size)
    dist.init_process_group("mycel", store=store, rank=rank, world_size=world_size)
    dist.all_reduce(torch.ones(10))
    mine, deadline = Path(file.replace("{rank}", str(rank))), time.monotonic() + 60
    while "all_reduce" not in (text := mine.read_text() if mine.exists() else ""):
        assert time.monotonic() < deadline, text
        time.sleep(0.01)
    dist.destroy_process_group()
    return text
