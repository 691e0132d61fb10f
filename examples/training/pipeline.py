"""A pipeline: every rank has some of the layers, and micro-batches pass through in 1F1B order.

The activations go by send and receive. Needs at least as many layers as ranks (``--layers 8`` for eight).

    torchrun --nproc-per-node 4 examples/training/pipeline.py
    mycel emulate examples/clusters/two_boxes.yaml -- python examples/training/pipeline.py --layers 8
"""

from __future__ import annotations

import argparse

import common
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def train(options: argparse.Namespace) -> list[float]:
    """Losses of all steps."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if options.layers < size:
        raise SystemExit(
            f"{options.layers} layers over {size} ranks: at least one a rank is needed (--layers {size})"
        )
    whole = common.transformer(options)
    # The embedding goes with the first blocks, the head with the last ones.
    cuts = [0, *(1 + options.layers * r // size for r in range(1, size)), len(whole)]
    model = nn.Sequential(*whole[cuts[rank] : cuts[rank + 1]])
    optimizer = common.optimizer_of(model, options)
    stage = PipelineStage(model, rank, size, torch.device("cpu"))
    # One window of text a micro-batch; the pipeline is full with as many as there are stages.
    micro_batches = options.batch_size = max(options.batch_size, size)
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=common.loss_of)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        elif rank == size - 1:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        # Only the last stage sees a loss; the mean over the ranks is then that loss.
        return torch.stack(losses).mean() * size if losses else torch.zeros(())

    return common.fit(options, step, reader=0)


if __name__ == "__main__":
    common.main(train, __doc__)
