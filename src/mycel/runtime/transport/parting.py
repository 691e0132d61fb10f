"""The end of a job's store, which lives in rank 0's process: the others wait for it before they go on.

A program may destroy its process group and make another one at the same address at once. A rank that is quicker than
rank 0 would then find the old store, which is about to end. So rank 0 keeps listening until its store is gone, though
it answers nobody; the others connect, and wait, for a bounded time, until that connection ends. No messages are
needed: the kernel ends it when the listener is closed, or with the process.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from mycel.runtime.transport.address import innermost

__all__ = ["LONGEST_S", "StoreServer", "wait_for_end"]

#: How long a rank waits at most for rank 0 to come to the end too.
LONGEST_S = 10.0
#: How long rank 0 looks whether its store ends, once torch has let go of it: a program may keep a store of its own.
_AFTER_S = 0.3
_LOOK_S = 0.001
_DESCRIPTORS = Path("/proc/self/fd")


class StoreServer:
    """The listening socket of a store that lives in this process.

    Args:
        descriptor: the socket's.
        inode: by which it is known again.
        held: what torch drops when it lets go of the group's store.
    """

    def __init__(self, descriptor: int, inode: str, held: object) -> None:
        self._descriptor, self._inode = descriptor, inode
        self._held = weakref.ref(held)

    @classmethod
    def of(cls, store: object) -> StoreServer | None:
        """The server behind a group's store; ``None`` where it is in another process, or there is none."""
        port = getattr(innermost(store), "port", None)
        if not isinstance(port, int):
            return None
        for entry in tuple(_DESCRIPTORS.iterdir()):
            descriptor = int(entry.name)
            inode = _inode(descriptor)
            if inode.startswith("socket:") and _listens(descriptor, port):
                held = getattr(store, "underlying_store", store)
                return cls(descriptor, inode, held)
        return None

    @property
    def is_open(self) -> bool:
        """Whether it still listens."""
        return _inode(self._descriptor) == self._inode

    def when_closed(self, act: Callable[[], None]) -> None:
        """Call ``act`` when the store has ended, or when it is plain that it does not; returns at once."""
        threading.Thread(target=self._watch, args=(act,), name="mycel-parting", daemon=True).start()

    def _watch(self, act: Callable[[], None]) -> None:
        until = time.monotonic() + LONGEST_S
        is_held = True
        while self.is_open and time.monotonic() < until:
            if is_held and self._held() is None:
                is_held, until = False, time.monotonic() + _AFTER_S
            time.sleep(_LOOK_S)
        act()


def _inode(descriptor: int) -> str:
    try:
        return str((_DESCRIPTORS / str(descriptor)).readlink())
    except OSError:
        return ""


def _listens(descriptor: int, port: int) -> bool:
    """Whether a descriptor of this process is a socket that listens on a port."""
    try:
        duplicate = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return False
    with duplicate:
        if duplicate.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        accepts = duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return bool(accepts) and duplicate.getsockname()[1] == port


def wait_for_end(connect: Callable[[float], socket.socket], longest_s: float) -> None:
    """Wait until rank 0 listens no more; for a bounded time, since it may be busy with something else.

    Args:
        connect: connects to it in at most so many seconds; raises ``OSError`` where nobody listens.
        longest_s: seconds to wait at most.
    """
    deadline = time.monotonic() + longest_s
    try:
        with connect(longest_s) as sock:
            sock.settimeout(max(0.01, deadline - time.monotonic()))
            sock.recv(1)
    except OSError:
        return
