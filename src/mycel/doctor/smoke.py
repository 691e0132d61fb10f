"""Two ranks on loopback that add an array: the smallest job there is."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mycel.brief import brief

__all__ = ["SmokeRun", "run_two_ranks"]

#: What each rank does. The store is a file: nothing listens where somebody else may.
_RANK = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
import mycel.runtime
rank, file, timeout = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
torch.set_num_threads(1)
store = dist.FileStore(file, 2)
dist.init_process_group("mycel", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=timeout))
array = torch.full((100_000,), float(rank + 1))
dist.all_reduce(array)
assert bool((array == 3.0).all()), f"1 + 2 gave {array[array != 3.0][0].item()}"
dist.destroy_process_group()
"""
#: Variables that are about another job than these two ranks.
_OF_A_JOB = ("MYCEL_TOPOLOGY", "MYCEL_WIRING", "MYCEL_RANKS", "MYCEL_PLACE", "RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeRun:
    """How two ranks did.

    Attributes:
        started_s: seconds from the start of the processes to their end; both import torch.
        way: what moved the array.
        error: the last line that a rank which failed has said; empty where none did.
    """

    started_s: float
    way: str
    error: str

    __repr__ = brief


def run_two_ranks(timeout_s: float) -> SmokeRun:
    """Start two ranks on this machine, which sum an array and end.

    Args:
        timeout_s: seconds they may take together; a rank that still runs then is stopped.
    """
    env = {name: value for name, value in os.environ.items() if name not in _OF_A_JOB}
    way = {"unix": "unix sockets", "tcp": "TCP"}.get(env.get("MYCEL_LOCAL", ""), "shared memory")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mycel-doctor-") as folder:
        file = str(Path(folder) / "store")
        ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", _RANK, str(rank), file, str(timeout_s)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=env | {"MYCEL_FLIGHT_DIR": folder},
            )
            for rank in range(2)
        ]
        said = [_end_of(rank, begin + timeout_s) for rank in ranks]
    error = next((lines for rank, lines in zip(ranks, said, strict=True) if rank.returncode), "")
    return SmokeRun(started_s=time.monotonic() - begin, way=way, error=error)


def _end_of(rank: subprocess.Popen[str], until: float) -> str:
    """Wait for a rank's end; what it said last, in a line."""
    try:
        _, said = rank.communicate(timeout=max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        rank.kill()
        with suppress(subprocess.TimeoutExpired):
            rank.communicate(timeout=10)
        return "the time was over before the ranks had come together"
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"ended with code {rank.returncode}"
