"""Learn to follow a route, or to balance a pole, with environments on several ranks.

torchrun --nproc-per-node 4 examples/reinforcement/drive.py --minibatch 2048
python examples/reinforcement/drive.py --reward shaped
python examples/reinforcement/drive.py --task cartpole
python examples/reinforcement/drive.py --write            # both rewards, two mini-batches, the pole: table.md
torchrun --nproc-per-node 4 examples/reinforcement/drive.py --slow-ms 5 --preempt 0.6    # the last rank is slow

Ranks exchange gradients of mini-batches, by DDP over mycel; three numbers an update normalise the advantages.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from poles import Poles
from proximal import Array, Learned, Settings, World, learn
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


class Slowed:
    """Environments that take longer, as a simulator on a busy machine does."""

    def __init__(self, world: World, seconds: float) -> None:
        self._world, self._seconds = world, seconds
        self.observations, self.actions, self.discrete = world.observations, world.actions, world.discrete

    def observe(self) -> Array:
        """See ``World``."""
        return self._world.observe()

    def step(self, actions: Array) -> tuple[Array, NDArray[np.bool_], Array]:
        """See ``World``; later."""
        time.sleep(self._seconds)
        return self._world.step(actions)


def begin(backend: str) -> dist.Store:
    """Make the process group of what torchrun has started, and a store for what else ranks tell each other."""
    if backend == "mycel":
        import mycel.runtime  # noqa: F401  (registers the backend)
    store, rank, size = next(dist.rendezvous("env://"))
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    return store


def train(task: str, settings: Settings, *, store: dist.Store | None = None, slow_s: float = 0.0) -> Learned:
    """A reward of the route, or ``cartpole``; the last rank's environments take ``slow_s`` a step more."""
    make: Callable[[Sequence[int]], World] = partial(Routes, seed=settings.seed, reward=task)
    if task == "cartpole":
        make = partial(Poles, seed=settings.seed)
    is_last = dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1
    if slow_s and is_last:
        return learn(lambda numbers: Slowed(make(numbers), slow_s), settings, store)[1]
    return learn(make, settings, store)[1]


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
    parser.add_argument("--slow-ms", type=float, default=0.0, help="that the last rank's environments take longer")
    parser.add_argument("--preempt", type=float, default=1.0, help="share of ranks that are through when others stop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"train everything that is in {TABLE.name}")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    ranks = "WORLD_SIZE" in os.environ
    store = begin(options.backend) if ranks else None
    shared: dict[str, Any] = {"environments": options.environments, "seed": options.seed, "preempt": options.preempt}
    shared |= {"steps": options.steps} if options.steps else {}
    asked = [(options.reward if options.task == "route" else "cartpole", options.minibatch)]
    if options.write:
        asked = [("simple", 256), ("simple", 2048), ("shaped", 256), ("shaped", 2048), ("cartpole", 256)]
    lines = []
    for task, minibatch in asked:
        settings = settings_for(task, minibatch, **shared)
        own = None if store is None else dist.PrefixStore(f"{task} {minibatch}", store)
        learned = train(task, settings, store=own, slow_s=options.slow_ms / 1e3)
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
