"""Who takes part in local updates while ranks are lost and come back: a roster and groups, as they want them."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import Store

from mycel.elastic.groups import failure, get_handle, leave, reconfigure
from mycel.elastic.roster import Roster
from mycel.errors import CommunicationError

__all__ = ["Members"]

#: Between two questions to the store whether somebody wants in.
_ASK_S = 0.2


class Members:
    """Forms the default group anew of whoever has entered the roster's round; for ``local_updates(members=...)``.

    Args:
        roster: on which the members agree.
        store: the roster's, on a machine that all members reach.
        timeout: for a round of the roster: as long as the slowest member takes from one meeting to the next.

    Examples:
        >>> from mycel import elastic
        >>> elastic.start_alone()
        >>> store = dist.HashStore()
        >>> members = Members(elastic.Roster(store, place=0, expected=1), store=store)
        >>> members.form(-1).size(), members.is_wanted
        (1, False)
        >>> dist.destroy_process_group()
    """

    def __init__(self, roster: Roster, *, store: Store, timeout: timedelta = timedelta(minutes=10)) -> None:
        self._roster, self._store, self._timeout = roster, store, timeout
        self._asked, self._was_wanted = 0.0, False

    @property
    def is_wanted(self) -> bool:
        """Whether somebody wants to come in; the store is asked a few times a second at most."""
        now = time.monotonic()
        if now - self._asked >= _ASK_S:
            self._asked, self._was_wanted = now, self._roster.is_wanted
        return self._was_wanted

    def has_failed(self, error: Exception) -> bool:
        """Whether a rank was lost.

        Args:
            error: what was raised; backward passes and futures pass on others than were raised first.
        """
        return isinstance(error, CommunicationError) or failure() is not None

    def form(self, note: int) -> ProcessGroup:
        """Leave the group, agree on members, and form it anew.

        Args:
            note: steps done, for the roster's ``choose``.

        Returns:
            Another group of all its ranks, so that the default one stays the program's.

        Raises:
            CommunicationError: nobody closed a round in time, or a member was lost on the way.
        """
        leave()  # whoever still waits for this rank, in whatever group, need not
        entered = self._roster.gather(get_handle(towards=self._store), note=note, timeout=self._timeout)
        reconfigure(entered.number, entered.handles)
        self._asked, self._was_wanted = time.monotonic(), False
        made = dist.new_group(backend="mycel")
        assert isinstance(made, ProcessGroup)
        return made
