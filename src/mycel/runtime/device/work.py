"""Work on a device: waiting for it makes the current stream wait, as torch's own device backends have it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from mycel.runtime.device.lane import Lane
from mycel.runtime.held import HeldWork

__all__ = ["DeviceWork"]


class DeviceWork(HeldWork):
    """One collective that has been queued: on devices what ``MycelWork`` is on sockets, without a ticket.

    Args:
        lane: where.
        mark: its end.
        result: tensors that hold the result afterwards.
    """

    def __init__(self, lane: Lane, mark: Any, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._lane = lane
        self._mark = mark
        self._result = result
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Let what the caller queues from now on come after the collective; does not wait for the device itself."""
        self.let_go()
        self._lane.join(self._mark)
        return True

    def synchronize(self) -> None:
        """The same as ``wait``."""
        self._lane.join(self._mark)

    def is_completed(self) -> bool:
        """Whether the device is through with it."""
        self.let_go()
        return self._lane.reached(self._mark)

    def is_success(self) -> bool:
        """Whether the device is through with it; what fails on a device is reported by its own backend."""
        return self._lane.reached(self._mark)

    def exception(self) -> None:
        """Nothing: what fails on a device is reported by its own backend."""

    def result(self) -> list[torch.Tensor]:
        """The tensors with the result, as ``wait`` leaves them."""
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the result's tensors."""
        self.let_go()
        if self._future is None:
            self._future = self._lane.future(self._result)
        return self._future
