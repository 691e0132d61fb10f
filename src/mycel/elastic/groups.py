"""Forming torch's process groups anew, the same way in every version of torch.

From 2.14 on torch has the interface itself (``torch.distributed._reconfigure``, experimental there), and backend
``mycel`` serves it. Before, these functions are that interface. In both, they put in order what torch knows of the
group: its ranks, its store, and the groups that were made of its ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed import ProcessGroup

import mycel.runtime  # noqa: F401  (registers the backend)
from mycel.errors import UsageError
from mycel.runtime.backend import is_called_by_torch
from mycel.runtime.elastic.reconfigurable import Reconfigurable

__all__ = ["failure", "get_handle", "leave", "reconfigure", "shrink_group", "start_alone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What torch's ``ReconfigureOptions`` holds."""

    uuid: int | str
    handles: Sequence[str] | Collection[str]
    timeout: timedelta | None


def start_alone(timeout: timedelta | None = None) -> None:
    """Make the default group of this process alone, which ``reconfigure`` then forms anew with others.

    Nobody needs to be there for it: it is how a process comes into a job that is under way.

    Args:
        timeout: of the group's calls; torch's default if not given.

    Examples:
        >>> start_alone()
        >>> dist.get_backend(), dist.get_world_size()
        ('mycel', 1)
        >>> dist.destroy_process_group()
    """
    more: dict[str, Any] = {"enable_reconfigure": True} if is_called_by_torch() else {}
    dist.init_process_group("mycel", store=HashStore(), rank=0, world_size=1, timeout=timeout, **more)
    if more:  # torch wants such groups to have no members at first
        reconfigure("alone", [get_handle()])


def get_handle(group: ProcessGroup | None = None, *, towards: Store | None = None) -> str:
    """Where this process is found by others that form a group with it; valid for as long as ``group`` lives.

    Who has a handle can join the group: pass it on over what you trust, as you would a password
    (docs/concepts/protection.md).

    Args:
        group: the group that is to be formed anew; the default one if not given.
        towards: a store on a machine that all members reach, for the first call: the route to it tells this process's
            own address, where neither ``MYCEL_ADDRESS``, ``MYCEL_INTERFACE`` nor ``MASTER_ADDR`` does.

    Raises:
        UsageError: the group is not of backend ``mycel``.

    Examples:
        >>> start_alone()
        >>> get_handle() == get_handle()
        True
        >>> dist.destroy_process_group()
    """
    return _adapter(_chosen(group)).get_handle(towards)


def reconfigure(
    uuid: int | str,
    handles: Sequence[str] | Collection[str],
    group: ProcessGroup | None = None,
    *,
    timeout: timedelta | None = None,
) -> None:
    """Form a group anew of other members; every member has to call this with the same id and handles.

    The group stays the same object, with another rank and size, and gets schedules for the fabric between its
    members. Calls under way fail. When the default group is formed anew, groups that were made of its ranks are taken
    down, for their ranks have another meaning; ``new_group`` and ``init_device_mesh`` make new ones.

    Args:
        uuid: an id that was never used before.
        handles: of all members: in the order of their ranks, or a set, of which ranks are chosen by place.
        group: the group; the default one if not given.
        timeout: for all of it; the group's own if not given.

    Raises:
        CommunicationError: members did not come, or cannot be reached; the message names them. The group has no
            members then, and can be formed under another id.
        UsageError: a handle is none, or does not fit the described fabric.
        UsageError: the group is not of backend ``mycel``.

    Examples:
        >>> start_alone()
        >>> reconfigure(1, [get_handle()])
        >>> dist.get_rank(), dist.get_world_size()
        (0, 1)
        >>> dist.destroy_process_group()
    """
    chosen = _chosen(group)
    adapter = _adapter(chosen)
    options = _Options(uuid=uuid, handles=handles, timeout=timeout)
    adapter.reconfigure(options, functools.partial(_take_down_others, chosen))
    _settle(chosen, adapter)


def leave(group: ProcessGroup | None = None) -> None:
    """Give up a group at once, so that nobody waits for this process: the first thing to do when collectives fail.

    Of the default group, groups of its ranks are left, too. They may be whole while another has failed, and others
    then wait there for this process, which has given up the step; they are told that it has left. The group has no
    members until it is formed anew, and ``get_handle`` stays what it was.

    Args:
        group: the group; the default one if not given.

    Raises:
        UsageError: the group is not of backend ``mycel``.

    Examples:
        >>> start_alone()
        >>> leave()
        >>> reconfigure(1, [get_handle()])
        >>> dist.destroy_process_group()
    """
    chosen = _chosen(group)
    _adapter(chosen).leave(functools.partial(_take_down_others, chosen))


