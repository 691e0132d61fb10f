"""One program drives all ranks: DDP, a pipeline of two programs, and a search over two models at once.

    python examples/controller/run.py ddp --ranks 4
    python examples/controller/run.py stages
    python examples/controller/run.py search --ranks 4

Needs ``pip install 'mycel[controller]'``. Each prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import threading
from typing import Any

import programs

from mycel.controller import Controller, Credits, Mesh


def ddp(ranks: int, steps: int) -> dict[str, Any]:
    """DDP on all ranks; steps are called ahead, and only the losses come back."""
    with Controller(ranks) as cluster:
        trainer = cluster.mesh.call(programs.build, 128)
        losses = [cluster.mesh.call(programs.train, trainer, number) for number in range(steps)]
        return {"losses": [loss.result() for loss in losses]}


def stages(steps: int, slots: int = 2) -> dict[str, Any]:
    """Two ranks, two programs: activations go from one to the other, some steps at most under way between them."""
    with Controller(2) as cluster:
        left, right = cluster.mesh[0], cluster.mesh[1]
        first, second = left.call(programs.first_stage, 128), right.call(programs.second_stage, 128)
        edge = Credits(slots)
        losses = []
        for number in range(steps):
            activation = left.call(programs.forward, first, number, takes=edge)
            came = right.call(programs.forward_backward, second, right.put(activation), number)
            left.call(programs.backward, first, left.put(came), number, gives=edge)
            losses.append(came)
        return {"losses": [came.result()[0]["loss"] for came in losses]}


def search(ranks: int, steps: int) -> dict[str, Any]:
    """Half of the ranks for each of two models, as two clients; the better one then gets all of them."""
    last: dict[int, float] = {}

    def client(mesh: Mesh, width: int) -> None:
        trainer = mesh.call(programs.build, width)
        losses = [mesh.call(programs.train, trainer, number) for number in range(steps)]
        last[width] = sum(losses[-1].result()) / len(mesh)

    with Controller(ranks) as cluster:
        halves = cluster.mesh[: ranks // 2], cluster.mesh[ranks // 2 :]
        clients = [threading.Thread(target=client, args=pair) for pair in zip(halves, (32, 256), strict=True)]
        for one in clients:
            one.start()
        for one in clients:
            one.join()
        best = min(last, key=lambda width: last[width])
        client(cluster.mesh, best)
        return {"halves": last, "best": best}


def main() -> None:
    """What is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ddp", "stages", "search"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    asked = parser.parse_args()
    if asked.what == "stages":
        said = stages(asked.steps)
    else:
        said = {"ddp": ddp, "search": search}[asked.what](asked.ranks, asked.steps)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
