"""What the benchmarks of expert parallelism share: a script on every rank of an emulated cluster, and what it says.

A benchmark starts itself on the ranks (``on_cluster``); there it joins the others (``join``), computes, and says its
figures from rank 0 (``say``). Where it sets a mark, what the cables between the nodes have carried is noted.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mycel.runtime
from mycel.emulate import EmulatedCluster, start
from mycel.moe import ByteMeter, nodes_of
from mycel.topology.model import Topology

#: Seconds a rank waits for a mark to be noted.
DEADLINE_S = 60.0


def on_cluster(
    topology: Topology, script: Path, arguments: Sequence[str], *, timeout_s: float = 900.0, backend: str = "mycel"
) -> list[dict[str, Any]]:
    """Run a script on every rank; what rank 0 said, in order. Marks have ``crossed``: bytes between nodes so far."""
    nodes = nodes_of(topology)
    node_of = {topology.ranks[rank]: place for place, node in enumerate(nodes) for rank in node}
    inside: dict[int, object] = {v: vertex.node for v, vertex in enumerate(topology.vertices)}
    inside |= node_of  # a rank in no node is one of its own
    cables = [
        (link.src, link.dst) for link in topology.links if inside[link.src] is not None and inside[link.dst] is None
    ]
    said: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, EmulatedCluster(topology) as cluster:

        def hear(rank: int, line: str) -> None:
            if not line.startswith("@ "):
                if "Warning" not in line and "return func" not in line:
                    print(f"[rank{rank}] {line}", file=sys.stderr)
                return
            heard = json.loads(line[2:])
            if "mark" in heard:
                counters = cluster.counters()
                heard["crossed"] = sum(counters[cable].num_bytes for cable in cables)
                (Path(folder) / heard["mark"]).touch()
            said.append(heard)

        command = [sys.executable, str(script), *arguments]
        env = {"BENCHMARK_MARKS": folder, "BENCHMARK_BACKEND": backend}
        with start(cluster, command, env=env, output=hear, timeout_s=timeout_s, warm=mycel.runtime.warm) as run:
            code = run.wait()
    if code:
        raise SystemExit(f"{script.name}: a rank ended with {code}")
    return said


def is_rank() -> bool:
    """Whether this process is a rank of ``on_cluster``."""
    return "BENCHMARK_MARKS" in os.environ


def join() -> tuple[int, int]:
    """This rank and how many there are, in a process group."""
    torch.set_num_threads(1)
    dist.init_process_group(os.environ["BENCHMARK_BACKEND"])
    return dist.get_rank(), dist.get_world_size()


def say(**figures: Any) -> None:
    """From rank 0."""
    if dist.get_rank() == 0:
        print("@ " + json.dumps(figures), flush=True)


def mark(name: str) -> None:
    """Note what the cables have carried by now."""
    dist.barrier()
    if dist.get_rank() == 0:
        say(mark=name)
        file, deadline = Path(os.environ["BENCHMARK_MARKS"]) / name, time.monotonic() + DEADLINE_S
        while not file.exists():
            if time.monotonic() > deadline:
                raise SystemExit(f"mark {name}: nobody noted it")
            time.sleep(0.01)
    dist.barrier()


def total(meter: ByteMeter, nodes: Sequence[Sequence[int]]) -> int:
    """Metered bytes between nodes, of all ranks."""
    everyone = torch.tensor([meter.between(nodes)])
    dist.all_reduce(everyone)
    return int(everyone)


def step_s(step: Callable[[], object]) -> float:
    """Seconds of a step from a common start until the last rank has done it."""
    dist.barrier()
    begin = time.perf_counter()
    step()
    spent = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent)


def forward_backward(layer: Callable[..., Tensor], x: Tensor, **plan: Any) -> None:
    """One training step's passes."""
    layer(x, **plan).square().mean().backward()


def middle(values: Sequence[float]) -> float:
    """Median."""
    return statistics.median(values)