def shrink_group(
    ranks_to_exclude: Sequence[int],
    group: ProcessGroup | None = None,
    *,
    abort: bool = True,
    timeout: timedelta | None = None,
) -> ProcessGroup:
    """Go on without some ranks of a group; like ``torch.distributed.shrink_group``. All the others have to call this.

    Nothing else is needed, no store and no engine: survivors find each other over the connections that they have.

    Args:
        ranks_to_exclude: in the group; those that are lost, or no longer wanted. They do not call this.
        group: the group; the default one if not given.
        abort: fail calls that are under way; otherwise they are waited for.
        timeout: for all of it; the group's own if not given.

    Returns:
        The group, whose remaining ranks have moved up: the same object, but for groups that were made without
        ``enable_reconfigure`` under torch 2.14 and later, which ``torch.distributed.shrink_group`` makes anew.

    Raises:
        UsageError: a rank is none of the group, or this one, or nobody would be left.
        CommunicationError: a survivor is gone, too, or did not come.
        UsageError: the group is not of backend ``mycel``.

    Examples:
        On all ranks but 3, after a collective has failed because rank 3 was lost::

            mycel.elastic.shrink_group([3])
    """
    chosen = _chosen(group)
    adapter = _adapter(chosen)
    if not ranks_to_exclude:
        raise UsageError("name at least one rank to exclude")
    adapter.survivors(ranks_to_exclude)  # before torch says less of what is wrong
    if not adapter.is_elastic:  # torch makes another group
        return dist.shrink_group(list(ranks_to_exclude), chosen, int(abort))
    leave_others = functools.partial(_take_down_others, chosen)
    adapter.shrink_in_place(ranks_to_exclude, abort=abort, timeout=timeout, leave_others=leave_others)
    _settle(chosen, adapter)
    return chosen


def failure(group: ProcessGroup | None = None) -> Exception | None:
    """What a group has failed with, so that it has to be formed anew; ``None`` while it works.

    Errors come out of backward passes and futures as torch passes them on, not always of their own class: ask here
    whether it was the group.

    Args:
        group: the group; the default one if not given.

    Raises:
        UsageError: the group is not of backend ``mycel``.

    Examples:
        >>> start_alone()
        >>> failure() is None
        True
        >>> dist.destroy_process_group()
    """
    communicator = _adapter(_chosen(group)).tensor_group.communicator
    return None if communicator is None else communicator.cause


def _chosen(group: ProcessGroup | None) -> ProcessGroup:
    found: Any = dist.group.WORLD if group is None else group
    if found is None:
        raise UsageError("there is no default process group; call mycel.elastic.start_alone() first")
    chosen: ProcessGroup = found
    return chosen


def _adapter(group: Any) -> Reconfigurable:
    """What stands between torch and the group, in this version of torch."""
    with contextlib.suppress(RuntimeError, AttributeError):
        backend = group._get_backend(torch.device("cpu"))
        if isinstance(backend, Reconfigurable):
            return backend
    raise UsageError(f"only groups of backend mycel can be formed anew; this one is of {dist.get_backend(group)}")


def _take_down_others(group: ProcessGroup) -> None:
    """Groups of the default group's ranks end with it; whoever waits in one for this rank is told at once."""
    if group is not dist.group.WORLD:
        return
    for other in [other for other in list(c10d._world.pg_map) if other is not group]:
        # Any of them may have failed for the very reason that brings us here.
        with contextlib.suppress(Exception):
            communicator = _adapter(other).tensor_group.communicator
            if communicator is not None and not communicator.is_idle:
                communicator.abort("the default group is formed anew")
        with contextlib.suppress(Exception):
            dist.destroy_process_group(other)


def _settle(group: ProcessGroup, adapter: Reconfigurable) -> None:
    """Tell torch's tables which ranks the group has now, and over which store groups are made of them."""
    world = c10d._world
    if group not in world.pg_map:  # made by hand; torch does not know of it
        return
    world.pg_group_ranks[group] = {rank: rank for rank in range(adapter.tensor_group.size())}
    store = adapter.member_store
    backend, _ = world.pg_map[group]
    if store is not None:
        world.pg_map[group] = (backend, store)
    if group is dist.group.WORLD:
        world.group_count = 1  # names of groups to come: who has just come counts from the start
