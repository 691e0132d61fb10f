"""What a group of ranks does with tensors, whatever torch makes of it: the one implementation behind both adapters.

``MycelProcessGroup`` shows it to torch before 2.14 (``mycel.runtime.process_group``), ``MycelBackend`` to later ones
(``mycel.runtime.backend``). Neither adds anything to a collective.

What mycel does not schedule (other collectives, reductions or element types) goes to a Gloo group that is made then
(``mycel.runtime.fallback``), or to an NCCL one for tensors on GPUs, so that every program that runs on these runs
here. It goes there directly and never through torch's base classes: torch's C++ side calls these with the interpreter
lock held (torch 2.13, ``WORK_OVERRIDE`` in ``PyProcessGroup.hpp``). Gloo's ``enqueue`` then waits for a mutex whose
owner, a thread that drops a finished operation, waits for the interpreter lock: a deadlock, now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from mycel.errors import UsageError
from mycel.runtime.communicator import Communicator
from mycel.runtime.debug_log import say_group, show_log, warn_of_slips
from mycel.runtime.device.group import DeviceGroup, make_nccl
from mycel.runtime.exchanges import Exchanges
from mycel.runtime.fabric import Fabric
from mycel.runtime.fallback import Fallback
from mycel.runtime.membership import communicate, flight_log, meet
from mycel.runtime.movements import Movements
from mycel.runtime.reductions import Reductions
from mycel.runtime.registering import register_folder
from mycel.runtime.timeouts import bounded, bounded_s
from mycel.runtime.warm import load
from mycel.settings import read_settings
from mycel.untraced import untraced

__all__ = ["COLLECTIVES", "TensorGroup", "tensor_group"]

#: Methods of a group that torch calls, by the newest name, with the names that they have in other versions or in C++.
COLLECTIVES: dict[str, tuple[str, ...]] = {
    "allreduce": (),
    "allreduce_coalesced": (),
    "broadcast": (),
    "reduce": (),
    "all_gather_single": ("_allgather_base",),
    "allgather": (),
    "all_gather_single_coalesced": ("allgather_into_tensor_coalesced",),
    "allgather_coalesced": (),
    "reduce_scatter_single": ("_reduce_scatter_base",),
    "reduce_scatter": (),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced",),
    "barrier": (),
    "all_to_all_single": ("alltoall_base",),
    "alltoall": (),
    "gather": (),
    "scatter": (),
    "send": (),
    "recv": (),
    "recv_anysource": (),
}


@untraced
class TensorGroup(Reductions, Movements, Exchanges):
    """This rank's end of a group, for tensors.

    Args:
        store: the group's own key-value store.
        rank, size: in the group.
        timeout: default time-out of a collective.
        global_ranks: of the group's members, in group order.
        world_size, name: ranks of the whole job, and what logs call the group.
        held: of the default group, the store that torch lets go of when the group is destroyed.
        known_as: see ``Fabric``.

    Raises:
        UsageError: what the environment asks for does not fit.
        TopologyError: the topology or wiring file is malformed.
        CommunicationError: a peer does not come, or cannot be reached.

    Examples:
        >>> group = TensorGroup(dist.HashStore(), 0, 1, timedelta(seconds=5), [0], 1)
        >>> group.size(), group.communicator is None  # alone, there is nobody to communicate with
        (1, True)
        >>> group.shutdown()
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        global_ranks: Sequence[int],
        world_size: int,
        name: str = "",
        held: Store | None = None,
        known_as: Sequence[int] | None = None,
    ) -> None:
        # What can be wrong with files and variables is found before anything connects: a rank that went away with
        # that error would otherwise show itself to the others as a broken connection only.
        settings = read_settings()
        show_log(settings.debug, global_ranks[rank])
        warn_of_slips()
        if settings.restarts:  # torchrun's store may hold what the ranks before them have said
            store = PrefixStore(f"restart{settings.restarts}/", store)
        fabric = Fabric(settings, global_ranks, world_size, known_as) if size > 1 else None
        communicator: Communicator | None = None
        timeout, ip, life = bounded(timeout), "127.0.0.1", "alone"
        if fabric is not None:
            load()  # may compile, for seconds: not while others wait for this rank
            timeout_s = bounded_s(settings.timeout_s or timeout)
            rendezvous = meet(store, rank, size, timeout_s, settings, fabric, global_ranks, held=held)
            ip, life = rendezvous.addresses[rank].ip, rendezvous.life
            members = tuple(global_ranks)
            with rendezvous.failing_together():
                topology = fabric.topology(rendezvous.addresses)
                say_group(name, rank, rendezvous.addresses, topology, described=fabric.described)
                flight = flight_log(rendezvous, members, world_size, name, topology, settings)
                communicator = communicate(rendezvous, fabric, topology, timeout_s, settings, flight)
            if settings.schedules is not None:
                register_folder(communicator, settings.schedules)
        nccl = make_nccl(store, rank, size, timeout, global_ranks, name)
        devices: DeviceGroup | None = None
        if nccl is not None:
            devices = DeviceGroup(
                nccl,
                communicator,
                described=fabric is not None and fabric.described,
                least_bytes=settings.nccl_below,
                piece_bytes=settings.piece_bytes,
            )
        super().__init__(
            rank,
            size,
            timeout,
            communicator,
            Fallback(PrefixStore(f"gloo/{life}/", store), rank, size, timeout, ip),
            devices,
        )

    @property
    def communicator(self) -> Communicator | None:
        """The group's communicator; ``None`` in a group of one rank."""
        return self._communicator

    @property
    def number(self) -> int:
        """How many collectives have been called so far, the same on every rank; 0 in a group of one rank."""
        return 0 if self._communicator is None else self._communicator.number

    @property
    def devices(self) -> DeviceGroup | None:
        """The side for GPUs; ``None`` where there are none."""
        return self._devices

    @property
    def timeout(self) -> timedelta:
        """Default time-out of a collective."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default time-out of later collectives."""
        self._timeout = timeout = bounded(timeout)
        self._fallback.set_timeout(timeout)
        if self._communicator is not None:
            self._communicator.timeout_s = bounded_s(timeout)
        if self._devices is not None:
            self._devices.backend.set_timeout(timeout)

    def shutdown(self) -> None:
        """Finish what is under way, tell the others goodbye and close all connections; nothing in a forked child."""
        self._fallback.close()
        self._messages.close()
        if self._communicator is not None:
            self._communicator.close()
            if self._communicator.is_inherited:
                return
        if self._devices is not None:
            self._devices.backend.shutdown()
            self._devices.close()

    def abort(self) -> None:
        """Fail what is under way on every rank."""
        if self._communicator is not None:
            self._communicator.abort()
        self._messages.abort()
        if self._devices is not None:
            self._devices.backend.abort()


def tensor_group(group: dist.ProcessGroup | None = None) -> TensorGroup:
    """What is behind a process group of backend ``mycel``, in every version of torch.

    Args:
        group: the group; the default one if not given.

    Raises:
        UsageError: the group is of another backend.

    Examples:
        >>> dist.init_process_group("mycel", store=dist.HashStore(), rank=0, world_size=1)
        >>> tensor_group().size()
        1
        >>> dist.destroy_process_group()
    """
    chosen: Any = dist.group.WORLD if group is None else group
    found = getattr(chosen, "tensor_group", None)
    if found is None and torch.device("cpu") in chosen._device_types:
        found = getattr(chosen._get_backend(torch.device("cpu")), "tensor_group", None)
    if not isinstance(found, TensorGroup):
        raise UsageError(f"a group of backend mycel is needed; this one is of {dist.get_backend(chosen)}")
    return found
