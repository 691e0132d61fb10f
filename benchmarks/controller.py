"""One controller against torchrun: steps a second over a step's length, opposite orders, and a killed rank.

    python benchmarks/controller.py                     # 2 ranks; writes a plot with --plot FILE.png
    python benchmarks/controller.py --steps-ms 1 5 50 --rounds 5 --output FILE.jsonl

A step sleeps for the rest of its length (it is paced: two processors cannot compute for two ranks and a controller
at once), and its gradients are summed for real, by DDP over backend mycel. Rounds take turns between torchrun, where
ranks loop by themselves, a controller that runs ahead, and one that waits for each step. A rate is steps over the
time between two barriers, on rank 0; figures are medians over rounds. Then two clients whose programs meet in
opposite orders: under one controller, and as two loops of torchrun's ranks, which stand still until their time-out.
Last, how long after a rank is killed the controller says so.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mycel.runtime  # noqa: F401  # the backend's name
from mycel.controller import Controller, Mesh
from mycel.errors import PeerLostError
from mycel.units import format_seconds
from record import append, stamp

WARM_UP = 5


class Paced:
    """A small network under DDP whose steps last as long as they are told to."""

    def __init__(self, step_s: float) -> None:
        torch.manual_seed(0)
        network = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
        self._model = DistributedDataParallel(network)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._step_s = step_s

    def step(self, number: int) -> float:
        """Forward, backward with DDP's sum, an update; then asleep until the step's end."""
        end = time.perf_counter() + self._step_s
        inputs = torch.randn(64, 256, generator=torch.Generator().manual_seed(number))
        loss = self._model(inputs).square().mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        time.sleep(max(0.0, end - time.perf_counter()))
        return float(loss.detach())


def build(step_s: float) -> Paced:
    """On the ranks."""
    return Paced(step_s)


def step(paced: Paced, number: int) -> float:
    """On the ranks."""
    return paced.step(number)


def now() -> float:
    """On the ranks: all are here."""
    dist.barrier()
    return time.perf_counter()


def add(number: int) -> float:
    """On the ranks."""
    tensor = torch.full((1024,), float(number))
    dist.all_reduce(tensor)
    return float(tensor[0])


def end() -> None:
    """On a rank."""
    os.kill(os.getpid(), signal.SIGKILL)


def controlled(cluster: Controller, step_s: float, steps: int, *, waits: bool) -> float:
    """Steps a second under a controller."""
    paced = cluster.mesh.call(build, step_s)
    for number in range(WARM_UP):
        cluster.mesh.call(step, paced, number).wait()
    begun = cluster.mesh.call(now)
    for number in range(steps):
        loss = cluster.mesh.call(step, paced, number)
        if waits:
            loss.wait()
    ended = cluster.mesh.call(now)
    return steps / (ended.result()[0] - begun.result()[0])


def loop() -> None:
    """What torchrun's ranks do: ``loop STEP_S STEPS``."""
    step_s, steps = float(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("mycel")
    paced = Paced(step_s)
    for number in range(WARM_UP):
        paced.step(number)
    begun = now()
    for number in range(steps):
        paced.step(number)
    ended = now()
    if dist.get_rank() == 0:
        print(json.dumps({"rate": steps / (ended - begun)}))
    dist.destroy_process_group()


def opposite() -> None:
    """What torchrun's ranks do: two programs, each with a group of its own, in opposite orders."""
    dist.init_process_group("mycel", timeout=timedelta(seconds=8))
    groups = [dist.new_group(timeout=timedelta(seconds=8)) for _ in range(2)]
    for number in range(10):
        for which in (0, 1) if dist.get_rank() == 0 else (1, 0):
            dist.all_reduce(torch.full((1024,), float(number)), group=groups[which])


def torchrun(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    """The usual way."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, __file__, *words], capture_output=True, text=True, timeout=300, check=False, env=os.environ
    )


def rates(ranks: int, step_s: float, rounds: int, seconds: float) -> dict[str, float]:
    """Medians, in turns."""
    steps = max(20, min(400, int(seconds / step_s)))
    found: dict[str, list[float]] = {"torchrun": [], "ahead": [], "waiting": []}
    for _ in range(rounds):
        ended = torchrun(ranks, "loop", str(step_s), str(steps))
        found["torchrun"].append(json.loads(ended.stdout.strip().splitlines()[-1])["rate"])
        with Controller(ranks) as cluster:
            found["ahead"].append(controlled(cluster, step_s, steps, waits=False))
            found["waiting"].append(controlled(cluster, step_s, steps, waits=True))
    return {name: statistics.median(values) for name, values in found.items()}


def orders(ranks: int) -> dict[str, Any]:
    """Two clients in opposite orders, under a controller and under torchrun."""

    def client(mesh: Mesh, sequence: tuple[int, int]) -> None:
        for number in range(10):
            for which in sequence:
                mesh.call(add, number + which)

    with Controller(ranks) as cluster:
        begun = time.perf_counter()
        clients = [threading.Thread(target=client, args=(cluster.mesh, order)) for order in ((0, 1), (1, 0))]
        for one in clients:
            one.start()
        for one in clients:
            one.join()
        cluster.mesh.call(add, 0).wait()
        ours = time.perf_counter() - begun
    begun = time.perf_counter()
    ended = torchrun(ranks, "opposite")
    return {"controller_s": ours, "torchrun_ended_with": ended.returncode, "torchrun_s": time.perf_counter() - begun}


def killed(ranks: int) -> float:
    """Seconds until a waiting client has heard that a rank was killed."""
    with Controller(ranks) as cluster:
        cluster.mesh.call(add, 0).wait()
        begun = time.perf_counter()
        cluster.mesh[ranks - 1].call(end)
        try:
            cluster.mesh.call(add, 1).wait()
        except PeerLostError:
            return time.perf_counter() - begun
        raise SystemExit("a killed rank was not noticed")


def draw(lines: list[dict[str, Any]], file: Path) -> None:
    """Rates over torchrun's, by a step's length."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    lengths = [line["step_ms"] for line in lines]
    for name, label in (("ahead", "controller, calls ahead"), ("waiting", "controller, waits for each step")):
        axes.plot(lengths, [line[name] / line["torchrun"] for line in lines], marker="o", label=label)
    axes.axhline(0.97, color="grey", linewidth=0.8, linestyle="dashed")
    axes.set(
        xscale="log", xlabel="paced length of a step (ms)", ylabel="steps a second, of torchrun's", ylim=(0, 1.1)
    )
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)


def main() -> None:
    """Measure, print, and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps-ms", type=float, nargs="+", default=[1, 2, 5, 10, 20, 50])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="that a round is to last")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args()
    lines = []
    for step_ms in asked.steps_ms:
        found = rates(asked.ranks, step_ms / 1e3, asked.rounds, asked.seconds)
        lines.append({"step_ms": step_ms, **found})
        ratios = ", ".join(f"{name} {found[name] / found['torchrun']:.3f}" for name in ("ahead", "waiting"))
        print(
            f"paced steps of {step_ms:g} ms: torchrun {found['torchrun']:.1f} a second; of that {ratios}", flush=True
        )
    order, heard = orders(asked.ranks), killed(asked.ranks)
    print(f"opposite orders: one controller {format_seconds(order['controller_s'])}; torchrun ended with "
          f"{order['torchrun_ended_with']} after {format_seconds(order['torchrun_s'])}")  # fmt: skip
    print(f"a killed rank was named after {format_seconds(heard)}")
    if asked.output:
        about = {"benchmark": "controller", "ranks": asked.ranks, "rounds": asked.rounds}
        for line in [*lines, {"orders": order, "killed_s": heard}]:
            append(asked.output, [about | line | stamp()])
    if asked.plot:
        draw(lines, asked.plot)


if __name__ == "__main__":
    if sys.argv[1:2] == ["loop"]:
        loop()
    elif sys.argv[1:2] == ["opposite"]:
        opposite()
    else:
        main()
