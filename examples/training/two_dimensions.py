"""Two dimensions: two ranks share every matrix (tensor parallel), groups of two share the data (FSDP2).

Needs an even number of ranks, and heads (a 32nd of the width) that can be halved.

    torchrun --nproc-per-node 4 examples/training/two_dimensions.py
    mycel emulate examples/clusters/two_boxes.yaml -- python examples/training/two_dimensions.py
"""

from __future__ import annotations

import argparse

import common
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

TENSOR = 2


def train(options: argparse.Namespace) -> list[float]:
    """Losses of all steps."""
    shape = (dist.get_world_size() // TENSOR, TENSOR)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    model = common.transformer(options)
    first = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    second = {name: RowwiseParallel() for name in ("out", "down")}
    for layer in model:
        if isinstance(layer, common.Block):
            parallelize_module(layer, mesh["tensor"], first | second)
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = common.optimizer_of(model, options)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = common.loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    # Ranks that share the matrices work on the same text.
    return common.fit(options, step, reader=mesh.get_local_rank("data"))


if __name__ == "__main__":
    common.main(train, __doc__)
