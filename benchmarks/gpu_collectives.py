"""Collectives of GPU tensors: mycel's schedules over NCCL's sends and receives against NCCL's own, and the bound.

    torchrun --nproc-per-node 8 benchmarks/gpu_collectives.py --topology cluster.yaml [--sizes 1MB,16MB,256MB]

On several machines with torchrun's own options. ``--topology`` is a file or a builder, such as ``dgx_h100``, with as
many ranks as the job. Backends take turns in the same run; a repeat counts the slowest rank; every result is compared
bit by bit with the right one. Rank 0 prints a table and appends a JSON line a point to ``--output``.

No machine with several GPUs has run this yet: no figure in these pages comes from it. ``--device cpu`` runs the same
script over Gloo and mycel's sockets, to see that it works.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from mycel.bench.measurement import Measurement, summarize
from mycel.collectives.bound import bound
from mycel.collectives.spec import Collective, CollectiveName
from mycel.errors import MycelError
from mycel.topology.load import load_topology
from mycel.topology.model import Topology
from mycel.units import format_seconds, format_size, parse_size
from record import ROOT, append, stamp

Tensor = torch.Tensor
NAMES: tuple[CollectiveName, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
#: Contributions are whole numbers below this: sums over thousands of ranks are exact in float32.
LARGEST = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One collective of one size on this rank: how to set it up, to call it, and to see whether it is right."""

    reset: Callable[[], object]
    call: Callable[[dist.ProcessGroup], object]
    is_right: Callable[[], bool]


def contribution(rank: int, elements: int, device: torch.device) -> Tensor:
    """Whole numbers that follow from the rank."""
    return ((torch.arange(elements, device=device) * 7 + rank * 13) % LARGEST).float()


def question(name: CollectiveName, elements: int, device: torch.device) -> Question:
    """Buffers on the device, and the right result.

    Args:
        elements: float32s of the whole array (all_to_all: of one rank's part), a multiple of the number of ranks.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    block = elements // n
    mine = contribution(rank, elements, device)
    parts = (contribution(r, elements, device) for r in range(n))
    if name in ("all_reduce", "reduce_scatter"):
        total = torch.zeros(elements, device=device)
        for part in parts:
            total += part
        if name == "all_reduce":
            array = torch.empty_like(mine)
            return Question(
                reset=lambda: array.copy_(mine),
                call=lambda group: dist.all_reduce(array, group=group),
                is_right=lambda: torch.equal(array, total),
            )
        array = torch.empty(block, device=device)
        right = total[rank * block : (rank + 1) * block]
        return Question(
            reset=lambda: array.fill_(-1.0),
            call=lambda group: dist.reduce_scatter_tensor(array, mine, group=group),
            is_right=lambda: torch.equal(array, right),
        )
    array = torch.empty(elements, device=device)
    if name == "broadcast":
        right = contribution(0, elements, device)
        return Question(
            reset=lambda: array.copy_(mine) if rank == 0 else array.fill_(-1.0),
            call=lambda group: dist.broadcast(array, src=0, group=group),
            is_right=lambda: torch.equal(array, right),
        )
    if name == "all_gather":
        shard = mine[:block]
        right = torch.cat([part[:block] for part in parts])
        return Question(
            reset=lambda: array.fill_(-1.0),
            call=lambda group: dist.all_gather_into_tensor(array, shard, group=group),
            is_right=lambda: torch.equal(array, right),
        )
    right = torch.cat([part[rank * block : (rank + 1) * block] for part in parts])
    return Question(
        reset=lambda: array.fill_(-1.0),
        call=lambda group: dist.all_to_all_single(array, mine, group=group),
        is_right=lambda: torch.equal(array, right),
    )


def seconds_of(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """Seconds a call, of ``calls`` back to back; on a GPU as its own clock has it."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begin) / calls
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun.record()
    for _ in range(calls):
        call()
    ended.record()
    ended.synchronize()
    return begun.elapsed_time(ended) / 1e3 / calls


