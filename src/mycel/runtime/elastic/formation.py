"""Forming a group anew from handles: who is in it, at which rank, over which part of the fabric."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar

from torch.distributed.distributed_c10d import Store

from mycel.errors import CommunicationError, UsageError
from mycel.runtime.elastic.handle import Handle, in_rank_order
from mycel.runtime.elastic.server import MemberServer
from mycel.runtime.elastic.store import MemberStore
from mycel.runtime.transport.address import own_address
from mycel.runtime.transport.secret import job_secret
from mycel.settings import Settings, read_settings
from mycel.topology.load import load_topology

__all__ = ["Formation", "Plan", "own_place", "places_in_fabric"]


class _Group(Protocol):
    """What is formed: a ``TensorGroup``."""

    def set_timeout(self, timeout: timedelta) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A group to be formed.

    Attributes:
        uuid: its id.
        members: by rank.
        places: of the members in the fabric, by rank.
        num_places: ranks of the fabric.
    """

    uuid: str
    members: tuple[Handle, ...]
    places: tuple[int, ...]
    num_places: int


G = TypeVar("G", bound=_Group)
#: What ``TensorGroup`` takes: store, rank, size, time-out, places of the members by rank, ranks of the fabric, name,
#: a store that torch holds, and numbers that tell members apart.
Make = Callable[[Store, int, int, timedelta, Sequence[int], int, str, None, Sequence[int]], G]


class Formation:
    """This process's part in the groups that one group object is, one after the other.

    Args:
        place: which rank of the described fabric this process is, where its group knows; otherwise ``MYCEL_PLACE``
            says so, or, with ``MYCEL_TOPOLOGY``, ``RANK``.
        towards: a store on a machine that all members reach; the route to it tells this process's address, where
            nothing else does.

    Attributes:
        store: of the present group; ``None`` before the first one.
        members: of the present group, by rank.
    """

    def __init__(self, place: int | None = None, towards: Store | None = None) -> None:
        self._settings = read_settings()
        self._towards = towards
        self._place = own_place(self._settings) if place is None else place
        self._server: MemberServer | None = None
        self._handle: Handle | None = None
        self._used: set[str] = set()
        self.store: MemberStore | None = None
        self.members: tuple[Handle, ...] = ()

    @property
    def handle(self) -> Handle:
        """This process's handle, the same until ``close``; asked first, it begins to listen."""
        if self._handle is None:
            own = own_address(self._settings, self._place or 0, self._towards)
            key = Handle.new_key()
            self._server = MemberServer(own.ip, _shown(key, self._settings))
            self._handle = Handle(
                ip=own.ip, port=self._server.port, host=own.host, pid=own.pid, key=key, place=self._place
            )
        return self._handle

    def plan(self, uuid: int | str, handles: Sequence[str] | Collection[str]) -> Plan:
        """What can be known without asking anybody.

        Args:
            uuid: the same for all members, and never used before.
            handles: of all members; the position in a sequence is the rank, of a set the ranks are chosen here.

        Raises:
            UsageError: a handle is none, or does not fit the described fabric.
            CommunicationError: the id was used before, or this process is not a member.
        """
        title = str(uuid)
        if title in self._used:
            raise CommunicationError(f"the id {title} was already used by this group; choose a new one each time")
        members = in_rank_order(handles, self.handle)
        places, num_places = places_in_fabric(members, self._settings)
        return Plan(uuid=title, members=members, places=places, num_places=num_places)

    def form(self, plan: Plan, timeout: timedelta, make: Make[G], default: timedelta) -> G:
        """Meet the other members and make the group.

        Args:
            plan: of the group; each can be tried once.
            timeout: for all of it.
            make: makes the group over a store that only its members have.
            default: time-out of the group's calls.

        Raises:
            CommunicationError: members did not come, or cannot be reached; the message names them.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        self._used.add(plan.uuid)
        self.leave()
        rank = plan.members.index(self.handle)
        store = MemberStore(
            uuid=plan.uuid,
            members=plan.members,
            rank=rank,
            key=_shown(plan.members[0].key, self._settings),
            timeout_s=timeout.total_seconds(),
        )
        try:
            left = timedelta(seconds=max(0.1, deadline - time.monotonic()))
            store.set_timeout(left)
            name = f"elastic-{plan.uuid}"
            # Whoever is at a rank, or a place, may be somebody else next time: members are told apart by their keys.
            known_as = [int(member.key, 16) for member in plan.members]
            made = make(store, rank, len(plan.members), left, plan.places, plan.num_places, name, None, known_as)
        except BaseException:
            store.close()
            raise
        store.set_timeout(default)
        if self._settings.timeout_s is None:
            made.set_timeout(default)
        self.store, self.members = store, plan.members
        return made

    def leave(self) -> None:
        """Leave the store of the present group; others that wait there are told."""
        if self.store is not None:
            self.store.close()
        self.store, self.members = None, ()

    def close(self) -> None:
        """Leave, and stop listening: the handle is of no use any more."""
        self.leave()
        if self._server is not None:
            self._server.close()
        self._server = self._handle = None


def own_place(settings: Settings) -> int | None:
    """Which rank of the described fabric this process is, from its environment."""
    if settings.place is not None:
        return settings.place
    rank = os.environ.get("RANK", "")
    return int(rank) if settings.topology is not None and rank.isdecimal() else None


def places_in_fabric(members: Sequence[Handle], settings: Settings) -> tuple[tuple[int, ...], int]:
    """The members' ranks in the fabric, and how many ranks that has.

    Without a described fabric a member's place is its rank.

    Raises:
        UsageError: a fabric is described, and a member's place in it is unknown, beyond it, or taken twice.
    """
    if settings.topology is None:
        return tuple(range(len(members))), len(members)
    num_places = load_topology(settings.topology).num_ranks
    seen: dict[int, Handle] = {}
    for member in members:
        if member.place is None:
            raise UsageError(
                f"{settings.topology} describes a fabric, and {member.described} does not say which of its "
                f"{num_places} ranks it is; set MYCEL_PLACE there, or unset MYCEL_TOPOLOGY"
            )
        if not 0 <= member.place < num_places:
            raise UsageError(
                f"{settings.topology} describes {num_places} ranks, and {member.described} is none of them"
            )
        if member.place in seen:
            raise UsageError(f"{member.described} and {seen[member.place].described} say that they are the same rank")
        seen[member.place] = member
    return tuple(seen), num_places


def _shown(key: str, settings: Settings) -> bytes:
    """What members show to each other: the handle's key and the job's secret, where there is one."""
    secret = job_secret(settings)
    own = bytes.fromhex(key)
    return hashlib.sha256(own).digest() if secret is None else secret.proof("elastic", own)
