"""How long a group takes from ``init_process_group`` to its first sum: warm, and with nothing compiled; Gloo beside.

    python benchmarks/start.py [--ranks 2,4,8] [--rounds 5] [--cold-rounds 1] [--output FILE.jsonl]

Ranks of one machine import what they need, wait for each other at a gate, and begin together. *Wall* is until the
last rank has its sum, *processor* what a rank and its threads spend meanwhile, the mean of all. Backends take turns.
A cold round has empty folders for compiled code and for what the machine was measured to need.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mycel.bench.measurement import describe_hardware, describe_versions
from record import append, stamp

BACKENDS = ("gloo", "mycel")
TIMEOUT_S = 600.0


def be_rank(backend: str) -> None:
    """Wait at the gate, start, sum once, and say what that took."""
    import torch
    import torch.distributed as dist

    import mycel.runtime  # noqa: F401

    torch.set_num_threads(1)
    print("ready", flush=True)
    if not sys.stdin.readline():  # whoever measures is gone
        return
    spent = time.process_time()
    dist.init_process_group(backend)
    formed = time.monotonic()
    array = torch.ones(16)
    dist.all_reduce(array)
    record = {"formed": formed, "end": time.monotonic(), "processor_s": time.process_time() - spent}
    if not bool((array == dist.get_world_size()).all()):
        raise RuntimeError(f"{backend}: wrong sum: {array}")
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(record), flush=True)


def start(backend: str, num_ranks: int, env: Mapping[str, str]) -> dict[str, float]:
    """One start; seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, **env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    command = [sys.executable, "-W", "ignore", __file__, "--rank", backend]
    ranks = [
        subprocess.Popen(
            command, env={**env, "RANK": str(rank)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for rank in range(num_ranks)
    ]
    try:
        for rank in ranks:
            if rank.stdout is None or rank.stdout.readline() != "ready\n":
                raise RuntimeError(f"a rank over {backend} did not come up")
        begin = time.monotonic()
        for rank in ranks:
            if rank.stdin is not None:
                rank.stdin.write("\n")
                rank.stdin.flush()
        records = [json.loads(rank.communicate(timeout=TIMEOUT_S)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return {
        "formed_s": max(record["formed"] for record in records) - begin,
        "wall_s": max(record["end"] for record in records) - begin,
        "processor_s": statistics.mean(record["processor_s"] for record in records),
    }


def measure(backend: str, state: str, num_ranks: int) -> dict[str, float]:
    """One start, warm or cold."""
    if state == "warm":
        return start(backend, num_ranks, {})
    with tempfile.TemporaryDirectory() as folder:
        return start(backend, num_ranks, {"NUMBA_CACHE_DIR": folder, "MYCEL_CACHE": folder})


def main() -> None:
    """Measure and print; also what ranks call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4,8", help="numbers of ranks, separated by commas")
    parser.add_argument("--rounds", type=int, default=5, help="warm starts of each")
    parser.add_argument("--cold-rounds", type=int, default=1, help="cold starts of each")
    parser.add_argument("--output", type=Path, help="file to append lines of JSON to")
    parser.add_argument("--rank", choices=BACKENDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        be_rank(options.rank)
        return
    start("mycel", 2, {})  # compiles, where nothing is compiled
    titles = f"{'wall, median':>13}{'least':>8}{'group formed':>14}{'processor':>11}"
    print(f"{'state':6}{'ranks':>6} {'backend':8}{titles}")
    for state, rounds in (("warm", options.rounds), ("cold", options.cold_rounds)):
        for num_ranks in map(int, options.ranks.split(",") if rounds else ()):
            turns: dict[str, list[dict[str, float]]] = {backend: [] for backend in BACKENDS}
            for _ in range(rounds):
                for backend in BACKENDS:
                    turns[backend].append(measure(backend, state, num_ranks))
            for backend, found in turns.items():
                line = summary(found)
                print(
                    f"{state:6}{num_ranks:6} {backend:8}{line['wall_s']:11.3f} s{line['least_wall_s']:6.3f} s"
                    f"{line['formed_s']:12.3f} s{line['processor_s']:9.3f} s",
                    flush=True,
                )
                if options.output is not None:
                    what = {"benchmark": "start", "state": state, "world_size": num_ranks, "backend": backend}
                    about: dict[str, Any] = {"hardware": describe_hardware(), "versions": dict(describe_versions())}
                    append(options.output, [{**what, **line, "rounds": rounds, **about, **stamp()}])


def summary(found: list[dict[str, float]]) -> dict[str, float]:
    """Medians of some starts, and the least wall time."""
    medians = {name: statistics.median(each[name] for each in found) for name in found[0]}
    return {**medians, "least_wall_s": min(each["wall_s"] for each in found)}


if __name__ == "__main__":
    main()
