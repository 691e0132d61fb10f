"""Run under torchrun by the test of restarts: a rank is killed the first time round, and the second goes well.

Usage: restart.py DIRECTORY
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import mycel.runtime  # noqa: F401  (registers the backend)

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
note = Path(sys.argv[1]) / f"rank{rank}.attempt{attempt}"
dist.init_process_group("mycel", timeout=timedelta(seconds=60))
data = torch.full((1 << 20,), float(rank + 1))
dist.all_reduce(data)
if attempt == 0:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(data)
    except RuntimeError as error:
        note.write_text(f"{type(error).__name__}: {error}")
        raise
note.write_text(f"sum {data[0].item():g}")
dist.destroy_process_group()
