"""DistributedDataParallel: every rank has the whole model, gradients are all-reduced while they are computed.

torchrun --nproc-per-node 4 examples/training/ddp.py
mycel emulate examples/clusters/two_boxes.yaml -- python examples/training/ddp.py
"""

from __future__ import annotations

import argparse

import common
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def train(options: argparse.Namespace) -> list[float]:
    """Losses of all steps."""
    model = DistributedDataParallel(common.transformer(options), gradient_as_bucket_view=True)
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
