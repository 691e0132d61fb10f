"""What every rank runs for ``test_flight.py``: collectives, and what the flight recorder has of them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mycel.runtime
from mycel.errors import CommunicationError


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def recorded(rank: int, world_size: int, folder: str) -> list[dict[str, Any]]:
    """Collectives of several kinds and groups; the lines of the dump, made with all groups open."""
    pair = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(50_000))
    dist.all_reduce(torch.ones(8, dtype=torch.float64), op=dist.ReduceOp.MAX, async_op=True).wait()
    dist.broadcast(torch.ones(3, dtype=torch.int16), src=1)
    if rank < 2:
        dist.all_gather_into_tensor(torch.empty(20), torch.ones(10), group=pair)
    dist.barrier()
    file = mycel.runtime.dump_flight_records(folder)
    dist.barrier()
    assert file is not None
    return read(file)


def on_request(rank: int, world_size: int, folder: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """With a folder in the environment: what SIGUSR2 writes, and what closing the group does."""
    store = dist.FileStore(os.environ["STORE_FILE"], world_size)
    dist.init_process_group("mycel", store=store, rank=rank, world_size=world_size)
    file = Path(folder) / f"rank{rank}.jsonl"
    dist.all_reduce(torch.ones(10))
    os.kill(os.getpid(), signal.SIGUSR2)
    by_signal = read(file)
    dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()
    return by_signal, read(file)


def off(rank: int, world_size: int) -> bool:
    dist.all_reduce(torch.ones(10))
    return mycel.runtime.dump_flight_records() is None


def failed(rank: int, world_size: int) -> tuple[str, list[str]]:
    """Rank 0 calls something else than the others: what is raised, with its notes."""
    dist.all_reduce(torch.ones(10))
    try:
        if rank == 0:
            dist.all_reduce(torch.ones(100_000))
        else:
            dist.all_reduce(torch.ones(100_000), op=dist.ReduceOp.MAX)
    except CommunicationError as error:
        return str(error), list(getattr(error, "__notes__", []))
    return "", []
