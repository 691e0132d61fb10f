"""Run by the fault tests on every rank: one rank dies or stops in the middle of an all_reduce; the others report.

Usage: fault.py kill|stop VICTIM TIMEOUT_S sync|async
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import mycel.runtime  # noqa: F401  (registers the backend)

how, victim, timeout_s, mode = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
rank = int(os.environ["RANK"])
dist.init_process_group("mycel", timeout=timedelta(seconds=timeout_s))
data = torch.ones(4 << 20)
small = torch.ones(1024)
dist.all_reduce(small)


def attempt() -> tuple[str, str, float]:
    began = time.monotonic()
    try:
        if mode == "async":
            dist.all_reduce(data, async_op=True).wait()
        else:
            dist.all_reduce(data)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "none", "", time.monotonic() - began


if rank == victim:
    # The collective is under way, and not through, when the victim goes: the others cannot finish without it.
    dist.all_reduce(data, async_op=True)
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
first = attempt()
second = attempt()
print(json.dumps({"rank": rank, "first": first, "second": second}), flush=True)
os._exit(7)
