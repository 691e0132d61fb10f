"""Groups with their sockets against the number of ranks, all on one machine: what each rank needs to come up.

    python benchmarks/scale_sockets.py [--ranks 8,16,32,64] [--backends mycel,gloo] [--output FILE.jsonl]
    MYCEL_MESH_RANKS=0 python benchmarks/scale_sockets.py --ranks 128 --backends mycel --per-node 8

Ranks are forked from a process that has imported torch and loaded compiled code, and begin together. *start* is
``init_process_group``, *sum* the first all_reduce after it, *group* a ``new_group`` of all ranks, the mean of some.
*cpu* is what a rank and its threads spend, the mean of all ranks; *wall* that of the slowest; *open* how many
descriptors a rank has for the group when it is formed and after the first sum, the most of any rank but rank 0, which
serves the store, too; *MB* its private memory then, the most of all. With ``--per-node`` ranks of mycel take only so
many for those of their own machine: with the others they talk by TCP, over loopback.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mycel.runtime
from mycel.bench.measurement import describe_hardware, describe_versions
from mycel.runtime.transport import address, rendezvous
from mycel.settings import read_settings
from record import append, stamp
from scale import default_fabric, first_call

GROUPS = 5
WHATS = ("start", "sum", "group")
ELEMENTS = 256


def num_descriptors() -> int:
    """Open descriptors of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def private_mb() -> float:
    """Memory of this process that it shares with no other, in MB."""
    rows = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(row.split()[1]) for row in rows if row.startswith("Private_")) * 1024 / 1e6


def timed(what: str, act: Callable[[], object], record: dict[str, float], repeat: int = 1) -> None:
    """Do something so often; seconds of processor and wall that once takes go to ``record``."""
    wall, cpu = time.monotonic(), time.process_time()
    for _ in range(repeat):
        act()
    record[f"{what}_wall_s"] = (time.monotonic() - wall) / repeat
    record[f"{what}_cpu_s"] = (time.process_time() - cpu) / repeat


def pretend_machines(rank: int, per_node: int) -> None:
    """Have this process take itself for a rank of one of several machines."""
    address._host = lambda: f"node{rank // per_node}"
    rendezvous.is_loopback = lambda ip: False


def be_rank(backend: str, rank: int, num_ranks: int, folder: Path, limit_s: float, per_node: int | None) -> None:
    """The life of one rank."""
    if per_node is not None:
        pretend_machines(rank, per_node)
    before, memory = num_descriptors(), private_mb()
    record: dict[str, float] = {}
    store = dist.FileStore(str(folder / "gate"), num_ranks)
    store.add("come", 1)
    while store.add("come", 0) < num_ranks:
        time.sleep(0.05)
    init = dist.init_process_group
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": (folder / "port").read_text(encoding="ascii")}
    os.environ |= address | {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    timed("start", lambda: init(backend, timeout=timedelta(seconds=limit_s)), record)
    record["open_before"] = num_descriptors() - before
    x = torch.full((ELEMENTS,), float(rank))
    timed("sum", lambda: dist.all_reduce(x), record)
    if not bool((x == num_ranks * (num_ranks - 1) / 2).all()):
        raise RuntimeError(f"rank {rank}: wrong sum: {x}")
    record["open_after"] = num_descriptors() - before
    record["private_mb"] = private_mb() - memory
    dist.barrier()
    timed("group", lambda: dist.new_group(list(range(num_ranks))), record, GROUPS)
    dist.barrier()
    (folder / f"rank{rank}.json").write_text(json.dumps(record), encoding="utf-8")
    dist.destroy_process_group()


def measure(backend: str, num_ranks: int, limit_s: float, per_node: int | None) -> dict[str, float]:
    """One group of so many ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        free = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "port").write_text(str(free.port), encoding="ascii")
        del free
        children = []
        for rank in range(num_ranks):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    be_rank(backend, rank, num_ranks, folder, limit_s, per_node)
                    code = 0
                except Exception as error:
                    print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                finally:
                    os._exit(code)
            children.append(child)
        until = time.monotonic() + 2 * limit_s
        while children and time.monotonic() < until:
            children = [child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0]
            time.sleep(0.05)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        files = [folder / f"rank{rank}.json" for rank in range(num_ranks)]
        if missing := [file.stem for file in files if not file.exists()]:
            raise SystemExit(
                f"{backend}, {num_ranks} ranks: {', '.join(missing[:8])} did not come up in {limit_s:g} s"
            )
        records = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return {
        key: (statistics.mean if key.endswith("cpu_s") else max)(
            record[key] for record in (records[1:] if key.startswith("open") else records)
        )
        for key in records[0]
    }


def row(backend: str, num_ranks: int, found: dict[str, float]) -> str:
    """A line of the table."""
    times = "".join(
        f"{1e3 * found[f'{what}_cpu_s']:10.1f}{1e3 * found[f'{what}_wall_s']:10.1f}"
        for what in ("start", "sum", "group")
    )
    opened = f"{found['open_before']:8.0f}{found['open_after']:7.0f}{found['private_mb']:8.1f}"
    return f"{num_ranks:6} {backend:8}{times}{opened}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,16,32,64", help="numbers of ranks, separated by commas")
    parser.add_argument("--backends", default="mycel,gloo", help="mycel, gloo or both")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds that a group may take to come up")
    parser.add_argument("--per-node", type=int, help="ranks that take each other for ranks of one machine")
    parser.add_argument("--output", type=Path, help="file to append lines of JSON to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    mycel.runtime.warm()
    # Other fabrics than those below, but of both kinds: children inherit compiled code, and plan for themselves.
    for ranks, uneven in itertools.product((8, 36, 60, 84), (False, True)):
        first_call(default_fabric(ranks, 4, uneven=uneven), "all_reduce", 0)
    gc.freeze()  # or a collection in a child copies every page of the parent's objects
    heads = "".join(f"{what + ' cpu':>10}{'wall ms':>10}" for what in WHATS)
    print(f"{'ranks':>6} {'backend':8}{heads}{'open':>8}{'then':>7}{'MB':>8}")
    for num_ranks in map(int, options.ranks.split(",")):
        for backend in options.backends.split(","):
            found = measure(backend, num_ranks, options.limit_s, options.per_node)
            print(row(backend, num_ranks, found), flush=True)
            if options.output is not None:
                what = {"benchmark": "scale_sockets", "world_size": num_ranks, "backend": backend}
                what |= {"per_node": options.per_node, "mesh_ranks": read_settings().mesh_ranks}
                about: dict[str, Any] = {"hardware": describe_hardware(), "versions": dict(describe_versions())}
                append(options.output, [{**what, **found, **about, **stamp()}])


if __name__ == "__main__":
    main()
