"""Links between near memory, where things compute, and far memory, where they wait; both directions go at a time."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial

import torch
from torch import Tensor

from mycel.arguments import real_number
from mycel.comm.pending import Pending
from mycel.cost import Line
from mycel.errors import CommunicationError

__all__ = ["Copies", "CudaLink", "EmulatedLink", "Link"]

#: Far and near tensors, of one shape and type.
Copies = Sequence[tuple[Tensor, Tensor]]


class Link(ABC):
    """Carries copies of each direction one after the other, in the order in which they were asked for.

    A link of your own is a class with ``fetch``, and ``store`` where something goes out as well.

    Attributes:
        fetched_bytes: that were asked for near, so far.
        stored_bytes: that were asked for far, so far.
    """

    fetched_bytes = 0
    stored_bytes = 0

    @abstractmethod
    def fetch(self, copies: Copies) -> Pending[None]:
        """Begin to copy from far to near; what is computed after ``wait`` sees the copies.

        A near tensor may still be read by what was computed before this call.
        """

    def store(self, copies: Copies) -> Pending[None]:
        """Begin to copy from near to far what was computed before this call; after ``wait`` far memory has it.

        Near tensors must not change until then. A link without this copies at once.
        """
        with torch.inference_mode():
            for far, near in copies:
                far.copy_(near)
        self.stored_bytes += _size(copies)
        return Pending.done(None)

    def far(self, tensor: Tensor) -> Tensor:
        """The tensor as this link reads it fastest."""
        return tensor

    def close(self) -> None:
        """Carry what is under way to its end, and nothing more."""
        return


class EmulatedLink(Link):
    """A link of given speed on a machine that has none: a thread a direction copies, and takes as long as it would.

    Args:
        bandwidth_gbps: 10^9 bytes a second, of either direction.
        latency_s: before the first byte of each transfer.
        deadline_s: how long to wait for a transfer beyond the time that it should take.
        out_gbps: of the direction from near to far, where it is another.

    Raises:
        UsageError: a speed that is no number above 0, or a time that is none from 0.

    Examples:
        >>> link = EmulatedLink(bandwidth_gbps=10)
        >>> far, near = torch.zeros(1000), torch.ones(1000)
        >>> link.store([(far, near)]).wait()
        >>> far.sum().item(), link.stored_bytes
        (1000.0, 4000)
        >>> link.close()
    """

    def __init__(
        self,
        *,
        bandwidth_gbps: float,
        latency_s: float = 0.0,
        deadline_s: float = 60.0,
        out_gbps: float | None = None,
    ) -> None:
        self.bandwidth_gbps = real_number(bandwidth_gbps, "GB/s of a link", above=0)
        self.out_gbps = out = self.bandwidth_gbps if out_gbps is None else real_number(out_gbps, "GB/s out", above=0)
        self.latency_s = real_number(latency_s, "a link's latency in seconds", least=0)
        self.deadline_s = real_number(deadline_s, "a link's deadline in seconds", least=0)
        self._in = _Direction("mycel-link-in", Line(fixed_s=latency_s, unit_s=1e-9 / bandwidth_gbps), deadline_s)
        self._out = _Direction("mycel-link-out", Line(fixed_s=latency_s, unit_s=1e-9 / out), deadline_s)

    def fetch(self, copies: Copies) -> Pending[None]:
        """See ``Link``."""
        self.fetched_bytes += _size(copies)
        return self._in.carry([(near, far) for far, near in copies], _size(copies))

    def store(self, copies: Copies) -> Pending[None]:
        """See ``Link``."""
        self.stored_bytes += _size(copies)
        return self._out.carry(list(copies), _size(copies))

    def close(self) -> None:
        """See ``Link``."""
        self._in.close()
        self._out.close()


class _Direction:
    """One way of an emulated link: a thread, and until when it is busy."""

    def __init__(self, name: str, line: Line, deadline_s: float) -> None:
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self.line, self.deadline_s = line, deadline_s
        self._asked_s = 0.0
        self.closed = False

    def close(self) -> None:
        """Carry what was asked for, and nothing more."""
        self.closed = True
        self.thread.shutdown()

    def carry(self, copies: Copies, num_bytes: int) -> Pending[None]:
        """From the second to the first of each pair."""
        # The link is busy until then: what was asked for before comes first.
        self._asked_s = max(self._asked_s, time.perf_counter()) + self.line.at(num_bytes)
        try:
            future = self.thread.submit(_carry, copies, self._asked_s)
        except RuntimeError as error:
            why = "the link is closed" if self.closed else "its thread cannot start"
            raise CommunicationError(f"a transfer of {num_bytes} bytes: {why} ({error})") from None
        return Pending(partial(_result, future, self._asked_s + self.deadline_s, num_bytes))


def _size(copies: Copies) -> int:
    return sum(far.numel() * far.element_size() for far, _ in copies)


def _carry(copies: Copies, until_s: float) -> None:
    with torch.inference_mode():  # buffers made in that mode cannot be written outside of it
        for to, of in copies:
            to.copy_(of)
    time.sleep(max(0.0, until_s - time.perf_counter()))


def _result(future: Future[None], deadline_s: float, num_bytes: int) -> None:
    try:
        future.result(max(0.0, deadline_s - time.perf_counter()))
    except FutureTimeoutError:
        raise CommunicationError(
            f"a transfer of {num_bytes} bytes between near and far memory did not come to its end in time"
        ) from None


class CudaLink(Link):
    """Between pinned host memory and a GPU, on a stream of its own for each direction.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.out_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def far(self, tensor: Tensor) -> Tensor:
        """In pinned memory, without which a copy would not run beside computation."""
        return tensor.cpu().pin_memory()

    def fetch(self, copies: Copies) -> Pending[None]:
        """See ``Link``."""
        self.fetched_bytes += _size(copies)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for far, near in copies:
                near.copy_(far, non_blocking=True)
            event = self.stream.record_event()
        return Pending(lambda: torch.cuda.current_stream(self.device).wait_event(event))

    def store(self, copies: Copies) -> Pending[None]:
        """See ``Link``; ``wait`` waits for the device, as the processor may read far memory then."""
        self.stored_bytes += _size(copies)
        self.out_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.out_stream):
            for far, near in copies:
                far.copy_(near, non_blocking=True)
            event = self.out_stream.record_event()
        return Pending(event.synchronize)
