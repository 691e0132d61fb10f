"""What a training step needs, without a device and without memory: one step on fake tensors, counted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
)

from mycel.comm.sharded import is_fully_sharded
from mycel.errors import UsageError
from mycel.memory.needs.blocks import blocks_of, innermost, recomputed, tensors_in, watched
from mycel.memory.needs.groups import groups_of, on_fake_shards, watched_groups
from mycel.memory.needs.moments import Block, Needs
from mycel.memory.needs.storages import Storages

__all__ = ["Batch", "Loss", "MakeOptimizer", "loss_of", "needs_of", "trace"]

Loss = Callable[[Any], Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Batch = Sequence[Any] | Mapping[str, Any]


def loss_of(output: Any) -> Tensor:
    """What a step minimises when nobody says: the ``loss`` that a model gives, a scalar, or the mean of all numbers.

    Args:
        output: of a model.

    Raises:
        UsageError: there is nothing in it that has a gradient.
    """
    given = getattr(output, "loss", None)
    if isinstance(given, Tensor):
        return given
    tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not tensors:
        raise UsageError(f"a model that gives {type(output).__name__} without a gradient: say what the loss is")
    first = tensors[0]
    return first if first.dim() == 0 else first.float().mean()


def adam_w(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that counts when nobody says."""
    return torch.optim.AdamW(parameters)


def needs_of(
    model: nn.Module | Callable[[], nn.Module],
    batch: Batch | Callable[[], Batch],
    *,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = adam_w,
    loss: Loss = loss_of,
    blocks: Sequence[str] | None = None,
    recompute: Sequence[str] | bool = False,
    rounding: int = 1,
    name: str = "",
) -> Needs:
    """What a training step of a model holds, moment by moment, without running it.

    The step runs on fake tensors, which have sizes and no memory; torch's own autograd, optimizer and checkpointing
    decide what lives how long, so that nothing is estimated but what kernels hold inside. It is the second step: the
    optimizer's state is there. The model is not touched. One that ``fully_shard`` has sharded cannot be copied: it
    has fake shards for as long as this takes, and no collective runs, so that ranks need not call this together; its
    blocks are FSDP2's units.

    Args:
        model: any module, on any device, or a function that makes one, which is called where tensors are fake: then a
            model of any size takes no memory at all.
        batch: arguments of the model, or those by name, or a function that makes them, called after the model's.
        optimizer: the one that trains the model, or a function that makes one of parameters. ``None``: forward and
            backward alone.
        loss: of the model's output.
        blocks: names of modules that count as blocks; found by ``blocks_of`` if not given.
        recompute: which of them are computed again in backward, or all.
        rounding: bytes to whose multiple the allocator rounds: 512 on a GPU.
        name: of the model, for people.

    Raises:
        UsageError: a block that is not there, or a model whose sizes depend on the values in its tensors; the message
            names the operator.

    Examples:
        >>> layer = nn.Linear(100, 100, bias=False)
        >>> needs = needs_of(layer, (torch.ones(10, 100),))
        >>> needs.most("parameters"), needs.most("gradients"), needs.most("optimizer")
        (40000, 40000, 80004)
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        module: nn.Module
        names: dict[int, str] | None = None
        if not isinstance(model, nn.Module):
            stack.enter_context(fake)
            with _readable():
                module = model()
        elif is_fully_sharded(model):
            module = model
            names = stack.enter_context(on_fake_shards(module, groups_of(module), fake))
            stack.enter_context(fake)
        else:
            with FakeCopyMode(fake):
                module = copy.deepcopy(model)
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            stack.enter_context(fake)
        module.zero_grad(set_to_none=True)
        maker = _maker(optimizer, names, module)
        given = {key: _fake(fake, value) for key, value in _named(batch() if callable(batch) else batch).items()}
        chosen = _chosen(module, blocks)
        again = innermost(chosen) if recompute is True else list(recompute or ())
        for each in again:
            if each not in chosen:
                raise UsageError(f"recompute: {each!r} is no block; blocks are {', '.join(list(chosen)[:8])}")
        stack.enter_context(recomputed({each: chosen[each] for each in again}) if again else nullcontext())
        with _readable():
            return trace(
                module,
                given,
                optimizer=maker,
                loss=loss,
                blocks=chosen,
                rounding=rounding,
                name=name or _name(module),
            )


def trace(
    model: nn.Module,
    batch: Mapping[Any, Any],
    *,
    optimizer: MakeOptimizer | None,
    loss: Loss,
    blocks: Mapping[str, nn.Module],
    rounding: int,
    name: str,
) -> Needs:
    """Runs two steps where it is called, on tensors that may be fake, and counts the second.

    Args:
        model: the module.
        batch: its arguments: by place, where keys are numbers, or by name.
        optimizer: makes one.
        loss: of its output.
        blocks: modules by name.
        rounding: of the allocator.
        name: for people.
    """
    places = [batch[key] for key in sorted(key for key in batch if isinstance(key, int))]
    names = {key: value for key, value in batch.items() if isinstance(key, str)}
    storages = Storages(rounding=rounding)
    with storages, _marked(model, blocks, storages):
        storages.known(model.parameters(), "parameters")
        storages.known(model.buffers(), "parameters")
        storages.known((tensor for value in batch.values() for tensor in tensors_in(value)), "inputs")
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        made = optimizer(trained) if optimizer is not None else None
        first = 0
        sizes: dict[str, int] = {}
        with _inputs(blocks, sizes):
            for _ in range(2 if made is not None else 1):
                first = storages.num_marks
                storages.mark("forward", "")
                value = loss(model(*places, **names))
                storages.mark("backward", "")
                value.backward()  # type: ignore[no-untyped-call]
                del value
                storages.known((p.grad for p in model.parameters() if p.grad is not None), "gradients")
                storages.mark("step", "")
                if made is not None:
                    made.step()
                    storages.known(
                        (t for state in made.state.values() for t in state.values() if isinstance(t, Tensor)),
                        "optimizer",
                    )
                for parameter in model.parameters():
                    parameter.grad = None
    moments = storages.moments(first)
    kept = []
    own = _own(blocks)
    for block_name in blocks:
        at = [i for i, m in enumerate(moments) if m.block == block_name and m.phase == "forward"]
        if not at:
            continue
        kept.append(
            (
                at[0],
                Block(
                    name=block_name,
                    parameters=sum(_local(t) for t in own[block_name]),
                    saved=max(0, sum(storages.left_by(first + i, first + i) for i in at)),
                    input=sizes.get(block_name, 0),
                    forward_flops=sum(moments[i].flops for i in at),
                    backward_flops=sum(m.flops for m in moments if m.block == block_name and m.phase == "backward"),
                ),
            )
        )
    return Needs(
        name=name, moments=moments, blocks=tuple(block for _, block in sorted(kept, key=lambda each: each[0]))
    )


def _marked(model: nn.Module, blocks: Mapping[str, nn.Module], storages: Storages) -> AbstractContextManager[None]:
    """Marks moments as blocks begin: by hooks on modules, or by what FSDP2 calls."""
    if is_fully_sharded(model):
        groups = {name: group for name, group in groups_of(model).items() if name in blocks}
        if len(groups) == len(blocks):
            return watched_groups(groups, storages.mark, storages.gathers)
    return watched(dict(blocks), storages.mark)


def _own(blocks: Mapping[str, nn.Module]) -> dict[str, list[Tensor]]:
    """Parameters and buffers of each block that no block inside it has."""
    found: dict[str, list[Tensor]] = {}
    for name, block in blocks.items():
        within = {id(module) for module in block.modules()} - {id(block)}
        theirs = {
            id(tensor)
            for other in blocks.values()
            if id(other) in within
            for tensor in (*other.parameters(), *other.buffers())
        }
        found[name] = [t for t in (*block.parameters(), *block.buffers()) if id(t) not in theirs]
    return found


@contextmanager
def _inputs(blocks: Mapping[str, nn.Module], sizes: dict[str, int]) -> Iterator[None]:
    """While it is entered, notes the bytes of the first tensor that each block gets: what goes through it."""

    def hook(name: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            first = next(tensors_in((args, kwargs)), None)
            sizes[name] = 0 if first is None else first.numel() * first.itemsize

        return note

    handles = [module.register_forward_pre_hook(hook(name), with_kwargs=True) for name, module in blocks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _readable() -> Iterator[None]:
    """What fake tensors cannot do, said as a user would say it."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UsageError(
            f"{error.func} depends on the values in a tensor, and what a step needs is found without values; of a "
            "mixture of experts take the grouped or batched implementation"
        ) from None


