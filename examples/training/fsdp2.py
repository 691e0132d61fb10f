"""FSDP2: every rank keeps a share of each layer, gathers a layer when it is needed, and reduce-scatters gradients.

torchrun --nproc-per-node 4 examples/training/fsdp2.py
mycel emulate examples/clusters/two_boxes.yaml -- python examples/training/fsdp2.py
"""

from __future__ import annotations

import argparse

import common
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def train(options: argparse.Namespace) -> list[float]:
    """Losses of all steps."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = common.transformer(options)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = common.optimizer_of(model, options)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = common.loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return common.fit(options, step)


if __name__ == "__main__":
    common.main(train, __doc__)
