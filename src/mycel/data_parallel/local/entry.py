"""The one line that lets ranks train alone and meet."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mycel.data_parallel.combine.base import Combiner
from mycel.data_parallel.compress.base import Compressor
from mycel.data_parallel.local.members import Members
from mycel.data_parallel.local.outer import MakeOuter
from mycel.data_parallel.local.streaming import Streaming
from mycel.data_parallel.local.synchronizer import Synchronizer
from mycel.data_parallel.local.updates import LocalUpdates, OptimizerState
from mycel.data_parallel.policy import CompressionPolicy

__all__ = ["local_updates"]


def local_updates(
    optimizer: torch.optim.Optimizer,
    synchronizer: Synchronizer | Streaming,
    *,
    model: nn.Module,
    outer: MakeOuter | None = None,
    combiner: Combiner | None = None,
    compressor: Compressor | CompressionPolicy | None = None,
    feedback: bool | None = None,
    seed: int = 0,
    total_steps: int | None = None,
    average_buffers: bool = True,
    optimizer_state: OptimizerState = "keep",
    scaler: Any = None,
    uneven: bool = False,
    members: Members | None = None,
    group: dist.ProcessGroup | None = None,
) -> LocalUpdates:
    """Let ranks train alone and synchronise when ``synchronizer`` says; the training loop stays as it is.

    The optimizer is watched by hooks, so learning-rate schedulers and trainers see the object that they know. All
    ranks of the group call this together, after the model has its weights: those of the first rank become
    everybody's.

    A model wrapped by DDP averages gradients no longer, except in rounds of a single step without outer optimizer,
    which then cost what DDP costs. Of an FSDP2 model, sharded over a one-dimensional mesh, each rank's shards are
    synchronised with those of ``group``, the replicas of the same shard.

    Args:
        optimizer: the local one; what accelerate has wrapped is found.
        synchronizer: when to synchronise, for example ``QSR(alpha=0.2)``, ``Delayed(Periodic(48))`` or
            ``Streaming(steps=100, fragments=4, overlap=5)``.
        model: has the optimizer's parameters; plain, or wrapped by DDP or ``fully_shard``.
        outer: makes the optimizer of the shared parameters, for example ``diloco()``; none: they become what the
            combiner makes of the changes.
        combiner: how the ranks' changes become one; by default their mean.
        compressor: the mean of the changes is made through this one, such as ``DenseInt4()``; one that takes tensors
            joined for all parameters, others for matrices, a policy as its rules say.
        feedback: whether what compression loses of a change is added to the next one; by default as each compressor
            wants it.
        seed: of everything random in compressors.
        total_steps: of the training; the last round ends there, and with it everything that was under way. ``QSR``
            needs it, or ``uneven``.
        average_buffers: average floating-point buffers, such as running statistics of batch norms, every time,
            with rounds whose results come later only at the last.
        optimizer_state: what a synchronisation does with the local optimizer's state, such as momentum.
        scaler: the ``GradScaler`` of float16 training: the steps that it leaves out count, so that ranks still meet.
        uneven: ranks may have different numbers of batches; each calls ``finish`` after its last one.
        members: ranks may be lost, and come back: forms the group anew, as ``mycel.elastic.Members`` does.
        group: the ranks that synchronise; by default those of DDP or all.

    Returns:
        The handle: ``synchronize``, ``finish``, ``state_dict``, ``close``.

    Raises:
        UsageError: a combination that cannot work; the message says which.

    Examples:
        >>> from mycel.data_parallel import QSR, diloco
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> updates = local_updates(optimizer, QSR(alpha=0.2), model=model, outer=diloco(), total_steps=100)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> updates.step, updates.rounds  # rounds have (0.2 / 0.1)^2 = 4 steps
        (1, 0)
        >>> updates.close()
        >>> dist.destroy_process_group()
    """
    return LocalUpdates(
        optimizer,
        synchronizer,
        model=model,
        outer=outer,
        combiner=combiner,
        compressor=compressor,
        feedback=feedback,
        seed=seed,
        total_steps=total_steps,
        average_buffers=average_buffers,
        optimizer_state=optimizer_state,
        scaler=scaler,
        uneven=uneven,
        members=members,
        group=group,
    )
