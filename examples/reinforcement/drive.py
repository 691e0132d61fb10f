"""Learn to follow a route, or to balance a pole, with environments on several ranks.

torchrun --nproc-per-node 4 examples/reinforcement/drive.py --minibatch 2048
python examples/reinforcement/drive.py --reward shaped
python examples/reinforcement/drive.py --task cartpole
python examples/reinforcement/drive.py --write            # both rewards, two mini-batches, the pole: table.md

Ranks exchange gradients of mini-batches, by DDP over mycel; three numbers an update normalise the advantages.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from poles import Poles
from proximal import Learned, Settings, World, learn
from route import Reward, Routes

TABLE = Path(__file__).with_name("table.md")
#: CartPole is solved from this mean length of episodes on.
SOLVED = 475.0
#: Of Adam on the route, at mini-batches of 256.
RATE = 1e-3
#: Of the pole; other settings are those of the route.
POLE: dict[str, Any] = {"horizon": 128, "minibatch": 256, "epochs": 8, "rate": 2e-3, "steps": 60_000}


def settings_for(task: str, minibatch: int, **others: Any) -> Settings:
    """Those of a task; the rate grows with the square root of the route's mini-batch, which makes fewer steps.

    Examples:
        >>> settings_for("simple", 1024).rate / settings_for("simple", 256).rate
        2.0
    """
    own: dict[str, Any] = POLE if task == "cartpole" else {"rate": RATE * (minibatch / 256) ** 0.5}
    return Settings(**{**own, "minibatch": minibatch, **others})


def train(task: str, settings: Settings) -> Learned:
    """A reward of the route, or ``cartpole``."""
    make: Callable[[Sequence[int]], World] = partial(Routes, seed=settings.seed, reward=task)
    if task == "cartpole":
        make = partial(Poles, seed=settings.seed)
    return learn(make, settings)[1]


def line(task: str, settings: Settings, learned: Learned) -> dict[str, Any]:
    """What came out, for a table."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return {
        "task": task,
        "ranks": ranks,
        "minibatch": settings.minibatch,
        "seed": settings.seed,
        "steps": learned.steps,
        "score": learned.last(),
        "steps_per_s": learned.steps / learned.seconds,
    }


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    rows = ["| task | mini-batch | ranks | steps | score of the last fifth |", "|---|---|---|---|---|"]
    for found in lines:
        route = found["task"] in get_args(Reward)
        name = f"route, {found['task']} reward" if route else "CartPole"
        score = f"{found['score']:.1f} % of the route" if route else f"{found['score']:.0f} steps of 500"
        rows.append(f"| {name} | {found['minibatch']} | {found['ranks']} | {found['steps']} | {score} |")
    return "\n".join(rows) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("gloo", "mycel"), default="mycel")
    parser.add_argument("--task", choices=("route", "cartpole"), default="route")
    parser.add_argument("--reward", choices=get_args(Reward), default="simple")
    parser.add_argument("--minibatch", type=int, default=256, help="samples over all ranks")
    parser.add_argument("--environments", type=int, default=16, help="over all ranks")
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"train everything that is in {TABLE.name}")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    ranks = "WORLD_SIZE" in os.environ
    if ranks:
        if options.backend == "mycel":
            import mycel.runtime  # noqa: F401  (registers the backend)
        dist.init_process_group(options.backend)
    shared: dict[str, Any] = {"environments": options.environments, "seed": options.seed}
    shared |= {"steps": options.steps} if options.steps else {}
    asked = [(options.reward if options.task == "route" else "cartpole", options.minibatch)]
    if options.write:
        asked = [("simple", 256), ("simple", 2048), ("shaped", 256), ("shaped", 2048), ("cartpole", 256)]
    lines = []
    for task, minibatch in asked:
        settings = settings_for(task, minibatch, **shared)
        learned = train(task, settings)
        lines.append(line(task, settings, learned))
        if not ranks or dist.get_rank() == 0:
            print(f"{task}: {learned.steps / learned.seconds:.0f} environment steps a second", flush=True)
    if not ranks or dist.get_rank() == 0:
        made = table(lines)
        print(made, end="")
        if options.write:
            TABLE.write_text(made, encoding="utf-8")
    if ranks:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
