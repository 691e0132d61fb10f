"""Links between far memory, where experts are kept, and near memory, where they compute."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial

import torch
from torch import Tensor

from mycel.comm.pending import Pending
from mycel.cost import Line
from mycel.errors import CommunicationError, UsageError

__all__ = ["CudaLink", "EmulatedLink", "Link"]

#: Far and near tensors, of one shape and type.
Copies = Sequence[tuple[Tensor, Tensor]]


class Link(ABC):
    """Carries copies one after the other, in the order in which they were asked for."""

    @abstractmethod
    def fetch(self, copies: Copies) -> Pending[None]:
        """Begin to copy from far to near; what is computed after ``wait`` sees the copies.

        A near tensor may still be read by what was computed before this call.
        """

    def far(self, tensor: Tensor) -> Tensor:
        """The tensor as this link reads it fastest."""
        return tensor

    def close(self) -> None:
        """Carry what is under way to its end, and nothing more."""
        return


class EmulatedLink(Link):
    """A link of given speed on a machine that has none: a thread copies, and takes as long as the link would.

    Args:
        bandwidth_gbps: 10^9 bytes a second.
        latency_s: before the first byte of each ``fetch``.
        deadline_s: how long to wait for a transfer beyond the time that it should take.

    Raises:
        UsageError: a speed that is not positive, or a negative time.
    """

    def __init__(self, *, bandwidth_gbps: float, latency_s: float = 0.0, deadline_s: float = 60.0) -> None:
        if bandwidth_gbps <= 0 or latency_s < 0:
            raise UsageError(f"a link of {bandwidth_gbps} GB/s and {latency_s} s")
        self.bandwidth_gbps, self.latency_s, self.deadline_s = bandwidth_gbps, latency_s, deadline_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mycel-link")
        self._asked_s = 0.0

    def fetch(self, copies: Copies) -> Pending[None]:
        """See ``Link``."""
        num_bytes = sum(far.numel() * far.element_size() for far, _ in copies)
        taking_s = Line(fixed_s=self.latency_s, unit_s=1e-9 / self.bandwidth_gbps).at(num_bytes)
        # The link is busy until then: what was asked for before comes first.
        self._asked_s = max(self._asked_s, time.perf_counter()) + taking_s
        future = self._thread.submit(_carry, list(copies), self._asked_s)
        return Pending(partial(_result, future, self._asked_s + self.deadline_s, num_bytes))

    def close(self) -> None:
        """See ``Link``."""
        self._thread.shutdown()


def _carry(copies: Copies, until_s: float) -> None:
    with torch.inference_mode():  # buffers made in that mode cannot be written outside of it
        for far, near in copies:
            near.copy_(far)
    time.sleep(max(0.0, until_s - time.perf_counter()))


def _result(future: Future[None], deadline_s: float, num_bytes: int) -> None:
    try:
        future.result(max(0.0, deadline_s - time.perf_counter()))
    except FutureTimeoutError:
        raise CommunicationError(
            f"a transfer of {num_bytes} bytes of experts did not come to its end in time"
        ) from None


class CudaLink(Link):
    """From pinned host memory to a GPU, on a stream of its own.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def far(self, tensor: Tensor) -> Tensor:
        """In pinned memory, without which a copy would not run beside computation."""
        return tensor.cpu().pin_memory()

    def fetch(self, copies: Copies) -> Pending[None]:
        """See ``Link``."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for far, near in copies:
                near.copy_(far, non_blocking=True)
            event = self.stream.record_event()
        return Pending(lambda: torch.cuda.current_stream(self.device).wait_event(event))
