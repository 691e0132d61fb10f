"""A common start of a timed round: all ranks at the same moment of one clock, where they have one.

The last messages of a barrier travel over the links that are about to be measured. Ranks that leave it first begin at
once, and what they send holds up the others' last messages: the better a backend fills the links, the longer it
seems to take, by 2 of 22 ms for 256 KB between eight ranks. Ranks on one machine share a clock, so there rank 0 names
a moment a little ahead, and everybody waits for it. On several machines the barrier has to do.

References:
    S. Hunold, A. Carpen-Amarie, "Reproducible MPI benchmarking is still not as easy as you think", IEEE Transactions
    on Parallel and Distributed Systems 27(12), 2016 (section 4: window-based starts).
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["WINDOW_S", "Start"]

#: From naming the moment to the moment: enough for the name to reach eight ranks on two busy cores.
WINDOW_S = 0.01
#: What tells whether two processes read one clock: the running kernel and, in it, the namespace of its clocks.
_CLOCK = (Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/timens_offsets"))


class Start:
    """Lets all ranks of a group go on together. Every rank makes one, at the same point, and calls it as often.

    Args:
        control: group for the barrier and the moment; not one that is measured.

    Attributes:
        control: the group.
        shares_clock: all ranks read one clock.
    """

    def __init__(self, control: dist.ProcessGroup) -> None:
        self.control = control
        clocks: list[object] = [None] * dist.get_world_size(control)
        dist.all_gather_object(clocks, _clock(), group=control)
        self.shares_clock = clocks[0] is not None and len(set(clocks)) == 1

    def __call__(self) -> None:
        """Wait for everybody."""
        dist.barrier(group=self.control)
        if not self.shares_clock:
            return
        moment = torch.tensor([time.monotonic_ns() + int(WINDOW_S * 1e9)])
        dist.broadcast(moment, src=dist.get_global_rank(self.control, 0), group=self.control)
        time.sleep(max(0.0, (int(moment) - time.monotonic_ns()) / 1e9))


def _clock() -> str | None:
    try:
        return "".join(path.read_text(encoding="ascii") for path in _CLOCK if path.exists()) or None
    except OSError:
        return None
