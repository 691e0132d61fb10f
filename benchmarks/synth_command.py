"""``mycel synth`` on files of a thousand GPUs: processor seconds and peak memory of the whole command.

The files are JSON as somebody's script would write them: of each A100 node an NVSwitch and eight GPUs, each with its
NIC to one of two InfiniBand switches, and vertices and links in no order. Each line is one cold process, all of it:
the file read, the bound, the forests, the schedule made, verified and written. numba's code is on disk already; a
small fabric is done once before, which is not counted.

    python benchmarks/synth_command.py                     # a table, about two minutes
    python benchmarks/synth_command.py --nodes 16          # quickly
    python benchmarks/synth_command.py --output FILE       # JSON lines too
    python benchmarks/synth_command.py --fabric torus:dims=16x16 --collective all_gather
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from mycel.bench.measurement import describe_hardware
from record import append, markdown, stamp

COLUMNS = ("fabric", "collective", "form", "cpu_s", "peak_mib", "file_mb")


def write_fabric(file: Path, num_nodes: int, seed: int) -> None:
    """A cluster of A100 nodes with its vertices and links shuffled."""
    kinds = {"ib0": "switch", "ib1": "switch"}
    cables: list[tuple[str, str, int]] = []
    for node in range(num_nodes):
        kinds[f"nvswitch{node}"] = "switch"
        for place in range(8):
            gpu, nic = f"gpu{node}.{place}", f"nic{node}.{place}"
            kinds |= {gpu: "gpu", nic: "switch"}
            cables += [(gpu, f"nvswitch{node}", 300), (gpu, nic, 25), (nic, f"ib{place % 2}", 25)]
    draw = random.Random(seed)
    number = dict(zip(kinds, draw.sample(range(len(kinds)), len(kinds)), strict=True))
    nodes = [{"id": number[name], "type": kind} for name, kind in kinds.items()]
    links = [
        {"src": number[a], "dst": number[b], "capacity": size}
        for one, other, size in cables
        for a, b in ((one, other), (other, one))
    ]
    draw.shuffle(nodes)
    draw.shuffle(links)
    file.write_text(json.dumps({"name": f"a100x{num_nodes}", "unit": "GB/s", "nodes": nodes, "links": links}))


def run(fabric: str, collective: str, output: Path | None) -> dict[str, Any]:
    """The command in a process of its own; its processor seconds and its memory at its largest."""
    rest = ["--summary"] if output is None else ["-o", str(output)]
    command = [sys.executable, "-c", "from mycel.cli import main; main()", "synth", fabric, "-c", collective, *rest]
    silent = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)
    process = os.posix_spawn(sys.executable, command, dict(os.environ), file_actions=[silent])
    _, status, used = os.wait4(process, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    return {
        "fabric": Path(fabric).stem,
        "collective": collective,
        "form": "summary" if output is None else "schedule",
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_mib": used.ru_maxrss / 1024,
        "file_mb": 0.0 if output is None else output.stat().st_size / 1e6,
    }


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description="The whole command on large files")
    parser.add_argument(
        "--nodes", type=int, default=128, help="nodes of eight GPUs; the summary is of four times these"
    )
    parser.add_argument("--fabric", help="a fabric as mycel reads it, instead of the files")
    parser.add_argument(
        "--collective", action="append", help="may be repeated; all_gather and all_reduce if not given"
    )
    parser.add_argument("--output", type=Path, help="append JSON lines here")
    options = parser.parse_args()
    names = options.collective or ["all_gather", "all_reduce"]
    with tempfile.TemporaryDirectory() as folder:
        small, whole, large = (Path(folder) / f"{name}.json" for name in ("small", "whole", "large"))
        written = Path(folder) / "schedule.json"
        write_fabric(small, 5, seed=0)
        for name in names:
            run(str(small), name, written)
            run(str(small), name, None)
        if options.fabric:
            lines = [run(options.fabric, name, written) for name in names]
        else:
            write_fabric(whole, options.nodes, seed=1)
            write_fabric(large, 4 * options.nodes, seed=1)
            lines = [run(str(whole), name, written) for name in names] + [run(str(large), "all_gather", None)]
            for line, nodes in zip(lines, [*(options.nodes for _ in names), 4 * options.nodes], strict=True):
                line["fabric"] = f"{nodes} A100 nodes, shuffled"
    rows = [[f"{line[c]:.1f}" if isinstance(line[c], float) else line[c] for c in COLUMNS] for line in lines]
    print(markdown(COLUMNS, rows))
    if options.output:
        append(options.output, [line | stamp() | {"hardware": describe_hardware()} for line in lines])


if __name__ == "__main__":
    main()
