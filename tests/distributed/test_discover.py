"""``mycel discover`` once a rank: one file, and one reason for all where there can be none."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from mycel.topology import load_topology

MATRIX = """\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV12\tNV12\tPXB\t0-15\t0
GPU1\tNV12\t X \tNV12\tSYS\t16-31\t1
GPU2\tNV12\tNV12\t X \tSYS\t16-31\t1
NIC0\tPXB\tSYS\tSYS\t X \t\t
"""
NAMES = "".join(f"{number}, NVIDIA A100-SXM4-40GB, 4, 16\n" for number in range(3))


def start(folder: Path, ranks: range, size: int, *more: str, visible: str = "") -> list[subprocess.Popen[str]]:
    """Ranks as a launcher starts them, on a machine whose GPUs' tool prints the above."""
    (folder / "topo").write_text(MATRIX)
    (folder / "names").write_text(NAMES)
    tool = folder / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\nif [ "$1" = topo ]; then cat {folder}/topo; else cat {folder}/names; fi\n')
    tool.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MYCEL_")}
    shared = clean | {"PATH": f"{folder}:{os.environ['PATH']}", "WORLD_SIZE": str(size)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    command = [sys.executable, "-m", "mycel", "discover", "-o", str(folder / "found.yaml"), "--timeout", "30", *more]
    return [
        subprocess.Popen(
            command,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]


def ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    said = [process.communicate(timeout=60) for process in processes]
    return [(process.returncode, *text) for process, text in zip(processes, said, strict=True)]


def test_ranks_have_the_gpus_that_they_see(tmp_path: Path) -> None:
    ended = ends(start(tmp_path, range(2), 2, visible="2,0"))
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert "one NVLink of A100 is taken at 20 GB/s" in ended[0][1] and not ended[1][1]  # only one rank speaks
    found = load_topology(tmp_path / "found.yaml")
    assert [found.label(vertex) for vertex in found.ranks] == ["GPU2", "GPU0"]
    assert found.capacity[0, found.vertices.index(next(v for v in found.vertices if v.label == "nvswitch"))] == 240


def test_all_ranks_hear_why_there_is_no_topology(tmp_path: Path) -> None:
    ended = ends(start(tmp_path, range(3), 3, visible="1"))  # three ranks that see one GPU
    assert [code for code, _, _ in ended] == [2, 2, 2]
    assert all(said.strip().endswith("discover: two ranks run on GPU1; start one a GPU") for _, _, said in ended)
    assert not (tmp_path / "found.yaml").exists()


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    ended = ends(start(tmp_path, range(2), 3, "--timeout", "2"))
    assert [code for code, _, _ in ended] == [2, 2]
    # On a busy machine rank 1 may be late as well.
    assert re.search(r"discover: ranks? (1, )?2 of 3 did not come in time", ended[0][2]), ended
