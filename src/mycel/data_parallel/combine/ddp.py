"""Gradients of a DDP-wrapped model combined by something else than the mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mycel.arguments import the
from mycel.comm.background import InBackground
from mycel.comm.bundle import Bundle, Packed
from mycel.comm.groups import subgroup
from mycel.comm.handle import Handle
from mycel.data_parallel.combine.base import Combiner, check_combiner
from mycel.data_parallel.combine.tasks.base import TaskCombiner, check_shared, shares_of_tasks
from mycel.data_parallel.ddp_hook import take_hook
from mycel.errors import UsageError

__all__ = ["CombinedGradients", "combine_gradients"]


def combine_gradients(
    model: DistributedDataParallel,
    combiner: Combiner,
    *,
    heads: Sequence[str] = (),
    group: dist.ProcessGroup | None = None,
) -> CombinedGradients:
    """Have a DDP-wrapped model's gradients combined by ``combiner``, while others are computed where that can be.

    Call it once, before the first backward pass. The combiner has a process group of its own and works through DDP's
    buckets in their order, which is the same on every rank, in the background. Those that weigh whole gradients, such
    as ``MGDA()``, begin when the last bucket is there.

    Args:
        model: the wrapped model.
        combiner: for example ``Adasum()``; with ``MGDA()`` and its like every rank, or group of ranks, is a task.
        heads: patterns of names, as of files, of parameters that are not shared: their gradients stay this rank's
            own, or the mean of the ranks of its task, and are not sent to others.
        group: the ranks, for nothing else; by default a new group of the model's ranks.

    Returns:
        A handle with ``close()``.

    Raises:
        UsageError: the model is not wrapped by DDP, its gradients are compressed or combined already, ranks give
            different heads, or a pattern fits no parameter, or all.

    Examples:
        >>> from mycel.data_parallel.combine.adasum import Adasum
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
        >>> with combine_gradients(model, Adasum()):
        ...     model(torch.tensor([[1.0, 2.0, 3.0]])).sum().backward()
        >>> model.module.weight.grad.tolist()
        [[1.0, 2.0, 3.0]]
        >>> dist.destroy_process_group()
    """
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"combine_gradients needs a DistributedDataParallel model, got {type(model).__name__}; "
            "for other models combine what local updates have changed, local_updates(..., combiner=...), "
            "or gradients that are there, combine_now(parameters, ...)"
        )
    check_combiner(combiner)
    own = _matching(model, heads)
    ranks = dist.get_process_group_ranks(model.process_group)
    group = group or dist.new_group(ranks, use_local_synchronization=True)
    of_task = _ranks_of_task(combiner, group) if own else None
    if isinstance(combiner, TaskCombiner):
        shapes = [f"{n} {list(p.shape)}" for n, p in model.module.named_parameters() if n not in own]
        device = next((p.device for p in model.module.parameters()), torch.device("cpu"))
        check_shared(f"{len(shapes)} layers", "; ".join(shapes), group, device)
    return CombinedGradients(model, combiner, group, own=own, of_task=of_task)


def _matching(model: DistributedDataParallel, patterns: Sequence[str]) -> set[str]:
    """Names of the parameters that are not shared."""
    if isinstance(patterns, str):
        raise UsageError(f"heads={patterns!r}: give a list of patterns, heads=[{patterns!r}]")
    names = [name for name, parameter in model.module.named_parameters() if parameter.requires_grad]
    found: set[str] = set()
    for pattern in patterns:
        fit = {name for name in names if fnmatchcase(name, the(str, pattern, "a pattern of names"))}
        if not fit:
            raise UsageError(f"heads: no parameter fits {pattern!r}; the model has {', '.join(names[:4])}, ...")
        found |= fit
    if found and len(found) == len(names):
        raise UsageError(f"heads {list(patterns)} are all parameters of the model: nothing is left that tasks share")
    return found


def _ranks_of_task(combiner: Combiner, group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """The ranks that hold this rank's task; ``None`` where it holds one alone."""
    if not isinstance(combiner, TaskCombiner) or combiner.tasks is None:
        return None
    shares_of_tasks(combiner.tasks, group.size())
    members = tuple(r for r, task in enumerate(combiner.tasks) if task == combiner.tasks[group.rank()])
    # Also where a rank holds its task alone: torch names groups by how many there are, so all ranks make as many.
    made = subgroup(group, members)
    return made if len(members) > 1 else None


