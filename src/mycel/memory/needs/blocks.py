"""Which modules of a model run as a whole, and when each begins, forward and backward."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mycel.comm.recomputing import recomputing
from mycel.memory.collected import collected
from mycel.memory.needs.moments import Phase

__all__ = ["blocks_of", "innermost", "recomputed", "tensors_in", "watched"]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors of what a module takes or gives: itself, in tuples, lists, mappings and outputs of Hugging Face.

    Args:
        value: anything.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that hold all parameters among them, none within another: layers, and what stands beside them.

    A module whose children are alike, as a list of layers, is taken apart; whatever else has parameters is gone into
    until it has some of its own or its children are no larger than a layer would be.

    Args:
        model: any.

    Examples:
        >>> layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        >>> model = nn.Sequential(nn.Embedding(9, 4), layers, nn.Linear(4, 9))
        >>> list(blocks_of(model))
        ['0', '1.0', '1.1', '2']
    """
    found: dict[str, nn.Module] = {}

    def go(path: str, module: nn.Module) -> None:
        below = f"{path}." if path else ""
        if not any(True for _ in module.parameters()):
            return
        own = any(True for _ in module.parameters(recurse=False))
        if not own and _is_taken_apart(path, module):
            for name, child in module.named_children():
                go(below + name, child)
        else:
            found[path] = module

    go("", model)
    return found


def innermost(blocks: Mapping[str, nn.Module]) -> list[str]:
    """Names of the blocks that no other block is inside of.

    Args:
        blocks: modules by name.
    """
    every = {id(module) for module in blocks.values()}
    return [name for name, block in blocks.items() if not {id(m) for m in block.modules() if m is not block} & every]


def _is_taken_apart(path: str, module: nn.Module) -> bool:
    """A list of modules, what contains one, and the model itself."""
    lists = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or not path:
        return True
    if isinstance(module, nn.Sequential):
        return len(module) > 1 and "." not in path
    return "." not in path and any(isinstance(child, lists) for child in module.children())


@contextmanager
def watched(blocks: dict[str, nn.Module], begins: Callable[[Phase, str], None]) -> Iterator[None]:
    """While it is entered, says when a block begins, and with an empty name when what is between blocks does.

    Args:
        blocks: modules by name.
        begins: gets phase and name.
    """

    def before(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if not recomputing():
                begins("forward", name)

        return hook

    def after(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if recomputing():
                return
            begins("forward", "")
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: begins("backward", name))  # type: ignore[no-untyped-call]
                    return  # the first: one block, one beginning

        return hook

    handles = [module.register_forward_pre_hook(before(name)) for name, module in blocks.items()]
    handles += [module.register_forward_hook(after(name)) for name, module in blocks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recomputed(blocks: dict[str, nn.Module]) -> Iterator[None]:
    """While it is entered, what these blocks compute is computed again in backward, from their inputs.

    Args:
        blocks: modules by name.
    """
    had: dict[str, Any] = {name: block.__dict__.get("forward") for name, block in blocks.items()}
    for name, block in blocks.items():
        block.forward = types.MethodType(_again, block) if had[name] is None else partial(_computed, block, had[name])
    try:
        yield
    finally:
        for name, block in blocks.items():
            block.__dict__.pop("forward", None)
            if had[name] is not None:
                block.forward = had[name]


def _again(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A method, so that a copy of the model has its own."""
    return _computed(block, partial(type(block).forward, block), *args, **kwargs)


def _computed(block: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for name, value in kwargs.items():
        # A cache of keys that is empty serves nothing in training, and would be filled again by recomputation.
        length = getattr(value, "get_seq_length", None)
        if length is not None and length() == 0:
            kwargs[name] = None

    def run(*args: Any, **kwargs: Any) -> Any:
        if not recomputing():
            return inner(*args, **kwargs)
        with collected(f"a {type(block).__name__} that is computed again"):
            return inner(*args, **kwargs)

    # Who drops out need not be a module of torch's: attention of Hugging Face has a number of its configuration.
    return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=block.training, **kwargs)
