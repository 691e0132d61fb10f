"""How torch learns of backend ``mycel``: by importing ``mycel.runtime``, or by name, from torch 2.14 on."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level
from torch.distributed.distributed_c10d import Store

from mycel.runtime.backend import MycelBackend, is_called_by_torch
from mycel.runtime.elastic.process_group import ElasticProcessGroup
from mycel.runtime.elastic.reconfigurable import Unformed
from mycel.runtime.process_group import MycelProcessGroup
from mycel.runtime.tensor_group import TensorGroup

__all__ = ["create", "over_tensor_group", "register"]

#: Backends that torch wraps in its checks (TORCH_DISTRIBUTED_DEBUG=DETAIL), which hold their C++ side alone.
_wrapped: dict[str, MycelBackend] = {}
#: Backends by the name of their process group. Torch asks once for each kind of device; a backend serves all.
_made: weakref.WeakValueDictionary[str, MycelBackend] = weakref.WeakValueDictionary()


def register() -> None:
    """Register backend ``mycel`` with torch; does nothing where it is registered.

    Torch from 2.14 on calls this when a backend ``mycel`` is asked for: see the entry point in ``pyproject.toml``.
    """
    if "mycel" not in dist.Backend.backend_list:
        dist.Backend.register_backend("mycel", create, extended_api=True, devices=["cpu", "cuda"])


def create(options: Any, backend_options: Any = None) -> dist.ProcessGroup | MycelBackend:
    """Make a group, as ``torch.distributed.Backend.register_backend`` asks for with its extended interface.

    Args:
        options: torch's ``_DistributedBackendOptions``: store, rank, size, time-out, members.
        backend_options: unused.
    """
    name = str(options.group_id)
    known = _made.get(name)
    if known is not None and not known.is_shut_down:
        return known
    if getattr(options, "enable_reconfigure", False):
        why = "the group has not been formed yet"
        unformed = Unformed(options.group_rank, options.group_size, options.timeout, why)
        return ElasticProcessGroup(MycelBackend(unformed, name, is_elastic=True))
    size = options.group_size
    members = list(options.global_ranks_in_group) or list(range(size))
    world_size = dist.get_world_size() if options.global_ranks_in_group else size
    held = None if options.global_ranks_in_group else options.store
    group = TensorGroup(options.store, options.group_rank, size, options.timeout, members, world_size, name, held)
    if not is_called_by_torch():
        return MycelProcessGroup(group, name)
    backend = MycelBackend(group, name)
    _made[name] = backend
    if get_debug_level() == DebugLevel.DETAIL:
        for other in [other for other, held in _wrapped.items() if held.is_shut_down]:
            del _wrapped[other]
        _wrapped[name] = backend
    return backend


def over_tensor_group(group: TensorGroup, store: Store, name: str = "") -> dist.ProcessGroup:
    """A process group that torch's tables do not know, for who keeps groups of their own.

    Args:
        group: what it shows to torch.
        store: that its members share.
        name: for messages.
    """
    if not is_called_by_torch():
        return MycelProcessGroup(group, name)
    made = dist.ProcessGroup(store, group.rank(), group.size())
    custom = dist.ProcessGroup.BackendType.CUSTOM
    made._set_default_backend(custom)
    made._register_backend(torch.device("cpu"), custom, MycelBackend(group, name))
    return made
