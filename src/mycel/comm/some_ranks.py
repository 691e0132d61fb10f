"""Process groups of sub-sets that change from step to step: each made once, the longest unused ones given up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from datetime import timedelta
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from mycel.arguments import whole_number
from mycel.errors import UsageError

__all__ = ["SomeRanks"]

#: Groups that are kept, if not said otherwise: of 64 ranks in powers of two there are 127.
_MOST = 128
_KNOWN: WeakKeyDictionary[dist.ProcessGroup, SomeRanks] = WeakKeyDictionary()


class SomeRanks:
    """Groups of some of a group's ranks, by their numbers in it.

    Making a group costs milliseconds and connections, so none is made before it is needed, and none twice. Which are
    kept follows from what was asked for alone, so all ranks keep the same ones.

    ``dist.new_group`` with local synchronization would spare the others the call, but names groups by how many a
    rank has made, which differs between ranks of unequal groups.

    Args:
        group: of all ranks of the job.
        most: groups that are kept.
        timeout_s: of collectives of new groups; as torch has it if not given.

    Raises:
        UsageError: the group is not of all ranks of the job.
    """

    def __init__(self, group: dist.ProcessGroup, *, most: int = _MOST, timeout_s: float | None = None) -> None:
        self._ranks = dist.get_process_group_ranks(group)
        self._whole, self._rank = ref(group), group.rank()  # it is the key of what is known, and to be forgotten
        self._most = whole_number(most, "most", least=1)
        self._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self._made: OrderedDict[tuple[int, ...], dist.ProcessGroup | None] = OrderedDict()
        if dist.is_initialized() and len(self._ranks) != dist.get_world_size():
            raise UsageError(
                f"groups of some of {len(self._ranks)} ranks: torch makes groups with all {dist.get_world_size()} "
                "ranks of the job; give the group of all"
            )

    @classmethod
    def of(cls, group: dist.ProcessGroup, *, timeout_s: float | None = None) -> SomeRanks:
        """Those that were made for this group before, and more.

        Args:
            group: of all ranks of the job.
            timeout_s: of collectives of groups that are new.
        """
        known = _KNOWN.get(group)
        if known is None:
            known = _KNOWN[group] = cls(group)
        known._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        return known

    def __len__(self) -> int:
        return len(self._made)

    def make(self, wanted: Iterable[tuple[int, ...]]) -> int:
        """Have these groups. All ranks call it with the same ones, between steps.

        Args:
            wanted: ascending ranks of each. One rank alone, and all of them, need no group.

        Returns:
            How many were new.
        """
        size = len(self._ranks)
        needed = sorted({members for members in wanted if 1 < len(members) < size})
        new = 0
        for members in needed:
            if members in self._made:
                self._made.move_to_end(members)
                continue
            ranks = [self._ranks[member] for member in members]
            made = dist.new_group(ranks, timeout=self._timeout)
            self._made[members] = made if self._rank in members else None
            new += 1
        for members in list(self._made)[: max(0, len(self._made) - max(self._most, len(needed)))]:
            old = self._made.pop(members)
            if old is not None:
                dist.destroy_process_group(old)
        return new

    def get(self, members: tuple[int, ...]) -> dist.ProcessGroup | None:
        """A group that was made.

        Args:
            members: ascending, this rank among them.

        Returns:
            ``None`` where they are one rank.

        Raises:
            UsageError: it was not made, or this rank is not in it.
        """
        if len(members) == 1:
            return None
        if len(members) == len(self._ranks):
            return self._whole()
        found = self._made.get(members)
        if found is None:
            raise UsageError(f"ranks {list(members)}: no group of them was made for rank {self._rank}")
        return found