class CombinedGradients(Handle):
    """A combiner at work on a DDP-wrapped model; made by ``combine_gradients``.

    Args:
        model: the wrapped model.
        combiner: makes one gradient of all ranks'.
        group: the model's ranks, for nothing else.
        own: names of parameters that are not shared.
        of_task: the ranks over which gradients of these are averaged; ``None`` where they stay this rank's own.

    Examples:
        >>> from mycel.data_parallel.combine.adasum import Adasum
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # one rank, for show
        >>> model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
        >>> combined = combine_gradients(model, Adasum())
        >>> combined.close()  # DDP averages again, and another may be made
        >>> combine_gradients(model, Adasum()).close()
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        combiner: Combiner,
        group: dist.ProcessGroup,
        *,
        own: set[str] | None = None,
        of_task: dist.ProcessGroup | None = None,
    ) -> None:
        self._combiner, self._group = combiner, group
        self._own, self._of_task = own or set(), of_task
        self._names: Mapping[int, str] = {id(p): name for name, p in model.module.named_parameters()}
        self._whole = bool(getattr(combiner, "whole", False))
        self._thread = InBackground()
        self._waiting: list[_Bucket] = []
        self._release = take_hook(model, self._combined)

    def close(self) -> None:
        """Have DDP average gradients again; call it on every rank, between steps."""
        self._release()

    def _combined(self, bucket: Any) -> torch.futures.Future[Tensor]:
        taken = _Bucket(bucket, self._names, self._own)
        if bucket.index() == 0:  # what is left of a backward pass that failed is of no step
            self._waiting = []
        self._waiting.append(taken)
        if not self._whole or bucket.is_last():
            buckets, self._waiting = self._waiting, []
            self._thread.start(lambda: self._work(buckets), Bundle.over(taken.buffer, [taken.buffer]))
        return taken.future()

    def _work(self, buckets: Sequence[_Bucket]) -> None:
        try:
            if self._whole or self._own:
                self._combine_parts(buckets)
            else:
                for bucket in buckets:
                    self._combiner.start(Bundle.over(bucket.buffer, bucket.shared), self._group).wait()
        except BaseException as error:  # raised from the futures: DDP reads them without asking how it went
            for bucket in buckets:
                bucket.error = error
        for bucket in buckets:
            bucket.done.set_result(None)

    def _combine_parts(self, buckets: Sequence[_Bucket]) -> None:
        """What is shared, without what is not, as one vector."""
        shared = [gradient for bucket in buckets for gradient in bucket.shared]
        if shared:
            packed = Packed(shared)
            packed.copy_from(shared)
            if isinstance(self._combiner, TaskCombiner):
                self._combiner.start_all(packed.bundles, self._group).wait()
            else:
                for bundle in packed.bundles:
                    self._combiner.start(bundle, self._group).wait()
            packed.copy_to(shared)
        own = [gradient for bucket in buckets for gradient in bucket.own]
        if own and self._of_task is not None:
            packed = Packed(own)
            packed.copy_from(own)
            for bundle in packed.bundles:
                dist.all_reduce(bundle.flat, group=self._of_task)
                bundle.flat.div_(self._of_task.size())
            packed.copy_to(own)


class _Bucket:
    """What DDP gave, what of it all ranks share, and when it is done."""

    def __init__(self, bucket: Any, names: Mapping[int, str], own: set[str]) -> None:
        self.buffer: Tensor = bucket.buffer()
        gradients: list[Tensor] = bucket.gradients()
        is_own = [bool(own) and names[id(parameter)] in own for parameter in bucket.parameters()]
        self.shared = [g for g, alone in zip(gradients, is_own, strict=True) if not alone]
        self.own = [g for g, alone in zip(gradients, is_own, strict=True) if alone]
        self.error: BaseException | None = None
        self.done: torch.futures.Future[None] = torch.futures.Future()

    def future(self) -> torch.futures.Future[Tensor]:
        """The buffer, when it is combined. Raises what went wrong, which DDP passes on from ``backward``."""

        def value(_: object) -> Tensor:
            if self.error is not None:
                raise self.error
            return self.buffer

        return self.done.then(value)
