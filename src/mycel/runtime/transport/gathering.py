"""Waiting until all ranks have come, where each is connected with some of them only.

With a connection to every other rank, who has all of its own knows that all have come. Here each rank says so to its
parent in a tree (``control_graph.spanning_tree``) when it and those behind it have come, and hears from its parent
when all have. Without that, ranks would begin a group that one of them never comes to, and call its neighbours, who
give it up first, the lost ones.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Mapping

from mycel.errors import CollectiveTimeoutError, PeerLostError
from mycel.runtime.control_graph import Graph, spanning_tree

__all__ = ["gather"]

_ALL_HERE = b"\1"
#: For one wait.
_HEED_S = 0.5
#: Beyond the deadline: whoever misses a rank of its own knows better which, and says so.
_OTHERS_S = 3.0


def gather(
    rank: int,
    sockets: Mapping[int, socket.socket],
    graph: Graph,
    wait_for: Callable[[socket.socket, int, float], bool],
    heed: Callable[[], None],
    look: Callable[[], None],
    deadline: float,
) -> None:
    """Return when all ranks have called this; closes no socket.

    Args:
        rank: this one.
        sockets: to its neighbours, by rank; nothing else goes over them meanwhile.
        graph: the neighbours of each rank.
        wait_for: waits until a socket is ready (``select.POLLIN``), for so many seconds at most; whether it is.
        heed: called now and then meanwhile; does what ``look`` does from time to time.
        look: raises what another rank, which will not come, has said of the reason.
        deadline: until when to wait (``time.monotonic``).

    Raises:
        CommunicationError: a rank does not come, or has failed.
    """
    parent, children = spanning_tree(graph, rank)

    def hear(peer: int) -> None:
        while not wait_for(sockets[peer], select.POLLIN, _HEED_S):
            heed()
            if time.monotonic() >= deadline + _OTHERS_S:
                raise CollectiveTimeoutError(
                    f"rank {rank} has waited in vain for rank {peer} to say that all ranks behind it have come"
                )
        try:
            said = sockets[peer].recv(1)
        except OSError:
            said = b""
        if said != _ALL_HERE:
            look()  # who fails says why before its connections end
            raise PeerLostError(
                f"rank {peer} was lost while the group was formed: its connection to rank {rank} ended"
            )

    def say(peer: int) -> None:
        try:
            sockets[peer].send(_ALL_HERE, socket.MSG_NOSIGNAL)
        except OSError:
            return  # it is gone: reading says so, here or at others

    for child in children:
        hear(child)
    if parent >= 0:
        say(parent)
        hear(parent)
    for child in children:
        say(child)
