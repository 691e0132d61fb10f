"""A rank that holds its interpreter while the others wait for it: holding.py SECONDS [DOUBT ASK LOST].

The last three stand in for ``mycel.runtime.silence``'s seconds, so that a short time is a long one.
"""

from __future__ import annotations

import ctypes
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import mycel.runtime  # noqa: F401  (registers the backend)
from mycel.runtime import silence, watch

WHO = 1


def main() -> None:
    seconds, *thresholds = (float(word) for word in sys.argv[1:])
    if thresholds:
        silence.DOUBT_S, silence.ASK_S, silence.LOST_S = thresholds
        silence._HEARSAY_S = thresholds[2]
        watch.DOUBT_S, watch.LOST_S = thresholds[0], thresholds[2]
    dist.init_process_group("mycel", timeout=timedelta(seconds=seconds + 60))
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((1000,), rank + 1.0)
    dist.all_reduce(tensor)
    for half in range(2):  # while the others are in a collective, and while they make a group
        if rank == WHO:
            ctypes.PyDLL(None).usleep(int(seconds * 5e5))  # PyDLL, unlike CDLL, keeps the interpreter
        if half:
            group = dist.new_group()
            dist.all_reduce(tensor, group=group)
        else:
            dist.all_reduce(tensor)
    assert (tensor == size * (size + 1) / 2 * size**2).all()
    dist.destroy_process_group()
    print(f"rank {rank} is through", flush=True)


if __name__ == "__main__":
    main()