def measure(
    name: CollectiveName,
    num_bytes: int,
    topology: Topology,
    groups: dict[str, dist.ProcessGroup],
    device: torch.device,
    options: argparse.Namespace,
) -> list[Measurement]:
    """One collective of one size over every backend, in turns."""
    n = dist.get_world_size()
    elements = -(-num_bytes // 4 // n) * n
    asked = question(name, elements, device)
    times: dict[str, list[float]] = {backend: [] for backend in groups}
    right = dict.fromkeys(groups, True)
    for repeat in range(options.warm_up + options.repeats):
        for backend, group in groups.items():
            asked.reset()
            asked.call(group)
            right[backend] &= asked.is_right()
            dist.barrier()
            took = seconds_of(lambda group=group: asked.call(group), device, options.calls)
            slowest = torch.tensor([took], device=device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if repeat >= options.warm_up:
                times[backend].append(slowest.item())
    limit = None  # loopback is not the fabric that was named
    if device.type == "cuda":
        limit = bound(topology, Collective(name=name, num_ranks=n, root=0 if name == "broadcast" else None)).algbw
    rows = []
    for backend in groups:
        wrong = torch.tensor([0.0 if right[backend] else 1.0], device=device)
        dist.all_reduce(wrong, op=dist.ReduceOp.MAX)
        rows.append(
            summarize(
                times[backend],
                collective=name,
                num_bytes=elements * 4,
                backend=backend,
                unit=topology.unit,
                bound_algbw=limit,
                correct=wrong.item() == 0.0,
                world_size=n,
                topology=topology.name,
                fingerprint=topology.fingerprint,
                emulated=False,
            )
        )
    return rows


def table(rows: Sequence[Measurement], device: torch.device) -> Table:
    """A line a backend."""
    first = rows[0]
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, to try the script"
    made = Table(
        title=f"{first.topology}, {first.world_size} ranks, {where}",
        caption=f"bandwidths in {first.unit}; a time is that of the slowest rank",
        title_justify="left",
        header_style="bold",
    )
    for heading in ("collective", "size", "backend", "median", "p10", "p90", "algbw", "busbw", "of bound", "right"):
        made.add_column(heading, justify="right")
    for m in rows:
        made.add_row(
            m.collective,
            format_size(m.bytes),
            m.backend,
            *(format_seconds(s) for s in (m.median_s, m.p10_s, m.p90_s)),
            f"{m.algbw:.4g}",
            f"{m.busbw:.4g}",
            f"{m.fraction_of_bound:.2f}" if m.fraction_of_bound is not None else "",
            "yes" if m.correct else "[red]NO[/]",
        )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of every rank; exit code 1 when a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", required=True, help="file or builder, with as many ranks as the job")
    parser.add_argument("--collectives", default=",".join(NAMES))
    parser.add_argument("--sizes", default="1MB,4MB,16MB,64MB,256MB,1GB", help="of the whole array, powers of 1024")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--calls", type=int, default=5, help="back to back in a repeat")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "gpu_collectives.jsonl")
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, one process a GPU")
    if options.device == "cuda" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        parser.error("needs an NVIDIA GPU a rank and a torch made for them; --device cpu only tries the script")
    os.environ |= {"MYCEL_TOPOLOGY": options.topology, "MYCEL_NCCL_BELOW": "0"}
    import mycel.runtime  # noqa: F401  (registers the backend)

    topology = load_topology(options.topology).without_computing()
    device, own = torch.device("cpu"), "gloo"
    if options.device == "cuda":
        device, own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))), "nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(own, timeout=timedelta(minutes=5))
    try:
        groups = {own: dist.new_group(backend=own), "mycel": dist.new_group(backend="mycel")}
        rows: list[Measurement] = []
        for name in options.collectives.split(","):
            for size in options.sizes.split(","):
                rows += measure(name, parse_size(size), topology, groups, device, options)
        if dist.get_rank() == 0:
            marks = {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", **stamp()}
            append(options.output, [{**m.to_json(), **marks} for m in rows])
            console = Console()
            (console if console.is_terminal else Console(width=132)).print(table(rows, device))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0 if all(m.correct for m in rows) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MycelError as error:
        sys.exit(f"gpu_collectives: {error}")
