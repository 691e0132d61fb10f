"""Sends and receives of tensors between two ranks, as ``torch.distributed`` wants to see them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from mycel.errors import UsageError
from mycel.runtime.communicator import Communicator
from mycel.runtime.held import HeldWork
from mycel.runtime.monitored import pass_barrier
from mycel.runtime.p2p_endpoint import Endpoint
from mycel.runtime.p2p_matching import Transfer
from mycel.runtime.tensors import back_into, flattened
from mycel.runtime.timeouts import given_s
from mycel.runtime.work import span_of
from mycel.settings import read_settings
from mycel.untraced import untraced

__all__ = ["MessageWork", "PointToPoint"]

Tensor = torch.Tensor


class PointToPoint:
    """Messages between the ranks of a group. Nothing is opened or started before the first.

    Args:
        communicator: the group's; ``None`` in a group of one rank, which has nobody to talk to.
    """

    def __init__(self, communicator: Communicator | None) -> None:
        self._communicator = communicator
        self._made: Endpoint | None = None
        self._making = threading.Lock()
        self._relays = read_settings().relays

    @property
    def _endpoint(self) -> Endpoint:
        if self._made is None:
            with self._making:
                if self._made is None:
                    self._made = Endpoint(self._group.lines(), relays=self._relays)
        return self._made

    @property
    def _group(self) -> Communicator:
        if self._communicator is None:
            raise RuntimeError("a group of one rank has no communicator")
        return self._communicator

    def takes(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors like these are sent and received here."""
        is_plain = len(tensors) == 1 and tensors[0].is_cpu and tensors[0].layout == torch.strided
        return is_plain and self._communicator is not None

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        """Begin to send; over as soon as the tensor may be written again.

        A message of up to 64 KB is over at once while the receiver has less than 1 MB of this rank's that nobody has
        asked for; every other one when the receiver has called ``recv`` and the kernel has all of it.

        Raises:
            UsageError: ``dst`` is this rank, or no rank of the group.
            CommunicationError: the group has failed before, or the rank cannot be reached.
        """
        self._check("send", dst)
        endpoint, own = self._endpoint, tensors[0].detach()
        transfer = self._transfer("send", dst, tag, own if _is_plain(own) else flattened([own]), None)
        span = span_of("send", transfer.left)
        if span is None:
            endpoint.send(transfer)
        else:
            with span:
                endpoint.send(transfer)
        return MessageWork(endpoint, transfer, tensors)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        """Begin to receive from a rank; over when the message is in the tensor.

        Raises:
            UsageError: ``src`` is this rank, or no rank of the group.
            CommunicationError: the group has failed before.
        """
        self._check("recv", src)
        return self._receive(tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        """Begin to receive from whoever sends first with this tag; the work knows who it was.

        Raises:
            CommunicationError: the group has failed before.
        """
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: list[Tensor], src: int | None, tag: int) -> dist.Work:
        endpoint = self._endpoint
        own = tensors[0].detach()  # holds the memory, whatever becomes of the caller's tensor meanwhile
        flat, settle = own, None
        if not _is_plain(own):
            flat = flattened([own])
            settle = back_into(flat, [own])
        transfer = self._transfer("recv", src, tag, flat, settle)
        span = span_of("recv" if src is not None else "recvAnySource", transfer.left)
        if span is None:
            endpoint.receive(transfer)
        else:
            with span:
                endpoint.receive(transfer)
        return MessageWork(endpoint, transfer, tensors)

    def _transfer(
        self, verb: str, peer: int | None, tag: int, flat: Tensor, settle: Callable[[], None] | None
    ) -> Transfer:
        return Transfer(
            verb=verb,
            peer=peer,
            tag=tag,
            view=_bytes_of(flat),
            dtype=_dtype_name(flat.dtype),
            timeout_s=self._group.timeout_s,
            keep=flat,
            settle=settle,
        )

    def _check(self, verb: str, peer: int) -> None:
        rank, size = self._group.rank, self._group.size
        if peer == rank:
            raise UsageError(f"{verb}: rank {rank} is this process; tensors go to, and come from, another rank")
        if not 0 <= peer < size:
            raise UsageError(f"{verb}: no rank {peer} in a group of {size}")

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """Wait for every rank; see ``mycel.runtime.monitored_barrier``."""
        if self._communicator is not None:
            pass_barrier(self._endpoint, timeout.total_seconds(), wait_all_ranks=wait_all_ranks)

    def abort(self) -> None:
        """Fail what is under way here, after the group has failed."""
        if self._made is not None:
            self._made.abort()

    def close(self) -> None:
        """Let what has been accepted get through, fail the rest, close all connections."""
        if self._made is not None:
            self._made.close()


_memoryview_at: Any = ctypes.pythonapi.PyMemoryView_FromMemory
_memoryview_at.restype = ctypes.py_object
_memoryview_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200  # PyBUF_WRITE


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's elements are its memory, from the first byte to the last."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _bytes_of(flat: Tensor) -> memoryview:
    """The memory of a contiguous tensor; it has to be kept. A way through torch's views takes ten times as long."""
    num_bytes = flat.numel() * flat.element_size()
    if not num_bytes:
        return memoryview(bytearray())
    view: memoryview = _memoryview_at(flat.data_ptr(), num_bytes, _WRITABLE)
    return view


@lru_cache(maxsize=64)
def _dtype_name(dtype: torch.dtype) -> bytes:
    return str(dtype).removeprefix("torch.").encode()[:16]


@untraced
class MessageWork(HeldWork):
    """One message under way, as torch wants to see it.

    Args:
        endpoint: the group's.
        transfer: the message.
        result: its tensor.
    """

    def __init__(self, endpoint: Endpoint, transfer: Transfer, result: list[Tensor]) -> None:
        super().__init__()
        self._endpoint, self._transfer, self._result = endpoint, transfer, result
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the message; raises what went wrong."""
        self.let_go()
        limit = given_s(timeout)
        if not self._endpoint.wait(self._transfer, limit):
            raise RuntimeError(f"{self._transfer.what}: timeout, still under way after {limit:g} s of waiting")
        return True

    def is_completed(self) -> bool:
        """Whether the message is over, right or wrong; if so, a received one is in its tensor."""
        self.let_go()
        if self._future is not None and self._future.done():  # its callbacks may be running still
            return True
        if not self._transfer.is_done:
            self._endpoint.glance()
        return self._transfer.is_done

    def is_success(self) -> bool:
        """Whether the message is over and right."""
        return self.is_completed() and self._transfer.error is None

    def exception(self) -> BaseException | None:
        """What went wrong, if anything has."""
        return self._transfer.error if self.is_completed() else None

    def synchronize(self) -> None:
        """Wait, as torch asks it of device work."""
        self.wait()

    def source_rank(self) -> int:
        """Rank in the group that a received message came from."""
        return self._transfer.source

    _source_rank = source_rank

    def result(self) -> list[Tensor]:
        """The tensor of the message."""
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensor, done before the work is seen as completed.

        A failure is raised from a callback behind the future, as for collectives (``MycelWork.get_future``).
        """
        self.let_go()
        if self._future is None:
            raw: torch.futures.Future[Any] = torch.futures.Future()
            self._future = raw.then(self._value)
            if not self._endpoint.when_done(self._transfer, lambda: raw.set_result(None)):
                raw.set_result(None)
        return self._future

    def _value(self, _: object) -> list[Tensor]:
        if self._transfer.error is not None:
            raise self._transfer.error
        return self._result
