"""HSDP: layers are shared out inside a node and replicated between nodes. Needs an even number of ranks.

Most bytes then stay inside the nodes; between them only each rank's share of the gradients is all-reduced.

    torchrun --nproc-per-node 4 examples/training/hsdp.py
    mycel emulate examples/clusters/two_boxes.yaml -- python examples/training/hsdp.py
"""

from __future__ import annotations

import argparse

import common
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

BOXES = 2


def train(options: argparse.Namespace) -> list[float]:
    """Losses of all steps."""
    shape = (BOXES, dist.get_world_size() // BOXES)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("box", "rank_in_node"))
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
