"""The entry: a plan on a model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from mycel.arguments import real_number, the
from mycel.errors import UsageError, VerificationError
from mycel.memory.residency import is_resident
from mycel.memory.swap.blocks import find_blocks, put_round, swapped_forward
from mycel.memory.swap.executor import Swapping
from mycel.memory.tiers import CudaLink, FarMemory, Link, in_host, pinned
from mycel.planning.residency import MemoryInstance, MemoryPlan, check_plan

__all__ = ["attach"]


def attach(
    model: nn.Module,
    blocks: Sequence[nn.Module | str],
    instance: MemoryInstance,
    plan: MemoryPlan,
    *,
    link: Link,
    far: FarMemory | None = None,
    deadline_s: float = 60.0,
) -> Swapping:
    """Carry a memory plan out on a model, which is changed in nothing but in when its activations are where.

    What blocks save for their backward is kept, moved to far memory or computed again as the plan says; gradients are
    those without it, bit for bit. Parameters, buffers and arguments without gradients are never moved. Where things
    do not go as planned, as with two graphs alive, what is needed last goes out to make room.

    Args:
        model: trained in any way.
        blocks: modules of it, or their names, in order of forward; none inside another.
        instance: what ``measure`` said of them; its capacity is the budget.
        plan: for this instance.
        link: between near and far memory; it stays open.
        far: memory for what goes out; of the host if not given.
        deadline_s: how long a block waits for room.

    Returns:
        A handle: ``close()`` ends it, ``explain()`` says what happened.

    Raises:
        UsageError: the plan is for another model or another instance, a module is no block of this model, or is
            swapped already, or the model's parameters come and go.

    References:
        M. Wahib et al., "Scaling Distributed Deep Learning Workloads beyond the Memory Capacity with KARMA", SC 2020
        (swapping interleaved with recomputation).
        K. Wu et al., "SSDTrain: An Activation Offloading Framework to SSDs for Faster Large Language Model Training",
        2024 (arXiv 2408.10013; identity of storages, forwarding of what is still near).

    Examples:
        See ``Swapping``::

            instance = measure(model, blocks, lambda: loss(model(x)), link=link, budget=2 << 30)
            swapping = attach(model, blocks, instance, plan_memory(instance), link=link)
    """
    link = the(Link, link, "a link")  # type: ignore[type-abstract]  # of any concrete kind
    instance, plan = the(MemoryInstance, instance, "an instance"), the(MemoryPlan, plan, "a plan of memory")
    deadline_s = real_number(deadline_s, "a deadline in seconds", above=0)
    if is_resident(model):
        raise UsageError(
            f"{type(model).__name__}: its parameters come and go by a schedule already; close that first"
        )
    found = find_blocks(model, blocks)
    if len(found) != len(instance.blocks) or len(plan.policy) != len(instance.blocks):
        raise UsageError(
            f"a plan of {len(plan.policy)} blocks for an instance of {len(instance.blocks)} and a model of "
            f"{len(found)}: it is for another model"
        )
    try:
        check_plan(instance, plan)
    except VerificationError as error:
        raise UsageError(f"the plan is for another instance, or wrong: {error}") from error
    if far is None:
        far = FarMemory(pinned if isinstance(link, CudaLink) else in_host)
    far = the(FarMemory, far, "far memory")
    swapping = Swapping(instance, plan, list(found), link, far, deadline_s)
    for block, module in enumerate(found.values()):
        swapping.on_close(put_round(module, swapped_forward(swapping, block, module)))
    return swapping
