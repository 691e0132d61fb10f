"""A rank of MPI for ``loopback.py``, which starts it by ``mpiexec`` with a Python that has mpi4py and numpy.

    mpiexec -n 2 python benchmarks/mpi_rank.py ADDRESS

Each rank connects to the unix socket ``ADDRESS``, says which MPI it is, and then does one round for each line that
comes, ``{"collective", "bytes", "calls"}``: a check of its result, a barrier, and so many timed calls. Between rounds
it waits for its socket, and so takes no processor from whoever has the next turn.
"""

from __future__ import annotations

import json
import resource
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

ELEMENT = np.float32
#: Small whole numbers, whose sums are exact in float32.
_DIFFERENT = 251


def pattern(rank: int, count: int) -> Any:
    """What a rank gives: different on every rank and at every place."""
    return (np.arange(count) % _DIFFERENT + 1).astype(ELEMENT) * ELEMENT(1 << rank)


def prepared(collective: str, count: int, comm: Any) -> tuple[Callable[[], None], Any, Any, Callable[[], None]]:
    """A collective over ``count`` elements: the call, its result, what that must be, and what sets the inputs."""
    rank, size = comm.Get_rank(), comm.Get_size()
    block = count // size
    mine, blocks = slice(rank * block, (rank + 1) * block), range(size)
    array = np.zeros(count, ELEMENT)
    if collective == "all_reduce":
        wanted = sum(pattern(r, count) for r in blocks)
        return lambda: comm.Allreduce(MPI.IN_PLACE, array), array, wanted, lambda: _set(array, pattern(rank, count))
    if collective == "broadcast":
        given = pattern(0, count)
        return lambda: comm.Bcast(array), array, given, lambda: _set(array, given if rank == 0 else 0)
    if collective == "all_gather":
        own, wanted = pattern(rank, block), np.concatenate([pattern(r, block) for r in blocks])
        return lambda: comm.Allgather(own, array), array, wanted, lambda: _set(array, 0)
    if collective == "reduce_scatter":
        own, out = pattern(rank, count), np.zeros(block, ELEMENT)
        wanted = sum(pattern(r, count)[mine] for r in blocks)
        return lambda: comm.Reduce_scatter_block(own, out), out, wanted, lambda: _set(out, 0)
    if collective == "all_to_all":
        own = pattern(rank, count)
        wanted = np.concatenate([pattern(r, count)[mine] for r in blocks])
        return lambda: comm.Alltoall(own, array), array, wanted, lambda: _set(array, 0)
    raise SystemExit(f"no such collective over MPI: {collective}")


def _set(array: Any, value: Any) -> None:
    array[:] = value


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    comm = MPI.COMM_WORLD
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(sys.argv[1])
        lines = sock.makefile("rw", encoding="utf-8")

        def say(answer: dict[str, Any]) -> None:
            lines.write(json.dumps(answer) + "\n")
            lines.flush()

        say({"rank": comm.Get_rank(), "library": MPI.Get_library_version()})
        known: tuple[str, int] | None = None
        for line in lines:
            asked = json.loads(line)
            if known != (asked["collective"], asked["bytes"]):
                known = (asked["collective"], asked["bytes"])
                call, result, wanted, reset = prepared(known[0], known[1] // ELEMENT().itemsize, comm)
            reset()
            comm.Barrier()
            call()
            wrong = int((result != wanted).sum())
            reset()
            comm.Barrier()
            used, begin = _processor_seconds(), time.perf_counter()
            for _ in range(asked["calls"]):
                call()
            seconds = time.perf_counter() - begin
            used = _processor_seconds() - used
            say({"seconds": seconds / asked["calls"], "used": used / asked["calls"], "wrong": wrong})


if __name__ == "__main__":
    main()
