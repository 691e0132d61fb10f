"""An optimizer that takes a DDP model's gradients before they are averaged.

DDP's buckets come with gradients that stay as they are, such as those of Dion's matrices, and with all else, which
becomes a mean as always.
Beside it travels one number: NaN, if a gradient that stays is not finite. Then a first element of those that stay
becomes NaN on all ranks, so that every rank's ``GradScaler`` skips the step, and none waits for the others.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mycel.arguments import the
from mycel.comm.handle import Handle
from mycel.data_parallel.ddp_hook import take_hook
from mycel.data_parallel.stats import CommStats
from mycel.errors import UsageError

__all__ = ["Attached"]


class Attachable(Protocol):
    """What is asked of a ``MatrixOptimizer``.

    Attributes:
        param_groups: torch's; each has an ``algorithm``.
        stats: counts what the hook sends.
        replicas: the ranks of the model, from when to when some of its gradients are each rank's own.
    """

    param_groups: list[dict[str, Any]]
    stats: CommStats
    replicas: dist.ProcessGroup | None

    def stays(self, group: dict[str, Any], parameter: Tensor) -> bool:
        """Whether the next step wants this rank's gradient and not the mean; the same on all ranks."""
        ...

    def synchronize(self) -> None:
        """Make what each rank remembers for itself the mean over ranks."""
        ...


class Attached(Handle):
    """An optimizer at work on a model; made by ``MatrixOptimizer.attach``.

    Attributes:
        stats: the optimizer's.

    Examples:
        >>> from mycel.data_parallel import Dion
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> model = DistributedDataParallel(torch.nn.Linear(8, 4, bias=False))
        >>> optimizer = Dion(model.parameters(), lr=0.1, rank=0.5)
        >>> with optimizer.attach(model) as attached:
        ...     model(torch.ones(1, 8)).sum().backward()
        ...     optimizer.step()
        >>> attached.stats.steps
        1
        >>> dist.destroy_process_group()
    """

    def __init__(self, optimizer: Attachable, model: DistributedDataParallel) -> None:
        hint = "wrap the model first"
        the(DistributedDataParallel, model, "a model in DistributedDataParallel", hint=hint)
        mine = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        trained = {id(p): name for name, p in model.module.named_parameters() if p.requires_grad}
        if missing := [name for key, name in trained.items() if key not in mine]:
            raise UsageError(
                f"the optimizer has not all parameters that the model trains: not {', '.join(missing[:3])}"
            )
        if optimizer.replicas is not None:
            raise UsageError("the optimizer is attached to a model already: close() that handle first")
        self.stats: CommStats = optimizer.stats
        self._groups = mine
        self._optimizer, self._group = optimizer, model.process_group
        self._size = self._group.size()
        self._release = take_hook(model, self._hook)
        optimizer.replicas = self._group
        self._is_open = True

    def close(self) -> None:
        """Have DDP average all gradients again, and average momenta: a collective call, between steps."""
        if not self._is_open:
            return
        self._is_open = False
        self._release()
        self._optimizer.synchronize()
        self._optimizer.replicas = None

    def _hook(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Takes a bucket from DDP; the future is of its buffer."""
        buffer: Tensor = bucket.buffer()
        if buffer.is_sparse:
            raise UsageError(
                "a sparse gradient, which this optimizer cannot do: make its embedding with sparse=False"
            )
        self.stats.exact_bytes += 2 * (self._size - 1) / self._size * buffer.nbytes
        stay: list[Tensor] = []
        rest: list[Tensor] = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            stays = self._optimizer.stays(self._groups[id(parameter)], parameter)
            (stay if stays else rest).append(gradient)
        if not stay:
            return self._mean(buffer, lambda _: None, buffer)
        largest = torch.stack([torch.linalg.vector_norm(g, ord=torch.inf) for g in stay if g.numel()])
        payload = torch.cat([*(g.reshape(-1) for g in rest), largest.sum().mul(0.0).view(1).to(buffer.dtype)])

        def spread(mean: Tensor) -> None:
            *means, flag = mean.split_with_sizes([*(g.numel() for g in rest), 1])
            for gradient, part in zip(rest, means, strict=True):
                gradient.copy_(part.view(gradient.shape))
            stay[0].view(-1)[:1].add_(flag)

        return self._mean(payload, spread, buffer)

    def _mean(self, payload: Tensor, use: Any, buffer: Tensor) -> torch.futures.Future[Tensor]:
        payload.div_(self._size)
        self.stats.sent(2 * (self._size - 1) / self._size * payload.nbytes, collectives=int(self._size > 1))
        work = dist.all_reduce(payload, group=self._group, async_op=True)
        assert work is not None

        def done(future: Any) -> Tensor:
            use(payload)
            return buffer

        found: torch.futures.Future[Tensor] = work.get_future().then(done)
        return found
