"""Stands where a rank stands: starts it, and starts it again when it was killed. What a cluster's scheduler does.

It has imported everything before the first rank is needed, and ranks are forks of it, so that a rank is back soon
after it has died. At place 0 a process of its own serves the store in which ranks agree on who is there: it outlives
them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
import train

import mycel
from mycel import runtime

#: Seconds that a killed rank stays away.
AWAY_S = float(os.environ.get("ELASTIC_AWAY_S", "5"))


def serve_store() -> None:
    """In a fork, for ever: a store whose process no rank can take down."""
    if os.fork() == 0:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
        store.wait(["never"], timedelta(days=7))


def start_rank() -> int:
    """A fork that trains; its process number."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            train.main()
            code = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(f"pid {pid}\n", end="", flush=True)
    return pid


def main() -> None:
    """Until the rank ends by itself."""
    torch.set_num_threads(1)
    runtime.warm()
    for name in ("all_reduce", "broadcast"):  # loads what makes schedules, which a rank that is back needs at once
        mycel.synthesize(mycel.load_topology("star:ranks=3"), name)
    train.text()
    if os.environ["RANK"] == "0":
        serve_store()
    while True:
        _, status = os.waitpid(start_rank(), 0)
        code = os.waitstatus_to_exitcode(status)
        if code != -signal.SIGKILL:
            sys.exit(abs(code))
        time.sleep(AWAY_S)


if __name__ == "__main__":
    main()
