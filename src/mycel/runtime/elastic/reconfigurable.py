"""What the adapters between torch and a group add for groups whose members change, under torch's own names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from mycel.errors import CommunicationError, UsageError
from mycel.runtime.communicator import Communicator
from mycel.runtime.elastic.control_handles import exchange_handles
from mycel.runtime.elastic.formation import Formation
from mycel.runtime.elastic.store import MemberStore
from mycel.runtime.tensor_group import COLLECTIVES, TensorGroup
from mycel.runtime.work import MycelWork

__all__ = ["Reconfigurable", "Unformed", "nothing"]


def nothing() -> None:
    """There are no other groups."""


class Unformed(TensorGroup):
    """A group without members: before the first ``reconfigure``, and after one that has failed.

    Args:
        rank, size: what torch is told meanwhile.
        timeout: default time-out of the group to come.
        why: there are none.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta, why: str) -> None:
        self._rank, self._size, self._timeout = rank, size, timeout
        self._why = why
        self._communicator = self._devices = None
        self._shortcuts = {}

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Every collective."""
        raise CommunicationError(f"{self._why}; form it with reconfigure, under a new id, from the members' handles")

    monitored_barrier = refuse

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default time-out of the group to come."""
        self._timeout = timeout

    def shutdown(self) -> None:
        """Nothing is open."""

    def abort(self) -> None:
        """Nothing is under way."""


for _name in COLLECTIVES:
    setattr(Unformed, _name, Unformed.refuse)


class Reconfigurable:
    """Forms the group behind an adapter anew, of other members; the adapter stays the same object.

    Attributes:
        tensor_group: the present group.
    """

    tensor_group: TensorGroup
    _formation: Formation | None = None

    def _show(self, group: TensorGroup) -> None:
        """Have torch see another group from now on."""
        self.tensor_group = group

    @property
    def is_elastic(self) -> bool:
        """Whether the group behind this object can be another one."""
        return True

    @property
    def _forming(self) -> Formation:
        if self._formation is None:
            self._formation = Formation()
        return self._formation

    @property
    def member_store(self) -> MemberStore | None:
        """The key-value store that the present members share; ``None`` where the group came from torch's store."""
        return None if self._formation is None else self._formation.store

    def get_handle(self, towards: Store | None = None) -> str:
        """As ``get_reconfigure_handle``; where it is asked for first, a store may tell the own address."""
        if self._formation is None:
            self._formation = Formation(towards=towards)
        return self.get_reconfigure_handle()

    def get_reconfigure_handle(self) -> str:
        """Where this process is found by those who form a group with it; valid as long as this object lives."""
        return self._forming.handle.to_text()

    def reconfigure(self, opts: Any, leave_others: Callable[[], None] = nothing) -> dist.Work:
        """Form the group anew; calls under way fail, connections to members of before are closed.

        Args:
            opts: torch's ``ReconfigureOptions``, or what has its fields ``uuid``, ``handles`` and ``timeout``; hints
                are of no use here.
            leave_others: called when the present group is about to be given up, to leave groups of its ranks, too.

        Raises:
            CommunicationError: members did not come in time, or are gone, or the id was used before. The group is
                without members then, and can be formed under another id.
            UsageError: a handle is none, or does not fit the described fabric; the group stays as it is.
        """
        default = self.tensor_group.timeout
        timeout = getattr(opts, "timeout", None) or default
        plan = self._forming.plan(opts.uuid, opts.handles)
        leave_others()
        self._retire(
            f"the group is formed anew, as {plan.uuid}, of {len(plan.members)} members",
            then=f"forming it as {plan.uuid} failed",
        )
        self._show(self._forming.form(plan, timeout, TensorGroup, default))
        return MycelWork(None, None, [])

    def leave(self, leave_others: Callable[[], None] = nothing) -> None:
        """Give up the present group: it has no members until it is formed anew, and nobody waits for this rank.

        Args:
            leave_others: as for ``reconfigure``.
        """
        leave_others()
        self._retire("the group was left", then="it was left")
        self._forming.leave()

    def survivors(self, excluded: Sequence[int]) -> list[int]:
        """Which ranks of the present group stay.

        Args:
            excluded: those that do not.

        Raises:
            UsageError: there is no such rank, or this rank is one of them.
        """
        rank, size = self.tensor_group.rank(), self.tensor_group.size()
        if unknown := [peer for peer in excluded if not 0 <= peer < size]:
            raise UsageError(f"cannot exclude rank {unknown[0]} from a group of {size} ranks")
        if rank in excluded:
            raise UsageError(f"rank {rank} is excluded itself; only those who stay shrink a group")
        return [peer for peer in range(size) if peer not in excluded]

    def without(
        self,
        excluded: Sequence[int],
        *,
        abort: bool,
        timeout: timedelta | None = None,
        leave_others: Callable[[], None] = nothing,
    ) -> TensorGroup:
        """The group without some of its ranks, in the order of before; every other rank has to call this.

        The present one is given up; ``shrink_in_place`` puts the new one in its place.

        Args:
            excluded: ranks of the present group.
            abort: fail calls that are under way; otherwise they are waited for.
            timeout: for all of it; the group's own if not given.
            leave_others: as for ``reconfigure``.

        Raises:
            UsageError: there is no such rank, nobody would be left, or this rank is one of them.
            CommunicationError: a survivor did not come.
        """
        survivors = self.survivors(excluded)
        group = self.tensor_group
        communicator = group.communicator
        if communicator is None:
            raise UsageError("a group of one rank, or one without members, cannot shrink")
        limit = timeout or group.timeout
        leave_others()
        if abort:
            communicator.abort(f"the group shrinks to ranks {survivors}")
        handles = self._survivors_handles(communicator, survivors, limit)
        text = "\n".join([communicator.identity, *handles])
        plan = self._forming.plan(f"shrink-{hashlib.sha256(text.encode()).hexdigest()[:16]}", handles)
        if not abort:
            communicator.finish()
        self._retire(f"the group shrinks to ranks {survivors}", then="shrinking it failed")
        return self._forming.form(plan, limit, TensorGroup, group.timeout)

    def shrink_in_place(self, excluded: Sequence[int], **given: Any) -> None:
        """Go on without some ranks; arguments as for ``without``."""
        self._show(self.without(excluded, **given))

    def _survivors_handles(
        self, communicator: Communicator, survivors: Sequence[int], timeout: timedelta
    ) -> list[str]:
        own = self.get_reconfigure_handle()
        others = [peer for peer in survivors if peer != communicator.rank]
        found = exchange_handles(communicator.control, own, others, timeout.total_seconds())
        return [found.get(peer, own) for peer in survivors]

    def _retire(self, why: str, *, then: str) -> None:
        """Give up the present group; what is under way fails, here and at its other members.

        Who has nothing under way says goodbye: others may still be reading what this rank has sent them last.
        """
        group = self.tensor_group
        if isinstance(group, Unformed):
            return
        self._show(Unformed(group.rank(), group.size(), group.timeout, f"the group has no members: {then}"))
        if group.communicator is not None and not group.communicator.is_idle:
            group.communicator.abort(why)
        group.shutdown()

    def _close_formation(self) -> None:
        """Stop listening, when the adapter is shut down."""
        if self._formation is not None:
            self._formation.close()
            self._formation = None
