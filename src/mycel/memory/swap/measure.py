"""What blocks of a model take, and a link, measured on this machine: the instance that is planned."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from mycel.arguments import the, whole_number
from mycel.comm.recomputing import recomputing
from mycel.cost import Line
from mycel.errors import UsageError
from mycel.memory.swap.blocks import find_blocks, put_round
from mycel.memory.swap.saved import Stays, moves
from mycel.memory.tiers import CudaLink, FarMemory, Link, in_host, pinned
from mycel.memory.tiers.near import key_of
from mycel.planning.residency import Block, MemoryInstance

__all__ = ["measure"]

#: Sizes of transfers that are timed: a small one, and the largest block's unless that is more.
_SMALL, _LARGE = 1 << 14, 1 << 22


def measure(
    model: nn.Module,
    blocks: Sequence[nn.Module | str],
    loss: Callable[[], Tensor],
    *,
    link: Link,
    budget: int,
    runs: int = 3,
) -> MemoryInstance:
    """What blocks save and take here, and how fast the link is.

    The loss is computed and gone through backward a few times with everything near, so that this has to fit, with a
    small batch if need be; gradients of parameters are as before afterwards. A storage that two blocks save, as the
    output of one that the next one needs, counts for both.

    Args:
        model: to be trained.
        blocks: modules of it, or their names, in order of forward.
        loss: computes the model's loss once, a scalar.
        link: that will be used.
        budget: bytes for all that is saved for backward. What is saved outside of blocks is taken off.
        runs: of forward and backward, at least 1; medians count.

    Returns:
        The instance, in bytes and microseconds.

    Raises:
        UsageError: a block was not called, or more than once; a loss without gradients; a budget below what one block
            or what is outside of blocks saves; the message says which, and by how much.
    """
    link = the(Link, link, "a link")  # type: ignore[type-abstract]  # of any concrete kind
    budget = whole_number(budget, "a budget in bytes", least=1)
    runs = whole_number(runs, "a number of runs", least=1)
    found = find_blocks(model, blocks)
    grads = [(p, p.grad) for p in model.parameters()]
    for parameter, _ in grads:
        parameter.grad = None
    try:
        saved, inputs, outside = _sizes(found, loss)
        timed = [_times(found, loss) for _ in range(runs)]
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
    if budget <= outside:
        raise UsageError(
            f"a budget of {budget} bytes, and {outside} are saved outside of the blocks: {outside - budget + 1} too "
            "little for any plan; make what comes after them a block as well"
        )
    out, back = _rates(link, next(model.parameters()).device, max(saved))
    measured = tuple(
        Block(
            forward_us=max(1, round(statistics.median(run[0][k] for run in timed) * 1e6)),
            backward_us=max(1, round(statistics.median(run[1][k] for run in timed) * 1e6)),
            saved=max(1, saved[k]),
            input=inputs[k],
        )
        for k in range(len(found))
    )
    capacity = budget - outside
    largest = max(range(len(measured)), key=lambda k: measured[k].saved)
    if measured[largest].saved > capacity:
        raise UsageError(
            f"block {largest} ({list(found)[largest]}) saves {measured[largest].saved} bytes, and of the budget of "
            f"{budget} {capacity} are left for blocks: {measured[largest].saved - capacity} too little for any plan; "
            "cut the block in two, make the batch smaller or raise the budget"
        )
    return MemoryInstance(
        blocks=measured,
        capacity=capacity,
        out_bytes_per_us=1e-6 / out.unit_s,
        in_bytes_per_us=1e-6 / back.unit_s,
        latency_us=round(max(out.fixed_s, back.fixed_s) * 1e6),
    )


def _sizes(found: dict[str, nn.Module], loss: Callable[[], Tensor]) -> tuple[list[int], list[int], int]:
    """Bytes that each block saves, of these its input, and bytes that are saved outside."""
    count = len(found)
    saved: list[dict[int, int]] = [{} for _ in range(count)]
    inputs = [0] * count
    called = [0] * count
    held: list[Tensor] = []  # so that no storage's identity is given to another one
    model_wide: dict[int, int] = {}

    def around(k: int, module: nn.Module) -> Callable[..., Any]:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if recomputing():
                return original(*args, **kwargs)
            called[k] += 1
            stays = Stays(module, (args, kwargs))
            inputs[k] = sum(stays.inputs.values())
            saved[k] |= stays.inputs
            held.extend(leaf.detach() for leaf in tree_leaves((args, kwargs)) if moves(leaf))

            def note(x: Tensor) -> Tensor:
                if moves(x) and x not in stays:
                    saved[k][key_of(x)] = x.untyped_storage().nbytes()
                    held.append(x.detach())
                return x.detach()

            with saved_tensors_hooks(note, _same):
                return original(*args, **kwargs)

        return forward

    def outside(x: Tensor) -> Tensor:
        leaf = x._base if x._is_view() else x
        if moves(x) and not (leaf is not None and leaf.is_leaf):
            model_wide[key_of(x)] = x.untyped_storage().nbytes()
            held.append(x.detach())
        return x.detach()

    undo = [put_round(module, around(k, module)) for k, module in enumerate(found.values())]
    try:
        with saved_tensors_hooks(outside, _same):
            value = loss()
    finally:
        for each in undo:
            each()
    for name, times in zip(found, called, strict=True):
        if times != 1:
            raise UsageError(f"block {name!r} was called {times} times in a loss; each block has to be called once")
    if not value.requires_grad:
        raise UsageError("the loss has no gradients; compute it without no_grad, from parameters that require them")
    inside = {key for each in saved for key in each}
    return (
        [sum(each.values()) for each in saved],
        inputs,
        sum(size for key, size in model_wide.items() if key not in inside),
    )


def _same(x: Tensor) -> Tensor:
    return x


def _times(found: dict[str, nn.Module], loss: Callable[[], Tensor]) -> tuple[list[float], list[float]]:
    """Seconds of each block's forward and backward in one run."""
    count = len(found)
    forwards, begins = [0.0] * count, [0.0] * (count + 1)

    def around(k: int, module: nn.Module) -> Callable[..., Any]:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if recomputing():
                return original(*args, **kwargs)
            begin = _now()
            out = original(*args, **kwargs)
            forwards[k] = _now() - begin

            def backward(_: Tensor) -> None:
                begins[k] = begins[k] or _now()

            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(backward)  # type: ignore[no-untyped-call]
            return out

        return forward

    undo = [put_round(module, around(k, module)) for k, module in enumerate(found.values())]
    try:
        loss().backward()  # type: ignore[no-untyped-call]
    finally:
        for each in undo:
            each()
    ends = [_now(), *begins[:count]]
    backwards = [max(0.0, ends[k] - begins[k]) if begins[k] and ends[k] else 0.0 for k in range(count)]
    return forwards, backwards


def _now() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def _rates(link: Link, device: torch.device, largest: int) -> tuple[Line, Line]:
    """Seconds of a transfer out and of one back."""
    far = FarMemory(pinned if isinstance(link, CudaLink) else in_host)
    points: dict[int, tuple[float, float]] = {}
    for num_bytes in (_SMALL, max(4 * _SMALL, min(largest, _LARGE))):
        near = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        copy = far.take(num_bytes)
        link.store([(copy, near)]).wait()  # touches the pages
        spent: list[tuple[float, float]] = []
        for _ in range(7):
            begin = _now()
            link.store([(copy, near)]).wait()
            middle = _now()
            link.fetch([(copy, near)]).wait()
            spent.append((middle - begin, _now() - middle))
        points[num_bytes] = (min(a for a, _ in spent), min(b for _, b in spent))
    (small, at_small), (large, at_large) = points.items()
    lines = [Line.through((small, at_small[way]), (large, at_large[way])) for way in (0, 1)]
    least = 1e-12  # a link that takes no time that can be measured
    out, back = (Line(fixed_s=line.fixed_s, unit_s=max(least, line.unit_s)) for line in lines)
    return out, back
