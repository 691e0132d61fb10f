"""The same DDP training without a controller: torchrun --nproc-per-node 4 examples/controller/torchrun.py."""

from __future__ import annotations

import argparse
import json

import programs
import torch.distributed as dist

import mycel.runtime  # noqa: F401  # the backend's name


def main() -> None:
    """Train, and print every rank's losses on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    asked = parser.parse_args()
    dist.init_process_group("mycel")
    trainer = programs.Trainer(128, 0.05, dist.get_rank(), None)
    own = [trainer.step(number) for number in range(asked.steps)]
    gathered: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own)
    if dist.get_rank() == 0:
        print(json.dumps({"losses": list(zip(*gathered, strict=True))}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
