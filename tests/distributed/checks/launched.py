"""A program as users write it: started once a rank, by torchrun or by ``mycel emulate``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import collectives
import torch
import torch.distributed as dist

import mycel.runtime


def main() -> None:
    dist.init_process_group("mycel")
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.arange(5000.0) * (rank + 1)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.arange(5000.0) * (size * (size + 1) // 2))
    checks = sys.argv[2:]
    seen = {name: getattr(collectives, name)(rank, size) for name in checks}
    communicator = mycel.runtime.tensor_group().communicator
    assert communicator is not None
    answer = {"size": size, "sum": tensor.sum().item(), "fabric": communicator.topology.name, "checks": seen}
    Path(sys.argv[1], f"rank{rank}.json").write_text(json.dumps(answer))
    dist.destroy_process_group()


main()
