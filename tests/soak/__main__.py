"""Random collectives, one after the other and several at once, with every result checked.

    python -m tests.soak [--count 100000] [--ranks 4] [--seed 0] [--backend mycel]
    python -m tests.soak --unrest 3600    so many seconds, with things going on that are no failures

Kinds, sizes (none to a megabyte), types, reductions, groups, roots and whether a call is asynchronous are drawn from
one seed, so that all ranks draw the same. Contributions are small integers, in which every type and order of summing
is exact: a result is right bit for bit or wrong. Memory and descriptors are noted half of the way, when caches are
full, and at the end, each time after the allocator has given back what is free: a leak of a few hundred bytes a call
shows.

With ``--unrest`` four ranks run on an emulated cluster (root is needed) while ranks are stopped for 8 s, links are
down for 5 s, and the processors have other work: every result must be right, and no rank may see an error.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.soak.unrest import run_unrest
from torch import Tensor

from mycel.runtime.prepared import PREPARED

__all__ = ["Draw", "main", "soak"]

KINDS = (
    "all_reduce", "all_gather", "all_gather_list", "reduce_scatter", "broadcast", "reduce", "all_to_all",
    "all_to_all_uneven", "gather", "scatter", "barrier", "all_gather_uneven",
)  # fmt: skip
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
OPS = ("SUM", "MAX", "MIN")
#: Growth that is no leak: allocators keep what they have had.
MEMORY_SLACK = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One collective, the same on every rank."""

    kind: str
    group: int
    size: int
    dtype: torch.dtype
    op: str
    root: int
    is_async: bool
    salt: int

    @classmethod
    def of(cls, dice: random.Random, groups: Sequence[Sequence[int]]) -> Draw:
        group = dice.choice([0, 0, *range(len(groups))])
        exponent = dice.choice((0, 2, 4, 6, 8, 10, 12)) if dice.random() < 0.98 else dice.choice((14, 16, 17))
        return cls(
            kind=dice.choice(KINDS),
            group=group,
            size=0 if dice.random() < 0.02 else (1 << exponent) + dice.randint(0, 3),
            dtype=dice.choice(DTYPES),
            op=dice.choice(OPS),
            root=dice.choice(groups[group]),
            is_async=dice.random() < 0.4,
            salt=dice.randint(0, 1 << 30),
        )


def _given(draw: Draw, rank: int, size: int) -> Tensor:
    """What a rank contributes: integers up to 15, so that eight of them add up exactly in every type."""
    return (torch.arange(size, dtype=torch.int64).mul_(2654435761).add_(draw.salt + 97 * rank) >> 7 & 15).to(
        draw.dtype
    )


def _reduced(draw: Draw, parts: Sequence[Tensor]) -> Tensor:
    stacked = torch.stack([part.to(torch.int64) for part in parts])
    result = stacked.sum(0) if draw.op == "SUM" else stacked.amax(0) if draw.op == "MAX" else stacked.amin(0)
    return result.to(draw.dtype)


def _start(draw: Draw, group: Any, members: Sequence[int]) -> tuple[Any, Callable[[], None]]:
    """Start a collective; its work, if asynchronous, and a function that checks the result."""
    rank, n, size = dist.get_rank(), len(members), draw.size
    me, op = members.index(rank), getattr(dist.ReduceOp, draw.op)
    common: dict[str, Any] = {"group": group, "async_op": draw.is_async}
    expected: list[Tensor] = []
    got: list[Tensor] = []
    if draw.kind == "barrier":
        return dist.barrier(**common), lambda: None
    if draw.kind in ("all_reduce", "reduce"):
        tensor = _given(draw, rank, size)
        parts = [_given(draw, r, size) for r in members]
        got, expected = [tensor], [_reduced(draw, parts)]
        if draw.kind == "reduce":
            work = dist.reduce(tensor, draw.root, op=op, **common)
            expected = expected if rank == draw.root else [parts[me]]
        else:
            work = dist.all_reduce(tensor, op=op, **common)
    elif draw.kind == "broadcast":
        tensor = _given(draw, rank, size)
        got, expected = [tensor], [_given(draw, draw.root, size)]
        work = dist.broadcast(tensor, draw.root, **common)
    elif draw.kind == "all_gather":
        whole = torch.empty(size * n, dtype=draw.dtype)
        got, expected = [whole], [torch.cat([_given(draw, r, size) for r in members])]
        work = dist.all_gather_into_tensor(whole, _given(draw, rank, size), **common)
    elif draw.kind in ("all_gather_list", "all_gather_uneven"):
        lengths = [size + (37 * r if draw.kind == "all_gather_uneven" else 0) for r in range(n)]
        got = [torch.empty(length, dtype=draw.dtype) for length in lengths]
        expected = [_given(draw, r, length) for r, length in zip(members, lengths, strict=True)]
        work = dist.all_gather(got, expected[me].clone(), **common)
    elif draw.kind == "reduce_scatter":
        shard = torch.empty(size, dtype=draw.dtype)
        whole = _reduced(draw, [_given(draw, r, size * n) for r in members])
        got, expected = [shard], [whole[me * size : (me + 1) * size]]
        work = dist.reduce_scatter_tensor(shard, _given(draw, rank, size * n), op=op, **common)
    elif draw.kind in ("all_to_all", "all_to_all_uneven"):
        # The part from one to another is as long as both their places say.
        parted = [[size % 97 + (s * d % 3 if draw.kind[-1] == "n" else 0) for d in range(n)] for s in range(n)]
        sends, comes = parted[me], [parted[s][me] for s in range(n)]
        sent = _given(draw, rank, sum(sends))
        came = torch.empty(sum(comes), dtype=draw.dtype)
        parts = [_given(draw, r, sum(parted[s])).split(parted[s])[me] for s, r in enumerate(members)]
        got, expected = [came], [torch.cat(parts)]
        splits = (comes, sends) if draw.kind[-1] == "n" else ()
        work = dist.all_to_all_single(came, sent, *splits, **common)
    elif draw.kind == "gather":
        at_root = rank == draw.root
        got = [torch.empty(size, dtype=draw.dtype) for _ in members] if at_root else []
        expected = [_given(draw, r, size) for r in members] if at_root else []
        work = dist.gather(_given(draw, rank, size), got or None, dst=draw.root, **common)
    else:
        kept = torch.empty(size, dtype=draw.dtype)
        parts = [_given(draw, r, size) for r in members] if rank == draw.root else []
        got, expected = [kept], [_given(draw, rank, size)]
        work = dist.scatter(kept, parts or None, src=draw.root, **common)

    def check() -> None:
        for ours, right in zip(got, expected, strict=True):
            if not torch.equal(ours, right):
                raise AssertionError(f"rank {rank}: wrong result of {draw}")

    return work, check


