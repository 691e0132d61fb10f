"""What local updates are given: the optimizer that steps, its parameters by name, and what cannot work."""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mycel.comm.sharded import is_sharded
from mycel.comm.start import group_or_all
from mycel.data_parallel.combine.base import Combiner, check_combiner
from mycel.data_parallel.combine.mean import Mean
from mycel.data_parallel.combine.tasks.base import TaskCombiner
from mycel.errors import UsageError

__all__ = ["check", "check_members", "check_parts", "named", "own_group", "unwrapped"]


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer whose ``step`` runs in the end; accelerate wraps it."""
    inner = getattr(optimizer, "optimizer", None)
    return unwrapped(inner) if isinstance(inner, torch.optim.Optimizer) else optimizer


def named(optimizer: torch.optim.Optimizer, module: nn.Module) -> tuple[list[str], list[Tensor]]:
    """Names and parameters that the optimizer trains, in the model's order."""
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [(name, p) for name, p in module.named_parameters() if id(p) in trained and p.requires_grad]
    strangers = trained - {id(p) for p in module.parameters()}
    if strangers or not found:
        raise UsageError(
            f"local_updates: {len(strangers)} of the optimizer's {len(trained)} parameters are not the model's; "
            "pass the model that the optimizer was made for"
        )
    return [name.replace("_orig_mod.", "") for name, _ in found], [p for _, p in found]


def own_group(group: dist.ProcessGroup | None, *, delayed: bool) -> dist.ProcessGroup:
    """The ranks that synchronise; a group of our own where messages travel while others do."""
    if delayed:
        ranks = None if group is None else dist.get_process_group_ranks(group)
        made = dist.new_group(ranks, use_local_synchronization=ranks is not None)
        assert isinstance(made, dist.ProcessGroup)
        return made
    return group_or_all(group, "local_updates")


def check(
    parameters: list[Tensor],
    combiner: Combiner | None,
    group: dist.ProcessGroup | None,
    state: str,
    *,
    delayed: bool,
    compressed: bool,
) -> None:
    """Refuse what cannot work.

    Raises:
        UsageError: says what, and what to do instead.
    """
    if state not in ("keep", "average", "reset"):
        raise UsageError(f"optimizer_state {state!r} is none of: keep, average, reset")
    if delayed and state != "keep":
        raise UsageError(f"optimizer_state={state!r} needs rounds whose results are not delayed")
    if combiner is not None and compressed:
        raise UsageError(f"a compressor makes a mean, {type(combiner).__name__} something else: pass one of both")
    if compressed and any(p.is_complex() for p in parameters):
        raise UsageError("changes of complex parameters cannot be compressed; leave the compressor out")
    sharded = [p for p in parameters if is_sharded(p)]
    if not sharded:
        return
    if group is None:
        raise UsageError('the model is sharded: pass the replicas of a shard, group=mesh["replicate"].get_group()')
    if any(placement.is_replicate() for p in sharded for placement in p.placements):
        raise UsageError('FSDP2 averages gradients over replicas itself: fully_shard(model, mesh=mesh["shard"])')
    knows_shards = isinstance(combiner, Mean) or (isinstance(combiner, TaskCombiner) and combiner.shards is not None)
    if combiner is not None and not knows_shards:
        raise UsageError(
            f"{type(combiner).__name__} needs whole layers, and each rank has a shard only; use Mean(), or for tasks "
            "such as MGDA(shards=...) with the ranks that hold the other shards"
        )


def check_parts(outer: object, combiner: object) -> None:
    """Refuse what makes no outer optimizer, and what does not combine.

    Raises:
        UsageError: says what is wanted.
    """
    if outer is not None:
        _check_outer(outer)
    if combiner is not None:
        check_combiner(combiner)


def _check_outer(outer: object) -> None:
    if not callable(outer) or isinstance(outer, torch.optim.Optimizer):
        raise UsageError(
            f"outer makes the optimizer of the shared parameters, got {type(outer).__name__}: such as diloco(), or "
            "lambda parameters: torch.optim.SGD(parameters, lr=0.7)"
        )
    try:
        inspect.signature(outer).bind([])
    except TypeError:
        name = getattr(outer, "__name__", type(outer).__name__)
        raise UsageError(f"outer={name} does not take the shared parameters alone: call it, outer={name}()") from None
    except ValueError:  # written in C: it says itself what it takes
        return


def check_members(
    parameters: list[Tensor], group: dist.ProcessGroup | None, state: str, *, is_wrapped: bool, has_buffers: bool
) -> None:
    """Refuse what cannot work where ranks may be lost.

    Raises:
        UsageError: says what, and what to do instead.
    """
    if is_wrapped or any(is_sharded(p) for p in parameters):
        raise UsageError("members: DDP and FSDP2 lose a step with every rank that is lost; pass the model unwrapped")
    if group is not None:
        raise UsageError("members form the default group anew; leave group out")
    if state != "keep":
        raise UsageError(f"optimizer_state={state!r} meets outside of rounds, where no rank may be lost; use keep")
    if has_buffers:
        raise UsageError("members: buffers would meet outside of rounds; pass average_buffers=False")
