"""Blocks of a model: found by name or module, and a way round their forward that can be taken away again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from mycel.comm.recomputing import recomputing
from mycel.errors import UsageError
from mycel.memory.collected import collected
from mycel.memory.swap.executor import Pass, Swapping
from mycel.memory.swap.saved import Stays, moves
from mycel.names import nearest

__all__ = ["find_blocks", "is_swapped", "put_round", "swapped_forward", "through"]

#: Set on what stands in place of a forward.
_MARK = "mycel_swap"


def find_blocks(model: nn.Module, blocks: Sequence[nn.Module | str]) -> dict[str, nn.Module]:
    """Blocks by their names.

    Args:
        model: that has them.
        blocks: modules of it, or their names, in order of forward.

    Raises:
        UsageError: none, one that the model has not, one that is inside another or there twice, or one that another
            plan is carried out on.
    """
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, nn.Module] = {}
    for place, block in enumerate(blocks):
        if isinstance(block, str):
            if block not in names.values():
                raise UsageError(f"{type(model).__name__} has no module {block!r}{nearest(block, names.values())}")
            name, module = block, model.get_submodule(block)
        elif id(block) in names:
            name, module = names[id(block)], block
        else:
            raise UsageError(f"blocks[{place}], a {type(block).__name__}, is no module of {type(model).__name__}")
        if name in found:
            raise UsageError(f"block {name or '(the model itself)'!r} is there twice")
        if is_swapped(module):
            raise UsageError(f"block {name!r} is swapped already; close that first")
        found[name] = module
    if not found:
        raise UsageError(f"{type(model).__name__}: no blocks are given")
    for name, module in found.items():
        inside = {id(m) for m in module.modules()} - {id(module)}
        for other, candidate in found.items():
            if id(candidate) in inside:
                raise UsageError(f"block {other!r} is inside block {name!r}; one of them can be planned")
    return found


def is_swapped(module: nn.Module) -> bool:
    """Whether a plan is carried out on a module, or it is being measured.

    Args:
        module: of a model.
    """
    return hasattr(module.forward, _MARK)


def put_round(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Have a module compute by another function; gives what takes it away again.

    Args:
        module: whose ``forward`` it is.
        forward: in its place.
    """
    before = module.__dict__.get("forward")
    setattr(forward, _MARK, True)
    module.__dict__["forward"] = forward

    def undo() -> None:
        if module.__dict__.get("forward") is forward:
            del module.__dict__["forward"]
            if before is not None:
                module.__dict__["forward"] = before

    return undo


def through() -> saved_tensors_hooks:
    """Hooks that change nothing: what is saved under them is saved, and nobody else's hooks see it."""
    return saved_tensors_hooks(_same, _same)


def _same(x: Tensor) -> Tensor:
    return x


def swapped_forward(swapping: Swapping, block: int, module: nn.Module) -> Callable[..., Any]:
    """A block's forward by the plan.

    Args:
        swapping: carries it out.
        block: which.
        module: the block.
    """
    original = module.forward
    again = swapping.plan.policy[block] in ("recompute", "recompute_swap")

    def compute(one: Pass, stays: Stays, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _checkpointed(one, block, stays, original, args, kwargs) if again else original(*args, **kwargs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        if recomputing():  # a checkpoint around this block wants what it saved: that is in this plan's hands
            with through():
                return original(*args, **kwargs)
        one = swapping.enter(block)
        stays = Stays(module, (args, kwargs))
        whole = False
        one.forward(block, stays)
        try:
            with saved_tensors_hooks(lambda x: one.pack(x, block, stays), one.unpack):
                out = compute(one, stays, args, kwargs)
            whole = True
        finally:
            one.forward_end(block, whole=whole)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: one.backward(block))  # type: ignore[no-untyped-call]
        return out

    return forward


def _checkpointed(
    one: Pass, block: int, stays: Stays, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """By torch's checkpoint, whose inputs the plan's hooks see, and whose recomputation is counted."""
    leaves, spec = tree_flatten((args, kwargs))

    def run(*leaves: Any) -> Any:
        args, kwargs = tree_unflatten(leaves, spec)
        if not recomputing():
            return original(*args, **kwargs)

        def count(x: Tensor) -> None:
            if moves(x) and x not in stays:
                one.count(x, block)

        one.recompute(block)
        try:
            with collected(f"block {block} ({one.swapping.names[block]})", count):
                return original(*args, **kwargs)
        finally:
            one.recomputed(block)

    return checkpoint(run, *leaves, use_reentrant=False)
