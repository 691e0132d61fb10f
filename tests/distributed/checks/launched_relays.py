"""Long messages between two neighbours on a ring, which the two other ranks pass on; one of these may be stopped."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mycel.runtime import tensor_group
from mycel.runtime.p2p_pool import Flight, Piece

NUM_BYTES, NUM_MESSAGES = 4 << 20, 6
passed: list[Piece] = []


def count(flight: Flight, number: int, place: int) -> Piece:
    passed.append(taken(flight, number, place))
    return passed[-1]


taken = Flight.taken
Flight.taken = count  # type: ignore[method-assign]


def given(number: int) -> torch.Tensor:
    return torch.arange(NUM_BYTES // 4, dtype=torch.float32) + number


def main() -> None:
    dist.init_process_group("mycel")
    rank = dist.get_rank()
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    stops = sys.argv[2] == "stop"
    ends = torch.zeros(1)
    counts: list[int] = []
    if rank == 0:
        for number in range(NUM_MESSAGES):
            if stops and number == NUM_MESSAGES // 2:
                os.kill(pids[2], signal.SIGSTOP)
            dist.send(given(number), 1)
            counts.append(len(passed))
        outlet = tensor_group()._messages._endpoint._exchange.outlets[1]  # type: ignore[attr-defined]
        os.kill(pids[2], signal.SIGCONT)
        for other in (2, 3):
            dist.send(ends, other)
        answer = {"passed": counts, "relays": len(outlet.relays)}
        Path(sys.argv[1], "rank0.json").write_text(json.dumps(answer))
    elif rank == 1:
        came = torch.zeros(NUM_BYTES // 4)
        for number in range(NUM_MESSAGES):
            dist.recv(came, 0)
            assert torch.equal(came, given(number)), number
    else:
        dist.recv(ends, 0)
    dist.barrier()
    dist.destroy_process_group()


main()
