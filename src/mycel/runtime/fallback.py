"""What mycel does not schedule is done by torch's own Gloo group, which is made when it is first needed.

Most jobs never come here, and should not fail at start for a group that they do not use. Gloo connects two ranks when
they first have something for each other, so that a send between two ranks of many needs nobody else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ProcessGroupGloo
from torch.distributed.distributed_c10d import Store

from mycel.errors import CommunicationError
from mycel.runtime.forks import keep_in_children

__all__ = ["Fallback", "one_by_one"]

Tensor = torch.Tensor
_Gloo: Any = ProcessGroupGloo  # its type information lacks the options


class Fallback:
    """A group's Gloo group, as long as nobody asks for it not made.

    Args:
        store: where its ranks find each other; nothing else may use its keys.
        rank, size: in the group.
        timeout: default time-out of its calls.
        ip: the address of this rank, for Gloo to listen on as well.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, ip: str) -> None:
        self._store: Store | None = store
        self._rank, self._size = rank, size
        self._timeout = timeout
        self._ip = ip
        self._making = threading.Lock()
        self._gloo: Any = None

    @property
    def gloo(self) -> ProcessGroup:
        """The group.

        A backend has a process group's methods, but torch's type information knows them for the latter only.

        Raises:
            CommunicationError: it cannot be made here, or the process group has been destroyed.
        """
        if self._gloo is None:
            with self._making:
                if self._gloo is None:
                    self._gloo = self._make()
        made: ProcessGroup = self._gloo
        return made

    def _make(self) -> Any:
        if self._store is None:
            raise CommunicationError("the process group has been destroyed")
        try:
            options = _Gloo._Options()
            options._timeout = self._timeout
            options._devices = [_Gloo.create_device(hostname=self._ip, lazy_init=True)]
            made = _Gloo(self._store, self._rank, self._size, options)
            keep_in_children(made)
            return made
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self._rank}: mycel does not schedule this call, and Gloo, which would do it, does not start "
                f"at {self._ip}: {str(error).splitlines()[0]}"
            ) from error

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default time-out of later calls."""
        self._timeout = timeout
        if self._gloo is not None:
            self._gloo._set_default_timeout(timeout)

    def close(self) -> None:
        """Let go of the store; no group is made from here on."""
        with self._making:
            self._store = self._gloo = None


def one_by_one(
    operation: Callable[[Any, Tensor, Any], dist.Work], outputs: Sequence[Any], inputs: list[Tensor], opts: Any
) -> dist.Work:
    """Gloo's coalesced forms, which it does not offer to Python: all but the last are waited for here."""
    works: list[dist.Work] = []
    for output, input in zip(outputs, inputs, strict=True):
        for work in works[-1:]:
            work.wait()
        works.append(operation(output, input, opts))
    return works[-1]
