"""How benchmarks come to their ranks: those that a launcher has started, or processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["are_launched", "be_rank", "run_here"]


def are_launched() -> bool:
    """Whether ``torchrun``, ``mycel emulate`` or the like has started this process as one of several ranks."""
    return "RANK" in os.environ


def be_rank(
    measure: Callable[[Any], None], options: Any, timeout: timedelta, place: tuple[int, int, str] | None = None
) -> None:
    """Be one rank, over Gloo, with mycel's code compiled before any clock runs.

    Args:
        measure: what every rank does, given ``options``.
        options: of the command.
        timeout: of the group.
        place: rank, number of ranks and the store's file, where no launcher has said so.
    """
    import mycel.runtime  # registers the backend

    mycel.runtime.warm()
    torch.set_num_threads(1)
    if place is None:
        dist.init_process_group("gloo", timeout=timeout)
    else:
        rank, size, file = place
        store = dist.FileStore(file, size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    measure(options)
    dist.destroy_process_group()


def run_here(size: int, measure: Callable[[Any], None], options: Any, timeout: timedelta) -> int:
    """Start ranks as processes of this machine, and wait for them; the worst of their exit codes, without sign."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        places = [(rank, size, f"{folder}/store") for rank in range(size)]
        ranks = [context.Process(target=be_rank, args=(measure, options, timeout, place)) for place in places]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return max(abs(process.exitcode or 0) for process in ranks)
