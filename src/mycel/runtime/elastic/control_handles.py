"""Survivors tell each other their handles, over the control connections of the group that has failed."""

from __future__ import annotations

import time
from collections.abc import Collection

from mycel.errors import CollectiveTimeoutError, PeerLostError
from mycel.runtime.control import Control
from mycel.runtime.messages import Whereabouts

__all__ = ["exchange_handles"]

_LOOK_S = 0.05


def exchange_handles(control: Control, own: str, peers: Collection[int], timeout_s: float) -> dict[int, str]:
    """The handles of other ranks, by rank; each of them has to call this as well.

    Args:
        control: the group's control connections, which live on when a collective fails.
        own: this rank's handle.
        peers: the other survivors.
        timeout_s: how long to wait for them.

    Raises:
        PeerLostError: one is gone.
        CollectiveTimeoutError: some did not come in time.
    """
    deadline = time.monotonic() + timeout_s
    control.tell(peers, Whereabouts(handle=own))
    while True:
        # Looked at first: another thread takes messages, too, and who has said where it is may leave right after.
        gone = control.dead | control.left | control.cut
        missing = sorted(set(peers) - set(control.handles))
        if not missing:
            break
        if lost := [peer for peer in missing if peer in gone]:
            raise PeerLostError(f"rank {lost[0]} is gone as well; exclude it, too")
        if time.monotonic() >= deadline:
            names = ", ".join(f"rank {peer}" for peer in missing)
            raise CollectiveTimeoutError(f"{names} did not come to shrink the group within {timeout_s:g} s")
        control.wait(_LOOK_S)
        control.take()
        control.flush()
    return {peer: control.handles[peer] for peer in peers}
