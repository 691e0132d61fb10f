"""A rank's membership of a group: its communicator and records, as the environment asks, and who else is there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from mycel.runtime.calibration import costs_from_text, costs_to_text, kept_costs, known_costs
from mycel.runtime.communicator import PACE, Communicator
from mycel.runtime.fabric import Fabric
from mycel.runtime.flight import FlightLog, recorder
from mycel.runtime.meter import keep_writing
from mycel.runtime.tensors import dtype_name
from mycel.runtime.transport.address import own_address
from mycel.runtime.transport.parting import StoreServer
from mycel.runtime.transport.rendezvous import Rendezvous, Store
from mycel.runtime.transport.secret import job_secret
from mycel.runtime.watch import check_members
from mycel.settings import Settings
from mycel.topology.model import Topology

__all__ = ["communicate", "flight_log", "meet", "monitored_barrier"]


def meet(
    store: Store,
    rank: int,
    size: int,
    timeout_s: float,
    settings: Settings,
    fabric: Fabric,
    global_ranks: Sequence[int],
    *,
    held: object = None,
) -> Rendezvous:
    """Find the other ranks of a group.

    Args:
        store: the group's own key-value store.
        rank, size: in the group.
        timeout_s: how long to wait for ranks that have not come yet.
        settings: what the environment asks for.
        fabric: the group's.
        global_ranks: of the group's members, in group order.
        held: of the default group, the store that torch lets go of when the group is destroyed.

    Raises:
        UsageError: what the environment asks for does not fit this machine.
        CommunicationError: a peer does not come, or has failed.
    """
    own = own_address(settings, global_ranks[rank], store)
    rendezvous = Rendezvous(
        rank=rank,
        size=size,
        store=store,
        own=own,
        also=fabric.pinned(global_ranks[rank]),
        timeout_s=timeout_s,
        unix=settings.local != "tcp",
        secret=job_secret(settings),
        store_server=StoreServer.of(held) if held is not None and rank == 0 else None,
        observe=partial(check_members, fabric.members),
        notice=_known_costs(settings) if rank == 0 else None,
        make_notice=partial(_measured_costs, settings),
        mesh_ranks=settings.mesh_ranks,
    )
    if held is not None:
        rendezvous.say_what_is_trusted()
    return rendezvous


#: Costs as text by the folder that keeps them: a mesh has many groups, and their ranks 0 read the file once.
_costs: dict[Path | None, str] = {}


def _known_costs(settings: Settings) -> str | None:
    """This machine's costs, if they have been measured before."""
    if settings.cache not in _costs:
        kept = kept_costs(settings.cache)
        if kept is None:
            return None
        _costs[settings.cache] = costs_to_text(kept)
    return _costs[settings.cache]


def _measured_costs(settings: Settings) -> str:
    """This machine's costs, measured now, when all ranks have come and wait: starting keeps processors busy."""
    _costs[settings.cache] = text = costs_to_text(known_costs(settings.cache))
    return text


def flight_log(
    rendezvous: Rendezvous,
    global_ranks: tuple[int, ...],
    world_size: int,
    name: str,
    topology: Topology,
    settings: Settings,
) -> FlightLog | None:
    """The group's part of this process's flight recorder; ``None`` where nothing is recorded."""
    made = recorder(settings, rank=global_ranks[rendezvous.rank], world_size=world_size)
    if made is None:
        return None
    keep_writing(made, settings)
    # Ports and processes of all members: every rank knows the same, and no other group ever had them all.
    who = repr([(a.host, a.ip, a.port, a.pid) for a in rendezvous.addresses])
    return FlightLog(
        made,
        identity=hashlib.blake2b(who.encode(), digest_size=6).hexdigest(),
        name=name,
        ranks=global_ranks,
        topology=topology,
        described=settings.topology is not None and list(global_ranks) == sorted(global_ranks),
        dtype_name=dtype_name,
        folder=settings.flight_folder,
    )


def communicate(
    rendezvous: Rendezvous,
    fabric: Fabric,
    topology: Topology,
    timeout_s: float,
    settings: Settings,
    flight: FlightLog | None,
) -> Communicator:
    """A group's communicator, connected to the other ranks; channels are opened at the first calls that use them.

    Raises:
        CommunicationError: a peer does not come, or cannot be reached.
    """
    return Communicator(
        rank=rendezvous.rank,
        size=rendezvous.size,
        topology=topology,
        rendezvous=rendezvous,
        address_of=fabric.address_of(topology, rendezvous.addresses),
        timeout_s=timeout_s,
        dtype_names=dtype_name,
        piece_bytes=settings.piece_bytes,
        paced=_paced(settings, fabric),
        costs=costs_from_text(rendezvous.notice),
        methods=settings.methods,
        flight=flight,
        reroutes=settings.on_link_failure == "replan",
        members=fabric.members,
        in_memory=settings.local in (None, "memory"),
    )


def _paced(settings: Settings, fabric: Fabric) -> float:
    """The part of a path's bandwidth at which its channel sends at most: that is never held back by a guess.

    Schedules are chosen by assumed rates where none were given; a brake set to them would cost most of a fast card.
    """
    if settings.paced is not None:
        return settings.paced
    return PACE if fabric.described else 0.0


def monitored_barrier(
    group: ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """A barrier after which rank 0 knows who did not come, as ``torch.distributed.monitored_barrier``.

    Torch's own function refuses groups that do not say they are Gloo's; this one takes any whose process group has
    such a barrier. The group stays usable after a failure.

    Args:
        group: the group; the default one if not given.
        timeout: how long rank 0 waits for the others; the group's own time-out if not given.
        wait_all_ranks: name every rank that is missing, not only the first one.

    Raises:
        RuntimeError: ranks did not come in time; on rank 0 the message names them.

    Examples:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> monitored_barrier(timeout=timedelta(seconds=5))  # returns, as everybody has come
        >>> dist.destroy_process_group()
    """
    if dist.get_rank(group) < 0:
        return
    chosen: Any = dist.group.WORLD if group is None else group
    if isinstance(timeout, float | int):
        timeout = timedelta(seconds=timeout)
    chosen.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)
