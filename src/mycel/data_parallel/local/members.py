"""Ranks that are lost in a round, and ranks that come: who is in, and how newcomers get what the others have."""

from __future__ import annotations

import io
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mycel.data_parallel.local.parts import Said

__all__ = ["Members", "View", "hand_on", "look_round"]


class Members(Protocol):
    """Forms the default group anew; ``mycel.elastic.Members`` does, over a roster.

    Examples:
        >>> class Alone:  # nobody is lost, nobody comes
        ...     is_wanted = False
        ...     def has_failed(self, error):
        ...         return False
        ...     def form(self, note):
        ...         return dist.group.WORLD
        >>> Alone().has_failed(RuntimeError())
        False
    """

    @property
    def is_wanted(self) -> bool:
        """Whether somebody wants to come in."""
        ...

    def has_failed(self, error: Exception) -> bool:
        """Whether an error means that the group has to be formed anew, and not that the program is wrong."""
        ...

    def form(self, note: int) -> dist.ProcessGroup:
        """Form the group of whoever is there; every member calls it.

        Args:
            note: steps that this rank has done, -1 if it has no state yet.

        Returns:
            A group of all members for local updates alone.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a rank knows when a group has been formed: see ``Meetings``.

    Attributes:
        has_state: it has been in a group before.
        step: it has come to.
        begun, committed: meetings; without those that are held again.
        repeats: it holds a meeting of all parts, again if that fails; 2: the last one.
        trains, changed, last, wanted: what was said with the last committed meeting.
    """

    has_state: int
    step: int
    begun: int
    committed: int
    repeats: int
    trains: int = 1
    changed: int = 1
    last: int = 0
    wanted: int = 0

    @property
    def said(self) -> Said:
        """With the last committed meeting."""
        return Said(trains=self.trains, changed=self.changed, last=self.last, wanted=self.wanted)


def look_round(own: View, group: dist.ProcessGroup) -> list[View]:
    """Everybody's, by rank."""
    mine = torch.tensor(astuple(own), dtype=torch.int64)
    if group.size() == 1:
        return [own]
    found = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(found, mine, group=group)
    names = View.__dataclass_fields__
    return [View(**dict(zip(names, one.tolist(), strict=True))) for one in found]


def hand_on(state: dict[str, Any] | None, source: int, group: dist.ProcessGroup) -> dict[str, Any]:
    """One rank's state for everybody.

    Args:
        state: tensors, numbers and names; the source's own.
        source: its rank in the group.
        group: all of whose ranks call this.
    """
    is_source = group.rank() == source
    written = io.BytesIO()
    if is_source:
        torch.save(state, written)
    length = torch.tensor([written.tell()], dtype=torch.int64)
    dist.broadcast(length, group=group, group_src=source)
    content = torch.empty(int(length), dtype=torch.uint8)
    if is_source:
        content.copy_(torch.frombuffer(written.getbuffer(), dtype=torch.uint8))
    dist.broadcast(content, group=group, group_src=source)
    read = io.BytesIO(content.numpy().tobytes())
    loaded: dict[str, Any] = torch.load(read, weights_only=True)
    return loaded