def _maker(
    optimizer: torch.optim.Optimizer | MakeOptimizer | None, names: Mapping[int, str] | None, module: nn.Module
) -> MakeOptimizer | None:
    """A function that makes the same optimizer of the parameters that stand for the model's."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if names is None:
        raise UsageError("optimizer: a function that makes one is needed where a function makes the model")
    copied = dict(module.named_parameters())
    groups = []
    for group in optimizer.param_groups:
        missing = [p for p in group["params"] if id(p) not in names]
        if missing:
            raise UsageError(f"optimizer: it trains a parameter of {tuple(missing[0].shape)} that is not the model's")
        groups.append({**group, "params": [copied[names[id(p)]] for p in group["params"]]})
    kind: Any = type(optimizer)

    def make(_: list[nn.Parameter]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = kind(groups)
        return made

    return make


def _chosen(module: nn.Module, blocks: Sequence[str] | None) -> dict[str, nn.Module]:
    if blocks is None and is_fully_sharded(module):
        return {name: group.modules[0] for name, group in groups_of(module).items()}
    if blocks is None:
        return blocks_of(module)
    known = dict(module.named_modules())
    for each in blocks:
        if each not in known:
            raise UsageError(f"blocks: there is no module {each!r} in {type(module).__name__}")
    return {each: known[each] for each in blocks}


def _named(batch: Batch) -> dict[Any, Any]:
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, Tensor):
        return {0: batch}
    return dict(enumerate(batch))


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    if isinstance(value, Tensor) and not isinstance(value, torch._subclasses.FakeTensor):
        return mode.from_tensor(value)
    return value


def _local(tensor: Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    return int(local.numel() * local.itemsize)


def _name(module: nn.Module) -> str:
    return type(module).__name__
