"""Where a program runs: the rank, and the process group of the mesh it was called on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist

from mycel.errors import UsageError

__all__ = ["Current", "current", "runs_on"]

_HERE: list[Current] = []
_GROUPS: dict[tuple[int, ...], dist.ProcessGroup] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Current:
    """A rank's place in the mesh that a program was called on.

    Attributes:
        rank: in the mesh, from 0 on.
        ranks: of the mesh, by their numbers in the cluster.

    Examples:
        >>> here = Current(rank=1, ranks=(2, 3))
        >>> here.size, here.global_rank
        (2, 3)
    """

    rank: int
    ranks: tuple[int, ...]
    _groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=lambda: _GROUPS, repr=False)

    @property
    def size(self) -> int:
        """Ranks of the mesh."""
        return len(self.ranks)

    @property
    def global_rank(self) -> int:
        """This rank's number in the cluster."""
        return self.ranks[self.rank]

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the mesh's ranks; made when it is first asked for, by all of them together."""
        if self.size == dist.get_world_size():
            return dist.group.WORLD  # type: ignore[return-value]  # None only before the group is there
        if self.ranks not in self._groups:
            self._groups[self.ranks] = dist.new_group(list(self.ranks), use_local_synchronization=True)
        return self._groups[self.ranks]


def current() -> Current:
    """The mesh that the running program was called on, and this rank's place there.

    Raises:
        UsageError: no program of a controller is running.

    Examples:
        >>> current()
        Traceback (most recent call last):
        ...
        mycel.errors.UsageError: current() is for programs that a controller has called; none is running here
    """
    if not _HERE:
        raise UsageError("current() is for programs that a controller has called; none is running here")
    return _HERE[-1]


@contextmanager
def runs_on(here: Current) -> Iterator[None]:
    """While a program runs."""
    _HERE.append(here)
    try:
        yield
    finally:
        _HERE.pop()
