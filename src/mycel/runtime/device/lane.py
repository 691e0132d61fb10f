"""Lanes: where a collective's work is queued, and how the caller's own work waits for it.

On a GPU a lane is a stream beside the caller's. Three things keep that right: the lane first waits for what the
caller has queued so far (it makes the inputs); the caller's tensors are marked as in use on the lane, so that their
memory is not given to somebody else before the lane is through with it; and whoever waits for the collective makes
the *stream it is on* wait for an event, not the processor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

__all__ = ["CudaLane", "HostLane", "Lane", "lane_of"]


class Lane(Protocol):
    """A place to queue work; a *mark* is a point in it."""

    def enter(self, tensors: Sequence[torch.Tensor]) -> Any:
        """A context in which torch operations go to the lane, after all that the caller has queued.

        Args:
            tensors: that the operations read or write and that others made.
        """

    def mark(self) -> Any:
        """The point that the lane has reached so far."""

    def join(self, mark: Any) -> None:
        """Let what the caller queues from now on come after the mark."""

    def reached(self, mark: Any) -> bool:
        """Whether all before the mark is done."""

    def future(self, result: list[torch.Tensor]) -> torch.futures.Future[Any]:
        """A future of the result, complete once the lane has done what is queued so far."""


class HostLane:
    """No lane: every operation is over when its call returns."""

    @contextmanager
    def enter(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """See ``Lane``."""
        yield

    def mark(self) -> None:
        """See ``Lane``."""

    def join(self, mark: None) -> None:
        """See ``Lane``."""

    def reached(self, mark: None) -> bool:
        """See ``Lane``."""
        return True

    def future(self, result: list[torch.Tensor]) -> torch.futures.Future[Any]:
        """See ``Lane``."""
        made: torch.futures.Future[Any] = torch.futures.Future()
        made.set_result(result)
        return made


class CudaLane:
    """A stream of its own on one GPU.

    Args:
        device: the GPU, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def enter(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """See ``Lane``."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in tensors:
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Any:
        """See ``Lane``."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def join(self, mark: Any) -> None:
        """See ``Lane``."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def reached(self, mark: Any) -> bool:
        """See ``Lane``."""
        return bool(mark.query())

    def future(self, result: list[torch.Tensor]) -> torch.futures.Future[Any]:
        """See ``Lane``.

        A future made for a device remembers the streams that are current when it gets its value, and makes the
        streams of those who wait for it, or of its callbacks, wait for them.
        """
        made: torch.futures.Future[Any] = torch.futures.Future(devices=[self._device])
        with torch.cuda.stream(self._stream):
            made.set_result(result)
        return made


def lane_of(device: torch.device) -> Lane:
    """The lane of a device: a stream of its own where the device has streams."""
    return CudaLane(device) if device.type == "cuda" else HostLane()
