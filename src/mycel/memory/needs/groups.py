"""Parameter groups of FSDP2: when each begins and gathers, and a step of theirs without memory, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mycel.comm.recomputing import recomputing
from mycel.comm.sharded import is_fully_sharded, param_groups
from mycel.errors import UsageError
from mycel.memory.needs.moments import Phase

__all__ = ["ROOT", "groups_of", "on_fake_shards", "watched_groups"]

#: Name of the group of the model itself; an empty one is of what is between blocks.
ROOT = "(root)"


def groups_of(model: nn.Module) -> dict[str, Any]:
    """FSDP2's parameter groups by the names of their modules, in order of modules; shards are where parameters are.

    Args:
        model: the module that ``fully_shard`` was applied to last.

    Raises:
        UsageError: the model itself is not sharded, is replicated as well, or shards itself in a way of its own.
    """
    kind = type(model).__name__
    if not is_fully_sharded(model):
        raise UsageError(f"{kind}: parts of it are sharded and it is not; call fully_shard on the model, last")
    root: Any = model
    try:
        root._get_fsdp_state()._lazy_init()
        found: dict[str, Any] = {}
        for name, module in model.named_modules():
            if not is_fully_sharded(module):
                continue
            sharded: Any = module
            sharded.reshard()
            for number, group in enumerate(param_groups(module)):
                if group in found.values():  # one group of several modules
                    continue
                found[(name or ROOT) + (f" {number}" if number else "")] = group
        for name, group in found.items():
            if group.mesh_info.mesh.ndim != 1:
                raise UsageError(
                    f"{kind}: {name} is sharded and replicated, over a mesh of {group.mesh_info.mesh.ndim} "
                    "dimensions; memory is planned where a mesh has one"
                )
            if any(hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather") for param in group.fsdp_params):
                raise UsageError(f"{kind}: {name} has tensors that gather themselves in a way of their own")
    except AttributeError as error:
        raise UsageError(f"torch {torch.__version__} keeps FSDP2's parameter groups elsewhere: {error}") from None
    return found


@contextmanager
def watched_groups(
    groups: dict[str, Any], begins: Callable[[Phase, str], None], gathers: Callable[[str], None]
) -> Iterator[None]:
    """While it is entered, says when a group's forward or backward begins, and before a group's shards are read.

    Groups' own methods are stood in for, on these groups alone: FSDP2 gathers a group ahead of its turn, which no
    hook on a module sees.

    Args:
        groups: by name.
        begins: gets phase and name; an empty name when what is between groups begins.
        gathers: gets the name.
    """

    def stand_in(name: str, group: Any) -> None:
        pre_forward, post_forward, pre_backward = group.pre_forward, group.post_forward, group.pre_backward
        unshard, wait = group.unshard, group.wait_for_unshard
        alone = group.mesh_info.shard_mesh_size == 1

        def forward(*args: Any) -> Any:
            if group._training_state.name != "FORWARD":
                begins("forward", name)
            return pre_forward(*args)

        def after(*args: Any) -> Any:
            output = post_forward(*args)
            if not recomputing():
                begins("forward", "")
            return output

        def backward(*args: Any) -> Any:
            if group._training_state.name != "PRE_BACKWARD":
                begins("backward", name)
            return pre_backward(*args)

        def gather(async_op: bool = False) -> Any:
            skips = group._training_state.name == "PRE_BACKWARD" and not group.unshard_in_backward
            if not (alone or skips or group.is_unsharded or group._all_gather_result is not None):
                gathers(name)
            return unshard(async_op)

        def copy() -> Any:
            if alone and group._all_gather_result is not None:  # of one rank, shards are read here
                gathers(name)
            return wait()

        group.pre_forward, group.post_forward, group.pre_backward = forward, after, backward
        group.unshard, group.wait_for_unshard = gather, copy

    for name, group in groups.items():
        stand_in(name, group)
    try:
        yield
    finally:
        for group in groups.values():
            for method in ("pre_forward", "post_forward", "pre_backward", "unshard", "wait_for_unshard"):
                group.__dict__.pop(method, None)


# -- without memory ---------------------------------------------------------------------------------------------


class _Nothing:
    """A collective that moves nothing, between tensors that have no numbers."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


_OF_PARAM = (
    "_sharded_param_data",
    "sharded_param",
    "all_gather_outputs",
    "sharded_state",
    "_unsharded_param",
    "_unsharded_inner_tensors",
    "unsharded_accumulated_grad",
)
_OF_GROUP = ("_all_gather_comm", "_reduce_scatter_comm", "_sharded_state", "_training_state")


@contextmanager
def on_fake_shards(model: nn.Module, groups: dict[str, Any], mode: FakeTensorMode) -> Iterator[dict[int, str]]:
    """While it is entered, a sharded model has fake tensors in place of its own, and its collectives move nothing.

    A sharded module cannot be copied; so it is lent, and gets everything back.

    Args:
        model: the module.
        groups: all of it.
        mode: makes fake tensors.

    Yields:
        Names of the parameters that it had, by identity.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kept: list[tuple[Any, str, Any]] = []
    plain: list[tuple[dict[str, Any], str, Any]] = []
    sharded = {id(param.sharded_param) for group in groups.values() for param in group.fsdp_params}
    for group in groups.values():
        kept += [(group, name, getattr(group, name)) for name in _OF_GROUP]
        for param in group.fsdp_params:
            kept += [(param, name, getattr(param, name)) for name in _OF_PARAM if hasattr(param, name)]
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            plain += [
                (held, name, tensor)
                for name, tensor in held.items()
                if tensor is not None and id(tensor) not in sharded
            ]
    try:
        for group in groups.values():
            group._all_gather_comm = group._reduce_scatter_comm = _Nothing()
            for param in group.fsdp_params:
                _be_fake(param, mode)
        twins: dict[int, Any] = {}
        for held, name, tensor in plain:
            if id(tensor) not in twins:
                fake = mode.from_tensor(tensor.detach())
                is_parameter = isinstance(tensor, nn.Parameter)
                twins[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
            held[name] = twins[id(tensor)]
        yield names
    except BaseException:
        _forget(model)
        raise
    finally:
        for group in groups.values():
            for param in group.fsdp_params:
                param.__dict__.pop("_unsharded_param", None)
        for owner, name, value in kept:
            setattr(owner, name, value)
        for group in groups.values():
            for param in group.fsdp_params:
                param._setattr_on_modules(param.sharded_param)
        for held, name, tensor in plain:
            held[name] = tensor


def _be_fake(param: Any, mode: FakeTensorMode) -> None:
    flat = mode.from_tensor(param._sharded_param_data.detach())
    dim = param.fsdp_placement.dim
    local = flat.view(param.padded_sharded_param_size).narrow(dim, 0, param.sharded_size[dim])
    with mode:
        made = nn.Parameter(param.to_sharded_dtensor(local), requires_grad=param.sharded_param.requires_grad)
    param._sharded_param_data, param.sharded_param = flat, made
    param.all_gather_outputs, param._unsharded_inner_tensors = [], []
    param.unsharded_accumulated_grad = None
    param.__dict__.pop("_unsharded_param", None)
    param._setattr_on_modules(made)


def _forget(model: Any) -> None:
    """Of a step that did not come to its end FSDP2 keeps nothing."""
    reset = getattr(model._get_fsdp_state(), "_reset_iter_state", None)
    if reset is not None:
        reset()
