"""After a failure: a new group in the same processes, a restart by torchrun, or the same group without the link."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mycel.emulate.launch import start
from mycel.topology.load import load_topology

PROGRAMS = Path(__file__).parent / "programs"
CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
#: The harness's own limit; imports of torch on a busy machine take most of it.
LIMIT_S = 120.0


def test_a_new_group_in_the_same_processes(run_ranks: Callable[..., list[Any]]) -> None:
    for counts in run_ranks(3, "restarts", "again_and_again", 4, backend=None):
        assert counts[1:] == counts[:1] * 3, "descriptors or threads are left behind"


def test_torchrun_restarts_the_job_after_a_rank_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command += ["--max-restarts", "1", "--monitor-interval", "0.1", str(PROGRAMS / "restart.py"), str(tmp_path)]
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    ended = subprocess.run(
        command, env=env | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    said = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert {said[f"rank{rank}.attempt1"] for rank in range(3)} == {"sum 6"}
    # The agent may end the others before they can say so; who could blames the right one.
    assert all("PeerLostError: rank 1 was lost" in text for name, text in said.items() if name.endswith("attempt0"))


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.namespaces
def test_training_goes_on_without_a_link() -> None:
    """DDP on a ring of four; a cable is cut in the middle: no error, the same losses, over the other three."""
    steps, lines = 30, []
    topology = load_topology(CLUSTERS / "ring4.yaml")
    with start(
        topology,
        [sys.executable, str(PROGRAMS / "replan.py"), str(steps)],
        env={"OMP_NUM_THREADS": "1", "MYCEL_ON_LINK_FAILURE": "replan", "MYCEL_TIMEOUT": "40"},
        output=lambda rank, line: lines.append(line),
    ) as run:
        until = time.monotonic() + LIMIT_S
        broken = False
        while run.wait(0.01) is None and time.monotonic() < until:
            if not broken and any('"broken"' in line and '"step": 5,' in line for line in tuple(lines)):
                broken = True
                run.set_link(1, 2, up=False)
                run.set_link(2, 1, up=False)
        assert run.exit_codes == (0, 0, 0, 0), "\n".join(lines)
    said = [json.loads(line) for line in lines if line.startswith("{")]
    whole, other = (
        {(r["rank"], r["step"]): r["loss"] for r in said if r["run"] == name} for name in ("whole", "broken")
    )
    assert broken and len(whole) == len(other) == 4 * steps
    assert other == pytest.approx(whole, rel=1e-5)
    (warning,) = [line for line in lines if "goes on without it" in line]
    # It is cut one way after the other: who looks in between has seen bytes come through on the second.
    assert re.search(r"nothing gets through on link (1 -|1 ->|2 ->) [12]; ", warning)
    for record in said:
        if record["run"] == "end":
            assert record["gathered"] == [0.0, 1.0, 2.0, 3.0]
            assert record["parts"] == [float(rank) for rank in range(4) for _ in range(4)]
