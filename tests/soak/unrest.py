"""What is no failure: ranks that are stopped for a while, links that are down for a moment, busy processors."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from mycel.emulate.launch import Run, start
from mycel.topology.load import load_topology
from mycel.topology.model import Topology

__all__ = ["run_unrest"]

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "examples" / "clusters" / "star4.yaml"
#: Shorter than what a machine may be silent for; a rank that is stopped is not silent, whatever its time.
STOPPED_S, DOWN_S = 8.0, 5.0
PEACE_S = 2.0
#: For ranks to start on a busy machine, and to end.
PATIENCE_S = 180.0
NUM_BURNERS = 2


def run_unrest(seconds: float, seed: int) -> int:
    """Exit status: 0 if no rank saw an error and every result was right."""
    topology, dice = load_topology(CLUSTER), random.Random(seed)
    said: list[tuple[int, str]] = []
    events: dict[str, int] = {}
    longest = {"stopped": 0.0, "down": 0.0}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mycel-unrest-")))
        stop, ready = folder / "stop", folder / "ready"
        command = [sys.executable, "-W", "ignore", "-m", "tests.soak.unrest_rank", str(seed), str(stop), str(ready)]
        run = stack.enter_context(
            start(
                topology,
                command,
                env={"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
                output=lambda rank, line: said.append((rank, line)),
            )
        )
        until = time.monotonic() + PATIENCE_S
        while not ready.exists() and time.monotonic() < until and run.wait(0.1) is None:
            pass
        for _ in range(NUM_BURNERS):
            burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(burner.wait)
            stack.callback(burner.kill)
        until = time.monotonic() + seconds
        while time.monotonic() < until and run.wait(PEACE_S) is None:
            what = dice.choice(("stopped", "down", "both"))
            events[what] = events.get(what, 0) + 1
            for kind, lasted in _disturb(run, topology, what, dice).items():
                longest[kind] = max(longest[kind], lasted)
        stop.touch()
        code = run.wait(PATIENCE_S)
    for rank, line in said:
        if line.startswith("{"):
            counted = json.loads(line)
            print(f"rank {rank}: {counted['collectives']} collectives right in {counted['seconds']:.0f} s")
        elif "Error" in line or "WARNING" in line:
            print(f"rank {rank}: {line}")
    print(f"longest: a rank stopped for {longest['stopped']:.1f} s, a link down for {longest['down']:.1f} s")
    print(f"{events} in {seconds:.0f} s: {'no alarm' if code == 0 else f'FAILED, exit code {code}'}")
    return 0 if code == 0 else 1


def _disturb(run: Run, topology: Topology, what: str, dice: random.Random) -> dict[str, float]:
    """Something that passes; how long it was, which on a busy machine can be longer than was meant."""
    rank = dice.randrange(topology.num_ranks)
    vertex = topology.ranks[dice.randrange(topology.num_ranks)]
    ways = [(link.src, link.dst) for link in topology.links if vertex in (link.src, link.dst)]
    began = time.monotonic()
    lasted = {}
    if what != "down":
        run.kill(rank, signal.SIGSTOP)
    if what != "stopped":
        down = time.monotonic()
        for way in ways:
            run.set_link(*way, up=False)
        time.sleep(DOWN_S)
        for way in ways:
            run.set_link(*way, up=True)
        lasted["down"] = time.monotonic() - down
    if what != "down":
        time.sleep(max(0.0, began + STOPPED_S - time.monotonic()))
        run.kill(rank, signal.SIGCONT)
        lasted["stopped"] = time.monotonic() - began
    return lasted