def _footprint() -> tuple[int, int]:
    """Resident bytes and open descriptors of this process.

    Less what the allocator holds in reserve, and less the prepared programs, which are kept up to 64 MB in all and
    are still being added to after many thousand calls of ever new sizes.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") - PREPARED.num_bytes, len(list(Path("/proc/self/fd").iterdir()))


def _numbers(count: int, stop: Path | None) -> Iterator[int]:
    """Up to ``count``, or until ``stop`` exists, upon which the ranks agree."""
    if stop is None:
        yield from range(count)
        return
    for number in itertools.count():
        if number % 50 == 0:
            is_over = torch.tensor([int(stop.exists())])
            dist.all_reduce(is_over, dist.ReduceOp.MAX)
            if is_over.item():
                return
        yield number


def soak(count: int, seed: int, stop: Path | None = None) -> dict[str, Any]:
    """Run in an initialised process group of at least 2 ranks; what was counted.

    Args:
        count: collectives; with ``stop``, half of it is when memory is noted first.
        seed: of the draws.
        stop: a file that ends the run when it appears.
    """
    n = dist.get_world_size()
    members: list[list[int]] = [list(range(n))]
    members += [[r for r in range(n) if r % 2 == parity] for parity in (0, 1) if n >= 4]
    members += [list(range(1, n))] if n >= 3 else []
    groups = [dist.new_group(ranks) if i else dist.group.WORLD for i, ranks in enumerate(members)]
    dice = random.Random(seed)
    pending: list[tuple[Any, Callable[[], None]]] = []
    early, started = (0, 0), time.monotonic()
    done = 0
    for number in _numbers(count, stop):
        draw = Draw.of(dice, members)
        if number == count // 2:
            early = _footprint()
        if dist.get_rank() not in members[draw.group]:
            continue
        work, check = _start(draw, groups[draw.group], members[draw.group])
        done += 1
        if not draw.is_async:
            check()
            continue
        pending.append((work, check))
        if len(pending) >= 16 or draw.salt % 8 == 0:
            for waiting, check_it in pending:
                waiting.wait()
                check_it()
            pending.clear()
    for waiting, check_it in pending:
        waiting.wait()
        check_it()
    late = _footprint()
    return {
        "rank": dist.get_rank(), "collectives": done, "seconds": time.monotonic() - started,
        "memory": [early[0], late[0]], "descriptors": [early[1], late[1]],
    }  # fmt: skip


def _be_rank(rank: int, ranks: int, store: str, backend: str, count: int, seed: int, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    counted = soak(count, seed)
    dist.barrier()
    dist.destroy_process_group()
    Path(results, f"{rank}.json").write_text(json.dumps(counted), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 if every result was right and nothing grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="collectives to draw")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("mycel", "gloo"), default="mycel")
    parser.add_argument("--unrest", type=float, help="seconds to run on an emulated cluster without peace")
    options = parser.parse_args(arguments)
    if options.unrest is not None:
        return run_unrest(options.unrest, options.seed)
    import mycel.runtime

    mycel.runtime.warm()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        given = (options.ranks, store, options.backend, options.count, options.seed, folder)
        torch.multiprocessing.start_processes(_be_rank, given, nprocs=options.ranks, start_method="fork")
        counted = [json.loads(Path(folder, f"{r}.json").read_text(encoding="utf-8")) for r in range(options.ranks)]
    grown = False
    for row in counted:
        (memory, later), (descriptors, still) = row["memory"], row["descriptors"]
        grown |= later > memory * (1 + MEMORY_SLACK) or still > descriptors
        print(
            f"rank {row['rank']}: {row['collectives']} collectives right in {row['seconds']:.0f} s; memory beside "
            f"prepared programs {memory / 1e6:.0f} -> {later / 1e6:.0f} MB, descriptors {descriptors} -> {still}"
        )
    return int(grown)


if __name__ == "__main__":
    sys.exit(main())
