"""Point-to-point operations of a torch backend, posted in groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

__all__ = ["BackendTransport", "Transport"]

#: A piece of memory as bytes, and the rank that it goes to or comes from.
End = tuple[torch.Tensor, int]


class Transport(Protocol):
    """What moves bytes between ranks."""

    def exchange(self, sends: Sequence[End], receives: Sequence[End]) -> None:
        """Move all of these at the same time; what is queued afterwards on the current stream comes after them.

        Messages from one rank to another meet in the order given.
        """


class BackendTransport:
    """The sends and receives of one of torch's backends.

    Where the backend can, they are posted as one group: NCCL then runs them all in one kernel, in which none waits
    for another. Others, such as Gloo, only promise that each proceeds by itself.

    Args:
        backend: such as ``ProcessGroupNCCL``.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._groups = bool(backend.supports_coalescing)

    def exchange(self, sends: Sequence[End], receives: Sequence[End]) -> None:
        """See ``Transport``."""
        if not self._groups:
            for work in self._post(sends, receives):
                work.wait()
            return
        self._backend._start_coalescing()
        try:
            self._post(sends, receives)
        finally:
            work = self._backend._end_coalescing()
        if work is not None:
            work.wait()

    def _post(self, sends: Sequence[End], receives: Sequence[End]) -> list[Any]:
        works = [self._backend.recv([memory], peer, 0) for memory, peer in receives]
        works += [self._backend.send([memory], peer, 0) for memory, peer in sends]
        return works
