"""The life of a rank under a controller: an actor that carries out items in the order in which they come."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from monarch.actor import Actor, endpoint
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import Store

from mycel.controller.current import Current, runs_on
from mycel.controller.messages import ARGUMENT, IN_VAIN, OWN, Failure, Held, Item, answer, replace
from mycel.controller.transfer import land
from mycel.errors import CommunicationError

__all__ = ["Rank"]

#: Of this process: what calls have left here, by number.
_VALUES: dict[int, Any] = {}


class Rank(Actor):  # type: ignore[misc]  # Monarch ships no types
    """One rank.

    Args:
        size: ranks of the cluster.
        timeout_s: longest wait of a collective.
        backend: of the process group.
        paths: where the script that drives it finds modules.
    """

    def __init__(self, size: int, timeout_s: float, backend: str, paths: list[str]) -> None:
        sys.path += [path for path in paths if path not in sys.path]
        self._size, self._timeout, self._backend = size, timedelta(seconds=timeout_s), backend
        self._rank = -1
        self._store: Store | None = None
        self._done = 0
        self._turn = asyncio.Condition()

    @endpoint  # type: ignore[untyped-decorator]
    async def process(self) -> int:
        """This process, for who watches it."""
        return os.getpid()

    @endpoint  # type: ignore[untyped-decorator]
    async def serve(self) -> int:
        """Rank 0: begin the store that all meet in. Returns its port."""
        store = TCPStore("127.0.0.1", 0, self._size, is_master=True, timeout=self._timeout, wait_for_workers=False)
        self._store = store
        return int(store.port)

    @endpoint  # type: ignore[untyped-decorator]
    async def join(self, ranks: list[int], port: int) -> None:
        """Form the process group of all ranks.

        Args:
            ranks: numbers in the cluster, by place among the processes.
            port: of the store.
        """
        from monarch.actor import current_rank

        import mycel.runtime  # noqa: F401  # the backend's name

        self._rank = ranks[current_rank()["ranks"]]
        store = self._store or TCPStore("127.0.0.1", port, self._size, timeout=self._timeout)
        dist.init_process_group(
            self._backend, store=store, rank=self._rank, world_size=self._size, timeout=self._timeout
        )

    @endpoint  # type: ignore[untyped-decorator]
    async def run(self, item: Item) -> Any:
        """Carry out an item when all before it are. Returns its small value, ``Large``, or ``Failure``."""
        place = item.places[item.ranks.index(self._rank)]
        async with self._turn:
            await self._turn.wait_for(lambda: self._done == place)
            for number in item.frees:
                _VALUES.pop(number, None)
            value = self._carry_out(item)  # holds up the loop: nothing else is to happen here meanwhile
            self._done += 1
            self._turn.notify_all()
        _VALUES[item.number] = value
        return value if isinstance(value, Failure) else answer(value)

    @endpoint  # type: ignore[untyped-decorator]
    async def fetch(self, number: int) -> Any:
        """A value, whatever its size."""
        return replace(_VALUES.get(number), torch.Tensor, lambda tensor: tensor.detach().cpu())

    @endpoint  # type: ignore[untyped-decorator]
    async def leave(self) -> None:
        """End the process group."""
        land(0)
        _VALUES.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _carry_out(self, item: Item) -> Any:
        here = Current(rank=item.ranks.index(self._rank), ranks=item.ranks)
        failed: list[tuple[int, Failure]] = []

        def resolve(held: Held) -> Any:
            value = _VALUES[held.number]
            if isinstance(value, Failure):
                failed.append((held.number, value))
            return value

        try:
            program, args, kwargs = pickle.loads(item.call)
            args = replace(args, Held, resolve)
            kwargs = replace(kwargs, Held, resolve)
            if failed:
                number, cause = failed[0]
                return Failure(
                    cause.rank, f"call {number}, whose value this needs, failed: {cause.said}", "", ARGUMENT
                )
            with runs_on(here):
                return program(*args, **kwargs)
        except Exception as error:
            trace = "".join(traceback.format_exception(error.with_traceback(_own(error))))
            in_vain = isinstance(error, (CommunicationError, dist.DistBackendError))
            return Failure(self._rank, f"{type(error).__name__}: {error}", trace, IN_VAIN if in_vain else OWN)


def _own(error: BaseException) -> Any:
    """The traceback without this module's frame."""
    return error.__traceback__.tb_next if error.__traceback__ is not None else None
