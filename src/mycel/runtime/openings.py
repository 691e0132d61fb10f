"""While a rank waits for others to open their ends of channels: what it tells them, and when it waits in vain.

Channels are opened by the first call that uses them, so a rank waits until the others have come to that call. Where
they are at another one, which uses other channels, each might wait for the other, and no header ever be compared. So
who waits says now and then, to the rank that it waits for, which call it is in.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mycel.runtime.hearing import Hearing
from mycel.runtime.verdict import State, disagreement

__all__ = ["Openings"]

#: Between words to a rank whose end of a channel is missing.
_TELL_S = 1.0
#: For so long a connection of a rank that has gone may be under way yet: its others may have been quicker.
_UNDER_WAY_S = 0.5


class Openings:
    """One a communicator; for the thread whose turn it is.

    Args:
        hearing: the group's.
        dtype_names: from a dtype's code to its name, for messages.
    """

    def __init__(self, hearing: Hearing, dtype_names: Callable[[int], str]) -> None:
        self._hearing, self._dtype_names = hearing, dtype_names
        self._told = ((0, 0, 0), 0.0)
        self._missed = (-1, 0.0)

    def tell(self, awaited: int, header: tuple[int, int, int]) -> None:
        """Tell a rank whose end is missing what it is needed for, unless it was told just now."""
        now = time.monotonic()
        if self._told[0] != header:
            self._told = (header, now)
        elif now - self._told[1] >= _TELL_S:
            self._told = (header, now)
            self._hearing.say_call(awaited, header)

    def other_call(self, header: tuple[int, int, int]) -> str:
        """How another call in this one's place differs, in words, where a rank has said that it waits in one."""
        headers = {rank: other for rank, other in self._hearing.calls.items() if other[0] == header[0]}
        if not headers:
            return ""
        headers[self._hearing.rank] = header
        states = {rank: State(what="", waits_for=(), header=each) for rank, each in headers.items()}
        return disagreement(states, self._dtype_names).removeprefix("ranks do not agree: ")

    def is_missed(self, awaited: int) -> bool:
        """Whether a rank that is waited for has been gone for so long that no connection is to be expected."""
        if awaited not in self._hearing.control.gone:
            self._missed = (-1, 0.0)
            return False
        if awaited != self._missed[0]:
            self._missed = (awaited, time.monotonic())
        return time.monotonic() - self._missed[1] >= _UNDER_WAY_S
